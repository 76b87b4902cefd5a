"""The newest schedule of Slurm, and all users' leases in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuboard.errors import NoNodeReached
from gpuboard.leases.slurm.lease import ownership
from gpuboard.leases.terms import LONGEST_S
from gpuboard.model.lease import Lease, LeaseGpu
from gpuboard.model.schedule import Schedule, SchedulerJob
from gpuboard.model.snapshot import GpuView, MigView, Snapshot
from gpuboard.model.text import clean
from gpuboard.model.units import iso
from gpuboard.scheduler.base import Scheduler
from gpuboard.scheduler.slurm.sbatch_args import lease_of as lease_named

_GONE = frozenset({"completing"})
_PLACEHOLDER = "slurm-"  # prefix of the UUID of a GPU that has no reading


def schedule_of(scheduler: Scheduler) -> Schedule:
    """Return the newest schedule, querying Slurm if it is due. Raises NoNodeReached if there is none."""
    seen = scheduler.look(retry=True)
    if seen.schedule is None:
        raise NoNodeReached(
            f"Slurm does not answer: {clean(seen.error or 'no reason given', 400)}; "
            'to work without Slurm set scheduler = "none" in the config, or GPUBOARD_SCHEDULER=none'
        )
    return seen.schedule


def leases(schedule: Schedule, snapshot: Snapshot, now: float, known_as: Callable[[str], str | None]) -> list[Lease]:
    """Return the leases among a schedule's jobs, by job number.

    ``known_as``: a node's name → its name in Slurm, None if it is not in Slurm. A lease's GPUs and MIG devices are
    those that the snapshot shows as allocated to the job; if their number differs from Slurm's, they have no index.
    """
    leased = [(job.number, lease, job) for job in schedule.jobs if (lease := lease_named(job.name)) is not None]
    if not leased:  # the board calls this every second, and 8,000 GPUs take 10 ms
        return []
    where = {grant.node for _, _, job in leased for grant in job.grants}
    shown: dict[tuple[str, str], list[LeaseGpu]] = {}  # by Slurm's node and the job's id
    for node in snapshot.nodes:
        name = known_as(node.name) or ""
        for gpu in node.gpus if name in where else ():
            units: list[tuple[int | None, GpuView | MigView]] = [(None, gpu), *enumerate(gpu.mig)]
            for number, unit in units:
                for view in unit.jobs:
                    held = LeaseGpu(node.name, gpu.index, _uuid(unit.uuid), mig=number)
                    shown.setdefault((name, view.id), []).append(held)
    return [
        _lease(lease, job, shown, now)
        for _, lease, job in sorted(leased, key=lambda one: one[0])
        if job.state not in _GONE
    ]


def _lease(lease: str, job: SchedulerJob, shown: Mapping[tuple[str, str], list[LeaseGpu]], now: float) -> Lease:
    gpus: list[LeaseGpu] = []
    for grant in job.grants:
        seen = shown.get((grant.node, job.id), [])
        count = sum(kind.count for kind in grant.gpus)
        if len(seen) == count:
            gpus += seen
        else:
            gpus += [LeaseGpu(clean(grant.node, 253), None, "")] * min(count, 1024)
    until = job.until if job.until is not None else now + LONGEST_S
    return Lease(
        id=lease,
        owner=clean(job.user, 64),
        uid=job.uid,
        host="",
        gpus=gpus,
        since=iso(job.started if job.started is not None else now),
        until=iso(until),
        holder=None,
        purpose=clean(job.comment, 200),
        job=clean(job.id, 64),
        flags=[] if job.state == "running" else [clean(job.state, 40)],
        remaining_s=max(0.0, until - now),
        nodes=sorted({clean(grant.node, 253) for grant in job.grants}),
        **ownership(job.uid),
    )


def _uuid(uuid: str) -> str:
    return "" if uuid.startswith(_PLACEHOLDER) else uuid
