"""Generic resources as Slurm prints them: ``gpu:h100:4(IDX:0-3),shard:2(IDX:5)`` → GPUs and shards. Pure.

Forms of Slurm 19.05 to 25.11, read in its sources (``_node_gres_used`` and ``gres_build_job_details``, the printers of
`scontrol show node -d` and `show job -d`) and recorded from 22.05:

    gpu:8  gpu:h100:8(S:0-1)  gpu:no_consume:2         a node's resources as configured, with sockets
    gpu:h100:6(IDX:0-1,3-6)  gpu:h100:0(IDX:N/A)       those in use; untyped GPUs: gpu:6
    shard:(null):2(IDX:0-1)  shard:h100:3(1/4,2/4)     the same for shards: the GPUs that have some in use; since
                                                       23.11 used/total of each GPU of that type
    gpu:2(IDX:0-1)  gpu:h100(CNT:2)  gpu:h100:0(IDX:)  what a job holds on a node
    gpu(IDX:0-1)                                       the same in 19.05
    (null)  N/A                                        nothing

Slurm truncates a list of indexes after 63 characters: if the list is shorter than the count, it is ignored.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from gpuboard.model.schedule import Gres
from gpuboard.model.text import clean

_MAX = 65536  # GPUs or shards on one node: a larger count is invalid
_NOTHING = frozenset({"", "(null)", "N/A", "n/a", "none"})
_FIELD = re.compile(r"([A-Za-z][\w.-]*)((?::[^:(),\s]*)*)(?:\(([^()\s]*)\))?(?:,(?=.)|$)", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})([kKmMgG]?)", re.ASCII)
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_SHARED = re.compile(r"\d{1,9}/\d{1,9}(?:,\d{1,9}/\d{1,9})*", re.ASCII)
_SHARES = frozenset({"shard", "mps"})  # gres that let several jobs share one GPU


class GresError(ValueError):
    """A field without a readable number of GPUs."""


class Resources(NamedTuple):
    """The contents of one field."""

    gpus: tuple[Gres, ...] = ()
    shards: tuple[Gres, ...] = ()


@lru_cache(maxsize=4096)  # few different ones, repeated every cycle
def resources(field: str) -> Resources:
    """Return the GPUs and shards of a field, without other resources. Raises GresError."""
    if field in _NOTHING:
        return Resources()
    found: dict[bool, list[Gres]] = {True: [], False: []}
    text = field.replace(":(null)", ":")
    at = 0
    while at < len(text):
        match = _FIELD.match(text, at)
        if match is None:
            raise GresError(f"cannot read the GRES {clean(field, 80)!r}")
        name, words, details = match.groups()
        at = match.end()
        if name == "gpu" or name in _SHARES:
            found[name == "gpu"].append(_gres(field, name, words, details))
    return Resources(tuple(found[True]), tuple(found[False]))


def _gres(field: str, name: str, words: str, details: str | None) -> Gres:
    whole = name == "gpu"
    parts = [part for part in words.split(":") if part and part != "no_consume"]
    counted = _COUNT.fullmatch(parts[-1]) if parts else None
    kind = parts[: len(parts) - (counted is not None)]
    if len(kind) > 1:
        raise GresError(f"cannot read the GRES {clean(field, 80)!r}")
    count = None
    if counted is not None:
        count = int(counted[1]) * 1024 ** " kmg".index(counted[2].lower() or " ")
    indexes: tuple[int, ...] | None = None
    label, colon, value = (details or "").partition(":")
    if label == "IDX" and colon:
        indexes = _indexes(value)
        if count is None:
            count = len(indexes)
    elif label == "CNT" and count is None and value.isascii() and value.isdecimal() and len(value) < 10:
        count = int(value)
    elif details is not None and _SHARED.fullmatch(details) and not whole:
        given = [tuple(map(int, part.split("/"))) for part in details.split(",")]
        if sum(taken for taken, _ in given) != count or any(taken > of for taken, of in given):
            raise GresError(f"its {name}s contradict the use of each GPU: {clean(field, 80)!r}")
        indexes = tuple(i for i, (taken, _) in enumerate(given) if taken)
    elif details is not None and label != "S":
        raise GresError(f"cannot read the GRES {clean(field, 80)!r}")
    if count is None:
        count = 1  # `Gres=gpu:h100` is one GPU
    if whole and indexes is not None and len(indexes) != count:
        count, indexes = max(count, len(indexes)), None
    if count > _MAX:
        raise GresError(f"{count} is not a valid number of GPUs on one node: {clean(field, 80)!r}")
    return Gres(clean(kind[0], 96) if kind else "", count, indexes)


def _indexes(text: str) -> tuple[int, ...]:
    """Return the numbers of ``0-1,3-6``; none for an empty list or N/A. Raises GresError."""
    if text in _NOTHING:
        return ()
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < _MAX or (found and first <= found[-1]):
            raise GresError(f"cannot read the indexes {clean(text, 80)!r}")
        found += range(first, last + 1)
    return tuple(found)
