"""What the board shows: the cluster at one moment with its leases. Values alone; no textual."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property

import msgspec

from gpuboard.model.lease import Lease, LeaseList
from gpuboard.model.snapshot import GpuView, NodeView, Snapshot


class Place(msgspec.Struct, frozen=True, gc=False):
    """A GPU and the node it is in. Not a tuple: 8,000 of those a second keep the cycle collector busy for 40 ms."""

    node: NodeView
    gpu: GpuView


class Scene:
    """One picture of the cluster. Never changed after it was made; made anew at every change."""

    def __init__(
        self,
        snapshot: Snapshot,
        leases: LeaseList,
        *,
        uids: dict[str, int],
        banners: tuple[str, ...] = (),
    ) -> None:
        """``uids``: who we are on each node that has answered; ``banners``: what is wrong as a whole, in words."""
        self.snapshot = snapshot
        self.leases = leases
        self.uids = uids
        self.banners = banners

    @cached_property
    def places(self) -> dict[str, Place]:
        """Every GPU by its UUID. MIG devices are found under their parent."""
        return {gpu.uuid: Place(node, gpu) for node in self.snapshot.nodes for gpu in node.gpus}

    def place(self, uuid: str) -> Place | None:
        """Return where one GPU is; None: nowhere. To look through all of them costs less than to make ``places``."""
        if "places" in self.__dict__:
            return self.places.get(uuid)
        for node in reversed(self.snapshot.nodes):
            for gpu in reversed(node.gpus):
                if gpu.uuid == uuid:
                    return Place(node, gpu)
        return None

    @cached_property
    def devices(self) -> dict[str, Place]:
        """Every GPU and MIG device by its UUID; a MIG device with the GPU that it is a part of."""
        parts = {mig.uuid: place for place in self.places.values() for mig in place.gpu.mig}
        return {**self.places, **parts}

    @cached_property
    def nodes(self) -> dict[str, NodeView]:
        """Every node by its name."""
        return {node.name: node for node in self.snapshot.nodes}

    @cached_property
    def by_lease(self) -> dict[str, Lease]:
        """Every lease by its id; where somebody else took the id of one of ours for his, ours."""
        return {lease.id: lease for lease in sorted(self.leases.leases, key=self.is_mine)}

    @cached_property
    def by_gpu(self) -> dict[str, list[Lease]]:
        """The leases on every GPU and MIG device that has some, by its UUID: an id alone can be anybody's.

        A claim on a GPU that its node does not have (no index) is on nothing, whatever other node has that GPU.
        """
        found: dict[str, list[Lease]] = {}
        for lease in self.leases.leases:
            for gpu in lease.gpus:
                if gpu.index is not None:
                    found.setdefault(gpu.uuid, []).append(lease)
        return found

    def leases_on(self, uuid: str) -> Sequence[Lease]:
        """Return the leases that hold a GPU or MIG device, or parts of it."""
        return self.by_gpu.get(uuid, ())

    @cached_property
    def simulated(self) -> bool:
        """Whether any of it is invented."""
        return any(node.source == "simulated" for node in self.snapshot.nodes)

    def is_mine(self, lease: Lease) -> bool:
        """Return whether we own a lease, by the uid that we have on the first of its nodes: there its own was read.

        On another node the same uid may be somebody else. Slurm's jobs are those of the uid that asks for them here.
        """
        if lease.job is not None:
            return lease.uid == os.geteuid()
        return self.uids.get(lease.gpus[0].node) == lease.uid

    def may_end(self, lease: Lease) -> bool:
        """Return whether we may end a lease: our own, and as root anybody's."""
        if self.is_mine(lease):
            return True
        if lease.job is not None:
            return os.geteuid() == 0
        return all(self.uids.get(gpu.node) == 0 for gpu in lease.gpus)
