"""Operations on leases and processes over the board's connections; all of them block."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gpuboard.errors import GpuboardError, Interrupted
from gpuboard.leases.composite import CompositeLedger, open_ledger
from gpuboard.leases.ledger import Scope
from gpuboard.leases.reserve import reserve, terms_of
from gpuboard.leases.terms import duration
from gpuboard.model.replies import Signalled
from gpuboard.transport.base import CallFailed, LinkLost

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.cluster.snapshot.processes import Running
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
    """A reservation in progress, which the user can cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allocator: Allocator | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """Cancel it; GPUs already reserved are released. Does not wait."""
        with self._lock:
            self.cancelled = True
            if self._allocator is not None:
                self._allocator.abandon()

    def begin(self, allocator: Allocator) -> None:
        """Set the allocator that :meth:`cancel` abandons."""
        with self._lock:
            self._allocator = allocator
            if self.cancelled:
                allocator.abandon()


class _Unpublished(NamedTuple):
    """A lease that the user has not seen yet."""

    allocator: Allocator
    stack: contextlib.ExitStack  # closing it publishes the lease
    notes: list[str]  # messages about it, once it is published


class Operations:
    """Reserve, release, renew, signal. Thread-safe."""

    def __init__(
        self,
        nodes: Sequence[Node],
        settings: Settings,
        env: Mapping[str, str],
        fleet: Fleet,
        scheduler: Callable[[], Scheduler] | None = None,
    ) -> None:
        """``scheduler``: opens the scheduler, where there is one."""
        scope = Scope(tuple(nodes))
        self._ledger: Callable[[], CompositeLedger] = partial(
            open_ledger, lambda: scope, settings, env, scheduler, running=fleet
        )
        self._known = self._ledger()  # answers from the fleet's newest readings only
        self._settings = settings
        self._fleet = fleet
        self._changed = threading.Condition()
        self._reserving: set[Allocator] = set()
        self._unpublished: dict[str, _Unpublished] = {}
        self._closed = False

    def leases(self, snapshot: Snapshot) -> LeaseList:
        """Return all users' leases in the newest readings."""
        return self._known.leases(self._fleet, snapshot)

    def plan(self, request: Request, snapshot: Snapshot | None = None) -> Choice | Refusal:
        """Return what would be reserved now (in ``snapshot``), or the refusal. Raises UsageError.

        The choice names no GPUs where the ledger chooses them at the start. 8,000 GPUs take 0.1 s and more.
        """
        return self._known.plan(request, snapshot or self._fleet.snapshot())

    def names_gpus(self, request: Request) -> bool:
        """Return whether a plan names GPUs; else the scheduler chooses them when the lease starts."""
        return self._known.names_gpus(request)

    def reserve(self, request: Request, for_s: float, purpose: str, attempt: Attempt | None = None) -> Allocation:
        """Reserve for ``for_s`` seconds, without a holder; ``attempt`` can cancel it.

        The caller then shows the lease and calls :meth:`published`; if the board closes before, the lease is released.
        Raises Refused, UsageError, NoNodeReached, KeeperError, Interrupted; after any exception nothing is reserved.
        """
        terms = terms_of(for_s, None, purpose, self._settings)
        attempt = attempt or Attempt()
        with contextlib.ExitStack() as stack:
            ledger = stack.enter_context(self._ledger())
            allocator = stack.enter_context(ledger.allocator(picks=request.picks))
            with self._changed:
                self._check_cancelled(attempt)
                self._reserving.add(allocator)
            try:
                attempt.begin(allocator)
                notes: list[str] = []
                allocation = stack.enter_context(reserve(allocator, request, terms, notify=notes.append))
                with self._changed:
                    self._check_cancelled(attempt)
                    self._unpublished[allocation.lease.id] = _Unpublished(allocator, stack.pop_all(), notes)
                return allocation
            finally:
                with self._changed:
                    self._reserving.discard(allocator)
                    self._changed.notify_all()

    def published(self, allocation: Allocation) -> list[str]:
        """Keep a lease that is shown to the user; return the messages about it.

        Raises KeeperError; nothing is reserved then.
        """
        with self._changed:
            made = self._unpublished.pop(allocation.lease.id)
        made.stack.close()
        return made.notes

    def release(self, lease: str, theirs: Lease | None = None) -> Released:
        """End a lease of the caller at once. Raises NoSuchLease when it has ended.

        ``theirs``: another user's lease, for root. Leases of other owners with this id stay, except on the same nodes.
        """
        if theirs is not None:
            theirs = msgspec.structs.replace(theirs, nodes=sorted({gpu.node for gpu in theirs.gpus}))
        with self._ledger() as ledger:
            for found in [theirs] if theirs is not None else _found(ledger, lease):
                released = ledger.release(found)
                if released.failed:
                    raise GpuboardError(f"{lease}: {'; '.join(released.failed.values())}")
        return released

    def renew(self, lease: str, for_s: float) -> None:
        """Make a lease end ``for_s`` seconds from now. Raises NoSuchLease, UsageError, GpuboardError."""
        seconds = duration(for_s, self._settings)
        with self._ledger() as ledger:
            for found in _found(ledger, lease):
                if failed := ledger.renew(found, seconds).failed:
                    raise GpuboardError(f"{lease} was not renewed: {_by_node(failed)}")

    def signal(self, processes: Sequence[Running], name: str) -> list[str]:
        """Send a signal (one of SIGNALS) to exactly these processes; return why some did not get it.

        A node that does not answer delays no other node, and gets no further signal.
        """
        failed: list[str] = []
        left: dict[str, list[Running]] = {}
        for one in processes:
            left.setdefault(one.node, []).append(one)
        while left:
            now = {node: on_node.pop(0) for node, on_node in left.items()}
            calls = {
                node: ("signal", {"pid": one.pid, "started": one.started, "signal": name}) for node, one in now.items()
            }
            for node, answer in self._fleet.call_all(calls, _SIGNAL_S, Signalled).items():
                if isinstance(answer, (CallFailed, LinkLost)):
                    failed.append(str(answer) if len(processes) == 1 else f"{node}: {answer}")
                if isinstance(answer, LinkLost):
                    failed += [f"process {one.pid} on {node}: not sent" for one in left[node]]
                    left[node] = []
            left = {node: on_node for node, on_node in left.items() if on_node}
        return failed

    def close(self) -> None:
        """Release leases that are being reserved or are not published, in a quarter of a second at most.

        A node that does not answer by then has received the release; its claims expire within 90 s at the latest.
        """
        with self._changed:
            self._closed = True
            allocators = [*self._reserving, *(made.allocator for made in self._unpublished.values())]
        for allocator in allocators:
            allocator.abandon()
        until = time.monotonic() + _LEAVE_S
        with self._changed:
            while self._reserving and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _check_cancelled(self, attempt: Attempt) -> None:
        if self._closed or attempt.cancelled:
            raise Interrupted("cancelled; nothing is reserved")


def _found(ledger: CompositeLedger, lease: str) -> list[Lease]:
    found = ledger.find([lease])
    if found.unreached is not None:
        raise found.unreached
    return found.leases


def _by_node(failed: Mapping[str, str]) -> str:
    return "; ".join(words if words.startswith(node) else f"{node}: {words}" for node, words in failed.items())
