"""Reads the nodes for their checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.doctor.nodes import NodeSeen, clock_offset
from gpuboard.model.snapshot import Snapshot

_REREAD_S = 4.0  # timeout of the second reading; NVML alone may take 3.5 s


def read_nodes(
    fleet: Fleet, nodes: Sequence[Node], settle: Callable[[Fleet], Snapshot]
) -> tuple[list[NodeSeen], Snapshot]:
    """Read every node of a started ``fleet``; ``settle`` waits for the first readings and shows progress.

    A second reading, whose request is timed, is compared with this machine's clock.
    """
    settle(fleet)
    sent, asked = time.time(), time.monotonic()
    fleet.refresh([facts.name for facts in fleet.facts if facts.reading is not None], _REREAD_S)
    shift = time.time() - time.monotonic()
    snapshot, failures = fleet.snapshot(), fleet.failures
    seen = []
    for node, facts, view in zip(nodes, fleet.facts, snapshot.nodes, strict=True):
        reading = facts.reading
        fresh = reading is not None and facts.arrived >= asked
        offset_s = clock_offset(reading.at, sent, facts.arrived + shift) if reading is not None and fresh else None
        seen.append(NodeSeen(node, facts, view, failures.get(node.name), offset_s))
    return seen, snapshot
