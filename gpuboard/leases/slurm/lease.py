"""Find, describe, renew and end a lease that is a Slurm job."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuboard import paths
from gpuboard.agent.proc import user_name
from gpuboard.keeper import client as keeper
from gpuboard.keeper.client import KeeperError
from gpuboard.keeper.holder import alive
from gpuboard.leases.ledger import UnknownLease, matching
from gpuboard.leases.terms import LONGEST_S, remove_rank_map, stored_rank_map
from gpuboard.model.lease import Lease, LeaseGpu, LeaseHolder
from gpuboard.model.units import iso
from gpuboard.nodesets import listed
from gpuboard.scheduler.slurm import sbatch_args
from gpuboard.scheduler.slurm.client import Jobs, JobState
from gpuboard.scheduler.slurm.service import outdate

KIND = "slurm"  # Lease.ledger


def ownership(uid: int) -> dict[str, Any]:
    """Return the fields of a lease that depend on its owner: users have the same uid on all of Slurm's hosts."""
    own = uid == os.geteuid()
    return {"ledger": KIND, "mine": own, "may_end": own or os.geteuid() == 0}


def lease_of(
    lease: str,
    job: JobState,
    gpus: Sequence[LeaseGpu],
    *,
    purpose: str,
    holder: LeaseHolder | None,
    host: str | None = None,
) -> Lease:
    """Return a job as a lease, as of now. ``host``: where it was reserved; None: this host."""
    now = time.time()
    left_s = job.left_s if job.left_s is not None else LONGEST_S
    return Lease(
        id=lease,
        owner=user_name(job.uid),
        uid=job.uid,
        host=os.uname().nodename if host is None else host,
        gpus=list(gpus),
        since=iso(now - job.used_s),
        until=iso(now + left_s),
        holder=holder,
        purpose=purpose,
        job=str(job.number),
        remaining_s=left_s,
        nodes=sorted({gpu.node for gpu in gpus}),
        **ownership(job.uid),
    )


def find(text: str, mine: Sequence[JobState]) -> tuple[str, JobState]:
    """Return the lease in ``mine`` with this id or unique prefix of an id, and its job. Raises NoSuchLease."""
    known = {job.lease: job for job in mine if job.lease is not None}
    if (lease := matching(text, known)) is None:
        raise UnknownLease(text, known)
    return lease, known[lease]


def renew(jobs: Jobs, job: JobState, for_s: float, env: Mapping[str, str]) -> float:
    """Set the time limit of a lease's job, which counts from its start, to ``for_s`` from now or up to a minute later.

    Return how many seconds from now it ends. Raises GpuboardError.
    """
    limit = sbatch_args.minutes(job.used_s + for_s)
    jobs.set_limit(job.number, limit)
    for_s = limit * 60 - job.used_s
    if job.lease is not None:
        keeper.renew(job.lease, for_s, env)
    return for_s


def end(lease: str, cancel: Callable[[], None], env: Mapping[str, str]) -> None:
    """Cancel the job of a lease of this user and forget the lease; if ``cancel`` raises, the lease continues."""
    keeper.announce_end(lease, env)
    cancel()
    forget(lease, env)


def forget(lease: str, env: Mapping[str, str]) -> None:
    """Remove the keeper's record and the files of a lease whose job was cancelled."""
    outdate(env)
    with contextlib.suppress(KeeperError, OSError):
        keeper.forget(lease, env)
    remove_rank_map(env, lease)
    for name in (f"{lease}.alive", f"{lease}.alive.seen"):
        with contextlib.suppress(OSError):
            os.unlink(f"{paths.state_dir(env)}/leases/{name}")


def known_holder(lease: str, env: Mapping[str, str]) -> LeaseHolder | None:
    """Return the holder of a lease; None if it is detached or was reserved on another host."""
    holder = keeper.holders(env).get(lease)
    return LeaseHolder(holder.pid, alive(holder)) if holder is not None else None


def gpus_of(lease: str, job: JobState, env: Mapping[str, str]) -> list[LeaseGpu]:
    """Return the GPUs of a job from the lease's rank map; without one on this host, one entry per node, no index."""
    found = stored_rank_map(env, lease)
    if found is not None and found.job == str(job.number):
        return [LeaseGpu(rank.node, rank.index, rank.uuid) for rank in found.ranks]
    try:
        return [LeaseGpu(name, None, "") for name in sorted(listed(job.nodes))] if job.nodes else []
    except ValueError:
        return []
