"""Tables: as text that fits a terminal (aligned, columns elided and dropped in a given order), and as CSV.

Callers pass all text from outside through :func:`gpuboard.model.text.clean` first.
"""

from __future__ import annotations

import csv
import io
import sys
import unicodedata
from collections.abc import Iterable, Sequence

import msgspec

from gpuboard.model.text import clean

GAP = "  "
_FORMULAS = ("=", "+", "-", "@")  # a cell that begins so is a formula in a spreadsheet


class Column(msgspec.Struct, frozen=True):
    """A column: its heading, whether it is aligned right (numbers), and its minimum initial width.

    The minimum keeps columns in place while values change.
    """

    title: str
    right: bool = False
    least: int = 0


class Step(msgspec.Struct, frozen=True):
    """One step that makes a table narrower: cut column ``column`` to ``to`` cells; 0 drops the column."""

    column: int
    to: int


class Cell(msgspec.Struct, frozen=True):
    """A cell: its text, and the SGR parameters of its colour ("" for none)."""

    text: str
    colour: str = ""


class Row(msgspec.Struct, frozen=True):
    """A row of cells; or, with ``span``, a first cell and a text that spans the other columns, wrapped."""

    cells: tuple[Cell, ...]
    span: Cell | None = None


def width_of(text: str) -> int:
    """Return how many terminal cells ``text`` takes: two for wide characters, zero for combining ones."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) or unicodedata.category(c) in {"Mn", "Me", "Cf"} else
        2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )  # fmt: skip


def elide(text: str, width: int) -> str:
    """Return ``text`` in at most ``width`` cells; a cut is marked with an ellipsis."""
    if width_of(text) <= width:
        return text
    kept = ""
    for c in text:
        if width_of(kept + c) > width - 1:
            break
        kept += c
    return kept + "…" if width > 0 else ""


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return ``text`` elided or filled up to exactly ``width`` cells."""
    text = elide(text, width)
    fill = " " * (width - width_of(text))
    return fill + text if right else text + fill


def wrap(text: str, width: int) -> list[str]:
    """Return ``text`` broken at spaces into lines of at most ``width`` cells; longer words are broken too."""
    lines = [""]
    for word in text.split(" "):
        rest = word
        joined = f"{lines[-1]} {rest}" if lines[-1] else rest
        if width_of(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        while width_of(rest) > width:
            cut = next(n for n in range(len(rest), 0, -1) if n == 1 or width_of(rest[:n]) <= width)
            lines[-1] = rest[:cut]
            rest = rest[cut:]
            lines.append("")
        lines[-1] = rest
    return lines


def fit(natural: Sequence[int], steps: Sequence[Step], width: int) -> list[int]:
    """Return the width of each column (0: dropped) so that all fit into ``width`` cells with gaps between.

    Steps apply in order, each only as far as needed; the last column absorbs what still does not fit.
    """
    widths = list(natural)
    for step in steps:
        over = _total(widths) - width
        if over <= 0:
            break
        if step.to == 0:
            widths[step.column] = 0
        else:
            widths[step.column] = min(widths[step.column], max(step.to, widths[step.column] - over))
    spare = width - _total(widths)
    last = len(widths) - 1
    # Dropping a column may free more cells than needed: the last column, free text, gets them.
    widths[last] = max(1, min(natural[last], widths[last] + spare))
    return widths


def render(
    columns: Sequence[Column], rows: Sequence[Row], steps: Sequence[Step], width: int | None, *, colour: bool
) -> list[str]:
    """Return the lines of a table with headings. ``width`` in cells; None: no limit."""
    natural = [
        max(
            [width_of(column.title), column.least, *(width_of(row.cells[n].text) for row in rows if n < len(row.cells))]
        )
        for n, column in enumerate(columns)
    ]
    widths = natural if width is None else fit(natural, steps, width)
    lines = [_line([Cell(column.title) for column in columns], columns, widths, colour=False)]
    for row in rows:
        if row.span is None:
            lines.append(_line(row.cells, columns, widths, colour=colour))
            continue
        first = pad(row.cells[0].text, widths[0]) + GAP
        room = 10**6 if width is None else max(8, width - width_of(first))
        for n, part in enumerate(wrap(row.span.text, room)):
            lines.append((first if n == 0 else " " * width_of(first)) + paint(part, row.span.colour, colour=colour))
    return lines


def paint(text: str, sgr: str, *, colour: bool) -> str:
    """Return ``text``, coloured by SGR parameters where ``colour`` is set."""
    return f"\x1b[{sgr}m{text}\x1b[0m" if colour and sgr else text


def _total(widths: Sequence[int]) -> int:
    shown = [width for width in widths if width]
    return sum(shown) + len(GAP) * (len(shown) - 1)


def _line(cells: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], *, colour: bool) -> str:
    parts = [
        paint(pad(cell.text, width, right=column.right), cell.colour, colour=colour)
        for cell, column, width in zip(cells, columns, widths, strict=True)
        if width
    ]
    return GAP.join(parts).rstrip()


def write_csv(header: Sequence[str], rows: Iterable[Sequence[str | int | float | None]]) -> None:
    """Write a table on stdout as in RFC 4180, in UTF-8. Unknown values (None) are empty fields.

    Text has no control characters, so that a record is a line. Text that begins like a formula gets an apostrophe.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows([_field(value) for value in row] for row in rows)
    sys.stdout.buffer.write(text.getvalue().encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def _field(value: str | int | float | None) -> str | int | float:
    if not isinstance(value, str):
        return "" if value is None else value
    words = clean(value, 4096)
    return f"'{words}" if words.lstrip().startswith(_FORMULAS) else words
