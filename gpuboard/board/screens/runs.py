"""All runs of this user, and the one under the cursor in detail: verdicts, remedies, its ranks as a picture.

Where a high terminal has room for it, the end of a rank's logs, too.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Button

from gpuboard.board.background import Background
from gpuboard.board.dialogs.base import Confirm, button
from gpuboard.board.dialogs.launch import open_launch
from gpuboard.board.filter.runs import RUNS
from gpuboard.board.screens.base import FilteredScreen, Notice
from gpuboard.board.screens.logs import LogScreen
from gpuboard.board.text.detail import ranks as ranks_text
from gpuboard.board.text.detail.run import Stop, about, countdown, explained, first_rank, state_of, style_of
from gpuboard.board.text.lines import named
from gpuboard.board.text.rows import Cell, Column, Row
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.grid import Grid
from gpuboard.board.widgets.log_view import LogView
from gpuboard.board.widgets.pane import Lines
from gpuboard.errors import GpuboardError
from gpuboard.launch.runs.access import ask_to_stop
from gpuboard.launch.runs.folder import FINAL, RankView, lived_s, places
from gpuboard.launch.runs.index import RunDetail, RunEntry
from gpuboard.launch.stalls.request import explain_run
from gpuboard.launch.stalls.verdict import Explanation
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuboard.board.scene import Scene
    from gpuboard.launch.runs.access import RunAccess
    from gpuboard.launch.stalls.waits import RankGroup

_POLL_S = 1.0
_AROUND = 10  # rows of the list (5), the table of ranks (4) and the footer at least, where no logs are shown
_AROUND_LOGS = 15  # rows of the list (8), the logs (6) and the footer at least, where they are; the ranks come on top
_LOGS_FROM = 36  # rows of a terminal from which logs are shown below the ranks, if the details leave room
_EXPLAINED_S = 60.0  # for which an explanation is shown: the ranks of a run that is not stalled go on
_DETAILS = 6  # rows of the details at least, if there are so many
_REASON = "stopped from the board"
_EMPTY = """No runs yet.
x launches one on selected GPUs, on a lease, or on the best free GPUs.
In a shell: `gpuboard launch --n 2 train.py`."""
_NOT_RECORDED = "A recording has no runs."
_NO_MATCH = "No run matches the filter.\nEscape clears it."
_LIST = (
    Column("run", "Run", 8),
    Column("state", "State", 9),
    Column("age", "Ago", 7, right=True),
    Column("ran", "Ran", 7, right=True),
    Column("code", "Exit", 4, right=True),
    Column("lease", "Lease", 6, drop=2),
    Column("where", "Ranks", 16, weight=1, least=12),
    Column("target", "Target", 16, weight=2, least=14),
)
_RANKS = (
    Column("rank", "Rank", 4, right=True),
    Column("state", "State", 9),
    Column("node", "Node", 12),
    Column("gpu", "GPU", 3, right=True),
    Column("pid", "Pid", 7, right=True),
    Column("line", "Last line", 20, weight=1, least=20),
    Column("uuid", "UUID", 40, drop=1),
)


class Explained(NamedTuple):
    """An explanation of a run that was asked for here; None until it arrives."""

    state: object  # of the run at that time: later ones need a new explanation
    at: float  # monotonic
    found: Explanation | None

    def holds(self, entry: RunEntry) -> bool:
        """Whether it may still describe the run."""
        return self.state == _state(entry) and (self.found is None or time.monotonic() - self.at < _EXPLAINED_S)


class StopConfirm(Confirm):
    """Asks whether to stop a run: with its grace period, or at once (then ``now`` is set)."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("K", "kill", "Kill now", id="dialog.kill")]
    VARIANT = "primary"  # red is for the other one, which saves nothing

    def __init__(self, entry: RunEntry, grace_s: float | None) -> None:
        self.now = False
        grace = "its grace period" if grace_s is None else format_duration(grace_s)
        super().__init__(
            f"Stop run {entry.view.id}?",
            f"{clean(entry.view.target, 200)}\nRanks  {places(entry.view)}\n\n"
            f"Stop: SIGTERM to every rank now, SIGKILL after {grace}.\nKill now: SIGKILL at once; nothing is saved.",
            verb="Stop",
        )

    def buttons(self) -> Iterator[Button]:
        """Cancel, which has the focus, and the two ways to stop."""
        yield from super().buttons()
        yield button("Kill now (K)", "kill", "error")

    def action_kill(self) -> None:
        """Stop it without a grace period."""
        self.now = True
        self.dismiss(True)


class RunsScreen(FilteredScreen):
    """A list of all runs, and of the one under the cursor the details, the ranks and, on a high terminal, logs."""

    TITLE_WORDS = "Runs"
    LANGUAGE = RUNS
    FILTERED = "runs"
    FILTER_HINT = "state:failed node:gpu[01-04] age<1d target:train.py, or any word"
    DEFAULT_CSS = """
    RunsScreen #list { height: 2fr; min-height: 5; }
    RunsScreen #detail, RunsScreen #picture { margin: 0 1; }
    RunsScreen #ranks { height: 3fr; min-height: 4; }
    RunsScreen #logs { height: 3fr; display: none; }
    RunsScreen.-logs #logs { display: block; }
    RunsScreen.-logs #list { height: 1fr; min-height: 8; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back", id="runs.back"),
        Binding("o", "log", "Log", id="runs.log"),
        Binding("s", "stop", "Stop", id="runs.stop"),
        Binding("e", "explain", "Explain", id="runs.explain"),
        Binding("x", "launch", "Launch", id="runs.launch"),
        Binding("a", "all_nodes", "Ask all nodes", id="runs.all-nodes", show=False),
        Binding("tab", "app.focus_next", "List or ranks", id="runs.other", show=False),
    ]

    def __init__(self, run: str | None = None) -> None:
        """``run``: the cursor goes there when the run appears."""
        super().__init__()
        self._wanted = run
        self._entries: dict[str, RunEntry] = {}
        self._detail: tuple[str, RunDetail] | None = None
        self._stopping: dict[str, Stop] = {}
        self._explained: dict[str, Explained] = {}
        self._logs: tuple[str, int] | None = None  # run and rank whose logs are shown
        self._rank_lines: int | None = None  # height of the table of ranks; None: as much as there is
        self._background: Background[tuple[list[RunEntry], tuple[str, RunDetail] | None]] = Background(self)

    def compose(self) -> ComposeResult:
        yield self.filter_field()
        yield Grid(_LIST, empty="Reading runs …", id="list")
        yield Lines(id="detail")
        yield Lines(id="picture")
        yield Grid(_RANKS, id="ranks")
        with Vertical(id="logs"):
            yield LogView("stdout", id="out")
            yield LogView("stderr", id="err")
        yield Footer()

    def on_mount(self) -> None:
        self.grid.focus()
        self._look()
        self.set_interval(_POLL_S, self._look)

    def show(self, scene: Scene) -> None:
        """Nothing to draw: the details take the lease from the newest scene at the next poll."""

    def filter_rows(self) -> list[tuple[RunEntry]]:
        return [(entry,) for entry in self._entries.values()]

    def filter_changed(self) -> None:
        if self._entries:
            self._draw()
            self.call_after_refresh(self._draw_detail)  # in what the field leaves

    def action_filter(self) -> None:
        super().action_filter()
        self.call_after_refresh(self._draw_detail)

    def restyle(self) -> None:
        self._draw()

    def on_resize(self) -> None:
        """Share the new height among details and picture."""
        self.call_after_refresh(self._draw_detail)

    def jump(self, run: str) -> None:
        self._wanted = run
        self._look()

    @property
    def entry(self) -> RunEntry | None:
        key = self.grid.cursor
        return None if key is None else self._entries.get(key)

    def _look(self) -> None:
        if not self.is_current:
            return
        core, run = self.board.core, self._wanted or self.grid.cursor
        book, scene = core.runbook, self.board.scene

        def work() -> tuple[list[RunEntry], tuple[str, RunDetail] | None]:
            core.find_runs(scene)
            entries = book.read()
            known = [entry.view.id for entry in entries]
            chosen = run if run in known else known[0] if known else None
            return entries, None if chosen is None else (chosen, book.detail(chosen))

        self._background.ask(work, lambda found: self._seen(*found), again=self._look)

    def _seen(self, entries: list[RunEntry], detail: tuple[str, RunDetail] | None) -> None:
        self._entries = {entry.view.id: entry for entry in entries}
        self._detail = detail
        going = {run for run, entry in self._entries.items() if entry.live}
        self._stopping = {run: stop for run, stop in self._stopping.items() if run in going}
        self._explained = {
            run: one for run, one in self._explained.items() if run in going and one.holds(self._entries[run])
        }
        self._draw()

    def _draw(self) -> None:
        grid = self.grid
        none = _NOT_RECORDED if "launch" in self.board.REFUSED else _EMPTY
        grid.set_empty(_NO_MATCH if self._entries else none)
        now, query = time.time(), self.query_in_force
        if self._wanted in self._entries and not query.matches(self._entries[self._wanted]):
            self.clear_filter()
            query = self.query_in_force
        found = {run: entry for run, entry in self._entries.items() if query.matches(entry)}
        grid.set_rows([Row(run, partial(self._cells, entry, now)) for run, entry in found.items()])
        if self._wanted in found:
            grid.cursor = self._wanted
            self._wanted = None
        self._draw_detail()

    def _cells(self, entry: RunEntry, now: float) -> list[Cell]:
        view = entry.view
        ago, ran = lived_s(view, now), lived_s(view, now - (entry.read_s or 0.0) if entry.live else entry.written)
        state = state_of(entry, self._stopping.get(view.id))
        return [
            Cell(clean(view.id)),
            Cell(state, style_of(state)),
            Cell("?" if ago is None else format_duration(ago)),
            Cell("?" if ran is None else format_duration(ran)),
            Cell("" if view.exit_code is None else str(view.exit_code)),
            Cell(clean(view.lease or "-")),
            Cell(places(view)),
            Cell(clean(view.target)),
        ]

    # The run under the cursor

    @on(Grid.Moved, "#list")
    def _moved(self) -> None:
        self._draw_detail()
        self._look()

    def _draw_detail(self) -> None:
        entry, ranks = self.entry, self.query_one("#ranks", Grid)
        ranks.display = entry is not None
        about_run, picture = self.query_one("#detail", Lines), self.query_one("#picture", Lines)
        if entry is None:
            about_run.set_lines(())
            picture.set_lines(())
            ranks.set_rows(())
            self._arrange(None)
            self._show_logs(None)
            return
        detail = self._detail[1] if self._detail and self._detail[0] == entry.view.id else None
        stop = self._stopping.get(entry.view.id)
        lines = about(entry, detail, stop, self.board.scene, time.time())
        if stop is not None and entry.live:
            lines.insert(1, countdown(entry, detail, stop, time.monotonic()))
        groups: list[RankGroup] = [group for verdict in entry.view.verdicts if entry.live for group in verdict.groups]
        if asked := self._explained.get(entry.view.id):
            lines += explained(entry, asked.found, time.monotonic() - asked.at)
            groups = asked.found.groups if asked.found else groups
        above = sum(part.size.height for part in (self.field, *self.query(Notice)) if part.display)
        cells, rows = self.size.width - 2, self.size.height - above
        drawn = [line for part in lines for line in named(*part, cells)]
        room = rows - _AROUND
        most = max(4, room - min(len(drawn), _DETAILS))
        picture.set_lines(ranks_text.picture(entry.view, groups, cells, most, self.board.look)[:most])
        about_run.set_lines(drawn[: max(2, room - picture.count)])
        rank_lines = min(len(entry.view.ranks) + 1, self.size.height // 4)
        logs = self._has_logs(entry) and len(drawn) + picture.count <= rows - _AROUND_LOGS - rank_lines
        self._arrange(rank_lines if logs else None)
        uuids = detail.uuids if detail else {}
        marks = ranks_text.marks(entry.view, groups)
        ranks.set_rows(
            [
                Row(str(rank.rank), partial(_rank_cells, rank, marks[rank.rank], uuids.get(rank.rank, "")))
                for rank in entry.view.ranks
            ]
        )
        self._show_logs(entry if logs else None)

    def _has_logs(self, entry: RunEntry) -> bool:
        """Whether to show logs of a run if its details leave room.

        Not of a run on another host: moving through the list would read its logs from the node.
        """
        high = self.size.height >= _LOGS_FROM
        return high and bool(entry.view.ranks) and self.board.core.runbook.far(entry) is None

    def _arrange(self, rank_lines: int | None) -> None:
        """Make the table of ranks ``rank_lines`` high and show the logs below it; None: no logs."""
        if rank_lines != self._rank_lines:  # setting None is a layout of the whole screen, also where it was None
            self._rank_lines = rank_lines
            styles = self.query_one("#ranks", Grid).styles
            styles.height = styles.min_height = rank_lines
            self.set_class(rank_lines is not None, "-logs")

    def _show_logs(self, entry: RunEntry | None) -> None:
        """Show the end of the logs of a run's chosen rank, or read on; None: there is no room for logs."""
        if entry is None:
            self._logs = None
            return
        chosen = entry.view.id, self._rank(entry)
        views = {view.id: view for view in self.query(LogView)}
        for view in views.values():
            view.live = entry.live
        if chosen != self._logs:
            self._logs = chosen
            for stream, title in (("out", "stdout"), ("err", "stderr")):
                views[stream].title = f"Rank {chosen[1]} {title}"
                views[stream].open(Path(entry.view.folder) / f"rank-{chosen[1]}.{stream}")
        else:
            for view in views.values():
                view.poll()

    def _rank(self, entry: RunEntry) -> int:
        """Return the rank under the cursor in the table of ranks; from the list the one that failed first."""
        ranks = self.query_one("#ranks", Grid)
        if ranks.has_focus and ranks.cursor is not None:
            return int(ranks.cursor)
        return first_rank(entry) or 0

    # Actions

    @on(Grid.Moved, "#ranks")
    def _rank_moved(self) -> None:
        if self._rank_lines is not None:
            self._show_logs(self.entry)

    @on(Grid.Chosen, "#ranks")
    def _rank_chosen(self, event: Grid.Chosen) -> None:
        if self.entry is not None:
            self.app.push_screen(LogScreen(self.entry, int(event.key)))

    @on(LogView.StreamPicked)
    def _stream_picked(self, event: LogView.StreamPicked) -> None:
        """Open the log at the stream that was clicked; a click on its scroll bar only scrolls."""
        entry = None if self._logs is None else self._entries.get(self._logs[0])
        if self._logs is None or entry is None or event.scrolled:
            return
        if not self.is_active:  # the second of two clicks; is_current is true also below the screen on top
            return
        self.app.push_screen(LogScreen(entry, self._logs[1], event.view.id))

    @on(Grid.Chosen, "#list")
    def action_log(self) -> None:
        """Open the log of the rank under the cursor; from the list, of the rank that failed first."""
        entry = self.entry
        if entry is None or not entry.view.ranks:
            self.notify("no run with ranks under the cursor", markup=False)
            return
        self.app.push_screen(LogScreen(entry, self._rank(entry)))

    def action_stop(self) -> None:
        entry = self.entry
        if entry is None:
            return
        view = entry.view
        if entry.unreadable:
            self.notify(f"cannot read the state of run {view.id}", severity="warning", markup=False)
            return
        if view.state in FINAL:
            self.notify(f"run {view.id} has ended already: {view.state}", markup=False)
            return
        if (run := self._reached(entry, "stop")) is None:
            return
        grace_s = self._detail[1].grace_s if self._detail and self._detail[0] == view.id else None
        dialog = StopConfirm(entry, grace_s)
        self.board.open_dialog(dialog, lambda _: self._stop(view.id, run, 0.0 if dialog.now else None))

    def _stop(self, run: str, access: RunAccess, grace_s: float | None) -> None:
        board = self.board

        def asked(_: object) -> None:
            self._stopping[run] = Stop(time.monotonic(), grace_s)
            board.follower.follow(run)
            self._look()

        board.ask(lambda: ask_to_stop(access, grace_s, _REASON), asked)

    def _reached(self, entry: RunEntry, command: str) -> RunAccess | None:
        """Return a run for a request; None, with a notification, where none of the board's nodes is its head's host."""
        access = self.board.core.runbook.access(entry)
        if access is None:
            host, run = clean(entry.view.head.host), entry.view.id
            words = (
                f"run {run} was launched on {host}, which is not one of the nodes; use `gpuboard {command} {run}` there"
            )
            self.notify(words, severity="warning", timeout=12, markup=False)
        return access

    def action_explain(self) -> None:
        """Inspect the ranks of the run under the cursor, as `gpuboard explain` does."""
        entry = self.entry
        if entry is None:
            return
        view, state = entry.view, _state(entry)
        if not entry.live or entry.unreadable:
            self.notify(f"run {view.id} is not running: there is nothing to inspect", markup=False)
            return
        if (asked := self._explained.get(view.id)) is not None and asked.found is None:
            return  # in progress
        if (run := self._reached(entry, "explain")) is None:
            return

        def answered(found: Explanation | None) -> None:
            self._explained.pop(view.id, None)
            if found is not None:
                self._explained[view.id] = Explained(state, time.monotonic(), found)
            if self.is_open:
                self._draw_detail()

        def failed(error: GpuboardError) -> None:
            answered(None)
            self.board.show_error(error)

        self._explained[view.id] = Explained(state, time.monotonic(), None)
        self._draw_detail()
        self.board.ask(lambda: explain_run(run), answered, failed)

    def action_launch(self) -> None:
        open_launch(self.board)

    def action_all_nodes(self) -> None:
        """Ask every node for runs now, as `gpuboard runs --all-nodes` does."""
        self.board.core.find_runs(self.board.scene, everywhere=True)
        self._look()


def _state(entry: RunEntry) -> object:
    return entry.view.state, [verdict.text for verdict in entry.view.verdicts]


def _rank_cells(rank: RankView, mark: ranks_text.Mark, uuid: str) -> list[Cell]:
    return [
        Cell(str(rank.rank)),
        Cell(mark.word, mark.role),
        Cell(clean(rank.node)),
        Cell(str(rank.index)),
        Cell("?" if rank.pid is None else str(rank.pid)),
        Cell(clean(rank.last_line)),
        Cell(clean(uuid), "dim"),
    ]
