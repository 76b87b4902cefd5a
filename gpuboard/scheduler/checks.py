"""Jobs, nodes and reservations → one Schedule, held against each other. Pure.

The jobs are asked for before the nodes, so what a node says is used is the newer truth: what jobs hold beyond it has
been given back meanwhile, or was never theirs (jobs.py, *Forgery*). Either way `squeue` can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from gpuboard.model.schedule import Grant, Gres, Schedule, SchedulerJob, SchedulerNode
from gpuboard.scheduler.jobs import Jobs, TrueJob
from gpuboard.scheduler.nodes import Reservation

_RESERVED = frozenset({"reserved", "maint", "maintenance"})
_NAMED = 5  # jobs that one note names


def contradictions(jobs: Jobs, nodes: Mapping[str, SchedulerNode]) -> list[str]:
    """Return where jobs cannot be what they say, in words; then `squeue` is worth its cost. Empty: nothing."""
    found: list[str] = []
    if jobs.ambiguous:
        found.append(f"the text of job {_named(jobs.ambiguous.values())} imitates Slurm's own")
    if jobs.broken:
        found.append("there are pieces of text that are no job")
    twice = _twice(jobs)
    if twice:
        found.append(f"job {_named(map(str, twice))} is there more than once")
    holders: dict[str, list[tuple[SchedulerJob, Grant]]] = {}
    for job in jobs.held:
        for grant in job.grants:
            holders.setdefault(grant.node, []).append((job, grant))
    for name, held in holders.items():
        node = nodes.get(name)
        if node is None:
            found.append(f"job {_named(job.id for job, _ in held)} holds GPUs on {name}, which is no node")
        elif words := _contradiction(node, held):
            found.append(f"{name}: {words}")
    return found


def _twice(jobs: Jobs) -> list[int]:
    seen: set[int] = set()
    twice: set[int] = set()
    for number in (*(job.number for job in jobs.held), *jobs.ambiguous, *jobs.others):
        (twice if number in seen else seen).add(number)
    return sorted(twice)


def _contradiction(node: SchedulerNode, held: Sequence[tuple[SchedulerJob, Grant]]) -> str:
    """Return what does not fit between a node and its jobs, "" where all fits."""
    holder: dict[int, SchedulerJob] = {}
    count = 0
    for job, grant in held:
        for gres in grant.gpus:
            count += gres.count
            for index in gres.indexes or ():
                other = holder.setdefault(index, job)
                # a suspended job keeps its GPUs; with gang scheduling another one has them meanwhile
                if other is not job and "suspended" not in {other.state, job.state}:
                    return f"GPU {index} is held by job {other.id} and by job {job.id}"
                if "suspended" in {other.state, job.state} and other is not job:
                    count -= 1
    used = {index for gres in node.used for index in gres.indexes or ()}
    if all(gres.indexes is not None for gres in node.used):
        beyond = sorted(index for index in holder if index not in used)
        return f"GPU {beyond[0]} is held by job {holder[beyond[0]].id} and is not in use" if beyond else ""
    if count > _count(node.used):
        return f"{_named(job.id for job, _ in held)} hold {count} GPUs of which {_count(node.used)} are in use"
    return ""


def corrected(jobs: Jobs, truth: Mapping[int, TrueJob]) -> tuple[list[SchedulerJob], list[str]]:
    """Return the jobs as far as `squeue` bears them out, and notes on those that it does not.

    Of one that is there twice, or in a text that can be read in two ways, who and where it is true; which GPUs it
    holds is not told, and shows as GPUs in use by nobody known.
    """
    twice = set(_twice(jobs))
    found: list[SchedulerJob] = []
    notes: list[str] = []
    for job in jobs.held:
        true = truth.get(job.number)
        if true is None or true.uid != job.uid or job.number in twice:
            continue
        grants = tuple(grant for grant in job.grants if grant.node in true.nodes)
        if grants:
            found.append(replace(job, grants=grants))
    unclear = {number: str(number) for number in twice} | jobs.ambiguous
    for number, shown in sorted(unclear.items()):
        true = truth.get(number)
        if true is None or not true.nodes:
            continue
        notes.append(
            f"which GPUs job {shown} of {true.user} holds is not told: a job's text imitates Slurm's own output"
        )
        grants = tuple(Grant(name) for name in true.nodes)
        ends = true.started, true.until
        found.append(SchedulerJob(shown, number, true.user, true.uid, "", true.partition, true.state, grants, *ends))
    return found, notes


def is_reserved(nodes: Mapping[str, SchedulerNode]) -> bool:
    """Tell whether it takes a question about reservations to know which ones are in force on these nodes."""
    return any(not node.reservation and _RESERVED & node.flags for node in nodes.values())


def reserved_before(before: Schedule | None, nodes: Mapping[str, SchedulerNode]) -> list[Reservation]:
    """Return what an earlier answer said of reservations, as far as it may still be so."""
    old = before.nodes if before is not None else {}
    return [
        Reservation(old[name].reservation, (name,))
        for name, node in nodes.items()
        if _RESERVED & node.flags and name in old and old[name].reservation
    ]


def joined(
    jobs: Iterable[SchedulerJob], nodes: Mapping[str, SchedulerNode], reservations: Iterable[Reservation]
) -> dict[str, SchedulerNode]:
    """Return the nodes with the names of their reservations and with the doubts that only jobs can raise."""
    found = dict(nodes)
    names: dict[str, list[str]] = {}
    for reservation in reservations:
        for name in reservation.nodes:
            names.setdefault(name, []).append(reservation.name)
    for name, listed in names.items():
        if name in found and not found[name].reservation:
            found[name] = replace(found[name], reservation=",".join(listed))
    shards: dict[str, int] = {}
    for job in jobs:
        for grant in job.grants:
            if grant.shards:
                shards[grant.node] = shards.get(grant.node, 0) + _count(grant.shards)
            if grant.node not in found:
                doubt = f"job {job.id} runs there, yet Slurm does not list the node"
                found[grant.node] = SchedulerNode(grant.node, grant.node, "", "unknown", doubt=doubt)
    for name, node in nodes.items():
        hidden = node.shards_used - shards.get(name, 0)
        if hidden > 0 and not node.doubt:
            doubt = (
                f"{hidden} shards of its GPUs are given to jobs that Slurm does not show you; of which GPUs is not told"
            )
            found[name] = replace(found[name], doubt=doubt)
    return found


def _count(gpus: Iterable[Gres]) -> int:
    return sum(gres.count for gres in gpus)


def _named(ids: Iterable[str]) -> str:
    names = list(dict.fromkeys(ids))
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
