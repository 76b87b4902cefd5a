"""Which nodes connect to which in preflight (pure): every pair of a small run, a few per node of a large one."""

from __future__ import annotations

import random
from collections.abc import Sequence

EVERY_PAIR = 8  # nodes: up to 56 pairs; above, the number per node stays the same
SAMPLES = 2  # shuffled rings: two more neighbours each


def peers(nodes: Sequence[str], run: str) -> dict[str, list[str]]:
    """Return node → the nodes that it connects to on random high ports; every pair is tried in both directions.

    Above ``EVERY_PAIR`` nodes: its neighbours in the ring of the node ranks, and in ``SAMPLES`` rings shuffled by the
    run's id. Each node thus connects to at most 6 others, and as many connect to it; a single bad link of other pairs
    may stay unseen, a node that cannot be reached does not.
    """
    if len(nodes) <= EVERY_PAIR:
        return {node: [other for other in nodes if other != node] for node in nodes}
    chosen: dict[str, list[str]] = {node: [] for node in nodes}
    shuffle = random.Random(run)
    rings = [list(nodes), *(shuffle.sample(nodes, len(nodes)) for _ in range(SAMPLES))]
    for ring in rings:
        for node, after in zip(ring, [*ring[1:], ring[0]], strict=True):
            for one, other in ((node, after), (after, node)):
                if other not in chosen[one]:
                    chosen[one].append(other)
    return chosen


def pairs_text(nodes: int, tried: int) -> str:
    """Return which pairs of ``nodes`` nodes were tried, and how many."""
    how = "every pair" if nodes <= EVERY_PAIR else "the first node, a ring and samples"
    return f"{how}: {tried:,} of {nodes * (nodes - 1):,} pairs"
