"""The only node of a cluster: its host, a row with meters per GPU, and its processes."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical

from gpuboard.board.arrange import Row as Item
from gpuboard.board.history import History
from gpuboard.board.scene import Place, Scene
from gpuboard.board.text import single_node as text
from gpuboard.board.text.gpu_row import Shown, index_width, row_key, with_devices
from gpuboard.board.text.rows import MARK_WIDTH
from gpuboard.board.widgets.grid import HEADER, Grid, LazyRows, Row
from gpuboard.board.widgets.on_board import OnBoard
from gpuboard.board.widgets.pane import Lines

_SCROLL_BAR = 1  # cells
_EMPTY_LINES = 3  # for the text in place of rows


class MeterGrid(Grid):
    """GPUs and MIG devices with meters. Keys are UUIDs, or ``node:NAME`` of a node without known GPUs."""

    def __init__(self, history: History, *, id: str | None = None) -> None:
        super().__init__((), marks=True, id=id)
        self._history = history

    def show(self, scene: Scene, items: Sequence[Item], tall: int) -> None:
        self.set_columns(text.columns_for(tall, index_width(scene.snapshot.nodes[0].gpus)))
        self.set_tall(tall)

        def row(item: Shown) -> Row:
            widths = {self.columns[index].key: size for index, size in self._widths.items()}  # as they are when drawn
            return text.row_of(item, text.Layout(scene, self._history, widths, tall, self._look.glyphs))

        self.set_rows(LazyRows(with_devices(items), row_key, row))


class ProcessGrid(Grid, can_focus=False):
    """The processes of the node; without a cursor."""

    ROW_CURSOR = False
    FOLLOWS = False


class SingleNode(OnBoard, Vertical):
    """Shares its height among the GPUs, as tall as they fit, and the processes."""

    DEFAULT_CSS = """
    SingleNode { width: 1fr; }
    SingleNode #node-processes { height: 1fr; }
    """

    def __init__(self, history: History, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.grid = MeterGrid(history, id="meters")
        self.processes = ProcessGrid(text.TITLES, id="node-processes")
        self._host, self._reason = Lines(id="host"), Lines(id="reason")
        self._shown: tuple[Scene, Sequence[Item]] | None = None
        self.explained = False  # whether the reason for the state of the cursor's GPU stands elsewhere

    def compose(self) -> ComposeResult:
        yield self._host
        yield self.grid
        yield self._reason
        yield self.processes

    def on_resize(self) -> None:
        if self._shown is not None:
            self.show(*self._shown)

    def show(self, scene: Scene, items: Sequence[Item]) -> None:
        self._shown = (scene, items)
        node = scene.snapshot.nodes[0]
        host = text.host_lines(node, self.board.look.glyphs, self.size.width)
        self._host.set_lines(host)
        rows = len(with_devices(items))
        tall = text.tall_for(node, rows, self.size.height)
        wanted = rows * tall if rows else _EMPTY_LINES
        self.grid.styles.height = min(HEADER + wanted, max(HEADER + 1, self.size.height - len(host)))
        self.grid.show(scene, items, tall)
        self._show_reason()
        places = [item for item in items if isinstance(item, Place)]
        self.processes.set_empty(text.no_process(places))
        self.processes.set_columns(text.process_columns(places))
        self.processes.set_rows(text.process_rows(places))

    @on(Grid.Moved)
    def _show_reason(self) -> None:
        """Show why the GPU under the cursor is in its state, where its row has no room for that."""
        if self._shown is not None:
            scene, items = self._shown
            size = self.size.width - _SCROLL_BAR - MARK_WIDTH, self.size.height
            lines = text.reason_lines(with_devices(items), self.grid.cursor, scene, size)
            self._reason.set_lines([] if self.explained else lines)
