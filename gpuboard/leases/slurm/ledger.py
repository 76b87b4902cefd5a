"""The ledger in which a lease is a Slurm job. See :mod:`gpuboard.leases.ledger`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import msgspec

from gpuboard.agent.proc import user_name
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError, NoNodeReached
from gpuboard.leases.ledger import (
    NO_OPTIONS,
    Found,
    JobOptions,
    Progress,
    Released,
    Renewed,
    Scope,
    UnknownLease,
    not_yours,
)
from gpuboard.leases.slurm.lease import KIND, end, find, gpus_of, known_holder, lease_of, renew
from gpuboard.leases.slurm.schedule import leases, schedule_of
from gpuboard.leases.terms import stored_rank_map
from gpuboard.model.lease import Lease, LeaseList
from gpuboard.model.request import Choice, Refusal, Request
from gpuboard.model.snapshot import Snapshot
from gpuboard.model.text import clean
from gpuboard.model.units import iso
from gpuboard.scheduler.base import Scheduler
from gpuboard.scheduler.slurm.client import Jobs, JobState
from gpuboard.scheduler.slurm.sbatch_args import ask, job_name
from gpuboard.scheduler.slurm.sbatch_args import lease_of as lease_named

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.leases.output.formats import Allocation
    from gpuboard.leases.slurm.allocator import SlurmAllocator

SLURM = "Slurm"  # used in place of a node's name in messages and failures


class SlurmLedger:
    """Leases as Slurm jobs. ``scheduler`` makes a scheduler, which is closed with the ledger.

    ``running``: a running fleet (the board's), whose schedule, if it has one, replaces a query to Slurm.
    """

    kind = KIND
    name = SLURM
    names_gpus = False

    def __init__(
        self,
        scope: Callable[[], Scope],
        settings: Settings,
        env: Mapping[str, str],
        scheduler: Callable[[], Scheduler],
        *,
        running: Fleet | None,
        warn: Progress,
    ) -> None:
        self._scope = scope
        self._settings = settings
        self._env = env
        self._make_scheduler = scheduler
        self._running = running
        self._warn = warn
        self._opened: Scheduler | None = None

    def close(self) -> None:
        """Close the scheduler."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def covers(self, nodes: Sequence[Node], *, ask: bool = True) -> Collection[str]:
        """Return the names of the nodes that are in Slurm. Raises NoNodeReached if Slurm does not answer."""
        if not nodes or any(node.simulate is not None or node.job is not None for node in nodes):
            return ()  # simulated nodes, and nodes of the current job, whose launches use claims
        if self._running is not None and self._running.schedule is not None:
            return [node.name for node in nodes if self._running.known_as(node.name) is not None]
        if not ask:
            return ()
        from gpuboard.cluster.inventory.ssh_aliases import scheduler_names

        return scheduler_names(nodes, schedule_of(self._scheduler), self._settings)

    def allocator(self, scope: Scope, *, options: JobOptions, progress: Progress) -> SlurmAllocator:
        """Return the allocator for Slurm jobs. Raises UsageError for options that may not be passed to sbatch."""
        from gpuboard.leases.slurm.allocator import SlurmAllocator

        return SlurmAllocator(
            scope,
            self._settings,
            self._env,
            scheduler=self._scheduler,
            options=ask(self._settings.slurm, **msgspec.structs.asdict(options)),
            progress=progress,
        )

    def plan(self, request: Request, snapshot: Snapshot) -> Choice | Refusal:
        """Return the job that would be requested, without GPUs, as Slurm chooses them. Raises UsageError."""
        from gpuboard.leases.slurm.fit import Limits, fit

        fleet = self._running
        assert fleet is not None and fleet.schedule is not None
        names = [fleet.known_as(node.name) for node in self._scope().nodes]
        answer = fit(request, fleet.schedule, Limits({name for name in names if name is not None}))
        return answer if isinstance(answer, Refusal) else Choice((), answer.why)

    def leases(self, fleet: Fleet, snapshot: Snapshot, *, fresh: bool = False) -> LeaseList:
        """Return the leases in the newest schedule, which may be 30 s old; ``fresh``: query the caller's own again."""
        now = time.time()
        found: list[Lease] = []
        if (schedule := fleet.schedule) is not None:
            found = leases(schedule, snapshot, now, fleet.known_as)
            if fresh and self._scope().job is None:
                try:
                    found = self._with_own(found)
                except NoNodeReached as error:
                    self._warn(str(error))
        seen = snapshot.scheduler
        outdated = [KIND] if seen is not None and not seen.current else []
        return LeaseList(schema=1, at=iso(now), leases=found, outdated=outdated)

    def find(self, ids: Sequence[str]) -> Found:
        """Return the caller's leases. Inside a job Slurm is queried only for ids that may be jobs."""
        if not self._may_be_jobs(ids):
            return Found([], {text: UnknownLease(text) for text in ids})
        mine = self._jobs.mine()
        if not ids:
            return Found([self._lease(job.lease or "", job) for job in mine])
        found: dict[int, Lease] = {}
        missing: dict[str, UnknownLease] = {}
        for text in ids:
            try:
                lease, job = find(text, mine)
            except UnknownLease as error:
                others = self._jobs.of_lease(text, mine=False) if lease_named(job_name(text)) else []
                if others and os.geteuid():
                    raise not_yours(text, {user_name(job.uid) for job in others}) from None
                if not others:
                    missing[text] = error
                found |= {job.number: self._lease(text, job) for job in others}
            else:
                found[job.number] = self._lease(lease, job)
        return Found(list(found.values()), missing)

    def release(self, lease: Lease) -> Released:
        """Cancel the job."""
        assert lease.job is not None
        try:
            if lease.uid == os.geteuid():
                end(lease.id, partial(self._jobs.cancel, lease.id), self._env)  # by name: no error if it has ended
            else:
                self._jobs.cancel_number(int(lease.job))
        except GpuboardError as error:
            return Released(lease.id, [], {SLURM: clean(str(error))})
        return Released(lease.id, lease.gpus, {})

    def renew(self, lease: Lease, for_s: float) -> Renewed:
        """Set the job's time limit; on most sites only administrators may extend it."""
        assert lease.job is not None
        try:
            job = self._jobs.job(int(lease.job))
            if job is None or job.ended:
                return Renewed([], {SLURM: f"job {lease.job} has ended"})
            for_s = renew(self._jobs, job, for_s, self._env)
        except GpuboardError as error:
            return Renewed([], {SLURM: clean(str(error))})
        return Renewed(sorted({gpu.node for gpu in lease.gpus}), {}, for_s)

    def existing(self, text: str, n: int | None = None) -> Allocation:
        """Return a lease of the caller. Raises NotFree while its job is pending."""
        if not self._may_be_jobs([text]):
            raise UnknownLease(text)
        with self.allocator(Scope(()), options=NO_OPTIONS, progress=lambda _: None) as allocator:
            return allocator.existing(text, n)

    @cached_property
    def _jobs(self) -> Jobs:
        return Jobs(self._env)

    @property
    def _scheduler(self) -> Scheduler:
        if self._opened is None:
            self._opened = self._make_scheduler()
        return self._opened

    def _may_be_jobs(self, ids: Sequence[str]) -> bool:
        """Return whether ids may name jobs; inside a job by their rank maps, as Slurm may be unreachable there."""
        if not self._env.get("SLURM_JOB_ID") or self._scope().job is None:
            return True
        known = [stored_rank_map(self._env, text) for text in ids]
        return any(rank_map is not None and rank_map.job is not None for rank_map in known)

    def _with_own(self, found: Sequence[Lease]) -> list[Lease]:
        """Return ``found`` with the caller's own leases replaced by the current data of squeue and the rank maps."""
        uid = os.geteuid()
        known = {lease.id: lease for lease in found if lease.uid == uid}
        own = [self._lease(job.lease, job) for job in self._jobs.mine() if job.lease and job.state != "PENDING"]
        others = [lease for lease in found if lease.uid != uid]
        return others + [
            msgspec.structs.replace(lease, gpus=known[lease.id].gpus)
            if lease.id in known and not any(gpu.uuid for gpu in lease.gpus)
            else lease
            for lease in own
        ]

    def _lease(self, lease: str, job: JobState) -> Lease:
        holder = known_holder(lease, self._env)
        host = None if holder is not None else ""
        gpus = gpus_of(lease, job, self._env)
        return lease_of(lease, job, gpus, purpose=job.comment, holder=holder, host=host)
