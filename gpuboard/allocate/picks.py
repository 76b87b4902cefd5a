"""What people write for GPUs: ``gpu01:0,3@gpu02:1``, ``0,3`` on a single node, UUIDs."""

from __future__ import annotations

import re

from gpuboard.model.request import Pick

_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/_-]{4,100}", re.ASCII)
_NODE = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]*", re.ASCII)
_MOST = 4096  # GPUs one node may be asked for: 0-999999999 is a slip


def parse_picks(text: str, *, whole_nodes: bool = False) -> tuple[Pick, ...]:
    """Return the GPUs that ``text`` names, in its order; ``whole_nodes``: a node's name alone means all its GPUs.

    Parts are joined by ``@``; a part is ``node:indexes``, indexes (of the only node) or UUIDs; indexes are numbers and
    ranges (``0,2-3``). Raises ValueError.
    """
    found: list[Pick] = []
    for part in text.strip().split("@"):
        node, colon, rest = part.rpartition(":")
        if colon and not _NODE.fullmatch(node):
            raise ValueError(f"{node!r} is not a node's name; write gpu01:0,3@gpu02:1")
        if whole_nodes and not colon and _NODE.fullmatch(part) and not re.match(r"[0-9,-]+$|GPU-|MIG-", part):
            found.append(Pick(part, None, None))
            continue
        for word in rest.split(","):
            found += _word(node or None, word.strip())
    if len(set(found)) < len(found):
        raise ValueError(f"{text!r} names a GPU twice")
    return tuple(found)


def _word(node: str | None, word: str) -> list[Pick]:
    if _UUID.fullmatch(word):
        return [Pick(node, None, word)]
    span = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", word, re.ASCII)
    if not span:
        raise ValueError(f"{word!r} is neither an index nor a GPU's UUID; write gpu01:0,3@gpu02:1 or GPU-…")
    first, last = int(span[1]), int(span[2] or span[1])
    if not first <= last < _MOST:
        raise ValueError(f"{word!r} is no range of indexes")
    return [Pick(node, index, None) for index in range(first, last + 1)]
