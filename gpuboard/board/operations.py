"""What a person does with leases and processes, over the board's own connections. Everything here blocks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpuboard.errors import GpuboardError, Interrupted
from gpuboard.leases.composite import CompositeLedger, open_ledger
from gpuboard.leases.ledger import Scope
from gpuboard.leases.reserve import reserve, terms_of
from gpuboard.leases.terms import duration
from gpuboard.model.replies import Signalled

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.config import Settings
    from gpuboard.leases.ledger import Allocator, Released
    from gpuboard.leases.output.formats import Allocation
    from gpuboard.model.lease import Lease, LeaseList
    from gpuboard.model.request import Choice, Refusal, Request
    from gpuboard.model.snapshot import Snapshot
    from gpuboard.scheduler.base import Scheduler

SIGNALS = ("TERM", "INT", "KILL", "USR1", "STOP", "CONT")  # what the agent sends (agent/signals.py)
_LEAVE_S = 0.25  # quitting takes under half a second in all
_SIGNAL_S = 5.0


class Attempt:
    """A reservation that somebody may give up while it is being made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allocator: Allocator | None = None
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

    def begin(self, allocator: Allocator) -> None:
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
        scheduler: Callable[[], Scheduler] | None = None,
    ) -> None:
        """``scheduler`` makes one to ask, where there is one."""
        scope = Scope(tuple(nodes))
        self._ledger: Callable[[], CompositeLedger] = partial(
            open_ledger, lambda: scope, settings, env, scheduler, running=fleet
        )
        self._known = self._ledger()  # answers from the fleet's newest readings only
        self._settings = settings
        self._fleet = fleet
        self._changed = threading.Condition()
        self._taking: set[Allocator] = set()
        self._unpublished: dict[str, tuple[Allocator, contextlib.ExitStack]] = {}  # the user has not seen them yet
        self._closed = False

    def leases(self, snapshot: Snapshot) -> LeaseList:
        """Return everybody's leases in the newest readings."""
        return self._known.leases(self._fleet, snapshot)

    def plan(self, request: Request, snapshot: Snapshot | None = None) -> Choice | Refusal:
        """Return what would be taken now, or in ``snapshot``, or why nothing. Raises UsageError.

        The choice names no GPUs where the ledger chooses them itself. 8,000 GPUs take 0.1 s and more.
        """
        return self._known.plan(request, snapshot or self._fleet.snapshot())

    def names_gpus(self, request: Request) -> bool:
        """Return whether a plan names GPUs; else the scheduler chooses them when the lease starts."""
        return self._known.names_gpus(request)

    def reserve(self, request: Request, for_s: float, purpose: str, attempt: Attempt | None = None) -> Allocation:
        """Reserve for ``for_s`` seconds, without a holder. The caller then shows it and calls
        :meth:`published`.

        Until then nothing counts: when the board is closed, the lease is released. ``attempt``: by which it can be
        given up. Raises Refused, UsageError, NoNodeReached, KeeperError, Interrupted; whatever is raised, nothing
        stays reserved.
        """
        terms = terms_of(for_s, None, purpose, self._settings)
        attempt = attempt or Attempt()
        with contextlib.ExitStack() as stack:
            ledger = stack.enter_context(self._ledger())
            allocator = stack.enter_context(ledger.allocator(picks=request.picks))
            with self._changed:
                self._go_on(attempt)
                self._taking.add(allocator)
            try:
                attempt.begin(allocator)
                allocation = stack.enter_context(reserve(allocator, request, terms, notify=lambda _: None))
                with self._changed:
                    self._go_on(attempt)
                    self._unpublished[allocation.lease.id] = allocator, stack.pop_all()
                return allocation
            finally:
                with self._changed:
                    self._taking.discard(allocator)
                    self._changed.notify_all()

    def published(self, allocation: Allocation) -> None:
        """The user has seen the lease: from now on it lasts."""
        with self._changed:
            _, stack = self._unpublished.pop(allocation.lease.id)
        stack.close()

    def release(self, lease: str) -> Released:
        """End a lease at once. Raises NoSuchLease when it has ended or is another user's (root may end any)."""
        with self._ledger() as ledger:
            for found in _found(ledger, lease):
                released = ledger.release(found)
                if released.failed:
                    raise GpuboardError(f"{lease}: {'; '.join(released.failed.values())}")
        return released

    def renew(self, lease: str, for_s: float) -> None:
        """Let a lease end ``for_s`` seconds from now. Raises NoSuchLease, UsageError above max_lease, GpuboardError."""
        seconds = duration(for_s, self._settings)
        with self._ledger() as ledger:
            for found in _found(ledger, lease):
                if failed := ledger.renew(found, seconds).failed:
                    raise GpuboardError(f"{lease} was not renewed: {_by_node(failed)}")

    def signal(self, node: str, pid: int, started: float, name: str) -> None:
        """Send a signal (one of SIGNALS) to exactly the process that was started then. Raises CallFailed, LinkLost."""
        self._fleet.call(node, "signal", {"pid": pid, "started": started, "signal": name}, _SIGNAL_S, Signalled)

    def close(self) -> None:
        """Release what is being taken and what was not published, in a quarter of a second at most.

        A node that does not answer by then has been asked to release; its claims expire within 90 s at the latest.
        """
        with self._changed:
            self._closed = True
            taking = list(self._taking)
            unpublished = [allocator for allocator, _ in self._unpublished.values()]
        for allocator in (*taking, *unpublished):
            allocator.abandon()
        until = time.monotonic() + _LEAVE_S
        with self._changed:
            while self._taking and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _go_on(self, attempt: Attempt) -> None:
        if self._closed or attempt.given_up:
            raise Interrupted("given up; nothing is reserved")


def _found(ledger: CompositeLedger, lease: str) -> list[Lease]:
    found = ledger.find([lease])
    if found.unreached is not None:
        raise found.unreached
    return found.leases


def _by_node(failed: Mapping[str, str]) -> str:
    return "; ".join(words if words.startswith(node) else f"{node}: {words}" for node, words in failed.items())
