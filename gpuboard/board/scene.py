"""The cluster at one moment with its leases, as the board shows it. Values; no textual."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import ClassVar

import msgspec

from gpuboard.board.sums import sums_of
from gpuboard.cluster.snapshot.processes import ended_leases
from gpuboard.model.lease import Lease, LeaseList
from gpuboard.model.snapshot import GpuView, NodeView, Snapshot, judged, tally


class Place(msgspec.Struct, frozen=True, gc=False):
    """A GPU and its node. Not a tuple: 8,000 tuples per second cost the cycle collector 40 ms."""

    node: NodeView
    gpu: GpuView
    hidden: frozenset[str] = frozenset()  # UUIDs of MIG devices that a filter leaves out, or that another row has
    leads: bool = True  # whether no row above has others of its MIG devices

    @property
    def part(self) -> GpuView:
        """The GPU without the hidden devices."""
        return without(self.gpu, self.hidden)


def without(gpu: GpuView, hidden: frozenset[str]) -> GpuView:
    """Return a GPU without the hidden MIG devices, by UUID, and without the processes that are on these alone."""
    if not gpu.mig or not hidden:
        return gpu
    kept = [device for device in gpu.mig if device.uuid not in hidden]
    elsewhere = {(one.pid, one.started) for device in gpu.mig for one in device.processes or ()}
    elsewhere -= {(one.pid, one.started) for device in kept for one in device.processes or ()}
    found = gpu.processes and [one for one in gpu.processes if (one.pid, one.started) not in elsewhere]
    return msgspec.structs.replace(gpu, mig=kept, processes=found)


class Scene:
    """The cluster at one moment; immutable, replaced at every change."""

    _last: ClassVar[dict[str, int]] = {}  # where ``place`` found a GPU among the nodes of the scene before

    def __init__(
        self,
        snapshot: Snapshot,
        leases: LeaseList,
        *,
        uids: dict[str, int],
        banners: tuple[str, ...] = (),
        label: str = "",
    ) -> None:
        """``uids``: our uid on each node with a reading; ``banners``: what is wrong with the cluster as a whole.

        ``label``: what this is, if it is not the cluster as it is now.
        """
        self.snapshot = snapshot
        self.leases = leases
        self.uids = uids
        self.banners = banners
        self._label = label
        self.sums = sums_of(snapshot.nodes)
        self._found: dict[str, Place | None] = {}  # by ``place``

    @cached_property
    def places(self) -> dict[str, Place]:
        """Every GPU by its UUID. MIG devices are found under their parent."""
        return {gpu.uuid: Place(node, gpu) for node in self.snapshot.nodes for gpu in node.gpus}

    def place(self, uuid: str) -> Place | None:
        """Return the place of a GPU or None. A linear search costs less than building ``places`` for one GPU."""
        if "places" in self.__dict__:
            return self.places.get(uuid)
        if uuid not in self._found:
            nodes, last = self.snapshot.nodes, self._last.get(uuid)
            near = [] if last is None or last >= len(nodes) else [last]  # nodes rarely move
            found = (
                (number, at)
                for number in chain(near, reversed(range(len(nodes))))
                for at, gpu in enumerate(judged(nodes[number]))
                if gpu.uuid == uuid
            )
            number, at = next(found, (None, 0))
            if number is None:
                self._found[uuid] = None
            else:
                self._last[uuid] = number
                self._found[uuid] = Place(nodes[number], nodes[number].gpus[at])
        return self._found[uuid]

    @cached_property
    def devices(self) -> dict[str, Place]:
        """Every GPU and MIG device by its UUID; a MIG device with its parent GPU."""
        parts = {mig.uuid: place for place in self.places.values() for mig in place.gpu.mig}
        return {**self.places, **parts}

    @cached_property
    def nodes(self) -> dict[str, NodeView]:
        return {node.name: node for node in self.snapshot.nodes}

    @cached_property
    def by_lease(self) -> dict[str, Lease]:
        """Every lease by its id; where two users have a lease with one id, the caller's."""
        return {lease.id: lease for lease in sorted(self.leases.leases, key=lambda lease: lease.mine)}

    @cached_property
    def ended_leases(self) -> frozenset[str]:
        """The leases that have ended while processes of their owners still run."""
        return ended_leases(self.snapshot.nodes)

    @cached_property
    def by_gpu(self) -> dict[str, list[Lease]]:
        """The leases on each reserved GPU and MIG device, by UUID. Lease ids are not unique across users.

        A claim on a GPU that its node does not have (no index) is left out, even where another node has that GPU.
        """
        found: dict[str, list[Lease]] = {}
        for lease in self.leases.leases:
            for gpu in lease.gpus:
                if gpu.index is not None:
                    found.setdefault(gpu.uuid, []).append(lease)
        return found

    def leases_on(self, uuid: str) -> Sequence[Lease]:
        """Return the leases that hold a GPU or MIG device, or a share of it."""
        return self.by_gpu.get(uuid, ())

    @cached_property
    def label(self) -> str:
        """The label of every screen where this is not a real cluster as it is now: SIMULATED, or a replay's time."""
        simulated = any(node.source == "simulated" for node in self.snapshot.nodes)
        return "  ".join(filter(None, (self._label, "SIMULATED" if simulated else "")))

    @cached_property
    def free_on(self) -> dict[str, int]:
        """How many GPUs and MIG devices are free, by the name of their node; without nodes whose readings are old."""
        counts = ((node.name, tally(judged(node))) for node in self.snapshot.nodes if node.state == "up")
        return {name: found.gpus["free"] + found.devices["free"] for name, found in counts}

    @property
    def live(self) -> bool:
        """Whether it is of now; the label of a replay has its time."""
        return not self._label

    def own_nodes(self) -> set[str]:
        """Return the nodes on which the caller has a lease, or a process on a GPU."""
        found = {gpu.node for lease in self.leases.leases if lease.mine for gpu in lease.gpus}
        for node in self.snapshot.nodes:
            uid = self.uids.get(node.name)
            if uid is not None and any(process.uid == uid for gpu in judged(node) for process in gpu.processes or ()):
                found.add(node.name)
        return found
