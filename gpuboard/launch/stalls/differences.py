"""Ranks whose collectives differed without an error of torch (pure).

gloo may accept data of another size or type, and go on with wrong values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuboard.launch.events import Leaving
from gpuboard.model.text import clean
from gpuboard.model.units import ranges


def silent_difference(leaving: Sequence[Leaving], labels: Mapping[int, str]) -> str | None:
    """Return at which collective ranks that have ended well differed first; None if they agree as far as known.

    ``labels``: how each rank is named.
    """
    ranks: dict[int, dict[str, list[int]]] = {}  # number of a collective → call → ranks
    for one in leaving:
        calls = [clean(call, 200) for call in one.calls]
        for number, at in one.called:
            if 0 <= at < len(calls):
                ranks.setdefault(number, {}).setdefault(calls[at], []).append(one.rank)
    first = min((number for number, by_call in ranks.items() if len(by_call) > 1), default=None)
    if first is None:
        return None
    ones = sorted(ranks[first].items(), key=lambda item: (len(item[1]), min(item[1])))
    parts = "; ".join(f"{_named(sorted(who), labels)} called {call}" for call, who in ones)
    return f"the ranks differ at collective {first}: {parts}; torch reported no error: results may be wrong"


def _named(ranks: Sequence[int], labels: Mapping[int, str]) -> str:
    return labels[ranks[0]] if len(ranks) == 1 else f"ranks {ranges(ranks)}"
