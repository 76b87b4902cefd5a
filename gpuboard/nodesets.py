"""Nodesets (``gpu[01-16,20]``, ``@group``) through ClusterShell; the only module that imports it (30 ms: late).

ClusterShell expands every range in memory and folds names with several numbers in quadratic time. So the size of each
operand is computed first, and operands are combined here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import Any

from gpuboard.errors import UsageError
from gpuboard.model.text import quoted, split_outside

NODES_MAX = 16_384  # in a set that a user names, before `!` and `&`: more than the largest GPU cluster
_LISTED_MAX = 65_536  # in a list printed by a scheduler
_TEXT_MAX = 65_536  # characters: NODES_MAX short names, one by one
_GROUPS_MAX = 1024  # looked up for one set, including groups of groups: each may run a command of the site
_MASKS_MAX = 64  # `gpu[1-4]*`: each is compared with all nodes
_OPERATORS = ",!&^"
_LISTED = re.compile(r"[A-Za-z0-9_.,\[\]-]{1,65536}", re.ASCII)
_SIMPLE = re.compile(r"([^\[\],]*)\[(\d{1,9})-(\d{1,9})\]([^\[\],]*)", re.ASCII)  # nearly all
_RANGE = re.compile(r"\s*([0-9]{1,18})(?:\s*-\s*([0-9]{1,18})(?:/([0-9]{1,9}))?)?\s*", re.ASCII)


def expand(nodeset: str, most: int = NODES_MAX) -> list[str]:
    """Return the names in a nodeset, sorted.

    Raises UsageError for invalid text, an unknown group, and more than ``most`` names.
    """
    from ClusterShell.NodeSet import std_group_resolver

    if bad := sorted(set(re.findall(r"[^A-Za-z0-9_.,!&^@:*?/\[\]\s-]", nodeset, re.ASCII))):
        signs = " ".join(map(repr, bad[:20]))
        raise UsageError(f"nodeset {quoted(nodeset)} has {signs}, which no node's name can have")
    try:
        names = _names(nodeset, most, _Groups(std_group_resolver()))
    except ValueError as error:
        raise UsageError(f"nodeset {quoted(nodeset)} cannot be read: {error}; write gpu[01-16,20] or @group") from None
    if not names:
        remedy = "; is the group defined on this host?" if "@" in nodeset else ""
        raise UsageError(f"nodeset {quoted(nodeset)} names no node{remedy}")
    return names


@lru_cache(maxsize=8192)  # a scheduler repeats the same sets of nodes; 50 µs each
def listed(text: str) -> tuple[str, ...]:
    """Return the names in a list that a scheduler printed, ``node[1-3],x7``: no groups, no operators, no look-ups.

    Raises ValueError for anything else, and for more than _LISTED_MAX names.
    """
    if not _LISTED.fullmatch(text):
        raise ValueError(f"{quoted(text)} is not a list of nodes")
    if "[" not in text and "," not in text and "]" not in text:
        return (text,)
    if simple := _SIMPLE.fullmatch(text):
        before, first, last, after = simple.groups()
        if len(first) <= len(last) and 0 <= int(last) - int(first) < _LISTED_MAX:
            return tuple(f"{before}{number:0{len(first)}}{after}" for number in range(int(first), int(last) + 1))
    try:
        return tuple(_names(text, _LISTED_MAX, None))
    except ValueError as error:
        raise ValueError(f"{quoted(text)} is not a list of nodes: {error}") from None


def fold(names: Iterable[str]) -> str:
    """Return the shortest nodeset for ``names``."""
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(names)))


class _Groups:
    """ClusterShell's group resolver with bounds on the number of look-ups and of names."""

    def __init__(self, resolver: Any) -> None:
        self._resolver = resolver
        self._lookups = 0
        self._named = 0

    def group_nodes(self, group: str, namespace: str | None = None) -> list[str]:
        """Return the nodesets of a group."""
        return self._bounded(self._resolver.group_nodes(self._counted(group), namespace))

    def all_nodes(self, namespace: str | None = None) -> list[str]:
        """Return the nodesets of all nodes."""
        return self._bounded(self._resolver.all_nodes(self._counted(namespace)))

    def grouplist(self, namespace: str | None = None) -> list[str]:
        """Return the names of all groups."""
        return self._bounded(self._resolver.grouplist(self._counted(namespace)))

    def _counted(self, group: str | None) -> str | None:
        self._lookups += 1
        if self._lookups > _GROUPS_MAX:
            raise ValueError(f"it needs more than {_GROUPS_MAX} groups")
        return group

    def _bounded(self, found: list[str]) -> list[str]:
        for text in found:
            self._named += _size_of(split_outside(text, _OPERATORS)[::2], NODES_MAX - self._named)
        return found


def _names(text: str, most: int, groups: _Groups | None) -> list[str]:
    """Return the names in ``text``, sorted as ClusterShell does. Raises ValueError, also for more than ``most``."""
    if len(text) > _TEXT_MAX:
        raise ValueError(f"it is longer than {_TEXT_MAX} characters")
    parts = split_outside(text, _OPERATORS)
    _size_of(parts[::2], most)
    if len(parts) == 1:
        return _operand(text.strip(), groups)
    found: set[str] = set()
    for operator, operand in zip((",", *parts[1::2]), parts[::2], strict=True):
        names = set(_operand(operand.strip(), groups))
        if operator == ",":
            found |= names
        elif operator == "!":
            found -= names
        elif operator == "&":
            found &= names
        else:
            found ^= names
    return sorted(found, key=_order)


def _operand(text: str, groups: _Groups | None) -> list[str]:
    if not re.search(r"[@*?\[\]]", text):
        return [text]
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
    from ClusterShell.NodeUtils import GroupResolverSourceError

    try:
        return [str(name) for name in NodeSet(text, resolver=groups or RESOLVER_NOGROUP)]
    except Exception as error:  # groups come from the site's files and commands, and each parser has its own errors
        why = str(error)
        if isinstance(error, GroupResolverSourceError):
            why = f"ClusterShell's groups.conf has no source of groups {error}"
        elif "recursion" in why:
            why = "its groups are nested in a cycle"
    raise ValueError(why)


def _size_of(operands: Iterable[str], most: int) -> int:
    """Return an upper bound of the names in ``operands``. Raises ValueError for more than ``most``."""
    total = 0
    for operand in operands:
        total += _size(operand.strip())
        if total > most:
            raise ValueError(f"too many nodes; at most {most} are possible")
    return total


def _size(operand: str) -> int:
    """Return an upper bound of the names in ``rack[0-3]node[1-4]``: the product of the brackets' sizes."""
    before, *brackets = operand.split("[")
    if not operand or "]" in before:
        raise ValueError("a bracket is not opened" if operand else "an operand is missing beside an operator")
    sizes = []
    for bracket in brackets:
        inside, closed, after = bracket.partition("]")
        if not closed or "]" in after:
            raise ValueError(f"a bracket is not {'opened' if closed else 'closed'}")
        sizes.append(_bracket(inside, re.search(r"[0-9]*$", before)[0]))  # type: ignore[index]
        before = after
    if re.search(r"[0-9]{19}", operand):
        raise ValueError("a number has more than 18 digits")
    if sizes and re.search(r"[*?]", operand) and prod(sizes) > _MASKS_MAX:
        raise ValueError(f"a bracket beside * or ? expands to more than {_MASKS_MAX} patterns")
    return prod(sizes)


def _bracket(inside: str, before: str) -> int:
    """Return an upper bound of the numbers in ``1-4,7``. For ClusterShell ``1[1-16]`` is 11-116, so after digits
    ``before`` the bound is the whole range from the least to the greatest."""
    ranges = []
    for text in inside.split(","):
        found = _RANGE.fullmatch(text)
        if not found:
            raise ValueError(f"{quoted(text)} is not a range of numbers")
        if int(found[1]) > int(found[2] or found[1]):
            raise ValueError(f"the range {quoted(text)} descends")
        ranges.append((found[1], found[2] or found[1], int(found[3] or 1)))
    if any(step < 1 for _, _, step in ranges):
        raise ValueError("a step is 0")
    if before:
        bounds = sorted((len(end), end) for range_ in ranges for end in range_[:2])
        return max(int(before + bounds[-1][1]) - int(before + bounds[0][1]) + 1, len(ranges))
    return sum(max(0, int(last) - int(first)) // step + 1 for first, last, step in ranges)


def _order(name: str) -> tuple[str, list[tuple[int, str]]]:
    """Return a sort key: letters, then numbers, padded numbers by length first."""
    parts = re.split(r"([0-9]+)", name)
    return "%s".join(parts[::2]), [(len(digits), digits) for digits in parts[1::2]]
