"""Columns, rows and cells as values, and drawing a line of them (the widget is ``grid.py``). No textual."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, overload

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from gpuboard.board.text.cells import cells_of, fit_runs
from gpuboard.board.theme.styles import Look

if TYPE_CHECKING:
    from rich.text import Text
    from textual.strip import Strip

T = TypeVar("T")
Runs = tuple[tuple[str, str | Style], ...]
Styled = list[tuple[str, Style]]

MARK_WIDTH = 1  # of the column where marks stand: rows begin where those of lists without marks do
GAP = 1  # between columns


class Column(NamedTuple):
    """A column. ``width`` in terminal cells; with ``weight`` at least ``least`` and a share of the remaining space.

    Without both it is not drawn. Where not all fit, those with the highest ``drop`` go first; those with 0 always stay.
    """

    key: str
    title: str
    width: int
    right: bool = False
    weight: int = 0
    least: int = 0
    drop: int = 0


class Cell(NamedTuple):
    """One column of a row. ``style``: a role of Look or a Style.

    ``text`` in several styles: runs of (text, style), or a Text. With ``rest`` it spans its own and all later columns;
    cells after it are not drawn.
    """

    text: str | Runs | Text
    style: str | Style = ""
    rest: bool = False


class Row(NamedTuple):
    """A row. ``cells``: one for each column of the grid, or a callable that returns them when the row becomes visible.

    A ``group`` is a heading: its first cell spans the whole width and the cursor skips it. Keys are unique. ``below``
    returns a cell for each further line of a row in a grid of tall rows; each spans all columns.
    """

    key: str
    cells: Sequence[Cell] | Callable[[], Sequence[Cell]]
    group: bool = False
    dim: bool = False
    below: Callable[[], Sequence[Cell]] | None = None


class LazyRows(Sequence[Row], Generic[T]):
    """Rows made from items on access: for thousands of rows of which few are visible."""

    def __init__(self, items: Sequence[T], key: Callable[[T], str], make: Callable[[T], Row]) -> None:
        """``make`` returns the row of an item; its key is ``key`` of the item."""
        self.items = items
        self._key = key
        self._make = make

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return LazyRows(self.items[index], self._key, self._make)
        return self._make(self.items[index])

    def keys(self) -> Iterable[str]:
        """Return all keys without making rows."""
        return map(self._key, self.items)


def keys_of(rows: Sequence[Row]) -> Iterable[str]:
    return rows.keys() if isinstance(rows, LazyRows) else (row.key for row in rows)


class Line(NamedTuple):
    """All that a line on the screen depends on, except columns and look."""

    cells: tuple[Cell, ...]
    group: bool
    dim: bool
    cursor: bool = False
    marked: bool = False
    below: tuple[Cell, ...] = ()

    def line(self, number: int) -> Line:
        """Return one of the lines of a tall row, without the others; 0 is the first."""
        if not number:
            return Line(self.cells, self.group, self.dim, self.cursor, self.marked)
        cell = self.below[number - 1] if number <= len(self.below) else Cell("")
        return Line((Cell(cell.text, cell.style, rest=True),), group=False, dim=self.dim, cursor=self.cursor)


def lines_of(line: Line, tall: int) -> list[Line]:
    """Return the lines of a row of ``tall`` lines; a heading stands in the last one, above its rows."""
    return [line] if tall == 1 else [line.line((number + line.group) % tall) for number in range(tall)]


def line_of(row: Row, *, cursor: bool = False, marked: bool = False) -> Line:
    """Return a row with its cells made."""
    cells = row.cells() if callable(row.cells) else row.cells
    return Line(tuple(cells), row.group, row.dim, cursor, marked, tuple(row.below()) if row.below is not None else ())


def share(columns: Sequence[Column], space: int) -> dict[int, int]:
    """Return the width of each column that fits into ``space`` terminal cells, by its index."""
    shown = [(index, column) for index, column in enumerate(columns) if column.width or column.weight]

    def needed() -> int:
        least = (column.least or column.width if column.weight else column.width for _, column in shown)
        return sum(least) + GAP * (len(shown) - 1)

    while needed() > space:
        first = max(shown, key=lambda item: item[1].drop)
        if not first[1].drop:
            break
        shown.remove(first)
    left = max(0, space - needed())
    weights = sum(column.weight for _, column in shown)
    widths = {}
    for index, column in shown:
        widths[index] = column.width
        if column.weight:
            part = left * column.weight // weights
            left, weights = left - part, weights - column.weight
            widths[index] = (column.least or column.width) + part
    return widths


def header_runs(
    columns: Sequence[Column],
    widths: Mapping[int, int],
    sort: tuple[str, bool] | None,
    *,
    indent: int,
    width: int,
    base: Style,
    look: Look,
) -> Styled:
    """Return the titles, at least ``width`` cells. ``sort``: by which column rows are sorted, and if downwards.

    Its mark stands on the side where titles of that column are not aligned, or on the other one if it would touch
    another title there. It covers no letter.
    """
    line, sides = " " * indent, list[int]()  # where the mark can stand
    for index, size in widths.items():
        column = columns[index]
        if sort is not None and sort[0] == column.key:
            blank, end = max(0, size - len(column.title)), len(line) + size
            sides = [len(line) + blank - 1, end] if column.right else [end - blank, len(line) - 1]
        title = fit_runs([(column.title, "")], size, "", right=column.right, ellipsis="")
        line += "".join(text for text, _ in title) + " " * GAP
    line += _rest(widths, indent, width)
    if sort is not None and (fitting := [at for at in sides if 0 <= at < width]):
        at = min(fitting, key=lambda at: len(line[max(0, at - 1) : at + 2].split()))  # titles that it would touch
        line = line[:at] + (look.glyphs.down if sort[1] else look.glyphs.up) + line[at + 1 :]
    return [(line, base + look.style("title"))]


def row_runs(
    line: Line,
    columns: Sequence[Column],
    widths: Mapping[int, int],
    *,
    marking: bool,
    width: int,
    base: Style,
    look: Look,
) -> Styled:
    """Return a row as it is drawn, at least ``width`` cells."""
    cut = look.glyphs.ellipsis
    if line.group:
        style = base + look.style("group")
        margin = [(" " * MARK_WIDTH, style)] if marking else []
        return fit_runs([*margin, *runs_of(line.cells[0], style, look)], width, style, ellipsis=cut)
    row = base + look.style("dim") if line.dim else base
    runs: Styled = []
    if marking:
        runs.append(((look.glyphs.marked if line.marked else " ").ljust(MARK_WIDTH), row))
    for index, cell in enumerate(line.cells):
        if cell.rest:
            room = width - sum(cell_len(text) for text, _ in runs)
            runs += fit_runs(runs_of(cell, row, look), room, row, ellipsis=cut)
            break
        if index in widths:
            right = columns[index].right
            runs += fit_runs(runs_of(cell, row, look), widths[index], row, right=right, ellipsis=cut)
            runs.append((" " * GAP, row))
    else:
        indent = MARK_WIDTH if marking else 0
        if indent + sum(widths.values()) + GAP * (len(widths) - 1) > width:  # a number that lacks digits must show it
            return fit_runs(runs[:-1], width, row, ellipsis=cut)
        runs.append((_rest(widths, indent, width), row))
    return runs


def laid_over(runs: Styled, over: Style) -> Styled:
    """Return runs with a style laid over all of them: the cursor's row."""
    return [(text, style + over) for text, style in runs]


def _rest(widths: Mapping[int, int], indent: int, width: int) -> str:
    """Return the blanks that fill a line after its columns."""
    return " " * (width - indent - sum(widths.values()) - GAP * len(widths))


def runs_of(cell: Cell, base: Style, look: Look) -> Styled:
    """Return what stands in a cell as texts with the styles they are drawn in, not yet cut."""
    style = _on(base, cell.style, look)
    if isinstance(cell.text, str):
        return [(cell.text, style)]
    if isinstance(cell.text, tuple):
        styles = {own: _on(style, own, look) for own in {own for _, own in cell.text}}  # few, and slow to add
        return [(text, styles[own]) for text, own in cell.text]
    text = cell.text
    style = _on(style, text.style, look)
    cuts = sorted({0, len(text), *(c for span in text.spans for c in (span.start, span.end) if 0 < c < len(text))})
    runs = []
    for start, end in pairwise(cuts):
        over = style
        for span in text.spans:
            if span.start <= start < span.end:
                over = _on(over, span.style, look)
        runs.append((text.plain[start:end], over))
    return runs


def strip(runs: Iterable[tuple[str, Style]], pad: Style, width: int) -> Strip:
    """Return runs as one line of exactly ``width`` terminal cells."""
    from textual.strip import Strip  # late: the first frame is drawn before textual is there

    segments: list[Segment] = []
    joined, last = "", pad
    for text, style in runs:
        if style is last:
            joined += text
        else:
            if joined:
                segments.append(Segment(joined, last))
            joined, last = text, style
    if joined:
        segments.append(Segment(joined, last))
    line = Strip(segments, sum(cells_of(text) for text, _, _ in segments))
    return line if line.cell_length == width else line.adjust_cell_length(width, pad)


def _on(base: Style, style: str | Style, look: Look) -> Style:
    """Return a style over ``base``; ``base`` itself where it adds nothing, so that texts side by side are one."""
    own = style if isinstance(style, Style) else look.style(style)
    return base + own if own else base
