"""Which leases a person means by ids: jobs of Slurm, and claims on those nodes that are not Slurm's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpuboard.cli.context import Context
from gpuboard.errors import NoSuchLease

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.leases.slurm.queries import JobLease
    from gpuboard.scheduler.slurm.client import Jobs

SLURM = "Slurm"  # where a lease lies that is a job, in place of a node


class Owned(NamedTuple):
    """What ids mean."""

    jobs: Jobs | None  # Slurm's commands, where there is a Slurm
    in_slurm: list[JobLease]
    nodes: list[Node]  # on which the claims of the others lie; none: there are no others


def owned(ids: Sequence[str], context: Context) -> tuple[Owned, list[str]]:
    """Return what ``ids`` mean (without any: all of ours), and those of them that are no jobs of Slurm.

    Raises NoSuchLease where one is nothing at all, NoNodeReached where Slurm does not answer.
    """
    scheduler = context.lease_scheduler()
    if scheduler is None:
        return Owned(None, [], context.scope()), list(ids)
    from gpuboard.leases.composite import without_slurm  # only where there is a Slurm
    from gpuboard.leases.slurm.queries import chosen
    from gpuboard.scheduler.slurm.client import Jobs

    try:
        jobs = Jobs(context.env)
        in_slurm, rest = chosen(ids, jobs, context.env)
        nodes = without_slurm(context.scope(), scheduler, context.settings) if rest or not ids else []
    finally:
        scheduler.close()
    if rest and not nodes:
        raise NoSuchLease(f"no lease {rest[0]!r} in Slurm; `gpuboard leases` lists yours")
    return Owned(jobs, in_slurm, nodes), rest
