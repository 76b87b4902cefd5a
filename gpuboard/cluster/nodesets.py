"""Nodesets (``gpu[01-16,20]``, ``@group``) through ClusterShell; the only module that imports it (30 ms)."""

from __future__ import annotations

from collections.abc import Iterable

from ClusterShell.NodeSet import NodeSet, NodeSetException

from gpuboard.errors import UsageError

NODES_MAX = 65536  # `n[0-999999999]` would be expanded in memory


def expand(nodeset: str) -> list[str]:
    """Return the names in a nodeset, in its order. Raises UsageError for a syntax or a group that is not known."""
    try:
        found = NodeSet(nodeset)
        count = len(found)
        if count <= NODES_MAX:
            return [str(name) for name in found]
    except NodeSetException as error:
        raise UsageError(f"nodeset {nodeset!r} cannot be read: {error}; write gpu[01-16,20] or @group") from None
    raise UsageError(f"nodeset {nodeset!r} names {count} nodes; at most {NODES_MAX} are possible")


def fold(names: Iterable[str]) -> str:
    """Return the shortest nodeset for ``names``."""
    return str(NodeSet.fromlist(list(names)))
