"""All leases in a list and on a time line, and the actions release, renew and copy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpuboard.board import clipboard
from gpuboard.board.dialogs.base import Confirm, Dialog, lease_duration
from gpuboard.board.dialogs.launch import open_launch
from gpuboard.board.dialogs.request_form import local, places_words
from gpuboard.board.dialogs.reserve import open_reserve
from gpuboard.board.filter.leases import LEASES, holder_words
from gpuboard.board.scene import Scene
from gpuboard.board.screens.base import SortedScreen
from gpuboard.board.screens.watches import open_watch
from gpuboard.board.tables.held import HeldLease, held
from gpuboard.board.text.detail import timeline
from gpuboard.board.text.lines import wrapped
from gpuboard.board.text.rows import Runs, share
from gpuboard.board.theme.styles import plot_role
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.grid import Cell, Column, Grid, Row
from gpuboard.board.widgets.pane import Lines
from gpuboard.launch.runs.folder import RunView, by_lease
from gpuboard.model.lease import Lease
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration, parse_duration, seconds_of

if TYPE_CHECKING:
    from textual.notifications import SeverityLevel

    from gpuboard.leases.ledger import Released

_RICH = 150  # terminal cells from which list and time line are side by side
_DETAILS = 3  # lines of each fact about the lease under the cursor
_BAR = "bar"
_LIST = (
    Column("id", "Lease", 6),
    Column("owner", "Owner", 10),
    Column("gpus", "GPUs", 18, weight=4, least=14),
    Column("left", "Left", 6, right=True),
    Column("until", "Until", 12),
    Column("marks", "Flags", 14, weight=1, least=12),
    Column("holder", "Holder", 17, drop=2),
    Column("host", "From", 12, drop=3),
    Column("purpose", "Purpose", 12, weight=6, least=8, drop=1),
)
_BESIDE = {  # those of the list that are drawn beside the time line
    column.key: column
    for column in (
        Column("id", "Lease", 6),
        Column("owner", "Owner", 10, drop=1),
        Column("gpus", "GPUs", 16, drop=2),
        Column("left", "Left", 6, right=True),
        Column("marks", "Flags", 12, drop=3),
    )
}
_EMPTY = "No GPU is reserved."
_HOW = "r reserves; to choose GPUs, mark them with space in the cluster view first."
_NO_MATCH = "No lease matches the filter.\nEscape clears it."
_ORDERS = {"left": "time left", "owner": "owner", "gpus": "GPUs"}


class LeasesScreen(SortedScreen):
    """Every lease; the user's own in bold."""

    TITLE_WORDS = "Leases"
    LANGUAGE = LEASES
    FILTERED = "leases"
    FILTER_HINT = "user:me node:gpu[01-04] left<1h flag:idle, or any word"
    DEFAULT_CSS = """
    LeasesScreen #sums, LeasesScreen #about { margin: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back", id="leases.back"),
        Binding("d", "release", "Release", id="leases.release"),
        Binding("n", "renew", "Renew", id="leases.renew"),
        Binding("g", "jump", "Its GPUs", id="leases.jump", show=False),  # enter does the same
        Binding("x", "launch", "Launch", id="leases.launch"),
        Binding("y", "copy", "Copy", id="leases.copy"),
        Binding("t", "timeline", "Time line", id="leases.timeline"),
        Binding("s", "sort", "Sort", id="leases.sort", show=False),
        Binding("S", "reverse", "Reverse order", id="leases.reverse", show=False),
        Binding("r", "reserve", "Reserve", id="leases.reserve"),
        Binding("e", "watch", "Watch its end", id="leases.watch", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._line: bool | None = None  # whether the time line is shown; None: where it fits beside the list
        self._order, self._down = "left", False
        self._held: dict[str, HeldLease] = {}

    def compose(self) -> ComposeResult:
        yield Lines(id="sums")
        yield self.filter_field()
        yield Grid(_LIST, empty=self._empty, id="leases")
        yield Lines(id="about")
        yield Footer()

    @property
    def _empty(self) -> str:
        return _EMPTY if "reserve" in self.board.REFUSED else f"{_EMPTY}\n\n{_HOW}"

    def filter_rows(self) -> list[tuple[HeldLease]]:
        return [] if self.board.scene is None else [(one,) for one in held(self.board.scene)]

    def show(self, scene: Scene) -> None:
        now = seconds_of(scene.snapshot.at)  # in a replay long ago
        every = held(scene)
        query = self.query_in_force
        ordered = sorted((one for one in every if query.matches(one)), key=self._place, reverse=self._down)
        self._held = {one.key: one for one in ordered}
        of = f"{len(ordered)} of {len(every)} match · " if query else ""
        lines: list[Runs] = [((of + _sums(ordered), "title"),)]
        if unread := scene.leases.unread:
            lines.append(((f"Not read, so leases there are not listed: {', '.join(unread)}", "warn"),))
        self.query_one("#sums", Lines).set_lines(lines)
        columns = self._columns(ordered, now)
        self.grid.set_empty(_NO_MATCH if query and every else self._empty)
        self.grid.set_columns(columns)
        self.grid.set_sort(self._order, self._down)
        self.grid.set_rows([self._row(one, columns, now) for one in ordered])
        self._about()

    def _place(self, one: HeldLease) -> tuple[object, ...]:
        if self._order == "owner":
            return not one.mine, one.lease.owner, one.until, one.lease.id
        if self._order == "gpus":
            return places_words(one.lease.gpus), one.until, one.lease.id
        return one.until, one.lease.id

    def _columns(self, ordered: Sequence[HeldLease], now: float) -> tuple[Column, ...]:
        """Return the columns: flags only where a lease has some; the title of the time line's column is its ruler."""
        flagged = any(one.marks for one in ordered)
        listed = tuple(column for column in _LIST if flagged or column.key != "marks")
        if not self._lined:
            self._axis = timeline.axis([], now, 1)
            return listed
        if not self._wide:  # all are copied
            listed = tuple(_BESIDE.get(column.key, column._replace(width=0, weight=0)) for column in listed)
        columns = (*listed, Column(_BAR, "", 30, weight=2, least=20))
        width = share(columns, self.grid.scrollable_content_region.width)[len(columns) - 1]
        self._axis = timeline.axis([(one.since, one.until) for one in ordered], now, width)
        return (*columns[:-1], columns[-1]._replace(title=timeline.ruler(self._axis)))

    def _row(self, one: HeldLease, columns: Sequence[Column], now: float) -> Row:
        cells = []
        for column in columns:
            if column.key == _BAR:
                role = plot_role(self._role(one))
                cells.append(Cell(timeline.bar(self._axis, one.since, one.until, role, self.board.look.glyphs)))
            elif column.key == "marks":
                cells.append(Cell(one.marks))
            else:
                role = "mine" if one.mine else ""
                cells.append(Cell(_text(one, column.key, now), "dim" if column.key in {"host", "holder"} else role))
        return Row(one.key, tuple(cells))

    @property
    def _wide(self) -> bool:
        return self.size.width >= _RICH

    @property
    def _lined(self) -> bool:
        return self._wide if self._line is None else self._line

    @staticmethod
    def _role(one: HeldLease) -> str:
        return "bad" if one.rogues else "warn" if one.idle else "mine" if one.mine else "reserved"

    @on(Grid.Moved)
    def _about(self) -> None:
        """Show the lease under the cursor in full: columns cut long values."""
        one = self._held.get(self.grid.cursor or "")
        lines: list[Runs] = []
        if one is not None and self.board.scene is not None:
            now = seconds_of(self.board.scene.snapshot.at)
            lease, span = one.lease, f"{local(one.since, now)} to {local(one.until, now)}"
            purpose = f"; {lease.purpose}" if lease.purpose else ""
            host = f" from {lease.host}" if lease.host else ""
            facts = (
                f"{lease.id}  {places_words(lease.gpus)}",
                f"{lease.owner}{host}, {holder_words(lease)}; {span}{purpose}",
            )
            room = self.size.width - 2
            lines = [((line, ""),) for fact in facts for line in wrapped(fact, room, most=_DETAILS)]
            for gpu, process in one.rogues[:2]:
                node = next((part.node for part in lease.gpus if part.uuid == gpu.uuid), "?")
                words = f"rogue on {node}:{gpu.index}: {process.user}'s process {process.pid}  {process.command}"
                lines.append(((words, "bad"),))
        self.query_one("#about", Lines).set_lines(lines)

    def _selected(self) -> HeldLease | None:
        one = self._held.get(self.grid.cursor or "")
        if one is None:
            self.board.notify("no lease selected; r reserves", markup=False)
        return one

    def action_timeline(self) -> None:
        self._line = not self._lined
        self.redraw()

    def orders(self) -> dict[str, str]:
        return _ORDERS

    @property
    def current_order(self) -> tuple[str, bool]:
        return self._order, self._down

    def set_order(self, key: str, *, down: bool) -> None:
        self._order, self._down = key, down
        self.redraw()

    def action_reserve(self) -> None:
        open_reserve(self.board, ())

    def action_launch(self) -> None:
        """Open the launch dialog, on the lease under the cursor if it is the user's own."""
        one = self._held.get(self.grid.cursor or "")
        open_launch(self.board, lease=one.lease.id if one is not None and one.mine else None)

    def action_watch(self) -> None:
        if one := self._selected():
            open_watch(self.board, one.lease.id)

    def action_copy(self) -> None:
        if one := self._selected():
            clipboard.copy_lease(self.board, one.lease)

    @on(Grid.Chosen)
    def action_jump(self) -> None:
        """Go to the first of its GPUs that is known, else to its node: Slurm may name neither."""
        one, scene = self._selected(), self.board.scene
        if one is None or scene is None:
            return
        lease = one.lease
        keys = [gpu.uuid for gpu in lease.gpus if gpu.index is not None and gpu.uuid in scene.devices]
        keys += [f"node:{name}" for name in lease.nodes if name in scene.nodes]
        if keys:
            self.board.go_to(keys[0])
        else:
            self.board.notify(f"none of the GPUs and nodes of lease {lease.id} is on this board", markup=False)

    def action_release(self) -> None:
        """Release the lease, after a question."""
        one = self._selected()
        if one is None:
            return
        lease, board = one.lease, self.board
        if not lease.may_end:
            self._refuse(lease, "release")
            return
        now = time.time()
        words = [f"{places_words(lease.gpus)}, held until {local(one.until, now)}"]
        words += [f"Its owner is {lease.owner}; as root you may release it."] if not one.mine else []
        pids: dict[str, dict[int, None]] = {}
        for process in (process for gpu in one.gpus for process in gpu.processes or ()):
            pids.setdefault(process.user or "?", {})[process.pid] = None
        if lease.job is not None:
            words.append(f"Slurm cancels job {lease.job} with its processes.")
        elif pids:
            whose = "; ".join(f"{user} {', '.join(map(str, numbers))}" for user, numbers in pids.items())
            words.append(f"No process is killed; these will be flagged overdue: {whose}")

        def done(ended: Released) -> None:
            failed = "".join(f"\n{node}: {why}" for node, why in ended.failed.items())
            words = places_words(ended.gpus) + failed
            severity: SeverityLevel = "warning" if failed else "information"
            board.notify(words, title=f"Released: {lease.id}", severity=severity, markup=False)

        def release(_: bool = True) -> None:
            board.ask(lambda: board.core.operations.release(lease.id, None if one.mine else lease), done)

        def read(users: dict[str, RunView]) -> None:
            run = users.get(lease.id) if one.mine else None
            if run is None:
                release()
            else:
                board.open_dialog(_in_use(lease, run), release)

        def meant(_: bool) -> None:
            board.ask(lambda: by_lease(entry.view for entry in board.core.runbook.read()), read)

        board.open_dialog(Confirm(f"Release {lease.id}?", "\n".join(words), verb="Release"), meant)

    def action_renew(self) -> None:
        one = self._selected()
        if one is None:
            return
        if not one.mine:
            self._refuse(one.lease, "renew")
            return
        self.board.open_dialog(RenewDialog(one.lease, parse_duration(self.board.core.settings.max_lease)))

    def _refuse(self, lease: Lease, action: str) -> None:
        root = " or root" if action == "release" else ""
        words = f"lease {lease.id} belongs to {lease.owner}; only the owner{root} can {action} it"
        self.board.notify(words, severity="warning", markup=False)


def _in_use(lease: Lease, run: RunView) -> Confirm:
    """Return the question before the release of a lease that a run uses."""
    if lease.job is not None:
        effect = f"Slurm ends the run with job {lease.job}."
    else:
        effect = "The run goes on without a reservation: others can reserve its GPUs while it computes on them."
    words = f"Run {run.id} uses it: {clean(run.target, 80)}\n{effect}\n\nTo end the run instead: u, then s; "
    words += "a lease that it reserved itself is then released too."
    return Confirm(f"Release {lease.id} although run {run.id} uses it?", words, verb="Release it anyway")


class RenewDialog(Dialog[str]):
    """Asks for how long, from now, to renew a lease."""

    PREVIEW = 1

    def __init__(self, lease: Lease, most_s: float) -> None:
        fields = [lease_duration("From now", most_s)]
        super().__init__(f"Renew {lease.id}: {places_words(lease.gpus)}", fields, verb="Renew")
        self._lease = lease

    def changed(self) -> None:
        if self.wrong():
            self.show_message("", "good")
            return
        now = time.time()
        end = now + parse_duration(self.values["for"])
        if end < seconds_of(self._lease.until):
            self.show_message(f"Will end {local(end, now)}, sooner than now", "warn")
        else:
            self.show_message(f"Will end {local(end, now)}", "good")

    def commit(self, values: dict[str, str]) -> None:
        """Renew it on all its nodes."""
        for_s, lease, board = parse_duration(values["for"]), self._lease.id, self.board

        def done(_: None) -> None:
            now = time.time()
            board.notify(f"until {local(now + for_s, now)}", title=f"Renewed: {lease}", markup=False)
            if self.is_open:
                self.dismiss(lease)

        self.work(lambda: board.core.operations.renew(lease, for_s), done)


def _text(one: HeldLease, key: str, now: float) -> str:
    lease = one.lease
    if key == "left":
        return format_duration(lease.remaining_s)
    if key == "until":
        return local(one.until, now)
    found = {
        "id": lease.id,
        "owner": lease.owner,
        "gpus": places_words(lease.gpus),
        "holder": holder_words(lease),
        "host": lease.host,
        "purpose": lease.purpose,
    }
    return found[key]


def _sums(ordered: Sequence[HeldLease]) -> str:
    if not ordered:
        return "Leases: none"
    gpus = sum(len(one.lease.gpus) for one in ordered)
    words = [f"{len(ordered)} lease{'s' if len(ordered) > 1 else ''}", f"{gpus} GPU{'s' if gpus > 1 else ''}"]
    words += [f"{mine} yours"] if (mine := sum(one.mine for one in ordered)) else []
    words += [f"{idle} idle"] if (idle := sum(one.idle for one in ordered)) else []
    words += [f"{rogue} with a rogue process"] if (rogue := sum(bool(one.rogues) for one in ordered)) else []
    return " · ".join(words)
