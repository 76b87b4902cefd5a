"""The overview as a screen of its own: the cluster's past, people, what ends next, and all events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpuboard.board.filter.events import EVENTS
from gpuboard.board.gpu_actions import GraphScreen
from gpuboard.board.overview.facts import Gatherer
from gpuboard.board.overview.people import ORDERS
from gpuboard.board.scene import Scene
from gpuboard.board.screens.base import FilteredScreen
from gpuboard.board.text.overview import EVENT_ROLES, KIND, event_time, places
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.grid import Cell, Column, Grid, LazyRows, Row
from gpuboard.board.widgets.overview import OverviewPanel
from gpuboard.board.widgets.pane import Lines
from gpuboard.model.units import seconds_of
from gpuboard.recording.events import ClusterEvent

_EVENTS_LEAST = 9  # lines of the events: status, titles, rows
_TALLEST = 22  # lines of the boxes
_COLUMNS = (
    Column("time", "Time", 14),
    Column("kind", "Event", KIND),
    Column("where", "Where", 0, weight=1, least=12),
    Column("user", "User", 10, drop=1),
    Column("words", "What", 0, weight=4, least=16),
)


class OverviewScreen(GraphScreen, FilteredScreen):
    """Boxes above, the events in a list below."""

    TITLE_WORDS = "Overview"
    LANGUAGE = EVENTS
    FILTERED = "events"
    AUTO_FOCUS = "#events"
    FILTER_HINT = "kind:lost,xid node:gpu[01-04] user:alice age<1h, or any word"
    DEFAULT_CSS = """
    OverviewScreen Grid { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back", id="overview.back"),
        Binding("s", "sort", "Sort people", id="overview.sort"),
    ]

    def compose(self) -> ComposeResult:
        yield OverviewPanel(Gatherer(self.board.core.history, self.board.core.events), id="boxes")
        yield self.filter_field()
        yield Lines(id="sums")
        yield Grid(_COLUMNS, empty=self.board.core.events.empty, id="events")
        yield Footer()

    @property
    def _boxes(self) -> OverviewPanel:
        return self.query_one("#boxes", OverviewPanel)

    def filter_rows(self) -> Iterable[tuple[ClusterEvent, float]]:
        now = self._now
        return ((event, now) for event in self.board.core.events.events)

    @property
    def _now(self) -> float:
        scene = self.board.scene
        return 0.0 if scene is None else seconds_of(scene.snapshot.at)

    def show(self, scene: Scene) -> None:
        """Draw the newest facts; the newest event is at the top."""
        lines = min(_TALLEST, max(self.size.height // 2, self.size.height - _EVENTS_LEAST - 2 * len(scene.banners)))
        self._boxes.take(min(lines, self.size.height - _EVENTS_LEAST), ("past", "people", "next"))
        self._boxes.show_scene(scene)
        every = self.board.core.events
        query = self.query_in_force
        found = [event for event, now in self.filter_rows() if query.matches(event, now)][::-1]
        self._show_sums(len(found), bool(query), every.problem)
        self.grid.set_empty("No event matches the filter.\nEscape clears it." if query else every.empty)
        self.grid.set_rows(LazyRows(found, lambda event: str(id(event)), self._row))

    def _show_sums(self, found: int, filtered: bool, problem: str) -> None:
        line = [(" Events  ", "title"), (f"{found}{' match' if filtered else ''}" if found or filtered else "", "dim")]
        self.query_one("#sums", Lines).set_lines([line, *([[(f" {problem}", "warn")]] if problem else [])])

    def _row(self, event: ClusterEvent) -> Row:
        cells: Sequence[Cell] = (
            Cell(event_time(event, self._now, "%H:%M:%S", "%m-%d %H:%M:%S"), "dim"),
            Cell(event.kind, EVENT_ROLES.get(event.kind, "")),
            Cell(places(event)),
            Cell(event.user or "-", "" if event.user else "dim"),
            Cell(event.words),
        )
        return Row(str(id(event)), cells)

    @on(Grid.Chosen, "#events")
    def open_place(self, message: Grid.Chosen) -> None:
        """Show the GPU, or the first node, of an event in the cluster view."""
        events = self.board.core.events.events
        event = next((event for event in events if str(id(event)) == message.key), None)
        scene = self.board.scene
        if event is None or scene is None or not event.nodes:
            return
        node = scene.nodes.get(event.nodes[0])
        if node is None:
            return
        first = re.split("[,:-]", event.gpus, maxsplit=1)[0]
        gpu = next((gpu for gpu in node.gpus if str(gpu.index) == first), None)
        self.board.go_to(gpu.uuid if gpu is not None else f"node:{node.name}")

    def action_sort(self) -> None:
        """Sort the people, those with the most GPUs first."""
        self.choose_order(self._boxes.gatherer.order, down=True)

    def orders(self) -> dict[str, str]:
        return {key: f"GPUs {key}" for key in ORDERS}

    def order_by(self, key: str) -> None:
        self._boxes.gatherer.order = key
        self.filter_changed()
