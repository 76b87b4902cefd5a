"""Checks jobs, nodes and reservations against each other and joins them. Pure.

Jobs are queried before nodes, so a node's list of GPUs in use is newer. A GPU that a job holds beyond that list was
released meanwhile, or the job's text is forged (jobs.py, *Forgery*). `squeue` decides.
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
    """Return contradictions between jobs and nodes; if there are any, `squeue` is worth its cost."""
    found: list[str] = []
    seen: set[int] = set()
    for piece in pieces:
        if not piece.clear:
            found.append(f"the text of job {piece.id or '?'} imitates Slurm's output")
        if piece.number in seen:
            found.append(f"job {piece.number} is listed more than once")
        seen.add(piece.number)
    by_node: dict[str, list[tuple[SchedulerJob, Grant]]] = {}
    for job in [piece.job for piece in pieces if piece.job is not None]:
        for grant in job.grants:
            by_node.setdefault(grant.node, []).append((job, grant))
    for name, grants in by_node.items():
        node = nodes.get(name)
        words = _clash(node, grants) if node is not None else f"a job runs on {name}, which is not listed as a node"
        if words:
            found.append(words)
    return found


def _clash(node: SchedulerNode, grants: Sequence[tuple[SchedulerJob, Grant]]) -> str:
    """Return a contradiction between the jobs on a node; "" if there is none."""
    used = {index for gres in node.used for index in gres.indexes or ()}
    indexed = bool(node.used) and all(gres.indexes is not None for gres in node.used)
    holders: dict[int, str] = {}
    count = 0
    for job, grant in grants:
        for gres in grant.gpus:
            count += gres.count
            for index in gres.indexes or ():
                if index in holders:
                    return f"GPU {index} of {node.name} is held by job {holders[index]} and by job {job.id}"
                if indexed and index not in used:
                    return f"GPU {index} of {node.name} is held by job {job.id} but not in use"
                holders[index] = job.id
    if node.used and not indexed and count > _count(node.used):
        return f"jobs hold {count} GPUs of {node.name}, but {_count(node.used)} are in use"
    return ""


def corrected(
    pieces: Sequence[Piece], truth: Mapping[int, TrueJob], nodes: Mapping[str, SchedulerNode]
) -> tuple[list[SchedulerJob], list[str]]:
    """Return the jobs that `squeue` confirms, and notes on the others.

    Owner and nodes are true for every job. A job's GPUs are dropped, so that they show as in use by an unknown job, if
    its record is ambiguous, contradicts `squeue`, or is one of several with its number. The author of such a record
    is the owner of the confirmed job before it, or of its number. That user's jobs are not trusted where it matters: on
    a node of a job without known GPUs, and for GPUs that another job holds too or that are not in use.
    """
    records = Counter(piece.number for piece in pieces if piece.whole)
    found: dict[int, SchedulerJob] = {}
    unclear: dict[int, str] = {}
    suspects: dict[int, str] = {}
    confirmed: Piece | None = None
    for piece in pieces:
        true = truth.get(piece.number)
        known = piece.job is None or _confirms(true, piece.job)
        if piece.clear and known and records[piece.number] == 1:
            if true is not None:
                confirmed = piece
                if piece.job is not None and not true.ended:
                    found[piece.number] = piece.job
            continue
        if confirmed is not None:
            suspects[confirmed.number] = confirmed.id
        unclear[piece.number] = piece.id
    unclear = {number: shown for number, shown in unclear.items() if number in truth}
    uids = {truth[number].uid for number in suspects | unclear}
    # a number in a forged text is no record, so its owner is no suspect
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
        notes.append(f"the text of one of these jobs imitates Slurm's output: {who}")
    if unclear:
        notes.append(f"unknown which GPUs are held by job {', '.join(shown for _, shown in sorted(unclear.items()))}")
    return [job for _, job in sorted(found.items()) if job.grants], notes


def _doubted(jobs: Collection[SchedulerJob], nodes: Mapping[str, SchedulerNode]) -> list[SchedulerJob]:
    """Return the jobs with GPUs that others hold too, that are not in use, or on a node of a job without known GPUs."""
    without_gpus = {grant.node for job in jobs for grant in job.grants if not grant.gpus and not grant.shards}
    held: dict[tuple[str, int], list[SchedulerJob]] = {}
    found: list[SchedulerJob] = []
    for job in jobs:
        for grant in job.grants:
            for index in [index for gres in grant.gpus for index in gres.indexes or ()]:
                held.setdefault((grant.node, index), []).append(job)
            if grant.gpus and grant.node in without_gpus:
                found.append(job)
    for (name, index), holders in held.items():
        used = nodes[name].used if name in nodes else ()
        indexed = bool(used) and all(gres.indexes is not None for gres in used)
        if len(holders) > 1 or (indexed and not any(index in (gres.indexes or ()) for gres in used)):
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


def _confirms(true: TrueJob | None, job: SchedulerJob) -> bool:
    """Return whether `squeue` confirms a job. A completing job leaves its nodes one by one."""
    if true is None or true.uid != job.uid:
        return False
    return true.ended or "completing" in {job.state, true.state} or {g.node for g in job.grants} <= set(true.nodes)


def visited(
    pieces: Sequence[Piece], jobs: Iterable[SchedulerJob], truth: Mapping[int, TrueJob], uid: int
) -> dict[str, tuple[int, ...]]:
    """Return the nodes where running jobs of ``uid`` hold no GPU: node → their numbers.

    ``truth``: the answer of `squeue`, empty where it was not queried. Then a forged text may count as such a job, whose
    only effect is a refused login.
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
    """Return whether reservations must be queried to know which are active on these nodes."""
    return any(not node.reservation and _RESERVED & node.flags for node in nodes.values())


def reserved_before(before: Schedule | None, nodes: Mapping[str, SchedulerNode]) -> list[Reservation]:
    """Return the reservations of an earlier answer that may still be active."""
    old = before.nodes if before is not None else {}
    return [
        Reservation(old[name].reservation, (name,))
        for name, node in nodes.items()
        if _RESERVED & node.flags and name in old and old[name].reservation
    ]


def joined(
    jobs: Iterable[SchedulerJob], nodes: Mapping[str, SchedulerNode], reservations: Iterable[Reservation]
) -> dict[str, SchedulerNode]:
    """Return the nodes with their reservations' names, and with doubts that follow from the jobs."""
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
                doubt = f"job {job.id} runs there, but Slurm does not list the node"
                found[grant.node] = SchedulerNode(grant.node, grant.node, "", "unknown", doubt=doubt)
    for name, node in nodes.items():
        unplaced = [gres for gres in node.used_shards if gres.indexes is None]
        if unplaced and not node.doubt and _count(unplaced) > shards.get(name, 0):
            doubt = "shards of its GPUs are held by jobs that Slurm does not show you; unknown of which GPUs"
            found[name] = replace(found[name], doubt=doubt)
    return found


def _count(gpus: Iterable[Gres]) -> int:
    return sum(gres.count for gres in gpus)
