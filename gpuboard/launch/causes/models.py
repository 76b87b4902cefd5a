"""Which rank has another model than the others, from DistributedDataParallel's errors (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuboard.model.units import ranges

_COUNTS = re.compile(r"Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params")
_SIZES = re.compile(r"params\[(\d+)\] in this process with sizes (\[[\d, ]*\]) appears not to match")


def compares_models(text: str) -> bool:
    """Whether an error is about the models of two ranks."""
    return bool(_COUNTS.search(text) or _SIZES.search(text))


def different_models(errors: Mapping[int, str], world_size: int) -> tuple[str, list[int]] | None:
    """Return how the models differ, and the ranks that are most likely wrong (a minority); None if unknown.

    ``errors``: those of the ranks that failed.
    """
    found = [match for text in errors.values() if (match := _COUNTS.search(text))]
    by_value: dict[str, set[int]] = {}
    for match in found:
        by_value.setdefault(f"{match[2]} parameters", set()).add(int(match[1]))
        by_value.setdefault(f"{match[4]} parameters", set()).add(int(match[3]))
    for rank, text in errors.items():  # compared with rank 0: ranks without an error agree with it
        if match := _SIZES.search(text):
            by_value.setdefault(f"sizes {match[2]} of parameter {match[1]}", set()).add(rank)
            by_value["other sizes"] = set(range(world_size)) - errors.keys()
    if not by_value:
        return None
    least = min(map(len, by_value.values()))
    minority = [ranks for ranks in by_value.values() if len(ranks) == least]
    suspects = sorted(minority[0]) if len(minority) == 1 and len(by_value) > 1 else []
    parts = [f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: {value}" for value, ranks in by_value.items()]
    return f"the ranks have different models: {'; '.join(parts)}", suspects
