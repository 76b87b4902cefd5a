"""The cluster view: free GPUs in the header, every node and GPU as a picture or as a table.

The picture of a single node has a row with meters per GPU, and its processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import msgspec
from rich.style import Style
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from gpuboard.board.arrange import GROUPS, SORTS, Matches, ViewState, arrange, arrange_nodes, count, natural, pane_of
from gpuboard.board.dialogs.columns import open_columns
from gpuboard.board.filter.conditions import GPUS
from gpuboard.board.gpu_actions import ActingScreen
from gpuboard.board.overview.facts import Gatherer
from gpuboard.board.scene import Place, Scene
from gpuboard.board.screens.base import SortedScreen
from gpuboard.board.screens.gpu import GpuPanel
from gpuboard.board.tables.columns import choices
from gpuboard.board.text.cells import fit, width
from gpuboard.board.text.overview import free_lines
from gpuboard.board.text.picture import legend
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.grid import Grid
from gpuboard.board.widgets.overview import OverviewPanel, RowsAndOverview
from gpuboard.board.widgets.pane import Banners, Lines, Summary
from gpuboard.board.widgets.picture import Picture
from gpuboard.board.widgets.single_node import MeterGrid, SingleNode
from gpuboard.board.widgets.table import GpuTable
from gpuboard.model.snapshot import GpuView, NodeView

_NO_MATCH = "No GPU matches the filter.\nEscape clears it."
_NO_NODES = "No nodes.\nList some with gpuboard --nodes gpu[01-04], or as `nodes` in the config file."
_NAME_MOST = 24  # cells of the filter's text in the status line
_NODE = "node:"  # prefix of the keys of nodes


class ClusterScreen(SortedScreen, ActingScreen):
    """The first screen. Picture and table share one cursor and one selection, both by UUID."""

    TITLE_WORDS = "Cluster"
    NOTICE = False
    LANGUAGE = GPUS
    FILTERED = "GPUs"
    FILTER_HINT = "user:alice state:free mem>40G model:H100 node:gpu[01-04], or any word"
    DOWN_FIRST = frozenset({"memory", "utilization", "sm", "tensor", "power", "temperature", "age", "free-gpus"})
    AUTO_FOCUS = ""  # on_mount gives the focus to the rows
    DEFAULT_CSS = """
    ClusterScreen #body { height: 1fr; }
    ClusterScreen #side { scrollbar-size-vertical: 1; }
    ClusterScreen.-below #body { layout: vertical; }
    ClusterScreen.-below #side { border-top: solid $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "view", "View", id="cluster.view"),
        Binding("s", "sort", "Sort", id="cluster.sort"),
        Binding("S", "reverse", "Reverse order", id="cluster.reverse", show=False),
        Binding("g", "group", "Group", id="cluster.group"),
        Binding("C", "columns", "Columns", id="cluster.columns", show=False),
        Binding("n", "node", "Node", id="cluster.node", show=False),
        Binding("p", "pane", "Detail pane", id="cluster.pane", show=False),
        Binding("escape", "clear", "Clear filter/selection", id="cluster.clear", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.view = ViewState()
        self._marks: frozenset[str] = frozenset()
        self._matching: tuple[int, int] | None = None  # GPUs and nodes that match the filter; None: no filter
        self._single = False  # there is one node only
        history = self.board.core.history
        self._summary, self._banners, self._status = Summary(id="summary"), Banners(id="banners"), Lines(id="status")
        self._picture, self._table = Picture(history, id="picture"), GpuTable(history, id="table")
        self._single_node = SingleNode(history, id="single")
        self._rows = RowsAndOverview(self._show_overview, id="left")
        self._overview = OverviewPanel(Gatherer(history, self.board.core.events), id="overview")
        self._side = GpuPanel(id="side")

    def compose(self) -> ComposeResult:
        yield self._summary
        yield self._banners
        yield self.filter_field()
        with Horizontal(id="body"):
            with self._rows:
                yield self._picture
                yield self._single_node
                yield self._table
                yield self._overview
            yield self._side
        yield self._status
        yield Footer()

    def on_mount(self) -> None:
        """Restore view, order and filter from the last start."""
        self.view = self.board.preferences.view
        self.field.put(self.view.filter)
        self._single = len(self.board.core.nodes) == 1
        self._table.choose(choices(self.board.preferences.columns))
        for picture in (self._picture, self._single_node.grid):
            picture.listed = self._listed
        self._switch()
        self.grid.set_empty(f"Reading {len(self.board.core.nodes)} nodes")
        self.set_focus(self.grid)

    # The targets of actions on GPUs

    @property
    def cursor_uuid(self) -> str | None:
        """The UUID of the GPU or MIG device under the cursor; None on a node without known GPUs."""
        key = self.grid.cursor
        return None if key is None or key.startswith(_NODE) else key

    @property
    def cursor_place(self) -> Place | None:
        """The GPU under the cursor, with its node; for a MIG device its parent GPU."""
        uuid = self.cursor_uuid
        return None if uuid is None or self.board.scene is None else _place(self.board.scene, uuid)

    @property
    def cursor_node(self) -> str | None:
        key = self.grid.cursor
        if key is not None and key.startswith(_NODE):
            return key.removeprefix(_NODE)
        place = self.cursor_place
        return place.node.name if place else None

    def targets(self) -> list[str]:
        """Return the targets of an action: the selected GPUs that still exist, in order, else the cursor's.

        While GPUs are selected, never the cursor's, even if all of them are gone: the user did not choose that GPU.
        """
        if self._marks:
            return self._selected()
        return [] if self.cursor_uuid is None else [self.cursor_uuid]

    def _selected(self) -> list[str]:
        """Return the selected GPUs and MIG devices that still exist."""
        scene = self.board.scene
        if scene is None:
            return []
        found = [(natural(place.node.name), place.gpu.index, uuid) for uuid, place in _places(scene, self._marks)]
        return [uuid for _, _, uuid in sorted(found)]

    # Drawing

    @property
    def grid(self) -> Picture | MeterGrid | GpuTable:
        """The view that is shown."""
        if self.view.view != "picture":
            return self._table
        return self._single_node.grid if self._single else self._picture

    def show(self, scene: Scene) -> None:
        """Draw ``scene``: the visible rows, and one pass over all GPUs for sums, filter and order."""
        self._summary.show_scene(scene)
        self._banners.show_scene(scene)
        matches = self._matches
        if self._single != (len(scene.snapshot.nodes) == 1):
            with self._cursor_kept():
                self._single = not self._single
        grid, pressed = self.grid, self.board.core.key_first.pressed
        grid.in_parts = pressed
        grid.set_empty(_NO_MATCH if matches else _NO_NODES)
        if isinstance(grid, Picture):
            nodes = arrange_nodes(scene, self.view, matches)
            grid.show(scene, nodes)
            self._matching = count(nodes) if matches else None
        else:
            rows = arrange(scene, self.view, matches)
            if isinstance(grid, MeterGrid):
                self._single_node.show(scene, rows)
            else:
                grid.show(scene, rows)
            self._matching = count(rows) if matches else None
        if pressed:
            self.call_after_refresh(self._show_beside)  # a key that comes now is drawn before that
        else:
            self._show_beside()

    @property
    def _matches(self) -> Matches | None:
        """The filter in force, if any."""
        query = self.query_in_force
        return query.matches if query else None

    def _listed(self) -> GpuTable:
        """Return the table, with the GPUs of the newest scene also while it is hidden."""
        if (scene := self.board.scene) is not None:
            self._table.show(scene, arrange(scene, self.view, self._matches))
        return self._table

    def _show_beside(self) -> None:
        """Show what stands beside and below the rows."""
        self._show_overview()
        self._show_side()
        self._show_status()

    def on_resize(self) -> None:
        self._place_pane()

    def go_to(self, key: str) -> None:
        """Put the cursor on a node or a GPU; a filter that hides it is cleared."""
        scene = self.board.scene
        if scene is None:
            return
        node = scene.nodes.get(key.removeprefix(_NODE)) if key.startswith(_NODE) else None
        if node is not None and node.gpus:
            key = node.gpus[0].uuid
        place = _place(scene, key)
        if node is None and place is None:
            return
        self.grid.cursor = wanted = self._key_in_grid(key, place)
        if self.grid.cursor != wanted and self.query_in_force:
            self.clear_filter()
            self.grid.cursor = wanted

    def _place_pane(self) -> None:
        place, size = pane_of(self.view, *self.size)
        self.set_class(place == "below", "-below")
        self._side.display = self._single_node.explained = place != "hidden"
        self._side.styles.width = size if place == "right" else "1fr"
        self._side.styles.height = size if place == "below" else "1fr"

    def action_pane(self) -> None:
        """Move the detail pane from the right to below the rows, hide it, show it again."""
        place, _ = pane_of(self.view, *self.size)
        beside, _ = pane_of(msgspec.structs.replace(self.view, pane="right"), *self.size)
        after = [*dict.fromkeys((beside, "below", "hidden")), beside]  # on a narrow terminal there is no room beside
        self._change(pane=after[after.index(place) + 1])
        self._place_pane()

    def _show_side(self) -> None:
        if self._side.display and self.board.scene is not None:
            place = self.cursor_place
            uuid = place.gpu.uuid if place else self.cursor_uuid
            self._side.show_gpu(self.board.scene, uuid, self.board.core.history, self.board.look.glyphs)

    def _show_overview(self) -> None:
        """Show the overview over the lines below the rows; processes of a single node end above it."""
        scene = self.board.scene
        if scene is None:
            return
        self._overview.take(free_lines(scene, self.view, *self._rows.size))
        self._single_node.processes.styles.margin = (0, 0, self._overview.lines, 0)
        self._overview.show_scene(scene)

    def _show_status(self) -> None:
        """Show selection, filter and order, then the legend of letters and marks."""
        view, parts = self.view, []
        glyphs = self.board.look.glyphs
        if watched := self.board.watches.words:
            parts.append((watched, "title"))
        if self._marks:
            gone = len(self._marks) - len(self._selected())
            parts.append((f"{len(self._marks)} selected" + (f", {gone} gone" if gone else ""), "marked"))
        if self._matching is not None:
            words = _matching_words(*self._matching)
            if self.field.wrong:  # the text in the field is not the filter in force
                text = self.query_in_force.text
                words += f" {fit(text, min(width(text), _NAME_MOST))}"
            parts.append((words, "title"))
        if view.sort:
            parts.append((f"by {self.orders()[view.sort]} {glyphs.down if view.reverse else glyphs.up}", ""))
        if view.group != "none":
            parts.append((f"grouped by {view.group}", ""))
        runs: list[tuple[str, str | Style]] = [(" ", "")]
        for text, style in parts:
            runs += [(text, style), ("  ", "")]
        room = self.size.width - sum(width(text) for text, _ in runs)
        words = self.grid.line_words if isinstance(self.grid, Picture) else ""
        nodes = self.board.scene.snapshot.nodes if self.board.scene else ()
        for sign, style, word in legend(nodes, view.view == "picture", room, words):
            runs += [(sign, style), (f" {word}  " if sign else word, "dim")]
        self._status.set_lines([tuple(runs)])

    # Cursor and selection

    def on_grid_moved(self) -> None:
        self._show_side()

    def on_picture_resized(self) -> None:
        self._show_status()

    def on_grid_marked(self, message: Grid.Marked) -> None:
        """Keep the selection; it holds for both views."""
        self._marks = message.keys
        self._show_status()

    def on_grid_chosen(self, message: Grid.Chosen) -> None:
        if message.key.startswith(_NODE):
            self.board.open_node(message.key.removeprefix(_NODE))
        elif self.board.scene is not None and (place := _place(self.board.scene, message.key)) is not None:
            self.board.open_gpu(place.gpu.uuid)

    def action_node(self) -> None:
        if self.cursor_node is not None:
            self.board.open_node(self.cursor_node)

    # Order and view

    def orders(self) -> dict[str, str]:
        return {sort: "SM" if sort == "sm" else sort.replace("-gpus", " GPUs") for sort in SORTS}

    @property
    def current_order(self) -> tuple[str, bool]:
        return self.view.sort, self.view.reverse

    def set_order(self, key: str, *, down: bool) -> None:
        self._change(sort=key, reverse=down)

    def action_group(self) -> None:
        """Group by the next of node, model, user, state, none."""
        self._change(group=GROUPS[(GROUPS.index(self.view.group) + 1) % len(GROUPS)])

    def action_view(self) -> None:
        with self._cursor_kept():
            self._change(view="table" if self.view.view == "picture" else "picture")

    def action_columns(self) -> None:
        if self.view.view != "table":
            self.action_view()
        open_columns(self.board, self._table)

    @contextmanager
    def _cursor_kept(self) -> Iterator[None]:
        """Show another grid, which the body chooses, with the cursor and the focus of the one before."""
        place, key, focused = self.cursor_place, self.grid.cursor, self.grid.has_focus
        yield
        self._switch()
        self.grid.cursor = self._key_in_grid(key, place)
        if focused:
            self.set_focus(self.grid)

    def _key_in_grid(self, key: str | None, place: Place | None) -> str | None:
        """Return the key of a row or a GPU in this grid: the picture has MIG devices in the cell of their GPU."""
        return place.gpu.uuid if place and isinstance(self.grid, Picture) else key

    def _switch(self) -> None:
        """Show the chosen view with the selection of the other."""
        for shown in (self._single_node, self._picture, self._table):
            shown.display = shown is (self._single_node if isinstance(self.grid, MeterGrid) else self.grid)
        self.grid.marks = self._marks
        self.grid.set_sort(self.view.sort or None, self.view.reverse)
        self.refresh_bindings()

    def _change(self, **changes: str | bool) -> None:
        """Change view, order or grouping, also for the next start."""
        self.view = msgspec.structs.replace(self.view, **changes)
        self.board.remember(view=self.view)
        self.grid.set_sort(self.view.sort or None, self.view.reverse)
        self.redraw()

    # The filter

    def filter_rows(self) -> Iterator[tuple[NodeView, GpuView | None, Scene]]:
        """Return every GPU, and the nodes without known GPUs."""
        if (scene := self.board.scene) is not None:
            for node in scene.snapshot.nodes:
                for gpu in node.gpus or (None,):
                    yield node, gpu, scene

    def filter_changed(self) -> None:
        """Show the matching GPUs, also after the next start."""
        if self.view.filter != (text := self.query_in_force.text):
            self._change(filter=text)
        else:
            self._show_status()

    def action_clear(self) -> None:
        """Clear the filter, or, without one, the selection."""
        if not self.clear_filter() and self._marks:
            self._marks = frozenset()
            self.grid.marks = ()
            self._show_status()

    def on_summary_picked(self, message: Summary.Picked) -> None:
        """Show only the GPUs that the header counts there; again: all."""
        if message.query == self.query_in_force.text:
            self.clear_filter()
        else:
            self.use_filter(message.query)


def _matching_words(gpus: int, nodes: int) -> str:
    """Return how many GPUs and nodes without known GPUs match: ``1 GPU and 2 nodes match``."""
    counts = ((gpus, "GPU"), (nodes, "node"))
    words = [f"{number} {word}{'s' * (number != 1)}" for number, word in counts if number] or ["0 GPUs"]
    return f"{' and '.join(words)} match{'es' * (gpus + nodes == 1)}"


def _place(scene: Scene, uuid: str) -> Place | None:
    """Return the place of a GPU, or of a MIG device's parent GPU."""
    return scene.place(uuid) or scene.devices.get(uuid)


def _places(scene: Scene, uuids: Iterable[str]) -> Iterator[tuple[str, Place]]:
    return ((uuid, place) for uuid in uuids if (place := _place(scene, uuid)) is not None)
