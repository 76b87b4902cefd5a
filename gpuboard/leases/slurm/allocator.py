"""Submit a job, wait until it runs, read its GPUs on the nodes, hand it to the keeper. All or nothing."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from gpuboard import paths
from gpuboard.cluster.inventory.nodes import folded, is_here, local_node
from gpuboard.cluster.inventory.ssh_aliases import scheduler_names
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError, Interrupted, NeverPossible, NotFree, UsageError
from gpuboard.keeper import client as keeper
from gpuboard.keeper.client import Handover, KeeperError, KeptJob, KeptNode
from gpuboard.keeper.holder import identify
from gpuboard.leases.ledger import Progress, Scope
from gpuboard.leases.output.formats import Allocation
from gpuboard.leases.policy.candidates import check
from gpuboard.leases.policy.choose import rank_order
from gpuboard.leases.rank_map import rank_map, reachable_addresses
from gpuboard.leases.slurm.fit import Fit, Limits, fit
from gpuboard.leases.slurm.job import GrantedJob, gpu_counts, granted_job
from gpuboard.leases.slurm.lease import end, find, forget, known_holder, lease_of
from gpuboard.leases.slurm.schedule import schedule_of
from gpuboard.leases.slurm.wait import JobWait
from gpuboard.leases.terms import (
    LONGEST_S,
    Terms,
    as_allocated,
    duration,
    new_id,
    rank_map_file,
    stored_rank_map,
    uninterrupted,
    write_rank_map,
)
from gpuboard.model.lease import Lease, LeaseGpu, LeaseHolder
from gpuboard.model.request import Choice, Refusal, Request
from gpuboard.model.schedule import Schedule
from gpuboard.model.units import parse_duration
from gpuboard.scheduler.base import Scheduler
from gpuboard.scheduler.slurm import sbatch_args
from gpuboard.scheduler.slurm.client import ENDED_STATES, SECRETS, SUBMITTING, Jobs, JobState, Uncertain
from gpuboard.scheduler.slurm.job_script import PAUSE_S, script
from gpuboard.scheduler.slurm.service import outdate

_SETTLE_S = 5.0  # after an interrupt: for a running sbatch to return
_CANCEL_S = 8.0  # after an interrupt: for the keeper to cancel the job
_SEEN_S = 5.0  # for the job's script to acknowledge the heartbeat file
_PLACE = "Slurm"  # entry for the scheduler among a lease's nodes in the keeper's record


class SlurmAllocator:
    """Reserves GPUs as a Slurm job. The caller closes ``scheduler``. See :class:`~gpuboard.leases.ledger.Allocator`."""

    def __init__(
        self,
        scope: Scope,
        settings: Settings,
        env: Mapping[str, str],
        *,
        scheduler: Scheduler,
        options: sbatch_args.Ask,
        progress: Progress = lambda _: None,
    ) -> None:
        self._nodes = list(scope.nodes)
        self._everywhere = ""  # if only this machine is considered: the nodeset of all nodes in scope
        here = local_node(scope.nodes)
        if here is not None and not scope.explicit and len(scope.nodes) > 1:
            self._nodes = [here]
            self._everywhere = folded([node.name for node in scope.nodes])
        self._settings = settings
        self._env = env
        self._scheduler = scheduler
        self._options = options
        self._progress = progress
        self._jobs = Jobs(env)
        self._keeper: keeper.Started | None = None
        self._unpublished: str | None = None  # the lease that its owner does not have yet
        self._job_number: int | None = None
        self._handed: Handover | None = None  # the keeper has the lease, its owner does not have it yet
        self._record: keeper.LeaseRecord | None = None
        self._abandoned = threading.Event()
        self.notes: list[str] = []  # messages for the user about the lease

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._withdraw()
        self.close()

    def close(self) -> None:
        """Close the connection to a keeper that has no lease yet; published leases stay."""
        if self._keeper is not None:
            self._keeper.close()

    def abandon(self) -> None:
        """Cancel ``allocate``, which raises Interrupted at its next step. Thread-safe; does not wait.

        The keeper cancels the job of an unconfirmed lease, as it does when this process ends.
        """
        self._abandoned.set()
        handed, self._handed = self._handed, None
        if handed is not None:
            handed.abandon()

    def plan(self, request: Request, for_s: float | None = None) -> Choice:
        """Return the sbatch line, its reason and Slurm's estimate; submits nothing. ``gpus`` is empty: Slurm chooses.

        Raises Refused, UsageError, NoNodeReached.
        """
        found, seconds = self._fit(request, for_s)
        arguments = sbatch_args.arguments(found.shape, self._options, sbatch_args.JobSpec("lease", seconds))
        estimate = self._jobs.test(arguments, script(""))
        line = shlex.join(["sbatch", *(each for each in arguments if not each.startswith("--job-name="))])
        return Choice((), f"{line}\n{found.why}\nSlurm: {estimate}")

    def allocate(self, request: Request, terms: Terms, wait_s: float | None = None) -> Allocation:
        """Reserve what ``request`` asks for as a job; the keeper sends heartbeats for the returned lease.

        ``wait_s``: how long to wait for its start (inf: no limit); None: until Slurm has considered it.
        Raises Refused, UsageError, NoNodeReached, KeeperError; after any exception, also an interrupt, no job outlives
        the ``with`` block of the allocator.
        """
        self._keeper = keeper.start_early(self._env)
        found, for_s = self._fit(request, terms.for_s)
        self._check_abandoned()
        lease = new_id(self._known_leases())
        self._unpublished = lease
        heartbeat = self._heartbeat(lease) if terms.holder is not None else ""
        self._hand_over(self._new_record(lease, terms, heartbeat))
        self._check_abandoned()
        arguments = sbatch_args.arguments(found.shape, self._options, sbatch_args.JobSpec(lease, for_s, terms.purpose))
        silence_s = parse_duration(self._settings.slurm.silence)
        text = script(heartbeat, silence_s, min(PAUSE_S, silence_s / 12))
        self._job_number, warnings = self._jobs.submit(arguments, text, lease)
        if warnings:
            self.notes.append(f"Slurm: {warnings}")
        self._update_keeper(LONGEST_S)
        job = self._wait(wait_s)
        self._update_keeper(job.left_s if job.left_s is not None else for_s)
        granted = granted_job(self._job_number, gpu_counts(self._job_number, self._settings), self._settings)
        self._check_abandoned()
        self.notes += granted.notes
        if heartbeat and not self._is_home_shared(heartbeat):
            self.notes.append(
                f"the nodes do not share {Path(heartbeat).parent}: if this host or the keeper fails, "
                f"lease {lease} lasts until its time limit"
            )
        held = terms.holder and LeaseHolder(terms.holder.pid, True)
        made = lease_of(lease, job, granted.gpus(), purpose=terms.purpose, holder=held)
        return self._allocation(made, granted, None, f"Slurm job {self._job_number}: {found.why}")

    def count(self) -> int:
        """Raise UsageError: the number of GPUs in Slurm's nodes is no useful default for a job."""
        raise UsageError("the number of GPUs is missing; pass --n N")

    def _fit(self, request: Request, for_s: float | None) -> tuple[Fit, float]:
        """Return the job's shape and its duration in seconds. Raises Refused, UsageError, NoNodeReached."""
        check(request)
        self._progress("")
        schedule = schedule_of(self._scheduler)
        partitions = self._jobs.partitions()
        named = self._options.partition or self._env.get("SBATCH_PARTITION", "")
        wanted = [name for name in named.split(",") if name] or [name for name, default, _ in partitions if default]
        if {name for name, _, _ in partitions}.isdisjoint(wanted):
            wanted = []  # hidden from this user or unknown: sbatch reports which
        limits = [limit for name, _, limit in partitions if name in wanted and limit is not None]
        if for_s is None:
            for_s = min(parse_duration(self._settings.slurm.time), duration(None, self._settings), *limits)
        for_s = duration(for_s, self._settings)
        within = Limits(self._scope(schedule), tuple(wanted), self._options.reservation)
        answer = fit(request, schedule, within)
        if isinstance(answer, Refusal):
            if self._everywhere:
                hint = f"only this machine was considered; add --nodes '{self._everywhere}' for all nodes"
                answer = msgspec.structs.replace(answer, message=f"{answer.message}\n  {hint}")
            raise NeverPossible(answer)
        return answer, for_s

    def _scope(self, schedule: Schedule) -> set[str]:
        """Return Slurm's names of the nodes in scope, without those that are not in Slurm."""
        return set(scheduler_names(self._nodes, schedule, self._settings).values())

    def _known_leases(self) -> set[str]:
        schedule = self._scheduler.seen.schedule
        found = (sbatch_args.lease_of(job.name) for job in schedule.jobs) if schedule is not None else ()
        return {lease for lease in found if lease}

    def _heartbeat(self, lease: str) -> str:
        """Create the heartbeat file and, beside it, the file that the job touches when it sees the first; return it."""
        path = f"{paths.state_dir(self._env)}/leases/{lease}.alive"
        try:
            paths.make_private(os.path.dirname(path))
            for name in (path, f"{path}.seen"):
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            os.utime(f"{path}.seen", (1, 1))
        except OSError as error:
            raise GpuboardError(f"cannot write {path}: {error.strerror}") from error
        return path

    def _new_record(self, lease: str, terms: Terms, heartbeat: str) -> keeper.LeaseRecord:
        job = KeptJob(
            job_name=sbatch_args.job_name(lease),
            number=None,
            heartbeat=heartbeat,
            touch_s=min(30.0, parse_duration(self._settings.slurm.silence) / 6),
            cancel=self._jobs.cancel_command(lease),
            look=self._jobs.look_command(),
            environ={name: value for name, value in self._jobs.environ.items() if name not in SECRETS},
            taker=identify(os.getpid()),
            ended=ENDED_STATES,
            in_time=["TIMEOUT"],
            secrets=list(SECRETS),
            mark=f"{SUBMITTING}={lease}",
            inside="SLURM_JOB_ID",
        )
        place = KeptNode(_PLACE, [], None, "", None)
        return keeper.record(lease, [place], {}, terms.holder, LONGEST_S, job=job)

    def _hand_over(self, record: keeper.LeaseRecord) -> Handover:
        self._record = record
        self._handed = handed = keeper.hand_over(record, self._env, self._keeper)
        self._keeper = None
        return handed

    def _update_keeper(self, for_s: float) -> None:
        """Send the job's number and its remaining time to the keeper; start another keeper if it was killed."""
        assert self._record is not None and self._record.job is not None and self._job_number is not None
        self._check_abandoned()
        job = self._record.job._replace(number=self._job_number)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._record = self._record._replace(job=job, until=now + for_s)
        try:
            if self._handed is not None:
                self._handed.job_started(self._job_number, for_s)
        except KeeperError:
            self._hand_over(self._record)

    def _ensure_keeper(self) -> None:
        """Start another keeper if this one was killed: if this process is killed too, only a keeper cancels the job."""
        self._check_abandoned()
        if self._handed is not None and self._handed.lost and self._record is not None:
            self._hand_over(self._record)

    def _wait(self, wait_s: float | None) -> JobState:
        assert self._job_number is not None
        patience_s = parse_duration(self._settings.slurm.patience)
        wait = JobWait(
            self._jobs, self._job_number, wait_s, patience_s, progress=self._progress, before_poll=self._ensure_keeper
        )
        return wait.run()

    def _is_home_shared(self, heartbeat: str) -> bool:
        """Return whether the job's script sees the heartbeat file: it then touches the file beside it."""
        until = time.monotonic() + _SEEN_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError), open(f"{heartbeat}.seen", "rb") as file:  # NFS: open revalidates
                if os.fstat(file.fileno()).st_mtime > 1:
                    return True
            time.sleep(0.05)
        return False

    def existing(self, text: str, n: int | None = None) -> Allocation:
        """Return a lease of the caller as it was allocated, or ``n`` GPUs of it. Raises NoSuchLease, NotFree."""
        lease, job = find(text, self._jobs.mine())
        if job.state in {"PENDING", "CONFIGURING"}:
            why = "is pending" if job.state == "PENDING" else "waits until Slurm has prepared its nodes"
            raise NotFree(Refusal(4, f"lease {lease} has no GPUs yet: Slurm job {job.number} {why}"))
        why, holder = f"Slurm job {job.number}", known_holder(lease, self._env)
        known = stored_rank_map(self._env, lease)
        if n is None and known is not None and known.job == str(job.number):
            # A job's GPUs do not change. Every rank of an mpirun may call this, so no node is read.
            used = [node.name for node in known.nodes]
            gpus = [LeaseGpu(rank.node, rank.index, rank.uuid) for rank in known.ranks]
            made = lease_of(lease, job, gpus, purpose=job.comment, holder=holder)
            file = rank_map_file(self._env, lease)
            return Allocation(made, known, why, file, folded(used), next(filter(is_here, used), None))
        granted = granted_job(job.number, gpu_counts(job.number, self._settings), self._settings)
        made = lease_of(lease, job, granted.gpus(), purpose=job.comment, holder=holder)
        if n is not None and n > (count := len(made.gpus)):
            raise NotFree(Refusal(4, f"requested {n} GPUs, but lease {lease} has {count}; try --n {count}"))
        return self._allocation(made, granted, n, why)

    def addresses(self) -> dict[str, str]:
        """Return an empty dict: no node is read before the job runs."""
        return {}

    def handing_over(self, lease: Lease) -> None:
        """Confirm the lease to the keeper, which until then cancels its job if this process is killed.

        Called before the owner can read it, so that a kill in between does not end a lease in use. Raises KeeperError.
        """
        handed, self._handed = self._handed, None
        if handed is None:
            return
        try:
            handed.confirm()
        except KeeperError:  # killed: the next keeper would cancel an unconfirmed lease once this process has ended
            assert self._record is not None
            again, self._handed = self._hand_over(self._record), None
            again.confirm()

    def published(self, lease: Lease) -> None:
        """The owner has the lease: from now on an exception in the ``with`` block does not release it."""
        self.handing_over(lease)
        self._unpublished = None
        outdate(self._env)

    def _check_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise Interrupted("reservation cancelled; nothing is reserved")

    def _withdraw(self) -> None:
        """Cancel the job of an unpublished lease, if there is one, and wait some seconds until that is done.

        The keeper cancels it, and retries where Slurm does not answer.
        """
        lease, self._unpublished = self._unpublished, None
        handed, self._handed = self._handed, None
        if lease is None:
            return
        with uninterrupted():
            try:
                number = self._job_number or self._jobs.settle(_SETTLE_S)
            except Uncertain:
                number = 0  # unknown: the keeper finds the job, if there is one, by its name
                if self._record is not None and (handed is None or handed.lost):  # abandoned, or the keeper was killed
                    with contextlib.suppress(KeeperError):
                        handed = self._hand_over(self._record)
            if number is None:
                forget(lease, self._env)
            elif handed is None or handed.lost:  # confirmed but not published; or the keeper was killed
                with contextlib.suppress(GpuboardError):
                    end(lease, lambda: self._jobs.cancel(lease), self._env)
            else:
                with contextlib.suppress(KeeperError):
                    if number:
                        handed.job_started(number, LONGEST_S)
                handed.abandon()
                until = time.monotonic() + _CANCEL_S
                while number and keeper.has(lease, self._env):
                    if time.monotonic() > until:
                        self._progress(f"Slurm has not cancelled job {number} yet; the keeper retries")
                        return
                    time.sleep(0.02)

    def _allocation(self, lease: Lease, job: GrantedJob, n: int | None, why: str) -> Allocation:
        chosen = as_allocated(self._env, lease.id, rank_order(job.snapshot, n))
        used = list(dict.fromkeys(gpu.node for gpu in chosen))
        addresses = reachable_addresses(
            {node.name: node.addresses for node in job.snapshot.nodes if node.name in used},
            {name: job.nodes[name].address for name in used},
        )
        found = rank_map(lease.id, chosen, addresses, lease.job)
        file = write_rank_map(self._env, found, whole=len(chosen) == len(lease.gpus))
        here = job.here if job.here in used else None
        return Allocation(lease, found, why, file, folded(used), here)
