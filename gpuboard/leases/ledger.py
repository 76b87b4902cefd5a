"""The interface of a ledger, the record of who reserved which GPUs. Imports little: on allocate's measured path.

Claims on the nodes and Slurm's jobs are ledgers; commands, the board and the Python interface use
:mod:`gpuboard.leases.composite`, which combines those in use. A ledger is short-lived: it opens connections on demand,
in the one thread that uses it, and :meth:`Ledger.close` closes them. Thread-safe and without I/O are
:meth:`Allocator.abandon` and what the board calls every second: ``covers(ask=False)``, ``Ledger.plan``, ``names_gpus``
and ``leases(fresh=False)``. tests/integration/test_ledger_conformance.py states what a ledger must do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from gpuboard.errors import GpuboardError, NoNodeReached, NoSuchLease

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.leases.output.formats import Allocation
    from gpuboard.leases.terms import Terms
    from gpuboard.model.lease import Lease, LeaseGpu, LeaseList
    from gpuboard.model.request import Choice, Pick, Refusal, Request
    from gpuboard.model.snapshot import Snapshot

Progress = Callable[[str], None]  # receives one line of progress; "" removes it


class Scope(msgspec.Struct, frozen=True):
    """The nodes on which a command may reserve GPUs or change leases.

    ``explicit``: the user named them (or is inside a Slurm job); otherwise a command that runs on one of them reserves
    on that node only. ``job``: the Slurm job that the command runs in.
    """

    nodes: tuple[Node, ...]
    explicit: bool = True
    job: str | None = None


class JobOptions(msgspec.Struct, frozen=True):
    """Options of a scheduler's job; None: the settings decide."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    more: tuple[str, ...] = ()  # further options of sbatch


NO_OPTIONS = JobOptions()


class UnknownLease(NoSuchLease):
    """An id that names none of the caller's leases, ``own``, unless it is on one of the nodes ``unread``: code 1."""

    def __init__(self, text: str, own: Collection[str] = (), unread: Sequence[str] = ()) -> None:
        yours = f"yours are: {', '.join(sorted(own))}" if own else "you have no leases"
        maybe = f"; it may be on a node whose leases could not be read: {', '.join(unread)}" if unread else ""
        super().__init__(f"no lease {text!r}; {yours}{maybe}")
        self.own = own
        self.unread = unread
        if unread:
            self.exit_code = GpuboardError.exit_code


class AmbiguousLease(NoSuchLease):
    """A prefix of several leases of the caller."""


class Found(msgspec.Struct, frozen=True):
    """The caller's leases that match ids, and what could not be determined."""

    leases: list[Lease]
    missing: dict[str, UnknownLease] = {}  # by id that names no lease in this ledger: the error
    unread: list[str] = []  # nodes whose leases could not be read: the caller may have some there
    unreached: NoNodeReached | None = None  # the error of a ledger that did not answer


class Released(msgspec.Struct, frozen=True):
    """A lease that was released: its GPUs; by node (or scheduler) where that failed, why, and when it expires there."""

    lease: str
    gpus: list[LeaseGpu]
    failed: dict[str, str]


class Renewed(msgspec.Struct, frozen=True):
    """The nodes (or the scheduler) where a lease was renewed; by node where that failed, why."""

    nodes: list[str]
    failed: dict[str, str]
    for_s: float = 0.0  # until its new end, which may be later than requested: Slurm counts in minutes


class Allocator(Protocol):
    """Reserves one lease. A context manager: it closes connections, and releases a lease that was not published."""

    notes: list[str]  # messages for the user about the lease

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def count(self) -> int:
        """Return the number of GPUs in scope, in any state.

        Raises NoNodeReached, Refused where there are none, UsageError where the ledger cannot count them.
        """

    def plan(self, request: Request, for_s: float | None = None) -> Choice:
        """Return what would be reserved now, with the expected start where it is known; reserves nothing.

        ``gpus`` is empty where the ledger chooses them. Raises Refused, UsageError, NoNodeReached.
        """

    def allocate(self, request: Request, terms: Terms, wait_s: float | None = None) -> Allocation:
        """Reserve all of ``request`` or nothing. From then on the keeper sends heartbeats for the lease.

        ``wait_s``: how long to wait until it is free (inf: no limit), None: not at all. Raises UsageError, Refused,
        NoNodeReached, KeeperError, Interrupted; after any exception nothing outlives the ``with`` block.
        """

    def handing_over(self, lease: Lease) -> None:
        """Confirm the lease: from now on it ends with its holder and no longer with this process.

        Called before the owner can read it, so that a kill in between does not end a lease in use. Raises KeeperError.
        """

    def published(self, lease: Lease) -> None:
        """The owner has the lease: an exception in the ``with`` block no longer releases it. Raises KeeperError."""

    def abandon(self) -> None:
        """Cancel ``allocate``, which raises Interrupted at its next step. Thread-safe; does not wait."""

    def addresses(self) -> dict[str, str]:
        """Return the address of each node in scope for the other nodes, as far as they were read."""


class Ledger(Protocol):
    """Records leases. All its methods block; see the module's docstring."""

    kind: str  # of each of its leases, `Lease.ledger`; differs between ledgers: "slurm"
    name: str  # in messages: "Slurm"
    names_gpus: bool  # whether :meth:`plan` names the GPUs; otherwise the ledger chooses them at the start

    def close(self) -> None:
        """Close all connections; leases stay."""

    def covers(self, nodes: Sequence[Node], *, ask: bool = True) -> Collection[str]:
        """Return the names of those ``nodes`` whose GPUs are reserved in this ledger. Raises NoNodeReached.

        Of several ledgers the first that covers a node has it. ``ask`` False: only from what is already known, without
        waiting.
        """

    def allocator(self, scope: Scope, *, options: JobOptions, progress: Progress) -> Allocator:
        """Return the allocator for the nodes of ``scope`` that this ledger covers. Raises UsageError."""

    def plan(self, request: Request, snapshot: Snapshot) -> Choice | Refusal:
        """Return the allocation that ``snapshot`` allows, or a refusal, without new readings. Raises UsageError."""

    def leases(self, fleet: Fleet, snapshot: Snapshot, *, fresh: bool = False) -> LeaseList:
        """Return all users' leases in the newest readings. ``fresh``: query the caller's own again."""

    def find(self, ids: Sequence[str]) -> Found:
        """Return the caller's leases with these ids or unique prefixes of ids; without ``ids`` all of them.

        Root may name any lease. Raises NoSuchLease for another user's lease or an ambiguous prefix; NoNodeReached.
        """

    def release(self, lease: Lease) -> Released:
        """End a lease of any ledger object at once; success also if it has already ended."""

    def renew(self, lease: Lease, for_s: float) -> Renewed:
        """Make a lease end ``for_s`` seconds from now. Raises NoSuchLease where root may not: claims of others."""

    def existing(self, text: str, n: int | None = None) -> Allocation:
        """Return a lease of the caller as it was allocated, or ``n`` GPUs of it. Raises NoSuchLease, Refused."""


def matching(text: str, own: Collection[str]) -> str | None:
    """Return the id in ``own`` that equals ``text``, or the only one with that prefix. Raises AmbiguousLease.

    >>> matching("k3", ["k3f9", "m2"])
    'k3f9'
    """
    if text in own:
        return text
    starting = sorted(lease for lease in own if text and lease.startswith(text))
    if len(starting) > 1:
        raise AmbiguousLease(
            f"{text!r} is ambiguous: it matches your leases {', '.join(starting)}; write more characters"
        )
    return starting[0] if starting else None


def in_no_ledger(text: str, errors: Sequence[NoSuchLease]) -> NoSuchLease:
    """Return the error for an id that no ledger has, from the error of each."""
    unknown = [error for error in errors if isinstance(error, UnknownLease)]
    own = [lease for error in unknown for lease in error.own]
    unread = [node for error in unknown for node in error.unread]
    return next((error for error in errors if error not in unknown), UnknownLease(text, own, unread))


def not_yours(text: str, owners: Collection[str]) -> NoSuchLease:
    """Return the error for an id that names a lease of ``owners``."""
    owner = ", ".join(sorted(owners))
    return NoSuchLease(f"lease {text} belongs to {owner}; others cannot use or renew it, and only root can end it")


def picked_nodes(scope: Scope, picks: Sequence[Pick]) -> list[Node]:
    """Return the nodes that ``picks`` name, all in scope where one of them names no node."""
    names = {pick.node for pick in picks}
    if not names or None in names:
        return list(scope.nodes)
    return [node for node in scope.nodes if node.name in names] or list(scope.nodes)
