"""What a person does with leases and processes, over the board's own connections. Everything here blocks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpuboard.errors import GpuboardError, Interrupted
from gpuboard.leases.claims import queries as held
from gpuboard.leases.claims.allocator import Allocator
from gpuboard.leases.claims.client import Mine
from gpuboard.leases.composite import slurm_allocator
from gpuboard.leases.policy.choose import choose
from gpuboard.leases.scope import Scope
from gpuboard.leases.terms import Terms, duration, forget_file
from gpuboard.model.lease import LeaseList
from gpuboard.model.replies import Signalled
from gpuboard.model.request import Choice, Refusal
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.config import Settings
    from gpuboard.leases.composite import AnyAllocator
    from gpuboard.leases.output.formats import Allocation
    from gpuboard.leases.slurm.queries import JobLease
    from gpuboard.model.request import Request
    from gpuboard.model.snapshot import Snapshot
    from gpuboard.scheduler.base import Scheduler
    from gpuboard.scheduler.slurm.client import Jobs

SIGNALS = ("TERM", "INT", "KILL", "USR1", "STOP", "CONT")  # what the agent sends (agent/signals.py)
_LEAVE_S = 0.25  # quitting takes under half a second in all
_SIGNAL_S = 5.0
_REFRESH_S = 2.0  # so that the board shows at once what was done


class Attempt:
    """A reservation that somebody may give up while it is being made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allocator: AnyAllocator | None = None
        self._over = False

    @property
    def given_up(self) -> bool:
        """Whether it was given up."""
        return self._over

    def give_up(self) -> None:
        """Want it no longer; what is taken already is given back. Does not wait."""
        with self._lock:
            self._over = True
            if self._allocator is not None:
                self._allocator.abandon()

    def begin(self, allocator: AnyAllocator) -> None:
        """Take note of who makes it."""
        with self._lock:
            self._allocator = allocator
            if self._over:
                allocator.abandon()


class Operations:
    """Reserving, releasing, renewing, signals. Safe from several threads."""

    def __init__(
        self,
        nodes: Sequence[Node],
        settings: Settings,
        env: Mapping[str, str],
        fleet: Fleet,
        scheduler: Callable[[], Scheduler | None] = lambda: None,
    ) -> None:
        """``scheduler`` makes one to ask where there is one; it is closed after each use."""
        self._nodes = list(nodes)
        self._scheduler = scheduler
        self._settings = settings
        self._env = env
        self._fleet = fleet
        self._changed = threading.Condition()
        self._taking: set[AnyAllocator] = set()
        self._untold: dict[str, tuple[AnyAllocator, contextlib.ExitStack]] = {}  # their owner has not seen them yet
        self._closed = False

    def plan(self, request: Request, snapshot: Snapshot | None = None) -> Choice | Refusal:
        """Return what the policy would take now, or in ``snapshot``, or why nothing. Raises UsageError.

        Of Slurm's nodes Slurm chooses the GPUs: then the choice names none, and says what would be asked for.
        Takes nothing. 8,000 GPUs take a tenth of a second and more: whoever asks again and again takes rests.
        """
        schedule = self._fleet.schedule
        if schedule is not None and self.slurm_chooses(request):
            from gpuboard.leases.slurm.fit import Limits, fit  # only where there is a Slurm

            scope = {name for node in self._nodes if (name := self._fleet.known_as(node.name)) is not None}
            answer = fit(request, schedule, Limits(scope))
            return answer if isinstance(answer, Refusal) else Choice((), answer.why)
        return choose(request, snapshot or self._fleet.snapshot())

    def slurm_chooses(self, request: Request) -> bool:
        """Tell whether Slurm has to be asked: for GPUs of its nodes, and for any where it has some of ours."""
        asked = {pick.node for pick in request.picks} or {node.name for node in self._nodes}
        return any(name is not None and self._fleet.known_as(name) is not None for name in asked)

    def reserve(self, request: Request, for_s: float, purpose: str, attempt: Attempt | None = None) -> Allocation:
        """Reserve for ``for_s`` seconds, without a holder. The caller then shows it and calls :meth:`told`.

        Until then nothing counts: when the board is closed, the lease is released. ``attempt``: by which it can be
        given up. Raises Refused, UsageError, NoNodeReached, KeeperError, Interrupted; whatever is raised, nothing
        stays reserved.
        """
        terms = Terms(duration(for_s, self._settings), None, clean(purpose, 200))
        allocator = self._allocator(request)
        attempt = attempt or Attempt()
        with self._changed:
            self._go_on(attempt)
            self._taking.add(allocator)
        try:
            attempt.begin(allocator)
            with contextlib.ExitStack() as stack:
                stack.enter_context(allocator)
                allocation = allocator.allocate(request, terms)
                with self._changed:
                    self._go_on(attempt)
                    self._untold[allocation.lease.id] = allocator, stack.pop_all()
            return allocation
        finally:
            with self._changed:
                self._taking.discard(allocator)
                self._changed.notify_all()

    def told(self, allocation: Allocation) -> None:
        """Take note that the person has been shown the lease: from now on it lasts."""
        with self._changed:
            allocator, stack = self._untold.pop(allocation.lease.id)
        allocator.published(allocation.lease)
        stack.close()

    def release(self, lease: str) -> held.ReleasedLease:
        """End a lease at once. Raises NoSuchLease when it is gone or somebody else's (root may end anybody's)."""
        if (in_slurm := self._in_slurm(lease)) is not None:
            from gpuboard.leases.slurm.queries import end  # only where there is a Slurm

            jobs, job = in_slurm
            if error := end(job, jobs, self._env):
                raise GpuboardError(f"{lease} was not released: {error}")
            return held.ReleasedLease(job.lease, job.gpus, {})
        mine, found = self._mine(lease)
        ended = held.release(mine, found.leases, self._fleet, self._env, lambda _: None)
        forget_file(self._env, mine.lease)
        self._fleet.refresh(mine.nodes, _REFRESH_S)
        if ended.failed:
            raise GpuboardError(f"{lease}: {'; '.join(ended.failed.values())}")
        return ended

    def renew(self, lease: str, for_s: float) -> None:
        """Let a lease end ``for_s`` seconds from now. Raises NoSuchLease, UsageError above max_lease, GpuboardError."""
        seconds = duration(for_s, self._settings)
        if (in_slurm := self._in_slurm(lease)) is not None:
            from gpuboard.leases.slurm.queries import prolong  # only where there is a Slurm

            jobs, job = in_slurm
            if error := prolong(job, seconds, jobs, self._env):
                raise GpuboardError(f"{lease} was not renewed: {error}")
            return
        mine, _ = self._mine(lease)
        _, failed = held.renew(mine, seconds, self._fleet, self._env)
        self._fleet.refresh(mine.nodes, _REFRESH_S)
        if failed:
            raise GpuboardError(f"{lease} was not renewed: {_by_node(failed)}")

    def signal(self, node: str, pid: int, started: float, name: str) -> None:
        """Send a signal (one of SIGNALS) to exactly the process that was started then. Raises CallFailed, LinkLost."""
        self._fleet.call(node, "signal", {"pid": pid, "started": started, "signal": name}, _SIGNAL_S, Signalled)

    def close(self) -> None:
        """Give back what is being taken and what nobody was told of, in a quarter of a second at most.

        What a hung node holds by then was asked to go and lapses within 90 s at the latest.
        """
        with self._changed:
            self._closed = True
            taking = list(self._taking)
            untold = [allocator for allocator, _ in self._untold.values()]
        for allocator in (*taking, *untold):
            allocator.abandon()
        until = time.monotonic() + _LEAVE_S
        with self._changed:
            while self._taking and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _allocator(self, request: Request) -> AnyAllocator:
        """Return what takes this: Slurm for nodes that it knows, else claims, over the board's own connections."""
        scheduler = self._scheduler()
        if scheduler is not None and (self._fleet.schedule is None or self.slurm_chooses(request)):
            return slurm_allocator(self._nodes, self._settings, self._env, scheduler)
        if scheduler is not None:
            scheduler.close()
        scope = Scope(self._nodes, self._settings, said=True, running=self._fleet)
        return Allocator(scope, self._settings, self._env)

    def _in_slurm(self, lease: str) -> tuple[Jobs, JobLease] | None:
        """Return the job that a lease is; None when it lies on nodes. Raises NoSuchLease for somebody else's."""
        if self._fleet.schedule is None:
            return None
        from gpuboard.leases.slurm.queries import chosen  # only where there is a Slurm
        from gpuboard.scheduler.slurm.client import Jobs

        jobs = Jobs(self._env)
        found, _ = chosen([lease], jobs, self._env)
        return (jobs, found[0]) if found else None

    def _go_on(self, attempt: Attempt) -> None:
        if self._closed or attempt.given_up:
            raise Interrupted("given up; nothing is reserved")

    def _mine(self, lease: str) -> tuple[Mine, LeaseList]:
        found = held.leases(self._fleet, self._fleet.snapshot())
        [mine] = held.chosen([lease], self._fleet, found.unread)
        return mine, found


def _by_node(failed: Mapping[str, str]) -> str:
    return "; ".join(words if words.startswith(node) else f"{node}: {words}" for node, words in failed.items())
