"""Rank maps that no allocation made: those in files, and those of ranks without GPUs."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpuboard import files
from gpuboard.cluster.inventory.nodes import Node, is_here, local_node
from gpuboard.errors import UsageError
from gpuboard.leases.rank_map import rank_map
from gpuboard.model.rankmap import RankMap
from gpuboard.model.request import ChosenGpu
from gpuboard.model.text import clean, shown

_RANKS_MAX = 16_384  # as many as a nodeset may name nodes
_BYTES_MAX = 4 << 20  # 10,000 ranks with blanks and line ends


def read_rank_map(path: Path) -> RankMap:
    """Return the rank map in a file, typed but not yet checked. Raises UsageError."""
    try:
        text = files.read(path, _BYTES_MAX).removeprefix(BOM_UTF8)  # some editors write one
        found = msgspec.json.decode(text, type=RankMap)
    except OSError as error:
        raise UsageError(f"{shown(path)}: the rank map cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{shown(path)}: not a rank map: {clean(str(error))}") from error
    if max(len(found.ranks), len(found.nodes)) > _RANKS_MAX:
        raise UsageError(f"{shown(path)}: at most {_RANKS_MAX} ranks and nodes are possible")
    return found


def nodes_of(rank_map: RankMap, nodes: Sequence[Node]) -> dict[str, Node]:
    """Return ``nodes`` by name, with this machine under any name of its own that the map uses (``localhost``).

    Those of a map that names a Slurm job are reached through that, unless we are in it. Raises UsageError when the map
    has this machine under two names.
    """
    found = {node.name: node for node in nodes}
    if rank_map.job is not None and not any(node.job == rank_map.job for node in nodes):
        return found | {entry.name: Node(entry.name, entry.name, job=rank_map.job) for entry in rank_map.nodes}
    named = [entry.name for entry in rank_map.nodes]
    found |= {name: Node(name, None) for name in named if name not in found and is_here(name)}
    here = sorted({name for name in named if name in found and local_node([found[name]])})
    if len(here) > 1:
        raise UsageError(f"the rank map has one machine under the names {' and '.join(here)}; list it once")
    return found


def cpu_rank_map(n: int, nodes: Sequence[Node], *, spread: bool, addresses: Mapping[str, str] | None = None) -> RankMap:
    """Return a map of ``n`` ranks without GPUs: on this machine (else the first node), or spread over all ``nodes``.

    Spread means evenly, the first nodes taking one more where it does not come out even. ``addresses``: where other
    nodes reach a node, in place of its name. Raises UsageError for more than _RANKS_MAX.
    """
    if n > _RANKS_MAX:
        raise UsageError(f"--n {n}: at most {_RANKS_MAX} ranks are possible without GPUs")
    used = list(nodes)[:n] if spread else [local_node(nodes) or nodes[0]]
    chosen = [
        ChosenGpu(node.name, index, f"CPU-{index}")
        for at, node in enumerate(used)
        for index in range(n // len(used) + (at < n % len(used)))
    ]
    known = addresses or {}
    return rank_map(None, chosen, {node.name: known.get(node.name, node.address) for node in used})
