"""Who holds what until when: every lease in a list and on a time line; ending, prolonging and copying them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpuboard.board import clipboard
from gpuboard.board.dialogs.base import Confirm, Dialog, Field, duration
from gpuboard.board.dialogs.launch import open_launch
from gpuboard.board.dialogs.request_form import lasting, local, places_words
from gpuboard.board.dialogs.reserve import open_reserve
from gpuboard.board.scene import Scene
from gpuboard.board.screens.base import BoardScreen
from gpuboard.board.screens.watches import open_watch
from gpuboard.board.text import timeline
from gpuboard.board.text.rows import Runs, share
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.grid import Cell, Column, Grid, Row
from gpuboard.board.widgets.pane import Lines
from gpuboard.model.lease import Lease
from gpuboard.model.units import format_duration, parse_duration

if TYPE_CHECKING:
    from textual.notifications import SeverityLevel

    from gpuboard.leases.ledger import Released
    from gpuboard.model.snapshot import GpuView, ProcessView

_RICH = 150  # terminal cells from which list and time line stand side by side
_BAR = "bar"
_LIST = (
    Column("id", "Lease", 6),
    Column("owner", "Owner", 10),
    Column("gpus", "GPUs", 18, weight=2, least=14),
    Column("left", "Left", 6, right=True),
    Column("until", "Until", 12),
    Column("marks", "Marks", 14, weight=1, least=12),
    Column("holder", "Holder", 17, drop=2),
    Column("host", "From", 12, drop=3),
    Column("purpose", "Purpose", 12, weight=2, least=8, drop=1),
)
_LINE = (
    Column("id", "Lease", 6),
    Column("owner", "Owner", 10, drop=1),
    Column("gpus", "GPUs", 16, drop=2),
    Column("left", "Left", 6, right=True),
)
_MARKS = Column("marks", "Marks", 12, drop=3)  # beside the time line only where there are any
_ORDERS = ("left", "owner", "gpus")


class HeldLease(NamedTuple):
    """A lease with what the readings say of its GPUs."""

    lease: Lease
    mine: bool
    since: float  # epoch seconds
    until: float
    gpus: list[GpuView]  # those that are seen
    rogues: list[tuple[GpuView, ProcessView]]  # other people's processes on them

    @property
    def key(self) -> str:
        """What tells it from all others: one id with two owners is two leases."""
        return f"{self.lease.id} {self.lease.owner}"

    @property
    def idle(self) -> int:
        """How many of its GPUs have not been used for long."""
        return sum("idle" in gpu.flags for gpu in self.gpus)

    @property
    def marks(self) -> tuple[tuple[str, str], ...]:
        """What is wrong or wasteful as runs of (words, role): rogues by name first."""
        found = []
        if users := sorted({process.user or "?" for _, process in self.rogues}):
            found.append((f"rogue: {', '.join(users)}", "bad"))
        found += [(flag, "bad") for flag in self.lease.flags]
        if self.idle:
            of = "" if self.idle == len(self.lease.gpus) else f" {self.idle} of {len(self.lease.gpus)}"
            found.append((f"idle{of}", "warn"))
        return tuple(run for k, words in enumerate(found) for run in (((" ", ""),) if k else ()) + (words,))


def held(scene: Scene) -> list[HeldLease]:
    """Return every lease of a scene with what is seen of its GPUs."""
    return [_held(lease, scene) for lease in scene.leases.leases]


def _held(lease: Lease, scene: Scene) -> HeldLease:
    places = [scene.devices[gpu.uuid] for gpu in lease.gpus if gpu.index is not None and gpu.uuid in scene.devices]
    gpus = [place.gpu for place in places]
    return HeldLease(
        lease,
        scene.is_mine(lease),
        datetime.fromisoformat(lease.since).timestamp(),
        datetime.fromisoformat(lease.until).timestamp(),
        gpus,
        [(gpu, process) for gpu in gpus for process in gpu.processes or () if process.rogue],
    )


class LeasesScreen(BoardScreen):
    """Every lease; one's own in bold."""

    TITLE_WORDS = "Leases"
    DEFAULT_CSS = """
    LeasesScreen #sums, LeasesScreen #about { margin: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back", id="leases.back"),
        Binding("d", "release", "Release", id="leases.release"),
        Binding("n", "renew", "Renew", id="leases.renew"),
        Binding("g", "jump", "Its GPUs", id="leases.jump", show=False),  # and enter, which is the list's
        Binding("x", "launch", "Launch", id="leases.launch"),
        Binding("y", "copy", "Copy", id="leases.copy"),
        Binding("t", "timeline", "Time line", id="leases.timeline"),
        Binding("s", "sort", "Sort", id="leases.sort", show=False),
        Binding("r", "reserve", "Reserve", id="leases.reserve"),
        Binding("e", "watch", "Tell me when it ends", id="leases.watch", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._line: bool | None = None  # whether the time line is shown; None: where there is room beside the list
        self._order = "left"
        self._held: dict[str, HeldLease] = {}

    def compose(self) -> ComposeResult:
        """Sums, what is missing, the leases, the one under the cursor."""
        yield Lines(id="sums")
        yield Grid(
            _LIST,
            empty="Nobody holds a GPU.\n\nr reserves; in the cluster view, mark GPUs with space first.",
            id="leases",
        )
        yield Lines(id="about")
        yield Footer()

    @property
    def _grid(self) -> Grid:
        return self.query_one("#leases", Grid)

    def show(self, scene: Scene) -> None:
        """Draw the leases of ``scene``."""
        now = time.time()
        ordered = sorted(held(scene), key=self._place)
        self._held = {one.key: one for one in ordered}
        said: list[Runs] = [((_sums(ordered), "title"),)]
        if unread := scene.leases.unread:
            said.append(((f"Not read, so leases there are missing: {', '.join(unread)}", "warn"),))
        self.query_one("#sums", Lines).set_lines(said)
        columns = self._columns(ordered, now)
        self._grid.set_columns(columns)
        self._grid.set_sort(self._order, False)
        self._grid.set_rows([self._row(one, columns, now) for one in ordered])
        self._about()

    def _place(self, one: HeldLease) -> tuple[object, ...]:
        if self._order == "owner":
            return not one.mine, one.lease.owner, one.until, one.lease.id
        if self._order == "gpus":
            return places_words(one.lease.gpus), one.until, one.lease.id
        return one.until, one.lease.id

    def _columns(self, ordered: Sequence[HeldLease], now: float) -> tuple[Column, ...]:
        """Return the columns that fit; the title of the time line is its ruler."""
        wide = self._wide
        if not self._lined:
            self._axis = timeline.axis([], now, 1)
            return _LIST
        marks = (_MARKS,) if any(one.marks for one in ordered) else ()
        columns = (*(_LIST if wide else (*_LINE, *marks)), Column(_BAR, "", 30, weight=8, least=20))
        width = share(columns, self._grid.scrollable_content_region.width)[len(columns) - 1]
        self._axis = timeline.axis([(one.since, one.until) for one in ordered], now, width)
        return (*columns[:-1], columns[-1]._replace(title=timeline.ruler(self._axis)))

    def _row(self, one: HeldLease, columns: Sequence[Column], now: float) -> Row:
        cells = []
        for column in columns:
            if column.key == _BAR:
                cells.append(
                    Cell(timeline.bar(self._axis, one.since, one.until, self._role(one), self.board.look.glyphs))
                )
            elif column.key == "marks":
                cells.append(Cell(one.marks))
            else:
                role = "mine" if one.mine else ""
                cells.append(Cell(_text(one, column.key, now), "dim" if column.key in {"host", "holder"} else role))
        return Row(one.key, tuple(cells))

    @property
    def _wide(self) -> bool:
        """Whether list and time line stand side by side."""
        return self.size.width >= _RICH

    @property
    def _lined(self) -> bool:
        """Whether the time line is shown."""
        return self._wide if self._line is None else self._line

    @staticmethod
    def _role(one: HeldLease) -> str:
        return "bad" if one.rogues else "warn" if one.idle else "mine" if one.mine else "reserved"

    def _about(self) -> None:
        """Say all of the lease under the cursor: what the columns cut."""
        one = self._held.get(self._grid.cursor or "")
        now = time.time()
        said: list[Runs] = []
        if one is not None:
            lease, span = one.lease, f"{local(one.since, now)} to {local(one.until, now)}"
            purpose = f"; {lease.purpose}" if lease.purpose else ""
            said = [
                ((f"{lease.id}  {places_words(lease.gpus)}", ""),),
                ((f"{lease.owner}{_whence(lease)}, {_holder(lease)}; {span}{purpose}", ""),),
            ]
            for gpu, process in one.rogues[:2]:
                node = next((part.node for part in lease.gpus if part.uuid == gpu.uuid), "?")
                words = f"rogue on {node}:{gpu.index}: {process.user}'s process {process.pid}  {process.command}"
                said.append(((words, "bad"),))
        self.query_one("#about", Lines).set_lines(said)

    @on(Grid.Moved)
    def _moved(self) -> None:
        self._about()

    @on(Grid.Chosen)
    def _chosen(self) -> None:
        self.action_jump()

    @on(Grid.Sorted)
    def _sorted(self, event: Grid.Sorted) -> None:
        if event.key in _ORDERS:
            self._order = event.key
            self._again()

    def on_resize(self) -> None:
        """Other columns may fit."""
        self._again()

    def _again(self) -> None:
        if self.board.scene is not None:
            self.show(self.board.scene)

    def _selected(self) -> HeldLease | None:
        one = self._held.get(self._grid.cursor or "")
        if one is None:
            self.board.notify("there is no lease; r reserves", markup=False)
        return one

    def action_timeline(self) -> None:
        """Show the time line, beside the list or in its place, or the list alone again."""
        self._line = not self._lined
        self._again()

    def action_sort(self) -> None:
        """Sort by what is next: time left, owner, GPUs."""
        self._order = _ORDERS[(_ORDERS.index(self._order) + 1) % len(_ORDERS)]
        self._again()

    def action_reserve(self) -> None:
        """Open the dialog that reserves."""
        open_reserve(self.board, ())

    def action_launch(self) -> None:
        """Open the dialog that launches on the lease, if it is one's own."""
        one = self._held.get(self._grid.cursor or "")
        open_launch(self.board, lease=one.lease.id if one is not None and one.mine else None)

    def action_watch(self) -> None:
        """Be told when the lease ends."""
        if one := self._selected():
            open_watch(self.board, one.lease.id)

    def action_copy(self) -> None:
        """Offer what can be copied of the lease."""
        if one := self._selected():
            clipboard.copy_lease(self.board, one.lease)

    def action_jump(self) -> None:
        """Show the lease's GPUs in the cluster view."""
        if one := self._selected():
            self.board.go_to_gpu(one.lease.gpus[0].uuid)

    def action_release(self) -> None:
        """End the lease, when that is meant."""
        one = self._selected()
        if one is None:
            return
        lease, scene = one.lease, self.board.scene
        assert scene is not None
        if not scene.may_end(lease):
            self._theirs(lease, "end")
            return
        now = time.time()
        words = [f"{places_words(lease.gpus)}, held until {local(one.until, now)}"]
        words += [f"It is {lease.owner}'s; as root you may end it."] if not one.mine else []
        pids = [f"{process.user}'s {process.pid}" for gpu in one.gpus for process in gpu.processes or ()]
        if lease.job is not None:
            words.append(f"Slurm ends its job {lease.job}, and what runs in it.")
        elif pids:
            words.append(f"Nothing is killed: {', '.join(dict.fromkeys(pids))} will be shown as overdue.")

        def done(ended: Released) -> None:
            failed = "".join(f"\n{node}: {why}" for node, why in ended.failed.items())
            words = places_words(ended.gpus) + failed
            severity: SeverityLevel = "warning" if failed else "information"
            self.board.notify(words, title=f"Released: {lease.id}", severity=severity, markup=False)

        def meant(yes: bool | None) -> None:
            if yes:
                self.board.ask(lambda: self.board.core.operations.release(lease.id), done)

        self.board.push_screen(Confirm(f"Release {lease.id}?", "\n".join(words), verb="Release"), meant)

    def action_renew(self) -> None:
        """Let the lease end at another time."""
        one = self._selected()
        if one is None:
            return
        if not one.mine:
            self._theirs(one.lease, "renew")
            return
        self.board.push_screen(RenewDialog(one.lease, parse_duration(self.board.core.settings.max_lease)))

    def _theirs(self, lease: Lease, what: str) -> None:
        words = f"{lease.id} is {lease.owner}'s; only its owner can {what} it" + (", or root" if what == "end" else "")
        self.board.notify(words, severity="warning", markup=False)


class RenewDialog(Dialog[str]):
    """Asks how long from now a lease is to last."""

    def __init__(self, lease: Lease, most_s: float) -> None:
        usual = lasting(min(8 * 3600.0, most_s))
        field = Field("for", "From now", usual, f"at most {lasting(most_s)}", duration(most_s))
        super().__init__(f"Renew {lease.id}: {places_words(lease.gpus)}", [field], verb="Renew")
        self._lease = lease

    def changed(self) -> None:
        """Say when it would end."""
        now = time.time()
        words = "" if self.wrong() else f"Ends {local(now + parse_duration(self.values['for']), now)}"
        self.say(words, "good")

    def commit(self, values: dict[str, str]) -> None:
        """Renew it on all its nodes."""
        for_s, lease, board = parse_duration(values["for"]), self._lease.id, self.board
        self.busy = True

        def done(_: None) -> None:
            now = time.time()
            board.notify(f"until {local(now + for_s, now)}", title=f"Renewed: {lease}", markup=False)
            if self.is_attached:
                self.dismiss(lease)

        def failed(error: Exception) -> None:
            if self.is_attached:
                self.busy = False
                self.say(str(error), "bad")

        board.ask(lambda: board.core.operations.renew(lease, for_s), done, failed)


def _text(one: HeldLease, key: str, now: float) -> str:
    lease = one.lease
    if key == "left":
        return format_duration(max(0.0, one.until - now))
    if key == "until":
        return local(one.until, now)
    found = {
        "id": lease.id,
        "owner": lease.owner,
        "gpus": places_words(lease.gpus),
        "holder": _holder(lease),
        "host": lease.host,
        "purpose": lease.purpose,
    }
    return found[key]


def _holder(lease: Lease) -> str:
    if lease.holder is None:
        return "detached" if lease.job is None else f"job {lease.job}"
    alive = {True: "", False: " gone", None: " there"}[lease.holder.alive]
    return f"pid {lease.holder.pid}{alive}"


def _whence(lease: Lease) -> str:
    return f" from {lease.host}" if lease.host else ""


def _sums(ordered: Sequence[HeldLease]) -> str:
    if not ordered:
        return "Leases: none"
    gpus = sum(len(one.lease.gpus) for one in ordered)
    words = [f"{len(ordered)} lease{'s' if len(ordered) > 1 else ''}", f"{gpus} GPU{'s' if gpus > 1 else ''}"]
    words += [f"{mine} yours"] if (mine := sum(one.mine for one in ordered)) else []
    words += [f"{idle} idle"] if (idle := sum(one.idle for one in ordered)) else []
    words += [f"{rogue} with a rogue process"] if (rogue := sum(bool(one.rogues) for one in ordered)) else []
    return " · ".join(words)
