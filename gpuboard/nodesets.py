"""Nodesets (``gpu[01-16,20]``, ``@group``) through ClusterShell; the only module that imports it (30 ms: late)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from gpuboard.errors import UsageError

NODES_MAX = 65536  # `n[0-999999999]` would be written out in memory
_LISTED = re.compile(r"[A-Za-z0-9_.,\[\]-]{1,65536}", re.ASCII)
_SIMPLE = re.compile(r"([^\[\],]*)\[(\d{1,9})-(\d{1,9})\]([^\[\],]*)", re.ASCII)  # nearly all
_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")  # between commas outside brackets


def expand(nodeset: str) -> list[str]:
    """Return the names in a nodeset, in its order. Raises UsageError for a syntax or a group that is not known."""
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    if _is_vast(nodeset):
        raise UsageError(f"nodeset {nodeset!r} names too many nodes; at most {NODES_MAX} are possible")
    try:
        names = [str(name) for name in NodeSet(nodeset)]
    except NodeSetException as error:
        raise UsageError(f"nodeset {nodeset!r} cannot be read: {error}; write gpu[01-16,20] or @group") from None
    if not names:
        raise UsageError(f"nodeset {nodeset!r} names no node; is the group known here?")
    return names


@lru_cache(maxsize=8192)  # a scheduler names the same sets of nodes again and again; 50 µs each
def listed(text: str) -> tuple[str, ...]:
    """Return the names in a list that a scheduler printed, ``node[1-3],x7``: no groups, no operators, no look-ups.

    Raises ValueError for anything else, and for more than NODES_MAX names.
    """
    if not _LISTED.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is no list of nodes")
    if "[" not in text and "," not in text and "]" not in text:
        return (text,)
    if simple := _SIMPLE.fullmatch(text):
        before, first, last, after = simple.groups()
        if len(first) <= len(last) and 0 <= int(last) - int(first) < NODES_MAX:
            return tuple(f"{before}{number:0{len(first)}}{after}" for number in range(int(first), int(last) + 1))
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    if _is_vast(text) or sum(map(_size, _PART.findall(text))) > NODES_MAX:
        raise ValueError(f"{text[:80]!r} names more than {NODES_MAX} nodes")
    try:
        return tuple(str(name) for name in NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise ValueError(f"{text[:80]!r} is no list of nodes: {error}") from None


def fold(names: Iterable[str]) -> str:
    """Return the shortest nodeset for ``names``."""
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(names)))


def _is_vast(nodeset: str) -> bool:
    """Tell whether one range of a nodeset alone is too long to be written out."""
    spans = [int(last) - int(first) for first, last in re.findall(r"([0-9]{1,18})-([0-9]{1,18})", nodeset)]
    return max(spans, default=0) >= NODES_MAX or re.search(r"[0-9]{19}", nodeset) is not None


def _size(part: str) -> int:
    """Return how many names ``rack[0-3]node[1-4]`` stands for: what each bracket stands for, multiplied."""
    size = 1
    for numbers in re.findall(r"\[([^\]]*)\]", part):
        spans = re.findall(r"([0-9]{1,18})-([0-9]{1,18})", numbers)
        size *= numbers.count(",") + 1 + sum(max(0, int(last) - int(first)) for first, last in spans)
    return size
