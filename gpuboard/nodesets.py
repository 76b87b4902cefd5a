"""Nodesets (``gpu[01-16,20]``, ``@group``) through ClusterShell; the only module that imports it (30 ms)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ClusterShell.NodeSet import NodeSet, NodeSetException

from gpuboard.errors import UsageError

NODES_MAX = 65536  # `n[0-999999999]` would be written out in memory


def expand(nodeset: str) -> list[str]:
    """Return the names in a nodeset, in its order. Raises UsageError for a syntax or a group that is not known."""
    spans = [int(last) - int(first) for first, last in re.findall(r"([0-9]{1,18})-([0-9]{1,18})", nodeset)]
    if max(spans, default=0) >= NODES_MAX or re.search(r"[0-9]{19}", nodeset):
        raise UsageError(f"nodeset {nodeset!r} names too many nodes; at most {NODES_MAX} are possible")
    try:
        names = [str(name) for name in NodeSet(nodeset)]
    except NodeSetException as error:
        raise UsageError(f"nodeset {nodeset!r} cannot be read: {error}; write gpu[01-16,20] or @group") from None
    if not names:
        raise UsageError(f"nodeset {nodeset!r} names no node; is the group known here?")
    return names


def fold(names: Iterable[str]) -> str:
    """Return the shortest nodeset for ``names``."""
    return str(NodeSet.fromlist(list(names)))
