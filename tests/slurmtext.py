"""Recorded outputs of Slurm's commands, and values derived from them."""

from __future__ import annotations

from pathlib import Path

from gpuboard.model.schedule import Gres, SchedulerJob, SchedulerNode
from gpuboard.scheduler.slurm.jobs import jobs

FOLDER = Path(__file__).parent / "data" / "slurm"


def recorded(name: str) -> str:
    """Return a recording, ``case/command``."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def recordings(pattern: str) -> list[str]:
    """Return the names of the recordings of a command."""
    return sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob(f"*/{pattern}.txt"))


def holding(text: str) -> list[SchedulerJob]:
    """Return the jobs of `scontrol show job -d` that hold something."""
    return [piece.job for piece in jobs(text) if piece.job is not None]


def held(job: SchedulerJob) -> dict[str, set[int]]:
    """Return the numbers of the GPUs that a job holds, by node."""
    return {grant.node: _indexes(grant.gpus) for grant in job.grants}


def used(node: SchedulerNode) -> set[int]:
    """Return the numbers of a node's GPUs in use."""
    return _indexes(node.used)


def _indexes(gpus: tuple[Gres, ...]) -> set[int]:
    return {index for gres in gpus for index in gres.indexes or ()}
