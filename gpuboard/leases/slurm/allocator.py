"""Leases that are jobs: ask Slurm, wait for its answer, see on the nodes what it gave, hand the job to the keeper."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from gpuboard import paths
from gpuboard.cluster.inventory.nodes import folded, is_here, local_node
from gpuboard.cluster.inventory.ssh_aliases import scheduler_names
from gpuboard.errors import GpuboardError, Interrupted, NeverPossible, NotFree, UsageError
from gpuboard.keeper import client as keeper
from gpuboard.keeper.client import Handover, KeeperError, KeptJob, KeptNode
from gpuboard.keeper.holder import identify
from gpuboard.leases.claims.client import LONGEST_S, new_id
from gpuboard.leases.ledger import Progress, Scope
from gpuboard.leases.output.formats import Allocation
from gpuboard.leases.policy.candidates import check
from gpuboard.leases.policy.choose import arranged
from gpuboard.leases.rank_map import rank_map, reachable_addresses
from gpuboard.leases.slurm.fit import Fit, Limits, fit
from gpuboard.leases.slurm.job import GrantedJob, look, nodes_of
from gpuboard.leases.slurm.lease import end, find, forget, known_holder, lease_of
from gpuboard.leases.slurm.schedule import schedule_of
from gpuboard.leases.slurm.wait import Waiting
from gpuboard.leases.terms import (
    Terms,
    as_allocated,
    duration,
    rank_map_file,
    stored_rank_map,
    uninterrupted,
    write_rank_map,
)
from gpuboard.model.lease import Lease, LeaseGpu, LeaseHolder
from gpuboard.model.request import Choice, Refusal, Request
from gpuboard.model.schedule import Schedule
from gpuboard.model.units import parse_duration
from gpuboard.scheduler.slurm import sbatch_args
from gpuboard.scheduler.slurm.client import ENDED_STATES, SECRETS, SUBMITTING, Jobs, JobState, Uncertain
from gpuboard.scheduler.slurm.job_script import PAUSE_S, script
from gpuboard.scheduler.slurm.service import outdate

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.scheduler.base import Scheduler

_SETTLE_S = 5.0  # after an interrupt: for an sbatch that is on its way
_CANCEL_S = 8.0  # after an interrupt: for the keeper to have ended the job
_SEEN_S = 5.0  # for the job's script to say that it sees the heartbeat
_PLACE = "Slurm"  # what stands for the scheduler among a lease's nodes


class SlurmAllocator:
    """Reserves GPUs as a job of Slurm. ``scheduler`` stays open. See :class:`~gpuboard.leases.ledger.Allocator`."""

    def __init__(
        self,
        scope: Scope,
        settings: Settings,
        env: Mapping[str, str],
        *,
        scheduler: Scheduler,
        asked: sbatch_args.Ask,
        progress: Progress = lambda _: None,
    ) -> None:
        here = local_node(scope.nodes)
        self._nodes = [here] if here is not None and not scope.explicit else list(scope.nodes)
        is_part = len(self._nodes) < len(scope.nodes)
        self._left_out = folded([node.name for node in scope.nodes]) if is_part else ""
        self._settings = settings
        self._env = env
        self._scheduler = scheduler
        self._asked = asked
        self._progress = progress
        self._jobs = Jobs(env)
        self._keeper: keeper.Started | None = None
        self._taking: str | None = None  # the lease whose owner does not know of it yet
        self._number: int | None = None  # of its job
        self._handed: Handover | None = None
        self._record: keeper.LeaseRecord | None = None
        self._abandoned = threading.Event()
        self.notes: list[str] = []  # what the person should know of the lease that was taken

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._drop()
        self.close()

    def close(self) -> None:
        """Leases that were published stay."""
        if self._keeper is not None:
            self._keeper.close()

    def abandon(self) -> None:
        """Give up, from any thread and without waiting; ``allocate`` raises Interrupted at its next step.

        The keeper cancels a job that nobody was told of, as it does when our process ends.
        """
        self._abandoned.set()
        handed, self._handed = self._handed, None
        if handed is not None:
            handed.abandon()

    # --- taking

    def plan(self, request: Request, for_s: float | None = None) -> Choice:
        """Return what Slurm would be asked, and what it says to that; takes nothing. ``gpus`` is empty: Slurm chooses.

        Raises Refused, UsageError, NoNodeReached.
        """
        found, seconds = self._fit(request, for_s)
        arguments = sbatch_args.arguments(found.shape, self._asked, sbatch_args.JobSpec("lease", seconds))
        words = self._jobs.test(arguments, script(""))
        line = shlex.join(["sbatch", *(word for word in arguments if not word.startswith("--job-name="))])
        return Choice((), f"{line}\n{found.why}\nSlurm: {words}")

    def allocate(self, request: Request, terms: Terms, wait_s: float | None = None) -> Allocation:
        """Have a job started that holds what ``request`` asks for and return it, kept alive by the keeper.

        ``wait_s``: how long to wait for its start (inf: for ever); None: until Slurm has looked at it.
        Raises Refused, UsageError, NoNodeReached, KeeperError; whatever is raised, also an interrupt, no job outlives
        the ``with`` block of the allocator.
        """
        self._keeper = keeper.start_early(self._env)
        found, for_s = self._fit(request, terms.for_s)
        self._go_on()
        lease = new_id(self._known_leases())
        self._taking = lease
        heartbeat = self._heartbeat(lease) if terms.holder is not None else ""
        self._hand_over(self._new_record(lease, terms, heartbeat))
        self._go_on()
        arguments = sbatch_args.arguments(found.shape, self._asked, sbatch_args.JobSpec(lease, for_s, terms.purpose))
        silence_s = parse_duration(self._settings.slurm.silence)
        text = script(heartbeat, silence_s, min(PAUSE_S, silence_s / 12))
        self._number, words = self._jobs.submit(arguments, text, lease)
        if words:
            self.notes.append(f"Slurm: {words}")
        self._tell_keeper(LONGEST_S)
        job = self._wait(wait_s)
        self._tell_keeper(job.left_s if job.left_s is not None else for_s)
        gpus = look(self._number, nodes_of(self._number, self._settings), self._settings)
        self._go_on()
        self.notes += gpus.notes
        if heartbeat and not self._is_home_shared(heartbeat):
            self.notes.append(
                f"the nodes do not see {Path(heartbeat).parent}: should this host or the lease's keeper go down, "
                f"lease {lease} lasts until its time limit"
            )
        held = terms.holder and LeaseHolder(terms.holder.pid, True)
        made = lease_of(lease, job, gpus.all(), purpose=terms.purpose, holder=held)
        return self._allocation(made, gpus, None, f"Slurm job {self._number}: {found.why}")

    def count(self) -> int:
        """Refuse: how many GPUs there are says nothing about how many somebody wants of Slurm."""
        raise UsageError("how many GPUs? pass --n N")

    def _fit(self, request: Request, for_s: float | None) -> tuple[Fit, float]:
        """Return the job's shape and how long it is to last. Raises Refused, UsageError, NoNodeReached."""
        check(request)
        self._progress("")
        schedule = schedule_of(self._scheduler)
        partitions = self._jobs.partitions()
        named = self._asked.partition or self._env.get("SBATCH_PARTITION", "")
        wanted = [name for name in named.split(",") if name] or [name for name, default, _ in partitions if default]
        if {name for name, _, _ in partitions}.isdisjoint(wanted):
            wanted = []  # hidden from us, or not there: Slurm will say
        limits = [limit for name, _, limit in partitions if name in wanted and limit is not None]
        if for_s is None:
            for_s = min(parse_duration(self._settings.slurm.time), duration(None, self._settings), *limits)
        for_s = duration(for_s, self._settings)
        within = Limits(self._scope(schedule), tuple(wanted), self._asked.reservation)
        answer = fit(request, schedule, within)
        if isinstance(answer, Refusal):
            if self._left_out:
                words = f"{answer.message}\n  only this machine was looked at; add --nodes '{self._left_out}' for all"
                answer = msgspec.structs.replace(answer, message=words)
            raise NeverPossible(answer)
        return answer, for_s

    def _scope(self, schedule: Schedule) -> set[str]:
        """Return Slurm's names of the nodes in scope; what it does not know cannot be had through it."""
        return set(scheduler_names(self._nodes, schedule, self._settings).values())

    def _known_leases(self) -> set[str]:
        schedule = self._scheduler.seen.schedule
        found = (sbatch_args.lease_of(job.name) for job in schedule.jobs) if schedule is not None else ()
        return {lease for lease in found if lease}

    def _heartbeat(self, lease: str) -> str:
        """Return a new heartbeat file, and beside it the one by which the job says that it sees it."""
        path = f"{paths.state_dir(self._env)}/leases/{lease}.alive"
        try:
            paths.make_private(os.path.dirname(path))
            for name in (path, f"{path}.seen"):
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            os.utime(f"{path}.seen", (1, 1))
        except OSError as error:
            raise GpuboardError(f"{path} cannot be written: {error.strerror}") from error
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

    def _tell_keeper(self, for_s: float) -> None:
        """Let the keeper know the job's number and how long it lasts yet; one that was killed has a successor."""
        assert self._record is not None and self._record.job is not None and self._number is not None
        self._go_on()
        job = self._record.job._replace(number=self._number)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._record = self._record._replace(job=job, until=now + for_s)
        try:
            if self._handed is not None:
                self._handed.job_started(self._number, for_s)
        except KeeperError:
            self._hand_over(self._record)

    def _mind_keeper(self) -> None:
        """See to it that a keeper has the lease while we wait: without one nobody would cancel the job for us."""
        self._go_on()
        if self._handed is not None and self._handed.lost and self._record is not None:
            self._hand_over(self._record)

    def _wait(self, wait_s: float | None) -> JobState:
        assert self._number is not None
        patience_s = parse_duration(self._settings.slurm.patience)
        waiting = Waiting(self._jobs, self._number, wait_s, patience_s, progress=self._progress, each=self._mind_keeper)
        return waiting.run()

    def _is_home_shared(self, heartbeat: str) -> bool:
        """Tell whether the job's script has seen the heartbeat: it sets the time of the file beside it."""
        until = time.monotonic() + _SEEN_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError), open(f"{heartbeat}.seen", "rb") as file:  # makes NFS ask its server
                if os.fstat(file.fileno()).st_mtime > 1:
                    return True
            time.sleep(0.05)
        return False

    # --- leases there are

    def existing(self, text: str, n: int | None = None) -> Allocation:
        """Return a lease of ours as it was allocated, or ``n`` GPUs of it. Raises NoSuchLease and the like."""
        lease, job = find(text, self._jobs.mine())
        if job.state == "PENDING":
            raise NotFree(Refusal(4, f"lease {lease} has nothing yet: Slurm job {job.number} is pending"))
        why, holder = f"Slurm job {job.number}", known_holder(lease, self._env)
        known = stored_rank_map(self._env, lease)
        if n is None and known is not None and known.job == str(job.number):
            # A job's GPUs do not change: every rank of an mpirun may ask, and none has to be looked at for that.
            used = [node.name for node in known.nodes]
            gpus = [LeaseGpu(rank.node, rank.index, rank.uuid) for rank in known.ranks]
            made = lease_of(lease, job, gpus, purpose=job.comment, holder=holder)
            file = rank_map_file(self._env, lease)
            return Allocation(made, known, why, file, folded(used), next(filter(is_here, used), None))
        seen = look(job.number, nodes_of(job.number, self._settings), self._settings)
        made = lease_of(lease, job, seen.all(), purpose=job.comment, holder=holder)
        if n is not None and n > len(made.gpus):
            words = f"lease {lease} has {len(made.gpus)} GPUs, {n} were asked for; try --n {len(made.gpus)}"
            raise NotFree(Refusal(4, words))
        return self._allocation(made, seen, n, why)

    def addresses(self) -> dict[str, str]:
        """Return none: no node is read before Slurm has started a job."""
        return {}

    # --- who knows of it

    def handing_over(self, lease: Lease) -> None:
        """Take note that its owner is about to be told of the lease. Until then the keeper ends it if we are killed.

        Raises KeeperError.
        """
        handed, self._handed = self._handed, None
        if handed is None:
            return
        try:
            handed.confirm()
        except KeeperError:  # killed, and a successor that finds us gone would take the lease for one nobody knows of
            assert self._record is not None
            again, self._handed = self._hand_over(self._record), None
            again.confirm()

    def published(self, lease: Lease) -> None:
        """Take note that its owner knows of the lease: until then it is dropped when we leave by an exception."""
        self.handing_over(lease)
        self._taking = None
        outdate(self._env)

    def _go_on(self) -> None:
        if self._abandoned.is_set():
            raise Interrupted("given up; nothing is reserved")

    def _drop(self) -> None:
        """End the job that nobody was told of, if there is one, and wait until it is gone, for some seconds.

        The keeper does it, and goes on where Slurm does not answer.
        """
        lease, self._taking = self._taking, None
        handed, self._handed = self._handed, None
        if lease is None:
            return
        with uninterrupted():
            try:
                number = self._number or self._jobs.settle(_SETTLE_S)
            except Uncertain:
                number = 0  # nobody knows: it is looked for by its name
            if number is None:
                forget(lease, self._env)
            elif handed is None or handed.lost:  # the owner was about to be told; or the keeper was killed
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
                        self._progress(f"Slurm has not cancelled job {number} yet: your keeper goes on trying")
                        return
                    time.sleep(0.02)

    # --- in words

    def _allocation(self, lease: Lease, gpus: GrantedJob, n: int | None, why: str) -> Allocation:
        chosen = as_allocated(self._env, lease.id, arranged(gpus.snapshot, n))
        used = list(dict.fromkeys(gpu.node for gpu in chosen))
        addresses = reachable_addresses(
            {node.name: node.addresses for node in gpus.snapshot.nodes if node.name in used},
            {name: gpus.nodes[name].address for name in used},
        )
        found = rank_map(lease.id, chosen, addresses, lease.job)
        file = write_rank_map(self._env, found, whole=len(chosen) == len(lease.gpus))
        here = gpus.here if gpus.here in used else None
        return Allocation(lease, found, why, file, folded(used), here)
