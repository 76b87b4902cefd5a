"""Bins of equal length, into which the samples of a plot fall (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_HELD = 2.5  # periods: a value holds until the next sample, at most this long; then a gap begins


def slices(times: Sequence[float], bin_s: float, count: int) -> list[tuple[int, int]]:
    """Return which samples lie in each of the ``count`` newest bins of ``bin_s`` seconds, as (first, end).

    Bins begin at multiples of ``bin_s`` of the (ascending) ``times``, so that a drawn plot only shifts; the last has
    the newest sample. A bin without a sample has the one before it, which holds until the next is due.
    """
    found = [(0, 0)] * count
    if not times:
        return found
    from statistics import median_low  # late: the first frame has no history yet

    period_s = median_low([later - time for time, later in pairwise(times)]) if len(times) > 1 else bin_s
    before = int(times[-1] // bin_s) - count  # the bin before the first
    places = [int(time // bin_s) - before - 1 for time in times]
    start = 0
    for number, at in enumerate(places):
        if at != places[start]:
            start = number
        if at >= 0:
            found[at] = start, number + 1
        if number + 1 < len(times) and (later := places[number + 1]) > max(at, -1) + 1:
            if times[number + 1] - times[number] > _HELD * period_s:
                later = min(later, -int(-(times[number] + period_s) // bin_s) - before - 1)
            for empty in range(max(at + 1, 0), later):
                found[empty] = number, number + 1
    return found
