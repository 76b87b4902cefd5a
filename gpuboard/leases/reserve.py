"""Reserving in one sequence: allocate, let the owner learn of it, publish, notify; and releasing at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gpuboard.leases.terms import Terms, duration, uninterrupted
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.keeper.holder import Holder
    from gpuboard.leases.composite import CompositeLedger
    from gpuboard.leases.ledger import Allocator
    from gpuboard.leases.output.formats import Allocation
    from gpuboard.model.lease import Lease
    from gpuboard.model.request import Request

_PURPOSE_LENGTH = 200  # characters


def terms_of(for_s: float | None, holder: Holder | None, purpose: str, settings: Settings) -> Terms:
    """Return how a lease is to be held. Raises UsageError above the site's max_lease."""
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

    The block is where the owner learns of the lease; where he can use it before the block ends, it calls
    ``allocator.handing_over`` first. ``notify`` then takes what he should know of the lease.
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
    """End a lease that this process reserved, undisturbed by signals, and close the ledger; ``warn`` of failures."""
    with uninterrupted(), ledger:
        for words in ledger.release(lease).failed.values():
            warn(f"lease {lease.id}: {clean(words)}")
