"""Watches: conditions checked in every new scene; when one is met, a notification and, if wanted, a reservation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpuboard.board.background import REST, Background
from gpuboard.board.dialogs import request_form
from gpuboard.board.dialogs.base import YES, Field, lease_duration, number, size
from gpuboard.board.dialogs.planner import Answer, PlannedDialog
from gpuboard.board.dialogs.reserve import reserved_text
from gpuboard.board.filter.language import Language
from gpuboard.board.filter.matchers import named, place, word
from gpuboard.board.operations import Attempt
from gpuboard.board.scene import Scene
from gpuboard.board.screens.base import FilteredScreen
from gpuboard.board.terminal.notify import announce
from gpuboard.board.text.detail.run import ended_words
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.grid import Cell, Column, Grid, Row
from gpuboard.board.widgets.pane import Lines
from gpuboard.errors import GpuboardError, Refused
from gpuboard.leases.policy.choose import choose
from gpuboard.model.lease import Lease
from gpuboard.model.request import Choice, Request
from gpuboard.model.units import parse_duration

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp
    from gpuboard.launch.runs.index import Runbook, RunEntry
    from gpuboard.leases.output.formats import Allocation


class Watch(msgspec.Struct, frozen=True):
    """One condition: GPUs for ``request`` are free, or ``lease`` has ended, or ``run`` has ended."""

    number: int
    since: float  # epoch seconds
    request: Request | None = None
    lease: Lease | None = None  # as it was when the watch was set
    run: str | None = None
    reserve_s: float | None = None  # seconds; None: notify only
    purpose: str = ""
    met_at: float | None = None
    words: str = ""  # result, or why it could not be reserved yet

    @property
    def condition(self) -> str:
        """The condition as text."""
        if self.lease is not None:
            return f"lease {self.lease.id} ends ({self.lease.owner}, {request_form.places_words(self.lease.gpus)})"
        if self.run is not None:
            return f"run {self.run} ends"
        assert self.request is not None
        then = "" if self.reserve_s is None else f", then reserve for {request_form.lasting(self.reserve_s)}"
        return request_form.request_words(self.request) + then


def holds(watch: Watch, scene: Scene, run: RunEntry | None = None) -> str:
    """Return what meets the condition; "" when that is not so or unknown. ``run``: the state of ``watch.run``."""
    if watch.run is not None:
        return "" if run is None or run.live else f"{run.view.state}: {ended_words(run).splitlines()[0]}"
    if watch.lease is not None:
        gone = (watch.lease.id, watch.lease.owner) not in {(one.id, one.owner) for one in scene.leases.leases}
        unread = set(watch.lease.nodes) & set(scene.leases.unread)
        return f"{request_form.places_words(watch.lease.gpus)} of {watch.lease.owner}" if gone and not unread else ""
    assert watch.request is not None
    answer = choose(watch.request, scene.snapshot)
    return request_form.places_words(answer.gpus) if isinstance(answer, Choice) else ""


class Watches:
    """The watches of this board."""

    def __init__(self, board: BoardApp) -> None:
        self._board = board
        self.all: list[Watch] = []
        self._last = 0
        self._background: Background[list[tuple[Watch, str]]] = Background(board, rest=REST)  # the policy is slow
        self._taking: tuple[int, Attempt] | None = None  # the watch that is reserving: its number

    @property
    def active(self) -> list[Watch]:
        """The watches that have not been met."""
        return [watch for watch in self.all if watch.met_at is None]

    @property
    def words(self) -> str:
        """A short text for the status line; "" without active watches."""
        active = self.active
        return f"watching for {active[0].condition}" if len(active) == 1 else f"{len(active)} watches" if active else ""

    def add(self, watch: Watch) -> None:
        self._last += 1
        self.all.append(msgspec.structs.replace(watch, number=self._last))
        if self._board.scene is not None:
            self.look(self._board.scene)

    def remove(self, number: int) -> None:
        """Remove a watch; a reservation in progress for it is cancelled."""
        self.all = [watch for watch in self.all if watch.number != number]
        if self._taking is not None and self._taking[0] == number:
            self._taking[1].cancel()

    def look(self, scene: Scene) -> None:
        """Check the conditions in a new scene."""
        active = self.active
        if not active or not self._background.rested:
            return
        runbook = self._board.core.runbook

        def work() -> list[tuple[Watch, str]]:
            return [(one, words) for one in active if (words := _holds(one, scene, runbook))]

        self._background.ask(work, self._looked)

    def _looked(self, met: Sequence[tuple[Watch, str]]) -> None:
        there = [(watch, words) for watch, words in met if watch in self.all]  # not removed meanwhile
        for watch, words in there:
            if watch.reserve_s is None:
                announce(self._board, "Available" if watch.request else "Ended", f"{watch.condition}: {words}")
                self._put(watch, words, met=True)
        # one at a time; first those whose GPUs were not taken by another user before
        reserve = sorted((watch for watch, _ in there if watch.reserve_s is not None), key=lambda watch: watch.words)
        if reserve and self._taking is None:
            self._reserve(reserve[0])

    def _reserve(self, watch: Watch) -> None:
        """Reserve for a watch; when another user was faster, the watch stays active."""
        request, for_s = watch.request, watch.reserve_s
        assert request is not None and for_s is not None
        operations, attempt = self._board.core.operations, Attempt()
        self._taking = watch.number, attempt

        def taken(allocation: Allocation) -> None:
            self._taking = None
            self._put(watch, f"reserved as {allocation.lease.id}", met=True)

            def shown(notes: list[str]) -> None:
                if not attempt.cancelled:  # the watch was removed before: the lease is being released
                    announce(self._board, f"Reserved: {allocation.lease.id}", reserved_text(allocation, notes))

            self._board.ask(lambda: operations.published(allocation), shown, refused)

        def refused(error: GpuboardError) -> None:
            self._taking = None
            if isinstance(error, Refused) and error.refusal.code == 4:
                now = time.time()
                self._put(watch, f"another user was faster at {request_form.local(now, now)}", met=False)
            elif any(one.number == watch.number for one in self.all):
                self._board.show_error(GpuboardError(f"{watch.condition}: {request_form.plain(str(error))}"))
                self._put(watch, f"could not reserve: {request_form.plain(str(error))}", met=True)

        self._board.ask(lambda: operations.reserve(request, for_s, watch.purpose, attempt), taken, refused)

    def _put(self, watch: Watch, words: str, *, met: bool) -> None:
        new = msgspec.structs.replace(watch, words=words, met_at=time.time() if met else None)
        self.all = [new if one.number == watch.number else one for one in self.all]


def _holds(watch: Watch, scene: Scene, runbook: Runbook) -> str:
    try:
        return holds(watch, scene, runbook.one(watch.run) if watch.run is not None else None)
    except GpuboardError:  # a named node has left the inventory since the watch was set
        return ""


class WatchDialog(PlannedDialog[Watch]):
    """Asks for the condition. ``ends``: a lease whose end to wait for, as the default."""

    PREVIEW = 2

    def __init__(self, scene: Scene, most_s: float, ends: str = "") -> None:
        self._scene = scene
        self._runs: frozenset[str] = frozenset()  # live runs

        def what(text: str) -> str:
            if text in self._scene.by_lease or text in self._runs:
                return ""
            return number(1, request_form.MOST)(text) and "a number, a lease or a run"

        super().__init__(
            "New watch",
            [
                Field("what", "Wait for", ends or "1", "free GPUs, or a lease or run", "2", what),
                Field("model", "Model", "", "part of a name; empty: any", example="H100"),
                Field("memory", "Free memory", "", "per GPU; empty: any", "40GiB", size),
                Field("nodes", "Nodes", "", "at most; empty: any number", "1", number(1, 4096, needed=False)),
                Field("reserve", "Reserve", "", "as soon as available", toggle=True),
                lease_duration("For", most_s),
                Field("purpose", "Purpose", "", "shown to others", "ablation study"),
            ],
            verb="Watch",
            plan=choose,  # as the watch: Slurm accepts jobs that wait
        )

    def on_mount(self) -> None:
        """Read which runs are live."""
        runbook = self.board.core.runbook

        def known(runs: frozenset[str]) -> None:
            self._runs = runs
            if self.is_open:
                self.check()

        self.board.ask(lambda: frozenset(run.view.id for run in runbook.read() if run.live), known)

    def show(self, scene: Scene) -> None:
        self._scene = scene
        super().show(scene)

    def request(self) -> Request | None:
        return None if self.wrong() else self._watch(self.values).request

    def look(self) -> None:
        if self.wrong():
            self.show_message("")
        elif (watch := self._watch(self.values)).request is None:
            self.show_message(f"Will notify you when {watch.condition}")
        super().look()

    def show_answer(self, answer: Answer) -> bool:
        """Show what is free now, or why the watch would wait; one that can never be met is refused."""
        if isinstance(answer, Choice):
            self.show_message(f"Available now: {request_form.gpus_words(answer.gpus)}", "good")
            return True
        if isinstance(answer, str):
            self.show_message(answer, "bad")
            return False
        words, never = request_form.refusal_words(answer)[0], answer.code == 3
        self.show_message(f"Impossible here: {words}" if never else f"Will wait: {words}", "warn" if never else "")
        return not never

    def commit(self, values: dict[str, str]) -> None:
        request = self.request()
        if request is None or (self.answer_to(request) is not None and not self.refused):
            self.dismiss(self._watch(values))

    def _watch(self, values: dict[str, str]) -> Watch:
        if values["what"] in self._runs:
            return Watch(0, time.time(), run=values["what"])
        if values["what"] in self._scene.by_lease:
            return Watch(0, time.time(), lease=self._scene.by_lease[values["what"]])
        request = request_form.request_of({**values, "gpus": values["what"]}, {})
        reserve_s = parse_duration(values["for"]) if values["reserve"] == YES else None
        return Watch(0, time.time(), request, reserve_s=reserve_s, purpose=values["purpose"])


def open_watch(board: BoardApp, ends: str = "") -> None:
    """Ask for a condition and set a watch. ``ends``: a lease whose end to wait for, as the default."""
    if board.scene is None:
        board.notify("no reading yet; try again in a moment", markup=False)
        return

    def set_(watch: Watch) -> None:
        board.watches.add(watch)
        board.notify(watch.condition, title="Watching for", markup=False)

    board.open_dialog(WatchDialog(board.scene, parse_duration(board.core.settings.max_lease), ends), set_)


_STATES = ("active", "met")
_WATCHES: Language[[Watch]] = Language(
    {
        "state": word(_STATES, lambda watch: ("met" if watch.met_at else "active",), hint="active or met"),
        "user": named("the owner of a lease, user:alice", lambda watch: (watch.lease.owner,) if watch.lease else ()),
        "lease": named("a lease's id, lease:k3f9", lambda watch: (watch.lease.id,) if watch.lease else ()),
        "run": named("a run's id, run:r3f9", lambda watch: (watch.run,)),
        "node": place(lambda watch: watch.lease.nodes if watch.lease else (), "a lease's node, node:gpu[01-04]"),
    },
    lambda watch: (watch.condition, watch.words, watch.purpose),
    {"owner": "user", "who": "user", "nodes": "node"},
)  # fmt: skip
_EMPTY = "No watches.\n\na adds one: for free GPUs, or for the end of a lease or a run."
_NO_MATCH = "No watch matches the filter.\nEscape clears it."


class WatchesScreen(FilteredScreen):
    """All watches, active and met."""

    TITLE_WORDS = "Watches"
    LANGUAGE = _WATCHES
    FILTERED = "watches"
    FILTER_HINT = "state:active user:alice, or any word"
    DEFAULT_CSS = """
    WatchesScreen #sums { margin: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back", id="watches.back"),
        Binding("a", "add", "New", id="watches.add"),
        Binding("d", "remove", "Remove", id="watches.remove"),
    ]

    def compose(self) -> ComposeResult:
        yield Lines(id="sums")
        yield self.filter_field()
        yield Grid(
            (
                Column("since", "Since", 10),
                Column("condition", "Condition", 30, weight=1, least=24),
                Column("state", "State", 30, weight=2, least=16),
            ),
            empty=_EMPTY,
            id="watches",
        )
        yield Footer()

    def filter_rows(self) -> list[tuple[Watch]]:
        return [(watch,) for watch in self.board.watches.all]

    def show(self, scene: Scene) -> None:
        watches, now = self.board.watches, time.time()
        words = f"Watches: {len(watches.active)} active" if watches.all else "Watches: none"
        self.query_one("#sums", Lines).set_lines([((words, "title"),)])
        rows = []
        for watch in filter(self.query_in_force.matches, watches.all):
            state = (
                watch.words if watch.met_at is None else f"met {request_form.local(watch.met_at, now)}: {watch.words}"
            )
            cells = (
                Cell(request_form.local(watch.since, now), "dim"),
                Cell(watch.condition),
                Cell(state or "active", "good" if watch.met_at is not None else "dim"),
            )
            rows.append(Row(str(watch.number), cells, dim=watch.met_at is not None))
        self.grid.set_empty(_NO_MATCH if watches.all else _EMPTY)
        self.grid.set_rows(rows)

    def action_add(self) -> None:
        open_watch(self.board)

    def action_remove(self) -> None:
        cursor = self.grid.cursor
        if cursor is None:
            self.board.notify("no watches; a adds one", markup=False)
            return
        self.board.watches.remove(int(cursor))
        self.redraw()
