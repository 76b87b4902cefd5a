"""Where the ranks of a request would run, without a reservation."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from gpuboard.errors import Refused, UsageError

if TYPE_CHECKING:
    from gpuboard.leases.ledger import Allocator, Scope
    from gpuboard.model.rankmap import RankMap
    from gpuboard.model.request import Request


class SelectedLater(UsageError):
    """Slurm selects the GPUs when the job starts."""


def planned(request: Request, allocator: Allocator, for_s: float | None = None) -> RankMap:
    """Return the map of the GPUs that would be reserved now.

    Raises Refused, NoNodeReached and SelectedLater.
    """
    from gpuboard.leases.rank_map import rank_map

    choice = allocator.plan(request, for_s)
    if not choice.gpus:
        raise SelectedLater(f"Slurm selects the GPUs when the job starts\n{choice.why}")
    return rank_map(None, choice.gpus, allocator.addresses())


def without_gpus(request: Request, scope: Scope, allocator: Allocator) -> RankMap:
    """Return a map of ranks on the CPU. They need no reservation, except on Slurm's nodes, where a job has to start."""
    from gpuboard.launch.rank_map_source import cpu_rank_map

    assert request.n is not None
    place = partial(cpu_rank_map, request.n, scope.nodes, spread=scope.explicit, per_node=request.per_node)
    found = place()
    if len(found.nodes) == 1:
        return found
    with contextlib.suppress(Refused):  # a node that cannot be read fails preflight, with its reason
        allocator.count()  # waits for the readings, which have the addresses
    return place(addresses=allocator.addresses())
