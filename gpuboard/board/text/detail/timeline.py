"""Leases as bars on a common axis of local times. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from gpuboard.board.theme.styles import Glyphs

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_STEPS = (5 * _MINUTE, 15 * _MINUTE, 30 * _MINUTE, _HOUR, 2 * _HOUR, 3 * _HOUR, 6 * _HOUR, 12 * _HOUR, _DAY, 2 * _DAY,
          7 * _DAY, 28 * _DAY)  # fmt: skip
_LABEL = 8  # least cells from one label to the next: "14:00", "Tue 24"
_PAST = 0.2  # part of the axis at most for the past: the future matters more
_LEAST_S = 3600.0


class Axis(NamedTuple):
    """A span of time on ``width`` terminal cells; epoch seconds."""

    start: float
    end: float
    now: float
    width: int

    def at(self, time: float) -> int:
        """Return the cell of a time, clamped to 0 and ``width``."""
        part = (time - self.start) / (self.end - self.start)
        return max(0, min(self.width, round(part * self.width)))


def axis(spans: Iterable[tuple[float, float]], now: float, width: int) -> Axis:
    """Return an axis that contains the ends of all ``spans`` (from, until); at most a fifth of it is past."""
    known = list(spans)
    ahead = max([_LEAST_S, *(until - now for _, until in known)])
    behind = min(ahead * _PAST / (1 - _PAST), max([0.0, *(now - since for since, _ in known)]))
    # rounded to 5 minutes: the bars do not move every second
    start = (now - behind) // 300 * 300
    return Axis(start, -(-(now + ahead) // 300) * 300 + 300, now, max(1, width))


def ruler(axis: Axis) -> str:
    """Return the labels of an axis, each starting at its time: now, hours, and weekdays at midnight."""
    step = next((s for s in _STEPS if s * axis.width >= _LABEL * (axis.end - axis.start)), _STEPS[-1])
    placed = {axis.at(axis.now): "now"}
    for time in _ticks(axis.start, axis.end, step):
        at = axis.at(time)
        local = datetime.fromtimestamp(time)
        midnight = (local.hour, local.minute) == (0, 0)
        label = f"{local:%d %b}" if step >= 7 * _DAY else f"{local:%a %d}" if midnight else f"{local:%H:%M}"
        apart = all(at > other + len(text) or at + len(label) < other for other, text in placed.items())
        if apart and at + len(label) <= axis.width:
            placed[at] = label
    line = ""
    for at, label in sorted(placed.items()):
        line = line.ljust(at) + label
    return line[: axis.width].ljust(axis.width)


def bar(axis: Axis, since: float, until: float, role: str, glyphs: Glyphs) -> tuple[tuple[str, str], ...]:
    """Return a lease as runs over the whole axis: a line for the past, from now on a bar of at least one full cell."""
    first, now, last = axis.at(since), axis.at(axis.now), axis.at(until)
    now = max(now, first)
    last = min(axis.width, max(last, now + 1))
    now = min(now, last - 1)
    runs = (
        (" " * min(first, now), ""),
        (glyphs.line * max(0, now - first), "dim"),
        (glyphs.meter[0] * (last - now), role),
        (" " * (axis.width - last), ""),
    )
    return tuple(run for run in runs if run[0])


def _ticks(start: float, end: float, step: int) -> Iterable[float]:
    """Return the times within an axis that are multiples of ``step`` by the local clock."""
    at = datetime.fromtimestamp(start).replace(hour=0, minute=0, second=0, microsecond=0)
    if step >= 7 * _DAY:
        at -= timedelta(days=at.weekday())
    while (time := at.timestamp()) <= end:
        if time >= start:
            yield time
        at += timedelta(seconds=step)  # by the wall clock: labels stay on the hour across a change to summer time
