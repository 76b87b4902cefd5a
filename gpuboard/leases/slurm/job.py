"""The GPUs of a running job: seen on each of its nodes through a step of the job, as CUDA sees them there."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node, is_here
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError
from gpuboard.model.lease import LeaseGpu
from gpuboard.model.snapshot import NodeView, Snapshot
from gpuboard.model.units import parse_duration
from gpuboard.nodesets import listed
from gpuboard.transport.base import TransportError
from gpuboard.transport.slurm.srun import show_job
from gpuboard.transport.slurm.srun_errors import gpus_by_nodes

_FIRST_READING_S = 15.0  # beyond the steps' start: the agent's, and NVML's without persistence mode


class GrantedJob(msgspec.Struct, frozen=True):
    """What a job has: how its nodes are reached, and a snapshot of nothing but its GPUs."""

    nodes: dict[str, Node]
    snapshot: Snapshot
    here: str | None  # the node that this machine is; None: none of them
    notes: tuple[str, ...] = ()  # what the person should know of them

    def all(self) -> list[LeaseGpu]:
        """Return all of them; MIG devices stand for the GPU they are of."""
        return [
            LeaseGpu(node.name, gpu.index, uuid)
            for node in self.snapshot.nodes
            for gpu in node.gpus
            for uuid in ([mig.uuid for mig in gpu.mig] if "mig" in gpu.flags else [gpu.uuid])
        ]


def nodes_of(number: int, settings: Settings) -> dict[str, int]:
    """Return how many GPUs a job has on each of its nodes; nodes without any are left out. Raises GpuboardError."""
    try:
        text = show_job(str(number), parse_duration(settings.connect_timeout))
        counts = {name: count for nodes, count in gpus_by_nodes(text, str(number), "") for name in listed(nodes)}
    except (TransportError, ValueError) as error:
        raise GpuboardError(f"what Slurm job {number} has cannot be read: {error}") from None
    return {name: count for name, count in counts.items() if count}


def look(number: int, counts: Mapping[str, int], settings: Settings) -> GrantedJob:
    """Return the GPUs of a running job of ours. Raises GpuboardError when a node does not show what Slurm gave it."""
    nodes = {name: Node(name, name, job=str(number)) for name in counts}
    fleet = Fleet(list(nodes.values()), settings, interval_s=None)
    try:
        fleet.start()
        fleet.wait(2 * fleet.connect_s + _FIRST_READING_S)
        fleet.freshen()
        snapshot = fleet.snapshot()
    finally:
        fleet.close()
    for node in snapshot.nodes:
        _check(number, node, counts[node.name])
    notes = tuple(words for node in snapshot.nodes for words in _cautions(number, node))
    here = next((name for name in nodes if is_here(name)), None)
    return GrantedJob(nodes, snapshot, here, notes)


def _check(number: int, node: NodeView, count: int) -> None:
    if node.age_s is None or node.error is not None:
        raise GpuboardError(
            f"Slurm job {number} runs, but its GPUs on {node.name} cannot be seen: {node.error or 'no answer'}"
        )
    shown = sum(len(gpu.mig) if "mig" in gpu.flags else 1 for gpu in node.gpus)
    if shown != count:
        raise GpuboardError(f"Slurm gave job {number} {count} GPUs on {node.name}, and the node shows {shown} of them")
    if lost := [gpu for gpu in node.gpus if gpu.state == "broken"]:
        words = "; ".join(f"{node.name}:{gpu.index}: {gpu.reason}" for gpu in lost)
        raise GpuboardError(f"Slurm gave job {number} GPUs that are broken: {words}; try --exclude {node.name}")


def _cautions(number: int, node: NodeView) -> list[str]:
    """Return words about GPUs of the job that somebody else is on, and about sick ones."""
    used = [
        f"{node.name}:{gpu.index} is {gpu.state}: {gpu.reason}, though Slurm gave it to job {number}"
        for gpu in node.gpus
        if gpu.state in {"busy", "occupied", "reserved"}
    ]
    return used + [f"{node.name}:{gpu.index} is sick: {'; '.join(gpu.sick)}" for gpu in node.gpus if gpu.sick]
