"""Rows on textual's Line API: only visible lines are made, only changed ones are drawn again.

8,000 rows cost what 80 do. Cursor and marks are keys, so they stay where they belong when rows are sorted, come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from gpuboard.board.cells import fit_runs

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp
    from gpuboard.board.look import Look

_HEADER = 1  # lines above the rows
_MARK_WIDTH = 2
_GAP = 1


class Column(NamedTuple):
    """A column. ``width`` in terminal cells; with a ``weight`` it has ``least`` at least and a part of what is left.

    Where not all fit, the columns with the highest ``drop`` are left out first; those with 0 never are.
    """

    key: str
    title: str
    width: int
    right: bool = False
    weight: int = 0
    least: int = 0
    drop: int = 0


class Cell(NamedTuple):
    """What stands in one column of a row. ``style``: a role of Look or a Style; runs of several styles: a Text."""

    text: str | Text
    style: str | Style = ""


class Row(NamedTuple):
    """A row. ``cells``: one for each column of the grid, or a callable that makes them when the row becomes visible.

    A ``group`` is a heading: its first cell takes the whole width and the cursor skips it. Keys are unique.
    """

    key: str
    cells: Sequence[Cell] | Callable[[], Sequence[Cell]]
    group: bool = False
    dim: bool = False


class _Line(NamedTuple):
    """Everything a line on the screen depends on beside columns and look."""

    cells: tuple[Cell, ...]
    group: bool
    dim: bool
    cursor: bool
    marked: bool


class Grid(ScrollView, can_focus=True):
    """A table that stays calm while what it shows changes."""

    DEFAULT_CSS = """
    Grid { height: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-gutter: stable; scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "up", "Up", id="grid.up", show=False),
        Binding("down", "down", "Down", id="grid.down", show=False),
        Binding("pageup", "page_up", "Page up", id="grid.page-up", show=False),
        Binding("pagedown", "page_down", "Page down", id="grid.page-down", show=False),
        Binding("home", "first", "First row", id="grid.first", show=False),
        Binding("end", "last", "Last row", id="grid.last", show=False),
        Binding("enter", "choose", "Open", id="grid.choose", show=False),
        Binding("space", "mark", "Select", id="grid.mark", show=False),
        Binding("shift+up", "mark_up", "Select upwards", id="grid.mark-up", show=False),
        Binding("shift+down", "mark_down", "Select downwards", id="grid.mark-down", show=False),
    ]

    class Event(Message):
        """What all messages of a grid have in common."""

        def __init__(self, grid: Grid) -> None:
            super().__init__()
            self.grid = grid

        @property
        def control(self) -> Grid:
            """The grid, for ``@on(Grid.Moved, "#id")``."""
            return self.grid

    class Moved(Event):
        """The cursor is on another row; ``key`` is None when there is none left."""

        def __init__(self, grid: Grid, key: str | None) -> None:
            super().__init__(grid)
            self.key = key

    class Chosen(Event):
        """Enter or a double click on a row."""

        def __init__(self, grid: Grid, key: str) -> None:
            super().__init__(grid)
            self.key = key

    class Marked(Event):
        """The marks have changed; ``keys`` are all of them, those of rows that are not shown now included."""

        def __init__(self, grid: Grid, keys: frozenset[str]) -> None:
            super().__init__(grid)
            self.keys = keys

    class Sorted(Event):
        """The header of the column ``key`` was clicked."""

        def __init__(self, grid: Grid, key: str) -> None:
            super().__init__(grid)
            self.key = key

    def __init__(
        self,
        columns: Sequence[Column],
        *,
        empty: str = "",
        marks: bool = False,
        header: bool = True,
        id: str | None = None,
    ) -> None:
        """``empty``: what to say while there are no rows; ``marks``: whether rows can be selected."""
        super().__init__(id=id)
        self.columns = tuple(columns)
        self.empty = empty
        self._marking = marks
        self._top = _HEADER if header else 0
        self._rows: Sequence[Row] = ()
        self._indexes: dict[str, int] | None = {}
        self._cursor: str | None = None
        self._at = 0  # index of the cursor's row
        self._marks: frozenset[str] = frozenset()
        self._sort: tuple[str, bool] | None = None
        self._widths: dict[int, int] = {}  # by index of a column; those that do not fit are missing
        self._lines: dict[int, tuple[_Line, Strip | None]] = {}  # by index of a row: as drawn
        self._drawn_with: Look | None = None

    # What others use

    @property
    def cursor(self) -> str | None:
        """The key of the row under the cursor."""
        return self._cursor

    @cursor.setter
    def cursor(self, key: str | None) -> None:
        index = self.index_of(key)
        if index is not None:
            self._go(index)

    @property
    def marks(self) -> frozenset[str]:
        """The keys of all marked rows, also of those that are not shown now."""
        return self._marks

    @marks.setter
    def marks(self, keys: Iterable[str]) -> None:
        """Mark these and no others; no message is sent."""
        self._marks = frozenset(keys)
        self._touch()

    @property
    def rows(self) -> Sequence[Row]:
        """The rows in the order shown."""
        return self._rows

    def index_of(self, key: str | None) -> int | None:
        """Return where the row of ``key`` is; None when there is none."""
        if self._indexes is None:
            self._indexes = {row.key: index for index, row in enumerate(self._rows)}
        return None if key is None else self._indexes.get(key)

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Show ``rows``. Cursor, marks and place on the screen stay; only lines that changed are drawn again."""
        old, self._rows = self._rows, rows
        if len(old) == len(rows) and self._at < len(rows) and rows[self._at].key == self._cursor:
            self._indexes = None
            self._touch()
            return
        before, self._indexes = self._at, None
        at = self.index_of(self._cursor)
        if at is None:
            at = self._neighbour(old, before)
        visible = self.scroll_offset.y <= before < self.scroll_offset.y + self._page
        if len(old) != len(rows):
            self._resized()
        moved_to = None if at is None else rows[at].key
        changed, self._cursor, self._at = moved_to != self._cursor, moved_to, at or 0
        if at is not None and visible and old:
            self.scroll_to(y=max(0, self.scroll_offset.y + at - before), animate=False, force=True)
        self._touch()
        if changed:
            self.post_message(self.Moved(self, moved_to))

    def set_columns(self, columns: Sequence[Column]) -> None:
        """Show other columns; rows must fit them, so ``set_rows`` comes next."""
        if tuple(columns) != self.columns:
            self.columns = tuple(columns)
            self._measure()

    def set_sort(self, key: str | None, reverse: bool = False) -> None:
        """Show in the header which column the rows are sorted by."""
        sort = None if key is None else (key, reverse)
        if sort != self._sort:
            self._sort = sort
            self.refresh(Region(0, 0, self.size.width, 1))

    def redraw(self) -> None:
        """Draw everything again, after the look has changed."""
        self._lines.clear()
        self.refresh()

    # Drawing

    @property
    def _look(self) -> Look:
        return cast("BoardApp", self.app).look

    @property
    def _page(self) -> int:
        """How many rows fit."""
        return max(1, self.scrollable_content_region.height - self._top)

    def on_mount(self) -> None:
        """Take our size."""
        self._resized()

    def on_resize(self) -> None:
        """Share the new width among the columns, and keep the cursor in sight."""
        self._measure()
        self._resized()
        if self._rows:
            self._reveal()

    def _resized(self) -> None:
        self.virtual_size = Size(0, len(self._rows) + self._top)

    def _measure(self) -> None:
        """Share the width among the columns."""
        space = self.scrollable_content_region.width - (_MARK_WIDTH if self._marking else 0)
        shown = list(enumerate(self.columns))

        def needed() -> int:
            return sum(
                (column.least or column.width) if column.weight else column.width for _, column in shown
            ) + _GAP * (len(shown) - 1)

        while needed() > space and (least := max(shown, key=lambda item: item[1].drop))[1].drop:
            shown.remove(least)
        left = max(0, space - needed())
        weights = sum(column.weight for _, column in shown)
        self._widths = {}
        for index, column in shown:
            if column.weight:
                part = left * column.weight // weights
                left, weights = left - part, weights - column.weight
                self._widths[index] = (column.least or column.width) + part
            else:
                self._widths[index] = column.width
        self.redraw()

    def _line(self, index: int) -> _Line:
        row = self._rows[index]
        cells = row.cells() if callable(row.cells) else row.cells
        return _Line(
            tuple(cells), row.group, row.dim, index == self._at and row.key == self._cursor, row.key in self._marks
        )

    def _touch(self) -> None:
        """Draw those visible lines again that would look different now."""
        first = self.scroll_offset.y
        last = min(len(self._rows), first + self._page)
        lines = {}
        width = self.size.width
        for index in range(first, last):
            line = self._line(index)
            drawn = self._lines.get(index)
            if drawn is not None and drawn[0] == line:
                lines[index] = drawn
            else:
                lines[index] = (line, None)
                self.refresh(Region(0, index - first + self._top, width, 1))
        below = last - first
        if len(self._lines) > below or not self._rows:  # rows have gone: blank what they leave
            self.refresh(Region(0, below + self._top, width, max(0, self._page - below)))
        self._lines = lines

    def render_line(self, y: int) -> Strip:
        """Return a line of the widget: the header, a row, or what is said when there are none."""
        base = self.visual_style.rich_style
        width = self.scrollable_content_region.width
        if self._drawn_with is not self._look:
            self._drawn_with = self._look
            self._lines.clear()
        if y < self._top:
            return self._header_strip(base, width)
        index = y - self._top + self.scroll_offset.y
        if index >= len(self._rows):
            return self._empty_strip(y - self._top, base, width)
        line, strip = self._lines.get(index) or (self._line(index), None)
        if strip is None:
            strip = self._row_strip(line, base, width)
            self._lines[index] = (line, strip)
        return strip

    def _header_strip(self, base: Style, width: int) -> Strip:
        look = self._look
        style = base + look.style("title")
        runs: list[tuple[str, Style]] = [(" " * _MARK_WIDTH, style)] if self._marking else []
        for index, size in self._widths.items():
            column = self.columns[index]
            mark = ""
            if self._sort is not None and self._sort[0] == column.key:
                mark = look.glyphs.down if self._sort[1] else look.glyphs.up
            title = fit_runs([(column.title, style)], size - len(mark), style, ellipsis="") if mark else None
            if title is None:
                runs += fit_runs([(column.title, style)], size, style, right=column.right, ellipsis="")
            else:
                text = "".join(part for part, _ in title).rstrip() + mark
                runs.append((text.rjust(size) if column.right else text.ljust(size), style))
            runs.append((" " * _GAP, style))
        return _strip(runs, base, width)

    def _empty_strip(self, y: int, base: Style, width: int) -> Strip:
        if self._rows or not self.empty or y < 1:
            return Strip.blank(width, base)
        lines = self.empty.splitlines()
        text = lines[y - 1] if y <= len(lines) else ""
        return _strip([("  ", base), *fit_runs([(text, base + self._look.style("dim"))], width - 2, base)], base, width)

    def _row_strip(self, line: _Line, base: Style, width: int) -> Strip:
        look = self._look
        over = Style()
        if line.marked:
            over += look.style("marked")
        if line.cursor:
            over += look.style("cursor")
        row = base + look.style("dim") if line.dim else base
        runs: list[tuple[str, Style]] = []
        if line.group:
            cell = line.cells[0]
            style = base + look.style("group")
            return _strip(fit_runs(self._runs(cell, style), width, style, ellipsis=look.glyphs.ellipsis), base, width)
        if self._marking:
            runs.append(((look.glyphs.marked if line.marked else " ") + " ", row + over))
        for index, size in self._widths.items():
            cell = line.cells[index]
            right = self.columns[index].right
            for text, style in fit_runs(self._runs(cell, row), size, row, right=right, ellipsis=look.glyphs.ellipsis):
                runs.append((text, style + over))
            runs.append((" " * _GAP, row + over))
        return _strip(runs, row + over if line.cursor else base, width)

    def _runs(self, cell: Cell, base: Style) -> list[tuple[str, Style]]:
        style = base + self._style(cell.style)
        if isinstance(cell.text, str):
            return [(cell.text, style)]
        text = cell.text
        style += self._style(text.style)
        cuts = sorted({0, len(text), *(c for span in text.spans for c in (span.start, span.end) if 0 < c < len(text))})
        runs = []
        for start, end in pairwise(cuts):
            over = style
            for span in text.spans:
                if span.start <= start < span.end:
                    over += self._style(span.style)
            runs.append((text.plain[start:end], over))
        return runs

    def _style(self, style: str | Style) -> Style:
        return style if isinstance(style, Style) else self._look.style(style)

    # Moving and marking

    def _neighbour(self, old: Sequence[Row], at: int) -> int | None:
        """Return the row that stands nearest to where the vanished cursor's row was; None when there is none."""
        if old:
            for step in range(1, len(old)):
                for near in (at + step, at - step):
                    if (
                        0 <= near < len(old)
                        and not old[near].group
                        and (now := self.index_of(old[near].key)) is not None
                    ):
                        return now
        return self._selectable(min(at, len(self._rows) - 1), 1)

    def _selectable(self, index: int, step: int) -> int | None:
        """Return the first row from ``index`` on that is no heading, looked for in the direction of ``step`` first."""
        for direction in (step, -step):
            at = index
            while 0 <= at < len(self._rows):
                if not self._rows[at].group:
                    return at
                at += direction
        return None

    def _go(self, index: int, step: int = 1) -> None:
        """Put the cursor on the row at ``index``, or the next one beside a heading, and bring it into sight."""
        if not self._rows:
            return
        at = self._selectable(max(0, min(index, len(self._rows) - 1)), step)
        if at is None:
            return
        changed = self._rows[at].key != self._cursor
        self._at, self._cursor = at, self._rows[at].key
        self._reveal()
        self._touch()
        if changed:
            self.post_message(self.Moved(self, self._cursor))

    def _reveal(self) -> None:
        """Scroll so far that the cursor is seen, with the heading above it when it is the first below one."""
        first = self.scroll_offset.y
        top = self._at - 1 if self._at and self._rows[self._at - 1].group else self._at
        if top < first:
            self.scroll_to(y=top, animate=False, force=True)
        elif self._at >= first + self._page:
            self.scroll_to(y=self._at - self._page + 1, animate=False, force=True)

    def _toggle(self, keys: Iterable[str]) -> None:
        self._marks ^= frozenset(keys)
        self._touch()
        self.post_message(self.Marked(self, self._marks))

    def _extend(self, step: int) -> None:
        """Mark the row under the cursor, and the one that it moves to."""
        if not self._marking or self._cursor is None:
            return
        before = self._cursor
        self._go(self._at + step, step)
        self._marks |= {before, self._cursor}
        self._touch()
        self.post_message(self.Marked(self, self._marks))

    def action_up(self) -> None:
        """One row up."""
        self._go(self._at - 1, -1)

    def action_down(self) -> None:
        """One row down."""
        self._go(self._at + 1, 1)

    def action_page_up(self) -> None:
        """A screenful up."""
        self._go(self._at - self._page, -1)

    def action_page_down(self) -> None:
        """A screenful down."""
        self._go(self._at + self._page, 1)

    def action_first(self) -> None:
        """To the first row."""
        self._go(0, 1)
        self.scroll_to(y=0, animate=False, force=True)

    def action_last(self) -> None:
        """To the last row."""
        self._go(len(self._rows) - 1, -1)

    def action_choose(self) -> None:
        """Open what the row stands for."""
        if self._cursor is not None:
            self.post_message(self.Chosen(self, self._cursor))

    def action_mark(self) -> None:
        """Mark the row or take its mark away, and go on to the next."""
        if self._marking and self._cursor is not None:
            self._toggle([self._cursor])
            self._go(self._at + 1, 1)

    def action_mark_up(self) -> None:
        """Mark upwards."""
        self._extend(-1)

    def action_mark_down(self) -> None:
        """Mark downwards."""
        self._extend(1)

    def column_at(self, x: int) -> str | None:
        """Return the key of the column at ``x``, in cells from our left edge."""
        left = _MARK_WIDTH if self._marking else 0
        for index, size in self._widths.items():
            if left <= x < left + size + _GAP:
                return self.columns[index].key
            left += size + _GAP
        return None

    def on_click(self, event: events.Click) -> None:
        """A click on the header sorts, on a row moves there; on its mark, or with ctrl, marks; twice opens."""
        at = event.get_content_offset(self)
        if at is None:
            return
        event.stop()
        if at.y < self._top:
            if (column := self.column_at(at.x)) is not None:
                self.post_message(self.Sorted(self, column))
            return
        index = at.y - self._top + self.scroll_offset.y
        if index >= len(self._rows) or self._rows[index].group:
            return
        self._go(index)
        if self._marking and (event.ctrl or at.x < _MARK_WIDTH):
            self._toggle([self._rows[index].key])
        elif event.chain == 2:
            self.action_choose()


def _strip(runs: Sequence[tuple[str, Style]], base: Style, width: int) -> Strip:
    """Return runs as one line of exactly ``width`` cells."""
    return Strip(Segment(text, style) for text, style in runs).adjust_cell_length(width, base).simplify()
