"""Leases that are jobs of Slurm, of everybody: what they hold, which of them somebody means, their end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from gpuboard.errors import GpuboardError, NoSuchLease
from gpuboard.leases.claims.client import LONGEST_S
from gpuboard.leases.slurm import lease as slurm_lease
from gpuboard.leases.slurm.lease import find, known_holder, lease_of, renew, user_name
from gpuboard.leases.terms import known_rank_map
from gpuboard.model.lease import Lease, LeaseGpu
from gpuboard.model.schedule import Schedule, SchedulerJob
from gpuboard.model.snapshot import GpuView, Snapshot
from gpuboard.model.text import clean
from gpuboard.model.units import iso
from gpuboard.nodesets import listed
from gpuboard.scheduler.slurm.client import Jobs, JobState
from gpuboard.scheduler.slurm.sbatch_args import job_name
from gpuboard.scheduler.slurm.sbatch_args import lease_of as lease_named

_GONE = frozenset({"completing"})
_PLACEHOLDER = "slurm-"  # how the UUID of a GPU begins that nothing but Slurm shows


class JobLease(msgspec.Struct, frozen=True):
    """A lease somebody means, and the job it is."""

    lease: str
    job: JobState
    gpus: list[LeaseGpu]  # as far as they are known here


def leases(schedule: Schedule, snapshot: Snapshot, now: float, known_as: Callable[[str], str | None]) -> list[Lease]:
    """Return the leases that jobs of a schedule are, by their numbers.

    ``known_as``: a node's name → Slurm's, None where it knows none. GPUs are those that the snapshot shows under the
    job; where it does not show all of them, they have no index.
    """
    leased = [(job.number, lease, job) for job in schedule.jobs if (lease := lease_named(job.name)) is not None]
    if not leased:  # the board asks each second, and 8,000 GPUs take 10 ms to be looked at
        return []
    where = {grant.node for _, _, job in leased for grant in job.grants}
    shown: dict[tuple[str, str], list[tuple[str, GpuView]]] = {}  # by Slurm's node and the job's id
    for node in snapshot.nodes:
        name = known_as(node.name) or ""
        for gpu in node.gpus if name in where else ():
            for view in gpu.jobs:
                shown.setdefault((name, view.id), []).append((node.name, gpu))
    return [
        _lease(lease, job, shown, now)
        for _, lease, job in sorted(leased, key=lambda one: one[0])
        if job.state not in _GONE
    ]


def _lease(
    lease: str, job: SchedulerJob, shown: Mapping[tuple[str, str], list[tuple[str, GpuView]]], now: float
) -> Lease:
    gpus: list[LeaseGpu] = []
    for grant in job.grants:
        seen = shown.get((grant.node, job.id), [])
        count = sum(kind.count for kind in grant.gpus)
        if len(seen) == count:
            gpus += [LeaseGpu(node, gpu.index, _uuid(gpu.uuid)) for node, gpu in seen]
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
    )


def _uuid(uuid: str) -> str:
    return "" if uuid.startswith(_PLACEHOLDER) else uuid


def up_to_date(found: Sequence[Lease], jobs: Jobs, env: Mapping[str, str]) -> list[Lease]:
    """Return ``found``, which may be half a minute old, with our own leases as they are now.

    Raises NoNodeReached.
    """
    mine = {job.lease: job for job in jobs.mine() if job.lease is not None and job.state != "PENDING"}
    others = [lease for lease in found if lease.uid != os.geteuid()]
    known = {lease.id: lease for lease in found if lease.uid == os.geteuid()}
    return others + [_own(lease, job, known.get(lease), env) for lease, job in mine.items()]


def _own(lease: str, job: JobState, known: Lease | None, env: Mapping[str, str]) -> Lease:
    """Return a lease of ours: squeue's word for its time, our own files' for its GPUs and holder."""
    gpus = _gpus(lease, job, env) or (known.gpus if known else [LeaseGpu(name, None, "") for name in _nodes(job)])
    holder = known_holder(lease, env)
    host = None if holder is not None else ""
    return lease_of(lease, job, gpus, purpose=job.comment, holder=holder, host=host)


def _gpus(lease: str, job: JobState, env: Mapping[str, str]) -> list[LeaseGpu]:
    """Return the GPUs of a lease of ours by its rank map; by nothing but its nodes where that is not here."""
    found = known_rank_map(env, lease)
    if found is None or found.job != str(job.number):
        return []
    return [LeaseGpu(rank.node, rank.index, rank.uuid) for rank in found.ranks]


def _nodes(job: JobState) -> list[str]:
    try:
        return sorted(listed(job.nodes)) if job.nodes else []
    except ValueError:
        return []


def chosen(ids: Sequence[str], jobs: Jobs, env: Mapping[str, str]) -> tuple[list[JobLease], list[str]]:
    """Return the leases that ``ids`` name, all of ours without ids, and those of ``ids`` that no job of ours is.

    Root may mean anybody's. Raises NoSuchLease for somebody else's, and for a start that several have; NoNodeReached.
    """
    mine = jobs.mine()
    if not ids:
        return [_chosen(job.lease or "", job, env) for job in mine], []
    found: dict[str, JobLease] = {}
    rest = []
    for text in ids:
        try:
            lease, job = find(text, mine)
        except NoSuchLease:
            if any((job.lease or "").startswith(text) for job in mine):
                raise
            others = jobs.of_lease(text, mine=False) if lease_named(job_name(text)) else []
            if not others:
                rest.append(text)
                continue
            if os.geteuid():
                owners = ", ".join(sorted({user_name(job.uid) for job in others}))
                words = f"lease {text} belongs to {owners}; only its owner, or root, can end or change it"
                raise NoSuchLease(words) from None
            found |= {f"{text} {job.number}": _chosen(text, job, env) for job in others}
        else:
            found[lease] = _chosen(lease, job, env)
    return list(found.values()), rest


def _chosen(lease: str, job: JobState, env: Mapping[str, str]) -> JobLease:
    return JobLease(lease, job, _gpus(lease, job, env) or [LeaseGpu(name, None, "") for name in _nodes(job)])


def end(lease: JobLease, jobs: Jobs, env: Mapping[str, str]) -> str:
    """End a lease; return why not, "" when it has ended."""
    cancel = partial(jobs.cancel_number, lease.job.number)
    try:
        if lease.job.uid == os.geteuid():
            slurm_lease.end(lease.lease, cancel, env)
        else:
            cancel()
    except GpuboardError as error:
        return str(error)
    return ""


def prolong(lease: JobLease, for_s: float, jobs: Jobs, env: Mapping[str, str]) -> str:
    """Let a lease end ``for_s`` from now; return why not, in Slurm's words, "" when it does."""
    try:
        renew(jobs, lease.job, for_s, env)
    except GpuboardError as error:
        return str(error)
    return ""
