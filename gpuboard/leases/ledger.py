"""The seam between gpuboard and a ledger: what records who reserved which GPUs. Imports little: `allocate` starts here.

Claims on the nodes and Slurm's jobs are ledgers; :mod:`gpuboard.leases.composite` is made of all that are in force, and
is what every command, the board and the Python interface hold. A ledger is short-lived: it opens connections when it
needs them and closes them with its ``with`` block, from one thread; :meth:`Allocator.abandon` alone may be called from
any thread. tests/integration/test_ledger_conformance.py states what a ledger must do.
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

Progress = Callable[[str], None]  # is called with one line about what is waited for; "" removes it


class Scope(msgspec.Struct, frozen=True):
    """The nodes whose GPUs a command may take or change.

    ``explicit``: the user named them (or is inside a Slurm job); else a command that runs on one of them takes that
    node's GPUs alone. ``job``: the Slurm job that the command runs in.
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


class Found(msgspec.Struct, frozen=True):
    """The caller's leases that ids name, and what could not be found out."""

    leases: list[Lease]
    missing: dict[str, GpuboardError] = {}  # ids that name no lease in this ledger, and the error that this would be
    unread: list[str] = []  # nodes that gave no reading: leases of the caller may lie there
    unreached: NoNodeReached | None = None  # a ledger that could not be asked


class Released(msgspec.Struct, frozen=True):
    """A lease that was ended: the GPUs that were released; by node, elsewhere, why not and when it expires there."""

    lease: str
    gpus: list[LeaseGpu]
    failed: dict[str, str]


class Renewed(msgspec.Struct, frozen=True):
    """The nodes on which a lease was renewed; by node, elsewhere, why not."""

    nodes: list[str]
    failed: dict[str, str]


class Allocator(Protocol):
    """Makes one lease. A context manager: connections end with it, and a lease that was not published is released."""

    notes: list[str]  # what the user should know of the lease that was made

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def count(self) -> int:
        """Return how many GPUs there are in scope, whatever their state.

        Raises NoNodeReached, Refused where there are none, UsageError where the ledger does not choose by node.
        """

    def plan(self, request: Request, for_s: float | None = None) -> Choice:
        """Return what would be taken now, with the expected start where the ledger knows one; takes nothing.

        ``gpus`` is empty where the ledger itself chooses them. Raises Refused, UsageError, NoNodeReached.
        """

    def allocate(self, request: Request, terms: Terms, wait_s: float | None = None) -> Allocation:
        """Reserve what ``request`` asks for: all of it or nothing. The keeper sends heartbeats for it from then on.

        ``wait_s``: how long to wait until it is free (inf: no limit), None: not at all. Raises UsageError, Refused,
        NoNodeReached, KeeperError, Interrupted; whatever is raised, nothing outlives the ``with`` block.
        """

    def handing_over(self, lease: Lease) -> None:
        """The owner is about to learn of the lease: from now on it lives with its holder, not with this process.

        Called before the owner can read it, so that a kill in between does not end a lease that is in use.
        Raises KeeperError.
        """

    def published(self, lease: Lease) -> None:
        """The owner knows of the lease: an exception in the ``with`` block no longer releases it.

        Raises KeeperError.
        """

    def abandon(self) -> None:
        """Give up, from any thread, without waiting: ``allocate`` raises Interrupted at its next step."""

    def addresses(self) -> dict[str, str]:
        """Return at which address the other nodes reach each node in scope, as far as they were read."""


class Ledger(Protocol):
    """Records leases. All its methods block; see the module's docstring."""

    name: str  # as messages call it: "Slurm"
    names_gpus: bool  # whether :meth:`plan` names the GPUs; else the ledger chooses them when it starts a lease

    def close(self) -> None:
        """Close all connections; leases stay."""

    def covers(self, nodes: Sequence[Node], *, ask: bool = True) -> Collection[str]:
        """Return the names of those ``nodes`` whose GPUs are reserved in this ledger. Raises NoNodeReached.

        ``ask`` False: from what is known already, without waiting.
        """

    def owns(self, lease: Lease) -> bool:
        """Return whether a lease is recorded in this ledger."""

    def allocator(self, scope: Scope, *, options: JobOptions, progress: Progress) -> Allocator:
        """Return what reserves on the nodes of ``scope``. Raises UsageError for options it cannot have."""

    def plan(self, request: Request, snapshot: Snapshot) -> Choice | Refusal:
        """Return what would be taken in ``snapshot``, or why nothing, from what is read already. Raises UsageError."""

    def leases(self, fleet: Fleet, snapshot: Snapshot, *, fresh: bool = False) -> LeaseList:
        """Return everybody's leases in the newest readings. ``fresh``: ask the ledger for those of the caller again."""

    def find(self, ids: Sequence[str]) -> Found:
        """Return the caller's leases that ``ids`` name by id or its start; without ids all of them. Root may name any.

        Raises NoSuchLease for an id that is somebody else's or starts several; NoNodeReached.
        """

    def release(self, lease: Lease) -> Released:
        """End a lease at once. One that has ended already is released."""

    def renew(self, lease: Lease, for_s: float) -> Renewed:
        """Make a lease end ``for_s`` seconds from now."""

    def existing(self, text: str, n: int | None = None) -> Allocation:
        """Return a lease of the caller as it was allocated, or ``n`` GPUs of it. Raises NoSuchLease, Refused."""


def matching(text: str, own: Collection[str]) -> str | None:
    """Return the id in ``own`` that is ``text``, or the only one that starts with it. Raises NoSuchLease for several.

    >>> matching("k3", ["k3f9", "m2"])
    'k3f9'
    """
    if text in own:
        return text
    starting = sorted(lease for lease in own if text and lease.startswith(text))
    if len(starting) > 1:
        raise NoSuchLease(f"{text!r} is the start of several leases of yours: {', '.join(starting)}; write more of it")
    return starting[0] if starting else None


def no_such_lease(text: str, own: Collection[str]) -> NoSuchLease:
    """Return the error for an id that names none of the caller's leases, ``own``."""
    yours = f"yours are: {', '.join(sorted(own))}" if own else "you have none"
    return NoSuchLease(f"no lease {text!r}; {yours}")


def not_yours(text: str, owners: Collection[str]) -> NoSuchLease:
    """Return the error for an id that names a lease of ``owners``."""
    owner = ", ".join(sorted(owners))
    return NoSuchLease(f"lease {text} belongs to {owner}; only its owner, or root, can end or change it")


def picked_nodes(scope: Scope, picks: Sequence[Pick]) -> list[Node]:
    """Return the nodes that ``picks`` name, all in scope where one of them names no node."""
    names = {pick.node for pick in picks}
    if not names or None in names:
        return list(scope.nodes)
    return [node for node in scope.nodes if node.name in names] or list(scope.nodes)
