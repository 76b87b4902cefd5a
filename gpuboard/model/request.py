"""A request for GPUs, and its two results: an allocation, or a refusal with a reason for every GPU."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from gpuboard.model.units import ranges

Topology = Literal["best", "any"]
RefusalCode = Literal[3, 4]  # exit codes: never possible, not now


def slot(index: int | None, mig: int | None) -> str:
    """Return a GPU's index, or a MIG device as ``status`` prints it and ``--gpus`` takes it: ``2:1``."""
    return f"{'?' if index is None else index}{'' if mig is None else f':{mig}'}"


def slots(gpus: Collection[tuple[int | None, int | None]]) -> str:
    """Return GPUs of a node, each an index and the number of a MIG device: ``0-2,5``; with devices ``1,2:0,2:1``."""
    whole = {index for index, mig in gpus if index is not None and mig is None}
    if len(whole) == len(set(gpus)):
        return ranges(whole)
    return ",".join(slot(index, mig) for index, mig in gpus)


class Pick(msgspec.Struct, frozen=True):
    """One GPU named by the user: ``gpu01:3`` or a UUID (``node`` None: on any node)."""

    node: str | None
    index: int | None
    uuid: str | None
    mig: int | None = None  # the number of a MIG device of that GPU


class Request(msgspec.Struct, frozen=True):
    """A request. Exactly one of ``n`` and ``picks`` is set."""

    n: int | None = None
    picks: tuple[Pick, ...] = ()
    per_node: int | None = None  # exactly this many on each node
    max_nodes: int | None = None
    one_node: bool = False  # the caller can use one node only: more nodes are no remedy
    model: str | None = None  # case-insensitive part of the name; a glob if it has * ? or [
    gpu_mem: int | None = None  # bytes of free memory that each GPU must have
    topology: Topology = "best"
    allow_sick: bool = False  # else a sick GPU is chosen only if ``picks`` or ``within`` name it
    exclude: tuple[Pick, ...] = ()
    within: tuple[str, ...] | None = None  # UUIDs; pick only among these (inside a lease)


class ChosenGpu(msgspec.Struct, frozen=True):
    """One allocated GPU."""

    node: str
    index: int
    uuid: str
    memory_fraction: float | None = None
    mig: int | None = None  # the number of a MIG device of that GPU


class Choice(msgspec.Struct, frozen=True):
    """The set the policy chose, in rank order, and why."""

    gpus: tuple[ChosenGpu, ...]
    why: str
    notes: tuple[str, ...] = ()  # warnings about these GPUs


class RefusedGpu(msgspec.Struct, frozen=True):
    """Why one GPU was not chosen."""

    node: str
    index: int
    uuid: str
    state: str
    reason: str
    mig: int | None = None  # the number of a MIG device of that GPU


class Refusal(msgspec.Struct, frozen=True):
    """Why a request was not granted. ``code`` is the exit code: 3 never possible, 4 not now."""

    code: RefusalCode
    message: str
    gpus: tuple[RefusedGpu, ...] = ()
    nearest: str = ""  # the nearest request that would succeed, as text or options
