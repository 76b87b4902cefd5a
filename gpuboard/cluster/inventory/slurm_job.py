"""The nodes of the Slurm job that this process is in: the inventory of commands that reserve or use GPUs there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpuboard.cluster.inventory.nodes import Node, expand_names
from gpuboard.errors import UsageError

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.scheduler.slurm.current_job import Inside


def current_job(settings: Settings, env: Mapping[str, str], warn: Callable[[str], None]) -> Inside | None:
    """Return the job that this process is in; None outside, and where the settings know no Slurm.

    ``warn`` gets a message about variables that an ended job has left behind. Raises GpuboardError if only Slurm can
    decide and does not answer.
    """
    if not env.get("SLURM_JOB_ID") or settings.scheduler == "none" or env.get("GPUBOARD_INVENTORY"):
        return None
    from gpuboard.scheduler.slurm.current_job import Outside, look  # rarely needed

    found = look(env)
    if isinstance(found, Outside):
        if found.stale:
            warn(found.stale)
        return None
    return found


def job_nodes(job: Inside, selected: Sequence[str] = ()) -> list[Node]:
    """Return the job's nodes, or the subset ``selected`` (`--nodes`). Raises UsageError for any other node.

    This node needs no step of the job; the others are reached through one.
    """
    wanted = expand_names(selected)
    nodes = {
        node.name: Node(node.name, None if node.name == job.here else node.name, job=node.job) for node in job.nodes
    }
    if unknown := [name for name in wanted if name not in nodes]:
        has = ", ".join(nodes)
        raise UsageError(
            f"{unknown[0]!r} is not a node of {job}, which has {has}; unset SLURM_JOB_ID to work outside the job"
        )
    return [nodes[name] for name in wanted or nodes]
