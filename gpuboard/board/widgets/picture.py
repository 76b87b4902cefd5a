"""The dense picture: a row per node, a cell per GPU; letter and colour show its state, a mark its flags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Offset
from textual.message import Message

from gpuboard.board.arrange import Group, NodeRow
from gpuboard.board.history import History
from gpuboard.board.scene import Scene
from gpuboard.board.terminal.textual_compat import draw_now
from gpuboard.board.text.format import PACK
from gpuboard.board.text.gpu_cell import CellSize, Ink, line_words
from gpuboard.board.text.picture import Drawing, Focus, Item, below, cells_of, columns_for, group_words, size_for, split
from gpuboard.board.text.rows import GAP
from gpuboard.board.widgets.grid import HEADER, RIGHT, Cell, Grid, LazyRows, Row
from gpuboard.model.snapshot import NodeView

_SORTS = {  # by column
    "node": "node", "connection": "age", "gpus": "state", "free": "free-gpus", "model": "model", "users": "user",
}  # fmt: skip


class Picture(Grid):
    """Every GPU of every node. Its keys are UUIDs, or ``node:NAME`` of nodes without known GPUs."""

    class Resized(Message):
        """Cells have another size, and show other things."""

    ROW_CURSOR = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", "Left", id="picture.left", show=False),
        Binding("right", "step(1)", "Right", id="picture.right", show=False),
        Binding("shift+left", "mark_step(-1)", "Select to the left", id="picture.mark-left", show=False),
        Binding("shift+right", "mark_step(1)", "Select to the right", id="picture.mark-right", show=False),
    ]

    def __init__(self, history: History, *, id: str | None = None) -> None:
        super().__init__((), marks=True, mark_column=False, id=id)
        self._history = history
        self._uuid: str | None = None  # the GPU under the cursor
        self._wish: str | None = None  # the key the user put the cursor on
        self._column = 0  # position of that GPU in its row: up and down keep it
        self._items: Sequence[Item] = ()  # large nodes are split
        self._whole: Sequence[Item] = ()
        self._scene: Scene | None = None
        self._cell_size = CellSize()

    @property
    def cursor(self) -> str | None:
        """The UUID of the GPU under the cursor, or ``node:NAME`` in a row without GPUs."""
        return self._uuid or (f"node:{self.node.name}" if self.node else None)

    @cursor.setter
    def cursor(self, key: str | None) -> None:
        self._wish = key
        index = None if key is None else self._index_with(key)
        if index is not None:
            self._go(index)

    @property
    def node(self) -> NodeView | None:
        item = self._items[self._at] if self._at < len(self._items) else None
        return item.node if isinstance(item, NodeRow) else None

    @property
    def line_words(self) -> str:
        """What the lines of a GPU's cell show; "" for letters."""
        return line_words(self._cell_size)

    def set_sort(self, key: str | None, reverse: bool = False) -> None:
        """Mark the column in the header, if any, by which the rows are sorted."""
        super().set_sort(next((column for column, sort in _SORTS.items() if sort == key), None), reverse)

    def show(self, scene: Scene, items: Sequence[Item]) -> None:
        """Show rows of a scene as ``arrange_nodes`` makes them."""
        self._scene, self._whole = scene, items
        self._items = items = self._lay_out(items)
        for key in (self._wish, self._uuid):
            if key is not None and (index := self._index_with(key)) is not None:
                self._wanted = items[index].key
                break
        self.set_rows(LazyRows(items, lambda item: item.key, self._row))

    def on_resize(self) -> None:
        """Lay the rows out again; Grid's own handler, which textual calls after this one, draws them."""
        if self._scene is not None:
            self.show(self._scene, self._whole)

    # Positions of GPUs

    def _index_with(self, key: str) -> int | None:
        """Return the row of a GPU, or the row with that key."""
        if self._at < len(self._items) and self._holds(self._items[self._at], key):
            return self._at  # the usual case, without a search through 1,000 nodes
        return next((index for index, item in enumerate(self._items) if self._holds(item, key)), None)

    def _holds(self, item: Item, key: str) -> bool:
        if isinstance(item, Group):
            return False
        if key.startswith("node:"):
            return key == f"node:{item.node.name}"
        return (item.shown is None or key in item.shown) and any(gpu.uuid == key for gpu in item.gpus)

    def _reachable(self) -> list[tuple[int, str]]:
        """Return position and UUID of the GPUs shown in the cursor's row."""
        return _shown(self._items[self._at]) if self._at < len(self._items) else []

    def _settle(self) -> None:
        """Stay on the GPU the user chose, else on the nearest one."""
        reachable = self._reachable()
        uuids = {uuid for _, uuid in reachable}
        if self._wish in uuids:
            self._uuid = self._wish
        elif self._uuid not in uuids:
            nearest = min(reachable, key=lambda found: abs(found[0] - self._column), default=None)
            self._uuid = nearest[1] if nearest else None

    def _go(self, index: int, step: int = 1) -> None:
        super()._go(index, step)
        self._wish = self.cursor

    def _hop(self, uuid: str) -> None:
        """Put the cursor on another GPU of its row."""
        self._wish = uuid
        self._column = next((place for place, other in self._reachable() if other == uuid), self._column)
        self._settle()
        self._touch({self._at})
        draw_now(self)
        self._send_moved()

    def action_step(self, step: int) -> bool:
        """Move to the next GPU in the row; return False at its end."""
        reachable = [uuid for _, uuid in self._reachable()]
        at = reachable.index(self._uuid) + step if self._uuid in reachable else -1
        if not 0 <= at < len(reachable):
            return False
        self._hop(reachable[at])
        return True

    # Keys and mouse

    def action_mark(self) -> None:
        """Mark or unmark the GPU, and move to the next, after the last to the row below."""
        self._toggle(self.cursor)
        if not self.action_step(1) and self._at + 1 < len(self._items):
            self._column = 0
            self.action_rows(1)

    def action_mark_step(self, step: int) -> None:
        self._extend(lambda: self.action_step(step))

    def on_click(self, event: events.Click) -> None:
        """A click on a GPU moves there, with ctrl or right marks, twice opens; on a node twice opens; a title sorts."""
        event.prevent_default()  # replaces Grid.on_click
        at = event.get_content_offset(self)
        if at is None or self.is_drag(event):
            return
        event.stop()
        if at.y < HEADER:
            if (column := _SORTS.get(self.column_at(at.x) or "")) is not None:
                self.post_message(self.Sorted(self, column))
            return
        index = self._row_at(at.y)
        item = self._items[index] if index < len(self._items) else None
        if not isinstance(item, NodeRow):
            return
        place = self._place_at(at.x)
        if place is not None and (uuid := self.key_at(at)) is not None:
            self._column, self._wish = place, uuid
            self._go(index)
            if event.ctrl or event.button == RIGHT:
                self._toggle(self.cursor)
            elif event.chain == 2:
                self.action_choose()
            return
        self._go(index)
        if event.chain == 2:
            self.post_message(self.Chosen(self, f"node:{item.node.name}"))

    def key_at(self, at: Offset) -> str | None:
        index, place = self._row_at(at.y), self._place_at(at.x)
        if at.y < HEADER or index >= len(self._items) or place is None:
            return None
        return dict(_shown(self._items[index])).get(place)

    def drag(self, grip: str, at: Offset, before: frozenset[str]) -> bool:
        """Mark the block of GPUs with corners at ``grip`` and ``at``."""
        start = self._index_with(grip)
        if start is None:
            return False  # the row is gone
        begun = next(place for place, uuid in _shown(self._items[start]) if uuid == grip)
        place = self._place_at(at.x, nearest=True) or 0
        self._column, self._uuid, self._wish = place, None, None  # the nearest in the new row
        beyond = self._drag_to(at.y, start)
        places = range(min(begun, place), max(begun, place) + 1)
        rows = self._items[min(start, self._at) : max(start, self._at) + 1]
        self._set_marks(before.union(uuid for item in rows for k, uuid in _shown(item) if k in places), None)
        return beyond

    def _place_at(self, x: int, *, nearest: bool = False) -> int | None:
        """Return the position in its row of the GPU at ``x``, or ``nearest`` to it."""
        left = 0
        for index, size in self._widths.items():
            if self.columns[index].key == "gpus":
                if nearest:
                    x = max(left, min(x, left + size - 1))
                cell = self._cell_size.width
                pack, inside = divmod(x - left, cell * PACK + 1)
                return pack * PACK + min(inside // cell, PACK - 1) if left <= x < left + size else None
            left += size + GAP
        return None

    # Drawing

    def _lay_out(self, items: Sequence[Item]) -> Sequence[Item]:
        """Set the size of cells, and the columns, for these rows; return them with large nodes split."""
        assert self._scene is not None  # rows come with their scene
        size = size_for(self._scene, items, self.scrollable_content_region.width, self._space_below)
        if size != self._cell_size:
            self._cell_size = size
            self.post_message(self.Resized())
        self.set_columns(columns_for(self._scene, items, size))
        self.set_tall(size.lines)
        return split(items, size.each)

    def _row(self, item: Item) -> Row:
        if isinstance(item, Group):
            return Row(item.key, (Cell(group_words(item)),), group=True)
        further = partial(self._below, item) if self._cell_size.wide else None
        return Row(item.key, partial(self._cells, item), dim=item.node.state != "up", below=further)

    def _cells(self, item: NodeRow) -> Sequence[Cell]:
        return cells_of(item, self._drawing())

    def _below(self, item: NodeRow) -> Sequence[Cell]:
        return below(item, self._drawing())

    def _drawing(self) -> Drawing:
        assert self._scene is not None  # as above
        focus = Focus(self.node.name if self.node else None, self._uuid, self.marks)
        widths = {column.key: self._widths.get(index, 0) for index, column in enumerate(self.columns)}
        ink = Ink(self._scene, self._history, self._look, self._cell_size)
        return Drawing(ink, focus, widths)


def _shown(item: Item) -> list[tuple[int, str]]:
    """Return position and UUID of the GPUs shown in a row."""
    if isinstance(item, Group):
        return []
    shown = item.shown
    return [(place, gpu.uuid) for place, gpu in enumerate(item.gpus) if shown is None or gpu.uuid in shown]
