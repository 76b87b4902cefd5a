"""Preflight checks of GPUs (pure): whether each one still matches the lease or the rank map."""

from __future__ import annotations

from gpuboard.launch.preflight.check import Check, CheckStatus
from gpuboard.model.rankmap import Rank, RankMap
from gpuboard.model.snapshot import GpuView, MigView, NodeView, Snapshot
from gpuboard.model.state import EXCLUSIVE, PROHIBITED
from gpuboard.model.text import clean
from gpuboard.model.units import format_size

OCCUPIED = 1024 * 2**20  # bytes of GPU memory: a driver and an idle context use less


def gpu_checks(rank_map: RankMap, snapshot: Snapshot | None, *, planned: bool = False) -> list[Check]:
    """Return, for every GPU of the map, whether it still matches the lease (or the map); ``planned``: see below."""
    views = {view.name: view for view in (snapshot.nodes if snapshot else [])}
    checks = []
    for node in rank_map.nodes:
        view = views.get(node.name)
        ranks = [r for r in rank_map.ranks if r.node == node.name]
        reason = unread(view)
        if view is None or reason:
            remedy = "`gpuboard status` shows the state of the node"
            checks.append(Check("GPU", node.name, "fail", "its GPUs could not be read", reason, remedy))
            continue
        for rank in ranks:
            checks.append(gpu_check(rank, view, rank_map.lease, rank_map.job, planned=planned))
    return checks


def unread(view: NodeView | None) -> str:
    """Return why the GPUs of a node could not be read, "" if they were."""
    if view is None:
        return "not queried"
    return clean(view.error or view.state) if view.state != "up" or (view.error is not None and not view.gpus) else ""


def gpu_check(rank: Rank, view: NodeView, lease: str | None, job: str | None, *, planned: bool = False) -> Check:
    """Return the check of one GPU. ``job``: it was read through a step of this Slurm job, which sees its GPUs only.

    ``planned``: without a lease, as a launch would reserve it.
    """

    def check(status: CheckStatus, evidence: str, cause: str = "", remedy: str = "") -> Check:
        return Check("GPU", view.name, status, f"GPU {index} {evidence}", cause, remedy)

    index, uuid = rank.index, rank.uuid
    gpu = next((g for g in view.gpus if uuid in {g.uuid, *(m.uuid for m in g.mig)}), None)
    if gpu is None:
        here = ", ".join(g.uuid for g in view.gpus) or "none"
        remedy = "release the lease and allocate again" if lease else "correct the uuid in the rank map"
        return check("fail", f"{clean(uuid)} is missing", f"the node has {here}", remedy)
    if gpu.index != index:
        cause = "a GPU was added or lost since the rank map was written"
        remedy = "allocate again: CUDA_VISIBLE_DEVICES would select another GPU"
        return check("fail", f"{clean(uuid)} has index {gpu.index} now", cause, remedy)
    if gpu.compute_mode == PROHIBITED:
        remedy = f"on that node, as root: nvidia-smi -i {gpu.index} -c DEFAULT"
        return check("fail", "is in compute mode prohibited", "no process can use it", remedy)
    part: GpuView | MigView = next((m for m in gpu.mig if m.uuid == uuid), gpu)
    leases = part.leases
    if part.state in {"broken", "mig", "unknown", "allocated"}:
        return check("fail", f"is {part.state}", clean(part.reason), "choose another GPU; see `gpuboard status`")
    if "disputed" in gpu.flags:
        return check("fail", "is disputed", clean(part.reason), "agree with the other owner, or allocate again")
    if job is not None:
        lease = f"Slurm job {job}"
    elif lease is not None and lease not in leases:
        return check(
            "fail", f"is no longer held by lease {lease}", clean(part.reason), "the lease has ended: allocate again"
        )
    elif lease is None and leases:
        remedy = "choose another GPU; if the lease is yours, pass --lease or set it in the rank map"
        return check("fail", f"is reserved by lease {', '.join(leases)}", clean(part.reason), remedy)
    if "rogue" in gpu.flags and job is None:
        others = [p for p in gpu.processes or [] if p.rogue]
        who = ", ".join(f"{clean(p.user or 'owner hidden')} (pid {p.pid}, {clean(p.command, 60)})" for p in others)
        return check("fail", "runs processes of others", who, "talk to their owner, or allocate again")
    if lease is None and part.state != "free":
        return check("fail", f"is {part.state}", clean(part.reason), "choose another GPU, or wait")
    if lease is None and not planned:
        return check(
            "warn", "is not reserved", "others may take it during the run", "`gpuboard launch --n N` reserves GPUs"
        )
    if "sick" in gpu.flags:
        return check("warn", "is sick", clean("; ".join(gpu.sick)), "`gpuboard status` shows details")
    if gpu.processes:
        pids = ", ".join(str(p.pid) for p in gpu.processes)
        if gpu.compute_mode in EXCLUSIVE:
            remedy = f"end it, or on that node, as root: nvidia-smi -i {gpu.index} -c DEFAULT"
            return check("fail", f"already runs pid {pids}", "in an exclusive compute mode it admits no other", remedy)
        return check("warn", f"already runs pid {pids}", "the ranks share memory and time with it", "")
    if part.memory_used is not None and part.memory_used >= OCCUPIED and not gpu.memory_shared:
        total = f"{format_size(part.memory_used)} of {format_size(part.memory_total)}"
        full = part.memory_total is not None and part.memory_used > part.memory_total // 2
        remedy = "if a run has just ended there, try again; else choose another GPU"
        return check("fail" if full else "warn", f"has {total} in use", "by no visible process", remedy)
    if lease is None:
        return check("ok", "is free")
    return check("ok", f"is held by {lease if job is not None else f'lease {lease}'}")
