"""Leases with the readings of their GPUs: what is wrong or wasteful about each (pure)."""

from __future__ import annotations

from typing import NamedTuple

from gpuboard.board.scene import Scene
from gpuboard.model.lease import Lease
from gpuboard.model.snapshot import GpuView, ProcessView
from gpuboard.model.units import seconds_of


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
    return [_held(lease, scene) for lease in scene.leases.leases]


def _held(lease: Lease, scene: Scene) -> HeldLease:
    places = [scene.devices[gpu.uuid] for gpu in lease.gpus if gpu.index is not None and gpu.uuid in scene.devices]
    gpus = [place.gpu for place in places]
    return HeldLease(
        lease,
        lease.mine,
        seconds_of(lease.since),
        seconds_of(lease.until),
        gpus,
        [(gpu, process) for gpu in gpus for process in gpu.processes or () if process.rogue],
    )
