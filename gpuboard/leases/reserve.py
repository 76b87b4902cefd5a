"""Reserve in one sequence: allocate, hand over to the owner, publish, notify; and release at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gpuboard.keeper.holder import Holder
from gpuboard.leases.terms import Terms, duration, uninterrupted
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.leases.composite import CompositeLedger
    from gpuboard.leases.ledger import Allocator
    from gpuboard.leases.output.formats import Allocation
    from gpuboard.model.lease import Lease
    from gpuboard.model.request import Request

_PURPOSE_LENGTH = 200  # characters


def terms_of(for_s: float | None, holder: Holder | None, purpose: str, settings: Settings) -> Terms:
    """Return the terms of a lease. Raises UsageError above the site's max_lease."""
    duration(for_s, settings)
    return Terms(for_s, holder, clean(purpose, _PURPOSE_LENGTH))


@contextlib.contextmanager
def reserve(
    allocator: Allocator,
    request: Request,
    terms: Terms,
    *,
    wait_s: float | None = None,
    notify: Callable[[str], None],
) -> Iterator[Allocation]:
    """Reserve, and publish the lease when the block ends without an exception; otherwise nothing stays reserved.

    The block hands the lease to the owner; where the owner can use it before the block ends, the block first calls
    ``allocator.handing_over``. ``notify`` receives the messages about the lease afterwards.
    Raises what :meth:`Allocator.allocate <gpuboard.leases.ledger.Allocator.allocate>` raises.

    >>> with ledger.allocator() as allocator, reserve(allocator, request, terms, notify=print) as allocation:
    ...     print(allocation.lease.id)  # doctest: +SKIP
    """
    allocation = allocator.allocate(request, terms, wait_s)
    yield allocation
    allocator.published(allocation.lease)
    for note in allocator.notes:
        notify(clean(note, 1000))


def release_own(ledger: CompositeLedger, lease: Lease, warn: Callable[[str], None]) -> None:
    """Release a lease of this process, ignoring signals, and close the ledger; ``warn`` receives the failures."""
    with uninterrupted(), ledger:
        for failure in ledger.release(lease).failed.values():
            warn(f"lease {lease.id}: {clean(failure)}")
