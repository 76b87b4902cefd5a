"""Rank maps from files, and rank maps for ranks without GPUs."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpuboard import files
from gpuboard.cluster.inventory.nodes import Node, is_here, local_node
from gpuboard.errors import UsageError
from gpuboard.leases.rank_map import rank_map
from gpuboard.model.decoding import from_json
from gpuboard.model.rankmap import RankMap
from gpuboard.model.request import ChosenGpu
from gpuboard.model.text import clean, shown

_RANKS_MAX = 16_384  # the limit of names in a nodeset
_BYTES_MAX = 4 << 20  # bytes: 10,000 ranks with indentation


def read_rank_map(path: Path) -> RankMap:
    """Return the rank map in a file, decoded by type but not yet checked. Raises UsageError."""
    try:
        text = files.read(path, _BYTES_MAX).removeprefix(BOM_UTF8)  # written by some editors
        found = from_json(text, RankMap)
    except OSError as error:
        raise UsageError(f"cannot read the rank map {shown(path)}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{shown(path)}: not a rank map: {clean(str(error))}") from error
    if max(len(found.ranks), len(found.nodes)) > _RANKS_MAX:
        raise UsageError(f"{shown(path)}: more than {_RANKS_MAX} ranks or nodes")
    return found


def nodes_of(rank_map: RankMap, nodes: Sequence[Node]) -> dict[str, Node]:
    """Return ``nodes`` by name, with this machine under each of its names that the map uses (``localhost``).

    If the map names a Slurm job that this process is not in, its nodes are reached through that job. Raises UsageError
    when the map lists this machine under two names.
    """
    found = {node.name: node for node in nodes}
    if rank_map.job is not None and not any(node.job == rank_map.job for node in nodes):
        return found | {entry.name: Node(entry.name, entry.name, job=rank_map.job) for entry in rank_map.nodes}
    named = [entry.name for entry in rank_map.nodes]
    found |= {name: Node(name, None) for name in named if name not in found and is_here(name)}
    here = sorted({name for name in named if name in found and local_node([found[name]])})
    if len(here) > 1:
        raise UsageError(f"the rank map lists this machine under the names {' and '.join(here)}; use one of them")
    return found


def cpu_rank_map(
    n: int,
    nodes: Sequence[Node],
    *,
    spread: bool,
    per_node: int | None = None,
    addresses: Mapping[str, str] | None = None,
) -> RankMap:
    """Return a map of ``n`` ranks without GPUs: on this machine (else the first node), or spread over all ``nodes``.

    Spread evenly; the first nodes take one more if ``n`` is not a multiple. ``per_node``: exactly so many on each of
    the first nodes. ``addresses``: node → address for the other nodes, in place of its name. Raises UsageError for
    more than _RANKS_MAX, and for too few nodes.
    """
    if n > _RANKS_MAX:
        raise UsageError(f"--n {n}: at most {_RANKS_MAX} ranks without GPUs")
    if per_node and (n % per_node or n // per_node > len(nodes)):
        raise UsageError(f"--n {n} ranks with --per-node {per_node} do not fit on {len(nodes)} nodes")
    most = n // per_node if per_node else n
    used = list(nodes)[:most] if spread or per_node else [local_node(nodes) or nodes[0]]
    chosen = [
        ChosenGpu(node.name, index, f"CPU-{index}")
        for at, node in enumerate(used)
        for index in range(n // len(used) + (at < n % len(used)))
    ]
    known = addresses or {}
    return rank_map(None, chosen, {node.name: known.get(node.name, node.address) for node in used})
