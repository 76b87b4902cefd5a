"""Curves, meters and small plots as text (pure). Unknown is a gap in a line, and blank in a meter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import cast

from gpuboard.board.history import slices
from gpuboard.board.text.format import UNKNOWN
from gpuboard.board.theme.styles import Glyphs

Values = Sequence[float | None]
_LABEL = 4  # cells of the numbers beside a plot
_UNITS = ((60.0, "min", 1), (60.0, "min", 15), (3600.0, "h", 6))  # of time axes: seconds, name, units from mark to mark
_STEPS = 6  # marks at most
_STEP_CELLS = 11  # from mark to mark, at least; else there is only the first
_STROKES = "_-'"  # of a curve in ASCII, from low to high in a cell
_SHORT_S = 10.0
_SCALES = tuple(step * 10**power for power in range(9) for step in (1, 2, 5))
_BRAILLE = 0x2800  # the pattern without dots; Unicode numbers the dots of the two columns from the top
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_PATTERNS = " " + "".join(chr(_BRAILLE + dots) for dots in range(1, 256))


def bins(times: Sequence[float], values: Values, bin_s: float, count: int) -> list[float | None]:
    """Return the highest value in each of the ``count`` newest bins (``slices``) of ``bin_s``; None: it has none."""
    return list(_bins(tuple(times), tuple(values), bin_s, count))


@lru_cache(maxsize=64)  # the samples on show are the same for some seconds
def _bins(times: tuple[float, ...], values: tuple[float | None, ...], bin_s: float, count: int) -> list[float | None]:
    parts = map(values.__getitem__, _slices(times, bin_s, count))
    if None in values:
        return [max([value for value in part if value is not None], default=None) for part in parts]
    return [max(part) if part else None for part in cast("Iterable[Sequence[float]]", parts)]


@lru_cache(maxsize=64)  # the same for all graphs of a GPU
def _slices(times: tuple[float, ...], bin_s: float, count: int) -> list[slice]:
    return [slice(first, end) for first, end in slices(times, bin_s, count)]


def part_of(value: float | None, most: float | None) -> float | None:
    """Return how much of ``most`` a value is, 0 to 1; None: not known."""
    return None if value is None or not most else value / most


def meter(part: float | None, cells: int, glyphs: Glyphs) -> tuple[str, str]:
    """Return a thin bar that is full to ``part`` (0 to 1) of ``cells``: its full and its empty part; None: blank."""
    if part is None:
        return "", " " * cells
    full, half, track = (glyphs.meter[at] for at in range(3))
    level = _level(part, 0.0, 1.0, 2 * cells)
    if part > 0:
        level = max(1, level)
    filled = full * (level // 2) + half * (level % 2)
    return filled, track * (cells - len(filled))


def metered(part: float | None, words: str, cells: int, role: str, glyphs: Glyphs) -> tuple[tuple[str, str], ...]:
    """Return a meter and, right of it, the words of its value, together ``cells`` wide."""
    full, rest = meter(part, cells - len(words) - 1, glyphs)
    return ((full, role), (rest, "dim"), (f" {words}", "unknown" if UNKNOWN in words else ""))


def curve(values: Values, height: int, glyphs: Glyphs, low: float, high: float) -> list[str]:
    """Return ``height`` lines, from the top, with a curve through ``values``, ``per_cell`` a column; gaps are blank."""
    return list(_curve(tuple(values), height, glyphs.ascii, low, high))


@lru_cache(maxsize=512)  # on a fixed grid most curves stay as they are for some seconds
def _curve(values: tuple[float | None, ...], height: int, ascii_only: bool, low: float, high: float) -> list[str]:
    if ascii_only:
        return _ascii_curve(values, height, low, high)
    top = 4 * height - 1  # rows of dots above the lowest
    levels = [None if value is None else _level(value, low, high, top) for value in values]
    dots = [bytearray(-(-len(levels) // 2)) for _ in range(height)]
    before: int | None = None
    for place, level in enumerate(levels):
        if level is not None:  # the dots between two values belong to the later one
            start = level if before is None or before == level else before + (1 if before < level else -1)
            for one in range(min(start, level), max(start, level) + 1):
                row, part = divmod(top - one, 4)
                dots[row][place // 2] |= _DOTS[place % 2][part]
        before = level
    return [row.decode("latin-1").translate(_PATTERNS) for row in dots]


def per_cell(glyphs: Glyphs) -> int:
    """Return how many values a curve shows per cell."""
    return 1 if glyphs.ascii else 2


def _ascii_curve(values: Values, height: int, low: float, high: float) -> list[str]:
    each = len(_STROKES)
    levels = [None if value is None else _level(value, low, high, height * each - 1) for value in values]
    rows = [[" "] * len(levels) for _ in range(height)]
    before: int | None = None
    for place, level in enumerate(levels):
        if level is not None:
            row, part = divmod(level, each)
            last = row if before is None else before // each
            for between in range(min(row, last) + 1, max(row, last)):
                rows[between][place] = "|"
            rows[row][place] = _STROKES[part]
        before = level
    return ["".join(row) for row in reversed(rows)]


def plotted(times: Sequence[float], values: Values, width: int, glyphs: Glyphs, *, span_s: float) -> Values:
    """Return the values that a plot of ``width`` shows of the last ``span_s`` seconds: ``per_cell`` in each cell.

    The newest is of the newest bin, or, where bins are short, of the newest that has ended: so a plot seldom changes.
    """
    count = _area(width) * per_cell(glyphs)
    bin_s = span_s / count
    return bins(times, values, bin_s, count + 1)[:-1] if bin_s < _SHORT_S else bins(times, values, bin_s, count)


def plotted_until(newest: float, width: int, glyphs: Glyphs, *, span_s: float) -> float:
    """Return the time up to which ``plotted`` shows samples of which the newest is of ``newest``.

    Until it changes, the plot stays as it is.
    """
    bin_s = span_s / (_area(width) * per_cell(glyphs))
    return newest // bin_s * bin_s if bin_s < _SHORT_S else newest


def plot(values: Values, height: int, glyphs: Glyphs, *, high: float) -> list[tuple[str, str]]:
    """Return a plot of ``plotted`` values from 0 to ``high``: lines as (axis with numbers, area), fixed in width."""
    lines = curve(values, height, glyphs, 0.0, high)
    labels = ["", *[""] * (height - 2), "0"][:height] if height > 1 else [""]
    labels[0] = f"{high:.0f}"
    return [(f"{label:>{_LABEL}}{glyphs.wall}", line) for label, line in zip(labels, lines, strict=True)]


def scale(values: Iterable[float | None]) -> float:
    """Return a round number that no value exceeds: the scale of a graph seldom changes."""
    most = max((value for value in values if value is not None), default=0.0)
    return float(next((scale for scale in _SCALES if scale >= most), most))


def _area(width: int) -> int:
    return max(1, width - _LABEL - 1)


def time_axis(width: int, glyphs: Glyphs, span_s: float) -> str:
    """Return the time axis below a plot: its span, and parts of it where there is room."""
    cells = _area(width)
    unit, name, step = next(each for each in _UNITS if span_s <= each[0] * each[2] * _STEPS)
    marks = {0: f"{span_s / unit:.0f} {name} ago "}
    if cells >= _STEP_CELLS * span_s / unit / step:
        for number in range(step, int(span_s / unit), step):
            marks[round(cells * (1 - number * unit / span_s)) - 1] = f" {number} "
    line = glyphs.line * cells
    for at, text in marks.items():
        line = line[:at] + text + line[at + len(text) :]
    line = line[: max(0, cells - 4)] + " now"
    return " " * (_LABEL + 1) + (line if cells >= len(marks[0]) + 6 else "now".rjust(cells)[-cells:])


def _level(value: float, low: float, high: float, top: int) -> int:
    if high <= low:
        return 0
    return round(min(max((value - low) / (high - low), 0.0), 1.0) * top)
