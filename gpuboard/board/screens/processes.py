"""The processes on the GPUs of all nodes: sorted, filtered, by run or job; signals to one's own, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpuboard.board.background import Background
from gpuboard.board.dialogs.signal import signal_these
from gpuboard.board.filter.processes import PROCESSES, is_mine
from gpuboard.board.preferences import ProcessOrder
from gpuboard.board.scene import Scene
from gpuboard.board.screens.base import SortedScreen
from gpuboard.board.text.processes import (
    about,
    cluster_columns,
    group_key,
    meter_cells,
    old_nodes,
    overview,
    running_row,
)
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.grid import Grid, LazyRows, Row
from gpuboard.board.widgets.pane import Lines
from gpuboard.cluster.snapshot.processes import (
    SORTS,
    JobProcesses,
    Running,
    grouped,
    in_order,
    running,
    unread,
)
from gpuboard.launch.runs.folder import by_lease

_UNREAD_MOST = 8  # names of nodes and GPUs
_SORT_WORDS = {
    "node": "node and GPU",
    "sm": "SM time",
    "cpu": "CPU utilization",
    "host": "host memory",
    "memory": "GPU memory",
}


class ProcessesScreen(SortedScreen):
    """Every process, each once; the user's own in bold."""

    TITLE_WORDS = "Processes"
    LANGUAGE = PROCESSES
    FILTERED = "processes"
    FILTER_HINT = "user:me node:gpu[01-04] mem>40G sm<10 flag:rogue, or any word"
    DOWN_FIRST = frozenset(key for key, order in SORTS.items() if order.descending)
    BY_COLUMN: ClassVar[dict[str, str]] = {"gpu": "node"}
    AUTO_FOCUS = "#processes"
    DEFAULT_CSS = """
    ProcessesScreen #sums, ProcessesScreen #about { margin: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back", id="processes.back"),
        Binding("t", "tree", "By run or job", id="processes.tree"),
        Binding("s", "sort", "Sort", id="processes.sort"),
        Binding("S", "reverse", "Reverse order", id="processes.reverse", show=False),
        Binding("K", "signal", "Signal", id="processes.signal"),
        Binding("g", "jump", "Its GPU", id="processes.jump", show=False),  # enter does the same
    ]

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, Running] = {}  # by key, without the filter
        self._runs: dict[str, str] = {}  # own runs by lease
        self._background: Background[dict[str, str]] = Background(self)

    def compose(self) -> ComposeResult:
        yield Lines(id="sums")
        yield self.filter_field()
        yield Grid(cluster_columns((), 0, (), ()), marks=True, id="processes")
        yield Lines(id="about")
        yield Footer()

    @property
    def order(self) -> ProcessOrder:
        """Order and grouping of the rows, kept between starts."""
        return self.board.preferences.processes

    def filter_rows(self) -> list[tuple[Running, Scene]]:
        scene = self.board.scene
        return [] if scene is None else [(one, scene) for one in self._found.values()]

    # Drawing

    def show(self, scene: Scene) -> None:
        """Draw the processes of ``scene``; only visible rows are made."""
        found = running(scene.snapshot.nodes)
        ended = scene.ended_leases
        self._found = {one.key: one for one in found}
        query = self.query_in_force
        matching = [one for one in found if query.matches(one, scene)]
        order = self.order
        shown = in_order(matching, order.sort, reverse=order.reverse)
        items: list[Running | JobProcesses] = list(shown)
        if order.tree:
            self._read_runs()
            items = []
            for group in grouped(shown, self._runs, ended):
                items += [group, *group.processes]

        bar, glyphs = meter_cells(self.size.width), self.board.look.glyphs

        def row(item: Running | JobProcesses) -> Row:
            own = isinstance(item, Running) and is_mine(item, scene.uids.get(item.node))
            return running_row(item, scene, ended, mine=own, indent=order.tree, bar=bar, glyphs=glyphs)

        grid = self.grid
        grid.set_empty("No process matches the filter.\nEscape clears it." if found else "No process on any GPU.")
        grid.set_columns(cluster_columns(scene.nodes, self.size.width, found, ended))
        sort, down = self.current_order
        grid.set_sort("gpu" if sort == "node" else sort, down)
        grid.set_rows(LazyRows(items, _key, row))
        self._show_sums(found, shown)
        self._about()

    def _show_sums(self, found: Sequence[Running], shown: Sequence[Running]) -> None:
        scene = self.board.scene
        missing = [] if scene is None else unread(scene.snapshot)
        sort, down = self.current_order
        glyphs = self.board.look.glyphs
        old = frozenset() if scene is None else old_nodes(scene)
        order = f"by {self.orders()[sort]} {glyphs.down if down else glyphs.up}"
        lines = [overview(found, shown, self._marked(), order, old)]
        if missing:
            more = f" and {len(missing) - _UNREAD_MOST} more" if len(missing) > _UNREAD_MOST else ""
            lines.append(((f"not read: {', '.join(missing[:_UNREAD_MOST])}{more}", "warn"),))
        self.query_one("#sums", Lines).set_lines(lines)

    @on(Grid.Moved)
    def _about(self) -> None:
        one, scene = self._found.get(self.grid.cursor or ""), self.board.scene
        self.query_one("#about", Lines).set_lines([] if one is None or scene is None else about(one, scene))

    def _read_runs(self) -> None:
        """Read the user's own runs in the background: their leases name the groups."""

        def work() -> dict[str, str]:
            views = (entry.view for entry in self.board.core.runbook.read())
            return {lease: view.id for lease, view in by_lease(views).items()}

        def read(runs: dict[str, str]) -> None:
            if runs != self._runs:
                self._runs = runs
                self.redraw()

        self._background.ask(work, read)

    def action_back(self) -> None:
        """Clear the filter; without one the selection; without that, close the screen."""
        if self.grid.marks and not self.field.is_open:
            self.grid.marks = ()
            self.redraw()
        else:
            super().action_back()

    # Order

    def _change(self, **changes: str | bool) -> None:
        """Change order or grouping, also for the next start."""
        self.board.remember(processes=msgspec.structs.replace(self.order, **changes))
        self.redraw()

    def orders(self) -> dict[str, str]:
        return {key: _SORT_WORDS.get(key, key) for key in SORTS}

    @property
    def current_order(self) -> tuple[str, bool]:
        return self.order.sort, SORTS[self.order.sort].descending != self.order.reverse

    def set_order(self, key: str, *, down: bool) -> None:
        self._change(sort=key, reverse=SORTS[key].descending != down)

    def action_tree(self) -> None:
        """Group by the user's runs, by jobs and by leases, or not."""
        self._change(tree=not self.order.tree)
        self.call_after_refresh(self._reveal)

    def _reveal(self) -> None:
        self.grid.cursor = self.grid.cursor  # with the heading above it

    # The processes

    @on(Grid.Marked)
    def _changed(self) -> None:
        self.redraw()

    def _marked(self) -> list[Running]:
        """Return the selected processes that still exist, also those that the filter hides."""
        return [self._found[key] for key in self.grid.marks if key in self._found]

    def action_signal(self) -> None:
        """Send a signal to the selected processes, else to the one under the cursor."""
        if self.grid.marks:
            found = sorted(self._marked(), key=lambda one: (one.node, one.pid))
        else:
            found = [one for one in [self._found.get(self.grid.cursor or "")] if one is not None]
        if not found:
            self.board.notify("no process selected", markup=False)
            return
        signal_these(self.board, found)

    @on(Grid.Chosen)
    def action_jump(self) -> None:
        if (one := self._found.get(self.grid.cursor or "")) is not None:
            self.board.open_gpu(one.gpus[0].uuid)


def _key(item: Running | JobProcesses) -> str:
    return group_key(item) if isinstance(item, JobProcesses) else item.key
