"""The notation for GPUs: ``gpu01:0,3@gpu02:1``, ``0,3`` on a single node, MIG devices (``gpu01:2:1``), UUIDs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuboard.errors import UsageError
from gpuboard.model.request import Pick
from gpuboard.model.text import quoted, split_outside

_UUID = re.compile(
    r"(?:GPU|MIG|SIM)-[0-9A-Za-z/_-]{4,100}|[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}", re.ASCII
)
_INDEX = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_MIG = re.compile(r"(0|[1-9]\d{0,3}):(\d{1,2})", re.ASCII)
_NODE = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]*", re.ASCII)
_INDEX_END = 4096  # indexes on one node are below: 0-999999999 is a typing error
PICKS_MAX = 16_384  # in total, the limit of a nodeset


def parse_picks(text: str, *, whole_nodes: bool = False) -> tuple[Pick, ...]:
    """Return the GPUs that ``text`` names, in its order; ``whole_nodes``: a node's name alone means all its GPUs.

    Parts are joined by ``@``; a part is ``node:indexes``, indexes (of the only node) or UUIDs; indexes are numbers,
    ranges (``0,2-3``) and MIG devices (``2:1``). With ``whole_nodes`` a nodeset may replace a node's name.
    Raises ValueError.
    """
    found: list[Pick] = []
    for part in text.strip().split("@"):
        node: str | None = None
        for word in map(str.strip, split_outside(part, ",")[::2]):
            name, colon, rest = word.partition(":")
            if colon and not _MIG.fullmatch(word):
                if not _NODE.fullmatch(name):
                    raise ValueError(f"{quoted(name)} is not a node name; write gpu01:0,3@gpu02:1")
                node = name
                add(found, _word(node, rest))
            elif whole_nodes and not any(form.fullmatch(word) for form in (_MIG, _INDEX, _UUID)):
                add(found, _nodes(word))
            else:
                add(found, _word(node, word))
    if len(set(found)) < len(found):
        raise ValueError(f"{quoted(text)} names a GPU twice")
    return tuple(found)


def add(found: list[Pick], more: Iterable[Pick]) -> None:
    """Append ``more`` to ``found``. Raises ValueError for more than PICKS_MAX in total."""
    found += more
    if len(found) > PICKS_MAX:
        raise ValueError(f"more than {PICKS_MAX} GPUs or nodes are named")


def _nodes(word: str) -> list[Pick]:
    """Return all GPUs of a node, or of each in a nodeset."""
    if _NODE.fullmatch(word):
        return [Pick(word, None, None)]
    from gpuboard.cluster.inventory.nodes import expand_names  # late: few commands use a nodeset here

    try:
        return [Pick(name, None, None) for name in expand_names([word])]
    except UsageError as error:
        raise ValueError(str(error)) from None


def _word(node: str | None, word: str) -> list[Pick]:
    if _UUID.fullmatch(word):
        return [Pick(node, None, word)]
    if part := _MIG.fullmatch(word):
        return [Pick(node, int(part[1]), None, int(part[2]))]
    span = _INDEX.fullmatch(word)
    if not span:
        raise ValueError(f"{quoted(word)} is neither an index nor a GPU's UUID; write gpu01:0,3@gpu02:1 or GPU-…")
    first, last = int(span[1]), int(span[2] or span[1])
    if not first <= last < _INDEX_END:
        raise ValueError(f"{word!r} is not a range of indexes")
    return [Pick(node, index, None) for index in range(first, last + 1)]
