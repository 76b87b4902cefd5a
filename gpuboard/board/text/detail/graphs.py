"""Graphs of readings: a thin line on a fixed grid, a dim track at the maximum, mean and peak, axes (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import NamedTuple

from gpuboard.board.history import FIVE_MINUTES, Span
from gpuboard.board.text.cells import fit, width
from gpuboard.board.text.lines import NAME, Runs
from gpuboard.board.text.plots import Values, per_cell, plot, plotted, time_axis
from gpuboard.board.theme.styles import Glyphs

_TWO_COLUMNS = 72  # least width for two graphs side by side
_GAP = 3  # cells between them
_TRACKS = "⠉", "."  # in Unicode and ASCII
_RUNS = re.compile(" +|[^ ]+")


class GraphFrame(NamedTuple):
    """How readings are drawn: width in cells, lines per graph, glyphs."""

    width: int
    height: int
    glyphs: Glyphs
    dim: bool = False  # the values are old
    span: Span = FIVE_MINUTES


class Graph(NamedTuple):
    """A reading and its past, in one unit from 0 to ``high``; from ``warn`` and ``bad`` on it has their roles."""

    name: str
    now: str
    times: Sequence[float]
    values: Values
    high: float
    role: str = ""  # of the line
    warn: float = inf
    bad: float = inf
    peaks: Values = ()  # of the samples, where they differ from ``values``
    words: Callable[[float], str] = "{:.0f}".format  # of a value of the past

    def summary(self) -> str:
        """Return mean and peak in the time on show; "" without values."""
        known = _mean_and_peak(tuple(self.values))
        if known is None:
            return ""
        mean, peak = known
        if self.peaks:
            _, peak = _mean_and_peak(tuple(self.peaks)) or (0.0, 0.0)
        return f"mean {self.words(mean)}  peak {self.words(peak)}"


@lru_cache(maxsize=64)  # the samples on show are the same for some seconds
def _mean_and_peak(values: tuple[float | None, ...]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (sum(known) / len(known), max(known)) if known else None


class Scale(NamedTuple):
    """The highest value of a graph's plot, and the roles of its line."""

    high: float
    role: str
    warn: float
    bad: float

    def role_of(self, value: float) -> str:
        """Return the role of the line at a value."""
        return "bad" if value >= self.bad else "warn" if value >= self.warn else self.role


def graph_width(frame: GraphFrame) -> int:
    """Return the cells of each of several graphs."""
    return (frame.width - _GAP * (_columns(frame) - 1)) // _columns(frame)


def _columns(frame: GraphFrame) -> int:
    return 2 if frame.width >= _TWO_COLUMNS else 1


def graphs(shown: Sequence[Graph], frame: GraphFrame) -> list[Runs]:
    """Return graphs with their names above, two side by side where they fit, and a time axis at the end."""
    columns = _columns(frame)
    each = frame._replace(width=graph_width(frame))
    drawn = [_lines(one, each) for one in shown]
    axis: Runs = [(time_axis(each.width, frame.glyphs, frame.span.seconds), "dim")]
    for one in drawn[-(len(drawn) % columns or columns) :]:
        one.append(axis)
    lines: list[Runs] = []
    for first in range(0, len(drawn), columns):
        for parts in zip(*drawn[first : first + columns], strict=True):
            line = list(parts[0])
            for part in parts[1:]:
                line += [(" " * _GAP, ""), *part]
            lines.append(line)
    return lines


def _lines(graph: Graph, frame: GraphFrame) -> list[Runs]:
    """Return name, value and summary, the plot below them; every line has the full width."""
    role = "dim" if frame.dim else "unknown" if graph.now.startswith("?") else ""
    summary, room = graph.summary(), frame.width - NAME - width(graph.now)
    if len(summary) + 2 > room:
        summary = summary.rpartition("  ")[2] if len(summary.rpartition("  ")[2]) + 2 <= room else ""
    now = fit(graph.now, frame.width - NAME - len(summary))
    lines: list[Runs] = [[(graph.name.ljust(NAME), "dim"), (now, role), (summary, "dim")]]
    values = plotted(graph.times, graph.values, frame.width, frame.glyphs, span_s=frame.span.seconds)
    return [*lines, *_drawn(tuple(values), frame, Scale(graph.high, graph.role, graph.warn, graph.bad))]


@lru_cache(maxsize=32)  # with short bins a plot stays as it is for some seconds
def _drawn(values: tuple[float | None, ...], frame: GraphFrame, scale: Scale) -> list[Runs]:
    """Return the lines of a plot, each of the full width."""
    each = per_cell(frame.glyphs)
    cells = [[value for value in values[at : at + each] if value is not None] for at in range(0, len(values), each)]
    roles = [None if not known else "dim" if frame.dim else scale.role_of(max(known)) for known in cells]
    spans: list[tuple[int, int, str | None]] = []  # columns of one role; None: nothing is known there
    for role, run in groupby(roles):
        start = spans[-1][1] if spans else 0
        spans.append((start, start + sum(1 for _ in run), role))
    lines: list[Runs] = []
    for number, (label, area) in enumerate(plot(values, frame.height, frame.glyphs, high=scale.high)):
        track = _TRACKS[frame.glyphs.ascii] if number == 0 else ""
        parts = [part for start, end, role in spans for part in _parts(area[start:end], role, track)]
        parts.append((" " * (frame.width - len(label) - len(area)), ""))
        joined = (("".join(text for text, _ in run), role) for role, run in groupby(parts, itemgetter(1)))
        lines.append([(label, "dim"), *(part for part in joined if part[0])])
    return lines


def _parts(text: str, role: str | None, track: str) -> Iterable[tuple[str, str]]:
    """Return a part of a plot's line, with the track where its line is not; blanks have no role, so that they join."""
    for run in _RUNS.findall(text):
        if run[0] != " ":
            yield run, role or ""
        elif track and role is not None:
            yield track * len(run), "dim"
        else:
            yield run, ""
