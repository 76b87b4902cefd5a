"""Which ledger has a lease: Slurm for nodes that Slurm knows, claims on the nodes for all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.errors import NoNodeReached, NoSuchLease, UsageError
from gpuboard.leases.claims.allocator import Allocator
from gpuboard.leases.scope import Scope
from gpuboard.leases.terms import known_rank_map
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from gpuboard.leases.output.formats import Allocation
    from gpuboard.leases.slurm.allocator import SlurmAllocator
    from gpuboard.model.lease import Lease
    from gpuboard.model.schedule import Schedule
    from gpuboard.scheduler.base import Scheduler

    AnyAllocator: TypeAlias = Allocator | SlurmAllocator

_LOOK_S = 15.0  # for an answer that says which nodes Slurm knows


class SlurmFlags(msgspec.Struct, frozen=True):
    """What somebody said about a job of Slurm; None: nothing, the settings decide."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    more: tuple[str, ...] = ()  # further options of sbatch


NO_FLAGS = SlurmFlags()


def open_allocator(
    nodes: Sequence[Node] | Scope,
    settings: Settings,
    env: Mapping[str, str],
    *,
    scheduler: Scheduler | None,
    flags: SlurmFlags = NO_FLAGS,
    said: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> AnyAllocator:
    """Return what allocates on ``nodes``. ``scheduler``: Slurm where it is in force; is closed with the allocator.

    A Scope in place of nodes: its feeds run already, so there is no Slurm.

    Raises UsageError where it is Slurm's for some of them only and the user named them, or where ``flags`` speak of a
    Slurm that has no part in it; NoNodeReached where Slurm does not say which nodes it knows.
    """
    if scheduler is not None and not isinstance(nodes, Scope):
        try:
            if asks_slurm(nodes, scheduler, settings, said=said):
                return slurm_allocator(nodes, settings, env, scheduler, flags=flags, said=said, progress=progress)
        except BaseException:
            scheduler.close()
            raise
        scheduler.close()
    if flags != NO_FLAGS:
        raise UsageError(
            "--partition, --account, --qos, --reservation and --slurm are for nodes of Slurm, and these are reserved "
            "without it; `gpuboard config` shows `scheduler`"
        )
    return Allocator(nodes, settings, env, said=said, progress=progress)


def slurm_allocator(
    nodes: Sequence[Node],
    settings: Settings,
    env: Mapping[str, str],
    scheduler: Scheduler,
    *,
    flags: SlurmFlags = NO_FLAGS,
    said: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> SlurmAllocator:
    """Return what allocates through Slurm. Raises UsageError for flags that cannot be."""
    from gpuboard.leases.slurm.allocator import SlurmAllocator  # late: only where there is a Slurm
    from gpuboard.scheduler.slurm.sbatch_args import ask

    asked = ask(settings.slurm, **msgspec.structs.asdict(flags))
    return SlurmAllocator(nodes, settings, env, scheduler=scheduler, asked=asked, said=said, progress=progress)


def without_slurm(nodes: Sequence[Node], scheduler: Scheduler, settings: Settings) -> list[Node]:
    """Return those of ``nodes`` on which leases lie as claims. Raises NoNodeReached where Slurm does not answer."""
    if any(node.simulate is not None or node.job is not None for node in nodes):
        return list(nodes)  # simulated, or of the job that we are in: there claims tell several launches apart
    from gpuboard.cluster.inventory.ssh_aliases import scheduler_names  # only where there is a Slurm

    known = scheduler_names(nodes, _schedule(scheduler), settings)
    return [node for node in nodes if node.name not in known]


def asks_slurm(nodes: Sequence[Node], scheduler: Scheduler, settings: Settings, *, said: bool) -> bool:
    """Tell whether ``nodes`` are had through Slurm. Raises UsageError and NoNodeReached, as :func:`open_allocator`."""
    strangers = [node.name for node in without_slurm(nodes, scheduler, settings)]
    if strangers and said and len(strangers) < len(nodes):
        raise UsageError(
            f"Slurm has no node {strangers[0]!r}, but others of these; a lease is through Slurm or without it: "
            "name the ones or the others with --nodes"
        )
    return len(strangers) < len(nodes)


def _schedule(scheduler: Scheduler) -> Schedule:
    """Return what Slurm holds, as far as it can be known. Raises NoNodeReached."""
    seen = scheduler.look(_LOOK_S)
    if seen.schedule is None:
        raise NoNodeReached(
            f"Slurm gives no answer: {clean(seen.error or 'none at all', 400)}; "
            'without Slurm: scheduler = "none" in the config, or GPUBOARD_SCHEDULER=none'
        )
    return seen.schedule


def nodes_of(lease: Lease, nodes: Sequence[Node]) -> list[Node]:
    """Return how the nodes of a lease are reached: through its job, else as those of ``nodes`` that it covers."""
    if lease.job is not None:
        return [Node(name, name, job=lease.job) for name in lease.nodes]
    return [node for node in nodes if node.name in lease.nodes]


class Ledgers(msgspec.Struct, frozen=True):
    """Where a lease there is may lie. ``nodes``: those in scope; ``scheduler``: Slurm where it is in force."""

    nodes: Callable[[], Sequence[Node]]
    settings: Settings
    env: Mapping[str, str]
    scheduler: Callable[[], Scheduler | None]

    def release(self, lease: Lease) -> list[str]:
        """End a lease that was taken here; return why not where that failed.

        Over a fresh connection: the first one may have been cut in the days of a run, and cost its nodes an agent.
        """
        with self._of(lease) as allocator:
            return allocator.release(lease)

    def renew(self, lease: Lease, for_s: float) -> None:
        """Let a lease that was taken here end ``for_s`` from now. Raises GpuboardError."""
        with self._of(lease) as allocator:
            allocator.renew(lease, for_s)

    def existing(self, text: str, n: int | None = None) -> Allocation:
        """Return a lease of ours as it was allocated, or ``n`` GPUs of it: a job of Slurm's, else claims on the nodes.

        Raises NoSuchLease and the like.
        """
        scheduler = self.scheduler()
        if scheduler is not None and not self._may_be_job(text):
            scheduler.close()
            scheduler = None
        if scheduler is None:
            found = self.nodes()
        else:
            with slurm_allocator([], self.settings, self.env, scheduler) as through:
                try:
                    return through.existing(text, n)
                except NoSuchLease:
                    found = self.nodes()
                    # where all are Slurm's there are no claims to look for, nor may ssh go there
                    if asks_slurm(found, scheduler, self.settings, said=False):
                        raise
        with Allocator(found, self.settings, self.env, said=True) as allocator:
            return allocator.existing(text, n)

    def _may_be_job(self, text: str) -> bool:
        """Tell whether a lease may be a job. Inside a job nearly none is, and Slurm need not answer there."""
        if not self.env.get("SLURM_JOB_ID") or not any(node.job is not None for node in self.nodes()):
            return True
        known = known_rank_map(self.env, text)
        return known is not None and known.job is not None

    def _of(self, lease: Lease) -> AnyAllocator:
        scheduler = self.scheduler() if lease.job is not None else None
        if scheduler is not None:
            return slurm_allocator([], self.settings, self.env, scheduler)
        return Allocator(nodes_of(lease, self.nodes()), self.settings, self.env, said=True)
