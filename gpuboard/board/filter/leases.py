"""Leases with the readings of their GPUs, and the keys of their filter (pure)."""

from __future__ import annotations

import time
from typing import NamedTuple

from gpuboard.board.dialogs.request_form import places_words
from gpuboard.board.filter.language import Key, Language
from gpuboard.board.filter.matchers import ME, nodes, number, one_of, text
from gpuboard.board.scene import Scene
from gpuboard.model.lease import Lease
from gpuboard.model.snapshot import GpuView, ProcessView
from gpuboard.model.units import parse_duration, parse_number, seconds_of


class HeldLease(NamedTuple):
    """A lease with the readings of its GPUs."""

    lease: Lease
    mine: bool
    since: float  # epoch seconds
    until: float
    gpus: list[GpuView]  # those in the snapshot
    rogues: list[tuple[GpuView, ProcessView]]  # other users' processes on them

    @property
    def key(self) -> str:
        """Its unique key: the same id of two owners is two leases."""
        return f"{self.lease.id} {self.lease.owner}"

    @property
    def idle(self) -> int:
        """The number of its GPUs with the flag idle."""
        return sum("idle" in gpu.flags for gpu in self.gpus)

    @property
    def node_names(self) -> list[str]:
        """The nodes of its GPUs."""
        return [gpu.node for gpu in self.lease.gpus]

    @property
    def flags(self) -> list[str]:
        """The lease's flags, and those of its GPUs that are shown with it."""
        found = [*self.lease.flags, *(["rogue"] if self.rogues else [])]
        return [*found, *dict.fromkeys(flag for gpu in self.gpus for flag in gpu.flags if flag in {"idle", "overdue"})]

    @property
    def marks(self) -> tuple[tuple[str, str], ...]:
        """What is wrong or wasteful, as runs of (words, role); rogue users first, by name."""
        found = []
        if users := sorted({process.user or "?" for _, process in self.rogues}):
            found.append((f"rogue: {', '.join(users)}", "bad"))
        found += [(flag, "bad") for flag in self.lease.flags]
        if self.idle:
            of = "" if self.idle == len(self.lease.gpus) else f" {self.idle} of {len(self.lease.gpus)}"
            found.append((f"idle{of}", "warn"))
        return tuple(run for k, words in enumerate(found) for run in (((" ", ""),) if k else ()) + (words,))


def held(scene: Scene) -> list[HeldLease]:
    """Return every lease of a scene with the readings of its GPUs."""
    return [_held(lease, scene) for lease in scene.leases.leases]


def _held(lease: Lease, scene: Scene) -> HeldLease:
    places = [scene.devices[gpu.uuid] for gpu in lease.gpus if gpu.index is not None and gpu.uuid in scene.devices]
    gpus = [place.gpu for place in places]
    return HeldLease(
        lease,
        scene.is_mine(lease),
        seconds_of(lease.since),
        seconds_of(lease.until),
        gpus,
        [(gpu, process) for gpu in gpus for process in gpu.processes or () if process.rogue],
    )


def holder_words(lease: Lease) -> str:
    """Return the process or job that a lease ends with."""
    if lease.holder is None:
        return "detached" if lease.job is None else f"job {lease.job}"
    return f"pid {lease.holder.pid}{' ended' if lease.holder.alive is False else ''}"


def _left(one: HeldLease) -> float:
    return max(0.0, one.until - time.time())


_FLAGS = ("rogue", "idle", "disputed", "overdue")
LEASES: Language[[HeldLease]] = Language(
    {
        "user": Key("a person, user:alice; user:me is you", 1,
                    text(lambda one: (one.lease.owner,), begins=True, mine=lambda one: one.mine), words=(ME,),
                    offers=lambda one: (one.lease.owner,)),
        "lease": Key("a lease's id, lease:k3f9", 1, text(lambda one: (one.lease.id,), begins=True),
                     offers=lambda one: (one.lease.id,)),
        "node": Key("a node or nodeset, node:gpu[01-04]", 2, nodes(lambda one: one.lease.nodes or one.node_names),
                    offers=lambda one: one.lease.nodes or one.node_names),
        "flag": Key(f"one of {', '.join(_FLAGS)}", 2, one_of(_FLAGS, lambda one: one.flags), words=_FLAGS),
        "left": Key("how long it still lasts, left<1h", 1, number(_left, parse_duration, "left<1h"), sign="<"),
        "gpus": Key("how many GPUs it holds, gpus>4", 1,
                    number(lambda one: len(one.lease.gpus), parse_number, "gpus>4"), sign=">"),
        "job": Key("a job's id, job:123", 1, text(lambda one: (one.lease.job,), begins=True),
                   offers=lambda one: (one.lease.job,)),
        "host": Key("where it was made, host:login1", 2, text(lambda one: (one.lease.host,)),
                    offers=lambda one: (one.lease.host,)),
        "purpose": Key("a part of it, purpose:nightly", 2, text(lambda one: (one.lease.purpose,))),
    },
    lambda one: (one.lease.id, one.lease.owner, places_words(one.lease.gpus), holder_words(one.lease), one.lease.host,
                 one.lease.purpose, *one.flags),
    {"owner": "user", "who": "user", "id": "lease", "nodes": "node", "flags": "flag", "from": "host"},
)  # fmt: skip
