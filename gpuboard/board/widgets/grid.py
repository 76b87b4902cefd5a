"""Rows on textual's Line API: only visible lines are made, only changed ones are redrawn.

8,000 rows cost as much as 80. Cursor and marks are keys, so they stay on their rows when rows move, come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.geometry import Offset, Region, Size
from textual.message import Message
from textual.strip import Strip

from gpuboard.board.terminal.textual_compat import draw_lines, draw_now
from gpuboard.board.text.cells import fit_runs
from gpuboard.board.text.rows import (
    GAP,
    MARK_WIDTH,
    Cell,
    Column,
    LazyRows,
    Line,
    Row,
    header_runs,
    keys_of,
    laid_over,
    line_of,
    lines_of,
    row_runs,
    runs_of,
    share,
    strip,
)
from gpuboard.board.widgets.on_board import OnBoard
from gpuboard.board.widgets.selection import Dragging, row_at

if TYPE_CHECKING:
    from gpuboard.board.theme.styles import Look

__all__ = ["HEADER", "RIGHT", "Cell", "Column", "Grid", "LazyRows", "Row"]

K = TypeVar("K")
RIGHT = 3  # right mouse button; some terminals do not pass on ctrl-click
HEADER = 1  # lines above the rows
_CHECKED = 24  # lines that are checked, and drawn, at once: 15 ms
_COPIED_MOST = 74_994  # bytes: 100,000 in base64, which is the limit of many terminals; a part would be lost silently


class _Drawn(NamedTuple):
    """A row as it was last drawn."""

    line: Line
    parts: list[Line]  # one for each line on the screen
    strips: dict[int, Strip]  # by number of a part


class Grid(OnBoard, Dragging, can_focus=True):
    """A table whose cursor, marks and scroll position are stable while its rows change."""

    ROW_CURSOR = True  # draw the cursor over the whole row
    FOLLOWS = True  # scroll to the cursor, and with it when its row moves
    DEFAULT_CSS = """
    Grid {
        height: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-gutter: stable; scrollbar-size-vertical: 1;
        padding: 0 0 0 1;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "rows(-1)", "Up", id="grid.up", show=False),
        Binding("down,j", "rows(1)", "Down", id="grid.down", show=False),
        Binding("pageup", "pages(-1)", "Page up", id="grid.page-up", show=False),
        Binding("pagedown", "pages(1)", "Page down", id="grid.page-down", show=False),
        Binding("home", "first", "First row", id="grid.first", show=False),
        Binding("end", "last", "Last row", id="grid.last", show=False),
        Binding("enter", "choose", "Open", id="grid.choose", show=False),
        Binding("space", "mark", "Select", id="grid.mark", show=False),
        Binding("shift+up", "mark_rows(-1)", "Select upwards", id="grid.mark-up", show=False),
        Binding("shift+down", "mark_rows(1)", "Select downwards", id="grid.mark-down", show=False),
        Binding("Y", "copy_list", "Copy the list", id="grid.copy", show=False),
    ]
    DRAWN: ClassVar[frozenset[str]] = frozenset({"bar", "spark", "trace"})  # keys of columns that are pictures
    METERED: ClassVar[frozenset[str]] = frozenset({"memory", "sm"})  # of those with a bar before the value

    class RowMessage(Message, Generic[K]):
        """Base class of a grid's messages; ``key`` is a row's or a column's."""

        def __init__(self, grid: Grid, key: K) -> None:
            super().__init__()
            self.grid = grid
            self.key = key

        @property
        def control(self) -> Grid:
            """The grid, for ``@on(Grid.Moved, "#id")``."""
            return self.grid

    class Moved(RowMessage[str | None]):
        """The cursor is on another row; ``key`` is None when there are no rows."""

    class Chosen(RowMessage[str]):
        """Enter or a double click on a row."""

    class Marked(RowMessage[None]):
        """The marks have changed; ``keys`` are all of them, also of rows that are not shown."""

        def __init__(self, grid: Grid, keys: frozenset[str]) -> None:
            super().__init__(grid, None)
            self.keys = keys

    class Sorted(RowMessage[str]):
        """The header of the column ``key`` was clicked."""

    def __init__(
        self,
        columns: Sequence[Column],
        *,
        empty: str = "",
        marks: bool = False,
        mark_column: bool = True,
        id: str | None = None,
    ) -> None:
        """``empty``: the text without rows; ``marks``: whether rows can be marked."""
        super().__init__(id=id)
        self._tall = 1  # lines of a row
        self.columns = tuple(columns)
        self.empty = empty
        self._marking = marks
        self._indent = MARK_WIDTH if marks and mark_column else 0
        if self._indent:
            self.styles.padding = 0  # the marks stand there
        self._rows: Sequence[Row] = ()
        self._indexes: dict[str, int] | None = {}
        self._cursor: str | None = None
        self._wanted: str | None = None  # the key the user put the cursor on
        self._notified: str | None = None  # the cursor in the last Moved message
        self._at = 0  # index of the cursor's row
        self._marks: frozenset[str] = frozenset()
        self._sort: tuple[str, bool] | None = None
        self._space = 0  # the width shared by the columns
        self._widths: dict[int, int] = {}  # by index of a column; columns that do not fit are missing
        self._lines: dict[int, _Drawn] = {}  # by index of a row
        self.in_parts = True  # many rows are drawn in parts: a key that comes meanwhile is drawn before the rest
        self._unchecked: list[int] = []  # visible rows whose lines may have changed
        self._base = Style()  # of the widget as it is drawn
        self._drawn_with: Look | None = None
        self.listed: Callable[[], Grid] = lambda: self  # returns the grid to copy; another one where this is a picture

    # Public interface

    @property
    def cursor(self) -> str | None:
        """The key of the row under the cursor. May be set before its row exists; the cursor goes there when it does."""
        return self._cursor

    @cursor.setter
    def cursor(self, key: str | None) -> None:
        index = self.index_of(key)
        if index is None:
            self._wanted = key
        else:
            self._go(index)

    @property
    def marks(self) -> frozenset[str]:
        """The keys of all marked rows, also of rows that are not shown."""
        return self._marks

    @marks.setter
    def marks(self, keys: Iterable[str]) -> None:
        """Set the marks without sending a message."""
        self._marks = frozenset(keys)
        self._touch()

    def index_of(self, key: str | None) -> int | None:
        """Return the index of the row with ``key`` or None."""
        if self._indexes is None:
            self._indexes = {key: index for index, key in enumerate(keys_of(self._rows))}
        return None if key is None else self._indexes.get(key)

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Show ``rows``. Cursor, marks and scroll position stay; only changed lines are redrawn.

        If the cursor's row is gone, the cursor is on the nearest one until the row returns.
        """
        old, self._rows = self._rows, rows
        if not old and not rows:
            return
        self._indexes = None
        calm = self._wanted == self._cursor and len(old) == len(rows) and self._at < len(rows)
        if not (calm and rows[self._at].key == self._cursor):
            before = self._at
            at = self.index_of(self._wanted)
            if at is None:
                at = self.index_of(self._cursor)
            if at is None:
                at = self._neighbour(old, before)
            follows = self.FOLLOWS and bool(old) and at not in {None, before}
            visible = follows and self._first <= before < self._first + self._page
            if len(old) != len(rows):
                self._resized()
            self._cursor, self._at = None if at is None else rows[at].key, at or 0
            self._wanted = self._wanted or self._cursor
            if visible and (self._first or self._at >= self._page):  # else the first rows stay
                to = self.scroll_offset.y + (self._at - before) * self._tall
                self.scroll_to(y=max(0, to), animate=False, force=True)
        self._settle()
        self._touch()
        self._send_moved()

    def set_columns(self, columns: Sequence[Column]) -> None:
        """Set the columns; call ``set_rows`` with matching rows next."""
        if tuple(columns) != self.columns:
            self.columns = tuple(columns)
            self._measure()

    def set_tall(self, lines: int) -> None:
        """Set how many lines a row takes; call ``set_rows`` with matching rows next."""
        if lines != self._tall:
            self._tall = lines
            self._resized()
            self.redraw()
            self._reveal()

    def set_sort(self, key: str | None, reverse: bool = False) -> None:
        """Show in the header which column the rows are sorted by."""
        sort = None if key is None else (key, reverse)
        if sort != self._sort:
            self._sort = sort
            self.refresh(Region(0, 0, self.size.width, 1))

    def set_empty(self, empty: str) -> None:
        if empty != self.empty:
            self.empty = empty
            if not self._rows:
                self.refresh()

    def tsv(self) -> str:
        """Return all rows as tab-separated text below their titles, also columns that do not fit; no headings."""
        kept = [index for index, column in enumerate(self.columns) if column.key not in self.DRAWN]
        lines = [[self.columns[index].title for index in kept]]
        for row in self._rows:
            if not row.group:
                cells = line_of(row).cells
                lines.append(
                    [self.plain(self.columns[index].key, cells[index]) for index in kept if index < len(cells)]
                )
        return "".join("\t".join(line) + "\n" for line in lines)

    def plain(self, key: str, cell: Cell) -> str:
        """Return a cell as text to copy, without a bar."""
        if key in self.METERED and isinstance(cell.text, tuple):
            cell = cell._replace(text=cell.text[-1:])
        return " ".join("".join(text for text, _ in runs_of(cell, Style(), self._look)).split())

    def action_copy_list(self) -> None:
        """Copy all rows to the terminal's clipboard (OSC 52)."""
        grid = self.listed()
        text, rows = grid.tsv(), sum(not row.group for row in grid._rows)
        if len(text.encode()) > _COPIED_MOST:
            words = (
                f"{rows} rows are {len(text.encode()) >> 10} KiB, and terminals take {_COPIED_MOST >> 10}; filter them"
            )
            self.app.notify(words, title="Not copied", severity="warning", markup=False)
            return
        self.app.copy_to_clipboard(text)
        words = f"{rows} row{'' if rows == 1 else 's'} as tab-separated text"
        self.app.notify(words, title="Copied", markup=False)

    def redraw(self) -> None:
        self._lines.clear()
        self.refresh()

    # Drawing

    @property
    def _look(self) -> Look:
        return self.board.look

    @property
    def _space_below(self) -> int:
        return max(1, self.scrollable_content_region.height - HEADER)

    @property
    def _page(self) -> int:
        return max(1, self._space_below // self._tall)

    @property
    def _first(self) -> int:
        return self.scroll_offset.y // self._tall

    def _row_at(self, y: int) -> int:
        """Return the index of the row at line ``y`` of the widget; there may be no such row."""
        return (y - HEADER + self.scroll_offset.y) // self._tall

    def on_mount(self) -> None:
        self._resized()

    def on_resize(self) -> None:
        """Share the new width among the columns and keep the cursor visible."""
        self._measure()
        self._resized()
        if self._rows:
            self._reveal()

    def _resized(self) -> None:
        self.virtual_size = Size(0, len(self._rows) * self._tall + HEADER)

    def _measure(self) -> None:
        self._share()
        self.redraw()

    def _share(self) -> None:
        self._space = self.scrollable_content_region.width
        self._widths = share(self.columns, self._space - self._indent)

    def _line(self, index: int) -> Line:
        row = self._rows[index]
        cursor = index == self._at and row.key == self._cursor
        return line_of(row, cursor=cursor, marked=row.key in self._marks)

    def _touch(self, only: Collection[int] | None = None) -> None:
        """Redraw the visible lines that have changed; ``only``: check only these, else some now, and the others later.

        A key that comes meanwhile is drawn before the others.
        """
        end = min(len(self._rows), -(-(self.scroll_offset.y + self._space_below) // self._tall))
        visible = range(self._first, end)
        if only is not None:
            for index in only:
                if index not in visible:
                    self._lines.pop(index, None)
            self._check(index for index in only if index in visible)
            return
        if len(self._lines) > len(visible):  # fewer rows: clear the lines below them
            below = end * self._tall - self.scroll_offset.y
            self.refresh(Region(0, below + HEADER, self.size.width, max(0, self._space_below - below)))
        self._lines = {index: drawn for index, drawn in self._lines.items() if index in visible}
        # those that wait come first: none waits forever, however often rows change
        self._unchecked = [*dict.fromkeys((*(index for index in self._unchecked if index in visible), *visible))]
        self._check_some(self._unchecked)

    def _check_some(self, rows: list[int]) -> None:
        """Check and draw the first of the unchecked rows; then go on, unless other rows have come."""
        if rows is self._unchecked:
            most = max(1, _CHECKED // self._tall) if self.in_parts else len(rows)
            self._check(rows[:most])
            del rows[:most]
            if rows:
                draw_now(self)
                self.call_later(self._check_some, rows)

    def _check(self, indexes: Iterable[int]) -> None:
        """Redraw the lines of these rows that have changed."""
        changed: list[tuple[int, int]] = []  # row, line of it
        for index in indexes:
            line, drawn = self._line(index), self._lines.get(index)
            if drawn is None or drawn.line != line:
                parts = lines_of(line, self._tall)
                strips = {} if drawn is None else {n: s for n, s in drawn.strips.items() if drawn.parts[n] == parts[n]}
                self._lines[index] = _Drawn(line, parts, strips)
                changed += ((index, number) for number in range(self._tall) if number not in strips)
        if changed:
            top = HEADER - self.scroll_offset.y  # slow: once for all
            draw_lines(self, (top + index * self._tall + number for index, number in changed))

    def get_line_filters(self) -> Sequence[LineFilter]:
        return self.board.own_line_filters()

    def render_lines(self, crop: Region) -> list[Strip]:
        base, width = self.visual_style.rich_style, self.scrollable_content_region.width  # slow: once for all
        if base != self._base:  # else the same object: sums of styles are found without comparing them
            self._base = base
        if self._drawn_with is not self._look:
            self._drawn_with = self._look
            self._lines.clear()
        if width != self._space:
            self._share()  # the first frame is drawn before the resize event
            self._lines.clear()
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        base, width = self._base, self._space
        if y < HEADER:
            titles = header_runs(
                self.columns, self._widths, self._sort, indent=self._indent, width=width, base=base, look=self._look
            )
            return strip(titles, base, width)
        index, number = divmod(y - HEADER + self.scroll_offset.y, self._tall)
        if index >= len(self._rows):
            return self._empty_strip(y - HEADER, base, width)
        if index not in self._lines:
            line = self._line(index)
            self._lines[index] = _Drawn(line, lines_of(line, self._tall), {})
        drawn = self._lines[index]
        if number not in drawn.strips:
            drawn.strips[number] = self._row_strip(drawn.parts[number], base, width, marked=drawn.line.marked)
        return drawn.strips[number]

    def _empty_strip(self, y: int, base: Style, width: int) -> Strip:
        if self._rows or not self.empty or y < 1:
            return Strip.blank(width, base)
        lines = self.empty.splitlines()
        text = lines[y - 1] if y <= len(lines) else ""
        return strip([("  ", base), *fit_runs([(text, base + self._look.style("dim"))], width - 2, base)], base, width)

    def _row_strip(self, line: Line, base: Style, width: int, *, marked: bool) -> Strip:
        runs = row_runs(
            line,
            self.columns,
            self._widths,
            marking=self._indent > 0,
            width=width,
            base=base + self._look.style("marked") if marked else base,
            look=self._look,
        )
        if line.cursor and self.ROW_CURSOR:
            runs = laid_over(runs, self._look.style("cursor"))
        return strip(runs, base, width)

    # Moving and marking

    def _neighbour(self, old: Sequence[Row], at: int) -> int | None:
        """Return the row nearest to the position of the cursor's vanished row, or None."""
        keys = list(keys_of(old))
        for step in range(1, len(keys)):
            for near in (at + step, at - step):
                if 0 <= near < len(keys) and (now := self.index_of(keys[near])) is not None:
                    return self._selectable(now, 1)
        return self._selectable(min(at, len(self._rows) - 1), 1)

    def _selectable(self, index: int, step: int) -> int | None:
        """Return the row nearest to ``index`` that is not a heading; the direction of ``step`` first."""
        for direction in (step, -step):
            at = index
            while 0 <= at < len(self._rows):
                if not self._rows[at].group:
                    return at
                at += direction
        return None

    def _go(self, index: int, step: int = 1) -> None:
        """Put the cursor on the row at ``index``, or the next one beside a heading, and scroll to it."""
        if not self._rows:
            return
        at = self._selectable(max(0, min(index, len(self._rows) - 1)), step)
        if at is None:
            return
        before, self._at = self._at, at
        self._cursor = self._wanted = self._rows[at].key
        self._settle()
        self._reveal()
        self._touch({before, at})
        self._send_moved()

    def _settle(self) -> None:
        """Hook: the rows or the cursor may have changed."""

    def _send_moved(self) -> None:
        if self.cursor != self._notified:
            self._notified = self.cursor
            self.post_message(self.Moved(self, self._notified))

    def _reveal(self) -> None:
        """Scroll to the cursor, and to the heading if the cursor is right below it."""
        if not self.FOLLOWS:
            return
        top = self._at - 1 if self._at and self._rows[self._at - 1].group else self._at
        end = (self._at + 1) * self._tall
        if top * self._tall < self.scroll_offset.y:
            self.scroll_to(y=top * self._tall, animate=False, force=True)
        elif end > self.scroll_offset.y + self._space_below:
            self.scroll_to(y=end - self._space_below, animate=False, force=True)

    def can_mark(self, key: str) -> bool:
        """Return whether the row of ``key`` can be marked: one of a node that has no GPU cannot."""
        return not key.startswith("node:")

    def _toggle(self, key: str | None) -> None:
        if self._marking and key is not None and self.can_mark(key):
            self._set_marks(self._marks ^ {key}, {self._at})

    def _extend(self, move: Callable[[], object]) -> None:
        """Mark the row under the cursor and the one it moves to."""
        if self._marking:
            before, at = self.cursor, self._at
            move()
            new = {key for key in (before, self.cursor) if key is not None and self.can_mark(key)}
            self._set_marks(self._marks | new, {at, self._at})

    def _set_marks(self, marks: frozenset[str], rows: Collection[int] | None) -> None:
        if marks != self._marks:
            self._marks = marks
            self._touch(rows)
            self.post_message(self.Marked(self, marks))

    def action_rows(self, step: int) -> None:
        scrolled = self.scroll_offset
        self._go(self._at + step, step)
        if self.scroll_offset == scrolled:
            draw_now(self)

    def action_pages(self, step: int) -> None:
        self._go(self._at + step * self._page, step)

    def action_first(self) -> None:
        self._go(0, 1)
        self.scroll_to(y=0, animate=False, force=True)

    def action_last(self) -> None:
        self._go(len(self._rows) - 1, -1)

    def to_top(self) -> None:
        """Show the first rows, for which the user has sorted; a cursor further down goes to the first one."""
        if self._at >= self._page:
            self.action_first()
        self.scroll_to(y=0, animate=False, force=True)

    def action_choose(self) -> None:
        if self.cursor is not None:
            self.post_message(self.Chosen(self, self.cursor))

    def action_mark(self) -> None:
        self._toggle(self.cursor)
        self.action_rows(1)

    def action_mark_rows(self, step: int) -> None:
        self._extend(lambda: self.action_rows(step))

    def column_at(self, x: int) -> str | None:
        """Return the key of the column at ``x``, in cells from the left edge."""
        left = self._indent
        for index, size in self._widths.items():
            if left <= x < left + size + GAP:
                return self.columns[index].key
            left += size + GAP
        return None

    def key_at(self, at: Offset) -> str | None:
        """Return the key of the row at ``at`` if it can be marked."""
        index = self._row_at(at.y)
        row = self._rows[index] if self._marking and at.y >= HEADER and index < len(self._rows) else None
        return row.key if row is not None and not row.group and self.can_mark(row.key) else None

    def drag(self, grip: str, at: Offset, before: frozenset[str]) -> bool:
        """Mark the rows from ``grip`` to the one at ``at``."""
        start = self.index_of(grip)
        if start is None:
            return False  # the row is gone
        beyond = self._drag_to(at.y, start)
        rows = self._rows[min(start, self._at) : max(start, self._at) + 1]
        self._set_marks(before.union(row.key for row in rows if not row.group and self.can_mark(row.key)), None)
        return beyond

    def _drag_to(self, y: int, start: int) -> bool:
        """Put the cursor on the row at ``y``, or past the edge; return whether it is past the edge."""
        index, beyond = row_at((y - HEADER) // self._tall, self._first, self._page, len(self._rows))
        self._go(index, 1 if beyond == (index > start) else -1)  # a heading does not stop a drag past the edge
        return beyond

    def on_click(self, event: events.Click) -> None:
        """A click on the header sorts, on a row moves there, twice opens; on its mark, with ctrl or right it marks."""
        at = event.get_content_offset(self)
        if at is None or self.is_drag(event):
            return
        event.stop()
        if at.y < HEADER:
            if (column := self.column_at(at.x)) is not None:
                self.post_message(self.Sorted(self, column))
            return
        index = self._row_at(at.y)
        if index >= len(self._rows) or self._rows[index].group:
            return
        self._go(index)
        if event.ctrl or event.button == RIGHT or at.x < self._indent:
            self._toggle(self.cursor)
        elif event.chain == 2:
            self.action_choose()
