"""The ledger of a whole cluster, composed of all ledgers in use: each node belongs to one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Self

import msgspec

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.errors import NoNodeReached, NoSuchLease, UsageError
from gpuboard.leases.claims.ledger import ClaimsLedger, Settle
from gpuboard.leases.ledger import (
    NO_OPTIONS,
    Allocator,
    Found,
    JobOptions,
    Ledger,
    Progress,
    Released,
    Renewed,
    Scope,
    UnknownLease,
    in_no_ledger,
    picked_nodes,
)
from gpuboard.model.snapshot import Snapshot

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.leases.output.formats import Allocation
    from gpuboard.model.lease import Lease, LeaseList
    from gpuboard.model.request import Choice, Pick, Refusal, Request
    from gpuboard.scheduler.base import Scheduler


def open_ledger(
    scope: Callable[[], Scope],
    settings: Settings,
    env: Mapping[str, str],
    scheduler: Callable[[], Scheduler] | None,
    *,
    running: Fleet | None = None,
    settle: Settle | None = None,
    warn: Progress = lambda _: None,
) -> CompositeLedger:
    """Return the ledger of the nodes in ``scope``; ``scheduler`` creates the scheduler, None: there is none.

    ``running``, ``settle``, ``warn``: see :class:`~gpuboard.leases.claims.ledger.ClaimsLedger`.
    """
    scope = cache(scope)
    ledgers: list[Ledger] = []
    if scheduler is not None:
        from gpuboard.leases.slurm.ledger import SlurmLedger

        ledgers.append(SlurmLedger(scope, settings, env, scheduler, running=running, warn=warn))
    composite = CompositeLedger(scope, ledgers)
    ledgers.append(ClaimsLedger(composite.rest, settings, env, running=running, settle=settle, warn=warn))
    return composite


class CompositeLedger:
    """Each node belongs to the first of ``ledgers`` that covers it; the last one covers every node.

    A context manager. See :class:`~gpuboard.leases.ledger.Ledger` for what the methods return and raise.
    """

    def __init__(self, scope: Callable[[], Scope], ledgers: Sequence[Ledger]) -> None:
        self._scope = scope
        self._ledgers = ledgers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; leases stay."""
        for ledger in self._ledgers:
            ledger.close()

    def rest(self) -> Scope:
        """Return the scope without the nodes that a ledger before the last one covers. Raises NoNodeReached."""
        return self._beyond(self._ledgers[:-1])

    def _beyond(self, ledgers: Sequence[Ledger]) -> Scope:
        scope = self._scope()
        covered = {name for ledger in ledgers for name in ledger.covers(scope.nodes)}
        if not covered:
            return scope
        return msgspec.structs.replace(scope, nodes=tuple(node for node in scope.nodes if node.name not in covered))

    def names_gpus(self, request: Request) -> bool:
        """Return whether :meth:`plan` can name GPUs on the requested nodes, without asking a ledger."""
        return self._of(picked_nodes(self._scope(), request.picks), ask=False)[0].names_gpus

    def allocator(
        self, *, picks: Sequence[Pick] = (), options: JobOptions = NO_OPTIONS, progress: Progress = lambda _: None
    ) -> Allocator:
        """Return the allocator for the nodes in scope; ``picks``: the GPUs that the request will name.

        Raises UsageError where nodes that the user named belong to several ledgers, NoNodeReached where a ledger cannot
        list its nodes.
        """
        scope = self._scope()
        asked = picked_nodes(scope, picks)
        ledger, covered = self._of(asked)
        if scope.explicit and (other := next((node.name for node in asked if node.name not in covered), None)):
            raise UsageError(
                f"a lease cannot combine nodes of {ledger.name} with others, here {other!r}; choose nodes of one kind "
                "with --nodes"
            )
        return ledger.allocator(scope, options=options, progress=progress)

    def plan(self, request: Request, snapshot: Snapshot) -> Choice | Refusal:
        """Return the allocation that ``snapshot`` allows, without new readings."""
        return self._of(picked_nodes(self._scope(), request.picks), ask=False)[0].plan(request, snapshot)

    def leases(self, fleet: Fleet, snapshot: Snapshot, *, fresh: bool = False) -> LeaseList:
        """Return the leases of all ledgers, those on the nodes first."""
        lists = [ledger.leases(fleet, snapshot, fresh=fresh) for ledger in reversed(self._ledgers)]
        return msgspec.structs.replace(
            lists[0],
            leases=[lease for each in lists for lease in each.leases],
            unread=[name for each in lists for name in each.unread],
            outdated=[kind for each in lists for kind in each.outdated],
        )

    def find(self, ids: Sequence[str]) -> Found:
        """Return the caller's leases. Raises NoSuchLease for an id that names none.

        ``unreached`` is set where a ledger with some of them may not answer; leases found in others are returned.
        """
        leases: list[Lease] = []
        unread: list[str] = []
        unreached: NoNodeReached | None = None
        left = list(ids)
        missing: list[dict[str, UnknownLease]] = []
        for ledger in self._ledgers:
            if ids and not left:
                break
            try:
                found = ledger.find(left)
            except NoNodeReached as error:
                unread += error.nodes
                unreached = unreached or error
                continue
            leases += found.leases
            unread += found.unread
            left = list(found.missing)
            missing.append(found.missing)
        if left and unreached is None:
            raise in_no_ledger(left[0], [of_ledger[left[0]] for of_ledger in missing])
        return Found(leases, unread=unread, unreached=unreached if left or not ids else None)

    def release(self, lease: Lease) -> Released:
        """End a lease in its ledger."""
        return self._owner(lease).release(lease)

    def renew(self, lease: Lease, for_s: float) -> Renewed:
        """Renew a lease in its ledger."""
        return self._owner(lease).renew(lease, for_s)

    def existing(self, text: str, n: int | None = None) -> Allocation:
        """Return a lease of the caller as it was allocated, or ``n`` GPUs of it."""
        unreached: NoNodeReached | None = None
        missing: list[NoSuchLease] = []
        for number, ledger in enumerate(self._ledgers, 1):
            try:
                return ledger.existing(text, n)
            except NoNodeReached as error:
                unreached = unreached or error
            except NoSuchLease as error:
                missing.append(error)
                if unreached is None and not self._beyond(self._ledgers[:number]).nodes:  # no later one has a node
                    break
        raise unreached or in_no_ledger(text, missing)

    def _of(self, nodes: Sequence[Node], *, ask: bool = True) -> tuple[Ledger, Collection[str]]:
        """Return the first ledger that covers one of ``nodes``, and the names of those that it covers."""
        for ledger in self._ledgers[:-1]:
            if covered := ledger.covers(nodes, ask=ask):
                return ledger, covered
        return self._ledgers[-1], {node.name for node in nodes}

    def _owner(self, lease: Lease) -> Ledger:
        return next(ledger for ledger in self._ledgers if ledger.kind == lease.ledger)
