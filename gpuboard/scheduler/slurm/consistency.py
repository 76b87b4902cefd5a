"""Jobs, nodes and reservations → one Schedule, held against each other. Pure.

The jobs are asked for before the nodes, so what a node says is used is the newer truth: what jobs hold beyond it has
been given back meanwhile, or was never theirs (snapshot/scheduler_jobs.py, *Forgery*). Either way `squeue` can tell.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from gpuboard import nodesets
from gpuboard.model.schedule import Grant, Gres, Schedule, SchedulerJob, SchedulerNode
from gpuboard.scheduler.slurm.jobs import Piece, TrueJob
from gpuboard.scheduler.slurm.nodes import Reservation

_RESERVED = frozenset({"reserved", "maint", "maintenance"})


def contradictions(pieces: Sequence[Piece], nodes: Mapping[str, SchedulerNode]) -> list[str]:
    """Return where jobs cannot be what they say, in words; then `squeue` is worth its cost. Empty: nowhere."""
    found: list[str] = []
    seen: set[int] = set()
    for piece in pieces:
        if not piece.clear:
            found.append(f"the text of job {piece.id or '?'} imitates Slurm's own")
        if piece.number in seen:
            found.append(f"job {piece.number} is there more than once")
        seen.add(piece.number)
    by_node: dict[str, list[tuple[SchedulerJob, Grant]]] = {}
    for job in [piece.job for piece in pieces if piece.job is not None]:
        for grant in job.grants:
            by_node.setdefault(grant.node, []).append((job, grant))
    for name, grants in by_node.items():
        node = nodes.get(name)
        words = _clash(node, grants) if node is not None else f"a job runs on {name}, which is no node"
        if words:
            found.append(words)
    return found


def _clash(node: SchedulerNode, grants: Sequence[tuple[SchedulerJob, Grant]]) -> str:
    """Return why jobs cannot all hold what they say on a node, "" where they can."""
    used = {index for gres in node.used for index in gres.indexes or ()}
    told = bool(node.used) and all(gres.indexes is not None for gres in node.used)
    holders: dict[int, str] = {}
    count = 0
    for job, grant in grants:
        for gres in grant.gpus:
            count += gres.count
            for index in gres.indexes or ():
                if index in holders:
                    return f"GPU {index} of {node.name} is held by job {holders[index]} and by job {job.id}"
                if told and index not in used:
                    return f"GPU {index} of {node.name} is held by job {job.id} and not in use"
                holders[index] = job.id
    if node.used and not told and count > _count(node.used):
        return f"jobs hold {count} GPUs of {node.name}, of which {_count(node.used)} are in use"
    return ""


def corrected(
    pieces: Sequence[Piece], truth: Mapping[int, TrueJob], nodes: Mapping[str, SchedulerNode]
) -> tuple[list[SchedulerJob], list[str]]:
    """Return the jobs as far as `squeue` bears them out, and notes on those that it does not.

    Who and where is true of every job. Which GPUs one holds is not told, and shows as GPUs in use by nobody known,
    where its piece can be read in two ways, says what is not so, or is one of several of a number. Whoever may have
    written such a piece, the owner of the sure one before it or of its number, is not believed either where it matters:
    on a node of a job of which nothing is told, and about GPUs that another job claims or that are not in use.
    """
    records = Counter(piece.number for piece in pieces if piece.whole)
    found: dict[int, SchedulerJob] = {}
    unclear: dict[int, str] = {}
    suspects: dict[int, str] = {}
    sure: Piece | None = None
    for piece in pieces:
        true = truth.get(piece.number)
        known = piece.job is None or _bears_out(true, piece.job)
        if piece.clear and known and records[piece.number] == 1:
            if true is not None:
                sure = piece
                if piece.job is not None and not true.ended:
                    found[piece.number] = piece.job
            continue
        if sure is not None:
            suspects[sure.number] = sure.id
        unclear[piece.number] = piece.id
    unclear = {number: shown for number, shown in unclear.items() if number in truth}
    uids = {truth[number].uid for number in suspects | unclear}
    # a number in somebody's text is not yet a record, and its owner is not the first to ask
    unclear = {number: shown for number, shown in unclear.items() if number not in found}
    suspects |= unclear
    unclear = {number: shown for number, shown in unclear.items() if not truth[number].ended}
    for number, shown in unclear.items():
        found[number] = _without_gpus(truth[number], number, shown)
    while doubted := [job for job in _doubted(found.values(), nodes) if job.uid in uids]:
        for job in doubted:
            unclear[job.number] = job.id
            found[job.number] = _without_gpus(truth[job.number], job.number, job.id)
    notes: list[str] = []
    if suspects:
        who = ", ".join(f"{shown} of {truth[number].user}" for number, shown in sorted(suspects.items()))
        notes.append(f"the text of one of these jobs imitates Slurm's own: {who}")
    if unclear:
        notes.append(f"which GPUs is not told of job {', '.join(shown for _, shown in sorted(unclear.items()))}")
    return [job for _, job in sorted(found.items()) if job.grants], notes


def _doubted(jobs: Collection[SchedulerJob], nodes: Mapping[str, SchedulerNode]) -> list[SchedulerJob]:
    """Return the jobs with GPUs that others claim, that are not in use, or on a node of a job that tells nothing."""
    untold = {grant.node for job in jobs for grant in job.grants if not grant.gpus and not grant.shards}
    held: dict[tuple[str, int], list[SchedulerJob]] = {}
    found: list[SchedulerJob] = []
    for job in jobs:
        for grant in job.grants:
            for index in [index for gres in grant.gpus for index in gres.indexes or ()]:
                held.setdefault((grant.node, index), []).append(job)
            if grant.gpus and grant.node in untold:
                found.append(job)
    for (name, index), holders in held.items():
        used = nodes[name].used if name in nodes else ()
        told = bool(used) and all(gres.indexes is not None for gres in used)
        if len(holders) > 1 or (told and not any(index in (gres.indexes or ()) for gres in used)):
            found += holders
    return found


def _without_gpus(true: TrueJob, number: int, shown: str) -> SchedulerJob:
    return SchedulerJob(
        id=shown,
        number=number,
        user=true.user,
        uid=true.uid,
        name="",
        partition=true.partition,
        state=true.state,
        grants=tuple(Grant(name) for name in true.nodes),
        started=true.started,
        until=true.until,
    )


def _bears_out(true: TrueJob | None, job: SchedulerJob) -> bool:
    """Tell whether a job is what `squeue` says of it. One that is ending leaves its nodes one by one."""
    if true is None or true.uid != job.uid:
        return False
    return true.ended or "completing" in {job.state, true.state} or {g.node for g in job.grants} <= set(true.nodes)


def visited(
    pieces: Sequence[Piece], jobs: Iterable[SchedulerJob], truth: Mapping[int, TrueJob], uid: int
) -> dict[str, tuple[int, ...]]:
    """Return where running jobs of ``uid`` hold no GPU: node → their numbers.

    ``truth``: what `squeue` says; empty where it was not asked. Then a text of somebody's can pass for such a job, and
    all that comes of it is a login that is refused.
    """
    where: dict[int, tuple[str, ...]] = {}
    if truth:
        where = {number: true.nodes for number, true in truth.items() if true.uid == uid and true.state == "running"}
    else:
        for piece in pieces:
            if piece.runs is not None and piece.runs.uid == uid:
                with contextlib.suppress(ValueError):  # on no node
                    where[piece.number] = nodesets.listed(piece.runs.nodes)
    holds = {(job.number, grant.node) for job in jobs for grant in job.grants}
    found: dict[str, tuple[int, ...]] = {}
    for number, names in sorted(where.items()):
        for name in names:
            if (number, name) not in holds:
                found[name] = (*found.get(name, ()), number)
    return found


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
        untold = [gres for gres in node.used_shards if gres.indexes is None]
        if untold and not node.doubt and _count(untold) > shards.get(name, 0):
            doubt = "shards of its GPUs are given to jobs that Slurm does not show you; of which GPUs is not told"
            found[name] = replace(found[name], doubt=doubt)
    return found


def _count(gpus: Iterable[Gres]) -> int:
    return sum(gres.count for gres in gpus)
