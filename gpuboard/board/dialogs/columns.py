"""The dialog that chooses, orders and sizes the columns of the table; the table below it follows at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, cast

from rich.style import Style
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.strip import Strip
from textual.widgets import Button, Static

from gpuboard.board.dialogs.base import Box, button
from gpuboard.board.tables.columns import ABOUT, COLUMNS, USUAL, WIDTH_LEAST, WIDTH_MOST, ColumnChoice
from gpuboard.board.text.rows import Line
from gpuboard.board.widgets.grid import Cell, Column, Grid, Row

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp
    from gpuboard.board.widgets.table import GpuTable

_LIST = (
    Column("title", "Column", 12),
    Column("width", "Width", 7, right=True),
    Column("about", "", 0, weight=1, least=8),
)
_AROUND = 16  # lines of the box without the list, and of the board above it
_HINT = "space: show, hide   left, right: move   + -: width   backspace: reset"


class ColumnList(Grid):
    """The columns in their order; marked ones are shown."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "Move to the left", id="columns.left", show=False),
        Binding("right", "move(1)", "Move to the right", id="columns.right", show=False),
        Binding("plus,equals_sign", "widen(1)", "Wider", id="columns.wider", show=False),
        Binding("minus", "widen(-1)", "Narrower", id="columns.narrower", show=False),
        Binding("backspace", "reset", "Usual columns", id="columns.reset", show=False),
    ]

    def _row_strip(self, line: Line, base: Style, width: int, *, marked: bool) -> Strip:
        return super()._row_strip(line, base, width, marked=False)  # most rows are marked: the sign is enough

    @property
    def _dialog(self) -> ColumnsDialog:
        return cast("ColumnsDialog", self.screen)

    def action_move(self, step: int) -> None:
        """Move the column under the cursor; up in the list is to the left in the table."""
        self._dialog.move(step)

    def action_widen(self, step: int) -> None:
        """Make the column under the cursor wider by a cell, or narrower."""
        self._dialog.widen(step)

    def action_reset(self) -> None:
        self._dialog.reset()


class ColumnsDialog(Box[bool]):
    """Changes the columns of ``table``. The result is whether to keep them."""

    DEFAULT_CSS = """
    ColumnsDialog { align: center bottom; }
    ColumnsDialog #box { margin-bottom: 1; }
    ColumnsDialog #hint { width: 100%; color: $text-muted; }
    """

    def __init__(self, table: GpuTable) -> None:
        super().__init__("Columns of the table")
        self._table = table
        self._before = table.chosen
        self._widths: dict[str, int] = {}
        self._order: list[str] = []

    @property
    def _list(self) -> ColumnList:
        return self.query_one(ColumnList)

    def inside(self) -> ComposeResult:
        yield ColumnList(_LIST, marks=True, id="columns")
        yield Static(_HINT, id="hint", markup=False)

    def buttons(self) -> Iterator[Button]:
        yield from super().buttons()
        yield button("Keep", "keep", "primary")

    def on_resize(self) -> None:
        """Leave the table's first rows visible."""
        self._list.styles.height = min(len(COLUMNS) + 1, max(5, self.size.height - _AROUND))

    def on_mount(self) -> None:
        self._fill()
        self._list.focus()

    def _fill(self) -> None:
        """List the table's columns, then the others."""
        chosen = self._table.chosen or tuple(ColumnChoice(key) for key in USUAL)
        self._widths = {choice.key: choice.width for choice in chosen}
        self._order = [*self._widths, *(key for key in COLUMNS if key not in self._widths)]
        self._list.marks = self._widths
        self._show()

    def _show(self) -> None:
        self._list.set_rows([self._row(key) for key in self._order])

    def _row(self, key: str) -> Row:
        column, size = COLUMNS[key], self._widths.get(key, 0)
        words, style = (str(size), "") if size else ("rest" if column.weight else "auto", "dim")
        shown = key in self._list.marks
        if shown and self._table.chosen and not self._table.width_of(key):
            words, style = "no room", "warn"
        return Row(key, (Cell(column.title or "Graph"), Cell(words, style), Cell(ABOUT[key], "dim")), dim=not shown)

    def _apply(self) -> None:
        marks = self._list.marks
        self._table.choose([ColumnChoice(key, self._widths.get(key, 0)) for key in self._order if key in marks])
        self._show()

    @on(Grid.Marked)
    def _marked(self, event: Grid.Marked) -> None:
        event.stop()
        if event.keys:
            self._apply()
        else:
            self._list.marks = [choice.key for choice in self._table.chosen] or USUAL
            self.board.notify("a table has at least one column", markup=False)

    @on(Grid.Chosen)
    def _chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        self.action_keep()

    @on(Grid.Moved)
    @on(Grid.Sorted)
    def _ignored(self, event: Grid.Moved | Grid.Sorted) -> None:
        event.stop()

    def move(self, step: int) -> None:
        key = self._list.cursor
        if key is None:
            return
        at = self._order.index(key)
        to = min(max(at + step, 0), len(self._order) - 1)
        self._order.insert(to, self._order.pop(at))
        self._apply()

    def widen(self, step: int) -> None:
        key = self._list.cursor
        if key is None:
            return
        now = self._widths.get(key) or self._table.width_of(key) or COLUMNS[key].width or COLUMNS[key].least
        self._widths[key] = min(max(now + step, WIDTH_LEAST), WIDTH_MOST)
        self._apply()

    def reset(self) -> None:
        self._table.choose(())
        self._fill()

    def action_keep(self) -> None:
        self.dismiss(True)

    def action_cancel(self) -> None:
        """Return to the columns from before."""
        self._table.choose(self._before)
        self.dismiss(False)


def open_columns(board: BoardApp, table: GpuTable) -> None:
    """Let the user change the columns of ``table``, and keep them for the next start."""
    board.open_dialog(ColumnsDialog(table), lambda _: board.remember(columns=tuple(map(str, table.chosen))))
