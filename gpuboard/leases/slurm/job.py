"""The GPUs of a running job as CUDA sees them on each of its nodes, read in a step of the job there."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node, is_here
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError
from gpuboard.model.lease import LeaseGpu
from gpuboard.model.snapshot import NodeView, Snapshot, mig_number
from gpuboard.model.units import parse_duration
from gpuboard.nodesets import listed
from gpuboard.transport.base import TransportError
from gpuboard.transport.slurm.srun import show_job
from gpuboard.transport.slurm.srun_errors import gpus_by_nodes

_FIRST_READING_S = 15.0  # in addition to the start of the steps: for the agent, and for NVML without persistence mode


class GrantedJob(msgspec.Struct, frozen=True):
    """The nodes of a job with their routes, and a snapshot of its GPUs only."""

    nodes: dict[str, Node]
    snapshot: Snapshot
    here: str | None  # the name of this machine if it is one of the nodes
    notes: tuple[str, ...] = ()  # warnings about these GPUs

    def gpus(self) -> list[LeaseGpu]:
        """Return all GPUs of the job; MIG devices in place of a GPU in MIG mode."""
        return [
            LeaseGpu(node.name, gpu.index, uuid, mig=mig_number(gpu, uuid))
            for node in self.snapshot.nodes
            for gpu in node.gpus
            for uuid in ([mig.uuid for mig in gpu.mig] if "mig" in gpu.flags else [gpu.uuid])
        ]


def gpu_counts(number: int, settings: Settings) -> dict[str, int]:
    """Return the number of GPUs that a job has on each of its nodes with GPUs. Raises GpuboardError."""
    try:
        text = show_job(str(number), parse_duration(settings.connect_timeout))
        counts = {name: count for nodes, count in gpus_by_nodes(text, str(number), "") for name in listed(nodes)}
    except (TransportError, ValueError) as error:
        raise GpuboardError(f"could not determine the nodes and GPUs of Slurm job {number}: {error}") from None
    return {name: count for name, count in counts.items() if count}


def granted_job(number: int, counts: Mapping[str, int], settings: Settings) -> GrantedJob:
    """Read the GPUs of a running job of this user. Raises GpuboardError where a node does not show ``counts`` GPUs."""
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
    notes = tuple(note for node in snapshot.nodes for note in _warnings(number, node))
    here = next((name for name in nodes if is_here(name)), None)
    return GrantedJob(nodes, snapshot, here, notes)


def _check(number: int, node: NodeView, count: int) -> None:
    if node.age_s is None or node.error is not None:
        raise GpuboardError(
            f"could not read the GPUs of Slurm job {number} on {node.name}: {node.error or 'no answer'}"
        )
    shown = sum(len(gpu.mig) if "mig" in gpu.flags else 1 for gpu in node.gpus)
    if shown != count:
        raise GpuboardError(f"Slurm job {number} has {count} GPUs on {node.name}, but the node shows {shown}")
    if broken := [gpu for gpu in node.gpus if gpu.state == "broken"]:
        why = "; ".join(f"{node.name}:{gpu.index}: {gpu.reason}" for gpu in broken)
        raise GpuboardError(f"GPUs of Slurm job {number} are broken: {why}; try --exclude {node.name}")


def _warnings(number: int, node: NodeView) -> list[str]:
    """Return a message for each GPU of the job that is in use by others or sick."""
    used = [
        f"{node.name}:{gpu.index} of Slurm job {number} is {gpu.state}: {gpu.reason}"
        for gpu in node.gpus
        if gpu.state in {"busy", "occupied", "reserved"}
    ]
    return used + [f"{node.name}:{gpu.index} is sick: {'; '.join(gpu.sick)}" for gpu in node.gpus if gpu.sick]
