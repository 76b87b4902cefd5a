"""The rank map: rank → node, local rank, GPU (schema 1). Built from an allocation, or written by hand and validated."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

import msgspec

from gpuboard.model.text import shown


class RankNode(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """One node of a rank map."""

    name: str
    address: str
    node_rank: int
    local_world_size: int
    cuda_visible_devices: str


class Rank(msgspec.Struct, frozen=True):
    """One rank. ``memory_fraction`` is the part of the GPU's memory it may use (a share), None for all of it."""

    rank: int
    node: str
    local_rank: int
    index: int
    uuid: str
    memory_fraction: float | None = None


class RankMap(msgspec.Struct, frozen=True):
    """The whole map. Port 0 means: chosen and bound at launch."""

    schema: int
    lease: str | None
    master_addr: str
    master_port: int
    world_size: int
    nodes: list[RankNode]
    ranks: list[Rank]
    job: str | None = None  # the Slurm job through which the nodes are reached; None: over ssh


def problems(rank_map: RankMap, device: Literal["cuda", "cpu"] = "cuda") -> list[str]:
    """Return the problems of a rank map, each naming its entry; empty when it is valid.

    Valid: ranks are exactly 0..world_size-1; local ranks of each node exactly 0..local_world_size-1; node ranks
    0..nodes-1; every rank's node is listed; no GPU twice; node 0 holds rank 0. Ranks on ``device`` "cpu" need no GPUs:
    nodes with empty ``cuda_visible_devices`` are valid then, whatever their ranks' GPUs.
    """
    found: list[str] = []
    if rank_map.schema != 1:
        found.append(f"schema is {rank_map.schema}; this gpuboard reads schema 1")
    if rank_map.job is not None and not re.fullmatch(r"[0-9]{1,10}([+][0-9]{1,10})?", rank_map.job, re.ASCII):
        found.append(f"job {rank_map.job!r} is not the number of a Slurm job")
    if not 0 <= rank_map.master_port <= 65535:
        found.append(f"master_port {rank_map.master_port} is not a port; 0 lets launch choose one")
    if not rank_map.ranks:
        found.append("ranks is empty: there is nothing to launch")
    if rank_map.world_size != len(rank_map.ranks):
        found.append(f"world_size is {rank_map.world_size} but {len(rank_map.ranks)} ranks are listed")
    found += _numbering([r.rank for r in rank_map.ranks], "rank", "")
    on_node: dict[str, list[Rank]] = {node.name: [] for node in rank_map.nodes}
    if device == "cuda":
        found += _shared_gpus(rank_map.ranks)
    listed = shown(", ".join(on_node), 400) or "none"
    names = Counter(node.name for node in rank_map.nodes)
    found += [f"node {name!r} is listed {count} times" for name, count in names.items() if count > 1]
    found += _numbering([n.node_rank for n in rank_map.nodes], "node_rank", "")
    for rank in rank_map.ranks:
        if rank.node in on_node:
            on_node[rank.node].append(rank)
        else:
            found.append(f"rank {rank.rank} is on node {rank.node!r}, which is not in nodes ({listed})")
    for node in rank_map.nodes:
        here = on_node[node.name]
        if len(here) != node.local_world_size:
            found.append(f"node {node.name}: local_world_size is {node.local_world_size} but it has {len(here)} ranks")
        if not here:
            found.append(f"node {node.name}: no rank is on it; remove it from nodes")
            continue
        found += _numbering([r.local_rank for r in here], "local_rank", f"node {node.name}: ")
        if node.node_rank == 0 and not any(r.rank == 0 for r in here):
            found.append(f"node {node.name} has node_rank 0 but not rank 0; the master must run where rank 0 is")
        if device == "cuda" or node.cuda_visible_devices:
            found += _gpu_problems(node, here)
    for rank in rank_map.ranks:
        if rank.memory_fraction is not None and not 0 < rank.memory_fraction <= 1:
            found.append(f"rank {rank.rank}: memory_fraction {rank.memory_fraction} is not in (0, 1]")
    return found


def _shared_gpus(ranks: list[Rank]) -> list[str]:
    """Return the GPUs that are listed on several nodes, which are one machine under several names."""
    nodes: dict[str, dict[str, None]] = {}
    for rank in ranks:
        nodes.setdefault(rank.uuid, {})[rank.node] = None
    return [
        f"GPU {uuid} is listed on {' and '.join(names)}; two ranks of one run never share a GPU"
        for uuid, names in nodes.items()
        if len(names) > 1
    ]


def _gpu_problems(node: RankNode, here: list[Rank]) -> list[str]:
    """Return the problems of the GPUs of a node's ranks, and of its CUDA_VISIBLE_DEVICES."""
    found = [
        f"node {node.name}: GPU {uuid} is given to {count} ranks; two ranks of one run never share a GPU"
        for uuid, count in Counter(r.uuid for r in here).items()
        if count > 1
    ]
    found += [
        f"node {node.name}: index {index} is given to {count} ranks"
        for index, count in Counter(r.index for r in here).items()
        if count > 1
    ]
    found += [f"node {node.name}: index {r.index} of rank {r.rank} is negative" for r in here if r.index < 0]
    devices = node.cuda_visible_devices.split(",")
    # CUDA ends the list at an empty or negative entry, and at one of the other kind than the first (index or UUID).
    kinds = {
        "index" if d.isdecimal() and d.isascii() else "UUID" if d.startswith(("GPU-", "MIG-", "SIM-")) else ""
        for d in devices
    }
    if len(kinds) > 1 or "" in kinds:
        found.append(
            f"node {node.name}: cuda_visible_devices {node.cuda_visible_devices!r} is not a list of indexes alone, "
            "or of UUIDs alone; CUDA ignores what follows the first wrong entry, without an error"
        )
    found += [
        f"node {node.name}: cuda_visible_devices {node.cuda_visible_devices!r} lists {device!r} {count} times"
        for device, count in Counter(devices).items()
        if count > 1
    ]
    if len(devices) != len(here):
        found.append(
            f"node {node.name}: cuda_visible_devices {node.cuda_visible_devices!r} names {len(devices)} GPUs, "
            f"{len(here)} ranks need one each"
        )
    for rank in here:
        if 0 <= rank.local_rank < len(devices) and devices[rank.local_rank] not in {str(rank.index), rank.uuid}:
            found.append(
                f"node {node.name}: local_rank {rank.local_rank} would see GPU {devices[rank.local_rank]!r} but "
                f"rank {rank.rank} is mapped to index {rank.index} ({rank.uuid})"
            )
    return found


def _numbering(numbers: list[int], word: str, where: str) -> list[str]:
    """Return why ``numbers`` are not exactly 0..n-1: duplicates first, then gaps."""
    counts = Counter(numbers)
    found = [f"{where}{word} {number} is listed {count} times" for number, count in counts.items() if count > 1]
    missing = sorted(set(range(len(numbers))) - set(numbers))
    extra = sorted(set(numbers) - set(range(len(numbers))))
    if missing or extra:
        found.append(
            f"{where}{word}s must be 0 to {len(numbers) - 1}: missing {missing}, out of range or duplicate "
            f"{extra or [n for n, c in counts.items() if c > 1]}"
        )
    return found
