"""Leases as shown to users, built from the nodes' claims or Slurm's jobs (``leases --json``, schema 1)."""

# No postponed annotations: msgspec would compile each of them, at every start.

from collections.abc import Sequence
from itertools import groupby

import msgspec

from gpuboard.model.gpu import is_mig
from gpuboard.model.request import slot
from gpuboard.model.text import clean
from gpuboard.model.units import ranges


class LeaseGpu(msgspec.Struct, frozen=True, gc=False):
    """One GPU of a lease."""

    node: str
    index: int | None  # None when the GPU is not in the newest reading (fell off the bus)
    uuid: str
    share: int | None = None  # bytes
    mig: int | None = None  # the number of a MIG device of that GPU


class LeaseHolder(msgspec.Struct, frozen=True, gc=False):
    """The process that a lease ends with; ``alive`` is None when it runs on another host."""

    pid: int
    alive: bool | None


class Lease(msgspec.Struct, frozen=True, gc=False, rename={"since": "from"}):
    """A reservation: owner, GPUs, start and end.

    ``mine``, ``may_end``: whether the caller owns it and may end it, by the rules of its ledger.
    """

    id: str
    owner: str
    uid: int
    host: str
    gpus: list[LeaseGpu]
    since: str
    until: str
    holder: LeaseHolder | None
    purpose: str = ""
    job: str | None = None
    flags: list[str] = []
    remaining_s: float = 0.0
    nodes: list[str] = []  # every node it covers, including nodes without a reading
    ledger: str = "nodes"  # where it is recorded (the ledger's `kind`)
    mine: bool = False
    may_end: bool = False


class LeaseList(msgspec.Struct, frozen=True, gc=False):
    """What ``leases --json`` prints."""

    schema: int
    at: str
    leases: list[Lease]
    unread: list[str] = []  # nodes whose claims could not be read: their leases are missing
    outdated: list[str] = []  # ledgers without a current answer: some of their leases may be missing


def gpus_text(gpus: Sequence[LeaseGpu]) -> str:
    """Return GPUs as ``gpu01:0-2,5@gpu02:1``, in their order (``gpu01:2,0,1``), and MIG devices as ``gpu01:2:1,2:3``.

    One whose index or number is not known is written as its UUID, or as ``?`` without one.
    """
    by_node = ((node, [*on_node]) for node, on_node in groupby(gpus, key=lambda gpu: gpu.node))
    return "@".join(f"{clean(node, 64)}:{_slots(on_node)}" for node, on_node in by_node)


def _slots(gpus: Sequence[LeaseGpu]) -> str:
    whole = [gpu.index for gpu in gpus if gpu.index is not None and not is_mig(gpu.uuid)]
    if len(whole) == len(gpus) and whole == sorted(set(whole)):
        return ranges(whole)
    return ",".join(_slot(gpu) for gpu in gpus)


def _slot(gpu: LeaseGpu) -> str:
    if gpu.index is None or (gpu.mig is None and is_mig(gpu.uuid)):  # a rank map lacks the numbers of devices
        return clean(gpu.uuid, 48) or "?"
    return slot(gpu.index, gpu.mig)
