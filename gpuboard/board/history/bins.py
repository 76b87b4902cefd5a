"""Bins of equal length, into which the samples of a plot fall (pure)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

_HELD = 2.5  # periods: a value holds until the next sample, at most this long; then a gap begins


def slices(times: Sequence[float], bin_s: float, count: int) -> list[tuple[int, int]]:
    """Return which samples lie in each of the ``count`` newest bins of ``bin_s`` seconds, as (first, end).

    Bins begin at multiples of ``bin_s`` of the (ascending) ``times``, so that a drawn plot only shifts; the last has
    the newest sample. A bin without a sample has the one before it, which holds until the next is due.
    """
    if not times:
        return [(0, 0)] * count
    first_bin = int(times[-1] // bin_s) - count + 1
    edges = [bisect_left(times, bin_s * (first_bin + number)) for number in range(count)]
    found = list(pairwise([*edges, len(times)]))
    if any(first == end for first, end in found):
        _hold(found, times, bin_s, first_bin)
    return found


def _hold(found: list[tuple[int, int]], times: Sequence[float], bin_s: float, first_bin: int) -> None:
    """Give bins without a sample the one before it."""
    from statistics import median_low  # late: the first frame has no history yet

    period_s = median_low([later - time for time, later in pairwise(times)]) if len(times) > 1 else bin_s
    for number, (first, end) in enumerate(found):
        if first == end > 0:
            at = times[end - 1]
            gap = end < len(times) and times[end] - at > _HELD * period_s
            if not gap or bin_s * (first_bin + number) < at + period_s:
                found[number] = end - 1, end
