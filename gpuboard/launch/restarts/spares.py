"""Which GPUs of the lease the next attempt uses (pure): in place of those that cannot be used, others of the lease."""

from __future__ import annotations

from collections import Counter

import msgspec

from gpuboard.launch.plan import Device
from gpuboard.launch.preflight.gpus import gpu_check, unread
from gpuboard.leases.rank_map import rank_map
from gpuboard.model.lease import LeaseGpu, gpus_text
from gpuboard.model.rankmap import Rank, RankMap
from gpuboard.model.request import ChosenGpu
from gpuboard.model.snapshot import GpuView, NodeView, Snapshot
from gpuboard.model.text import clean


def reassigned(
    current: RankMap, lease: RankMap, snapshot: Snapshot, device: Device, *, most: int, least: int
) -> tuple[RankMap, str]:
    """Return the rank map of the next attempt, and what changed: "" if nothing did.

    ``lease``: the whole lease, of which ``current`` uses a part; ``snapshot``: its nodes. Left out are GPUs that
    preflight would refuse, those of unreachable nodes, and sick ones, as far as the lease has others. The map has
    ``most`` ranks if the lease has as many usable GPUs, else fewer; with less than ``least`` it stays as it is, and
    preflight reports why.
    """
    views = {view.name: view for view in snapshot.nodes}
    used = {(rank.node, rank.uuid) for rank in current.ranks}
    nodes = {rank.node for rank in current.ranks}
    faults = {(rank.node, rank.uuid): _fault(rank, views.get(rank.node), lease, device) for rank in lease.ranks}
    usable = [rank for rank in lease.ranks if not faults[rank.node, rank.uuid][0]]
    usable.sort(key=lambda r: (bool(faults[r.node, r.uuid][1]), (r.node, r.uuid) not in used, r.node not in nodes))
    chosen = {(rank.node, rank.uuid) for rank in usable[:most]}
    if chosen == used or len(chosen) < least:
        return current, ""
    counts = Counter(node for node, _ in chosen)
    ranks = [rank for rank in lease.ranks if (rank.node, rank.uuid) in chosen]
    ranks.sort(key=lambda rank: -counts[rank.node])  # the node with the most GPUs is the first
    gpus = [ChosenGpu(rank.node, rank.index, rank.uuid, rank.memory_fraction) for rank in ranks]
    found = rank_map(current.lease, gpus, {node.name: node.address for node in lease.nodes}, current.job)
    found = msgspec.structs.replace(found, master_port=current.master_port)
    why = dict.fromkeys("".join(faults[key]) for key in sorted(used - chosen))
    where = gpus_text([LeaseGpu(rank.node, rank.index, rank.uuid) for rank in found.ranks])
    count = (
        f"{len(chosen)} rank{'' if len(chosen) == 1 else 's'} in place of {len(used)}, "
        if len(chosen) != len(used)
        else ""
    )
    return found, f"{count}on {where}" + (f"; left out: {'; '.join(why)}" if why else "")


def _uuids(gpu: GpuView) -> set[str]:
    return {gpu.uuid, *(device.uuid for device in gpu.mig)}


def _fault(rank: Rank, view: NodeView | None, lease: RankMap, device: Device) -> tuple[str, str]:
    """Return why a GPU cannot be used, and why it had better not be used; "" without a fault."""
    if why := unread(view):
        return f"{rank.node}: {why}", ""
    if device == "cpu" or view is None:
        return "", ""
    check = gpu_check(rank, view, lease.lease, lease.job)
    sick = next((gpu.sick for gpu in view.gpus if rank.uuid in _uuids(gpu) and "sick" in gpu.flags), [])
    words = f"{rank.node}: {check.evidence}" + (f" ({clean(check.cause, 80)})" if check.cause else "")
    if check.status == "fail":
        return words, ""
    return "", f"{rank.node}: GPU {rank.index} is sick ({clean('; '.join(sick))})" if sick else ""
