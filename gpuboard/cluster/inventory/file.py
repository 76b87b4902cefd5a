"""An inventory in a file, which a parent process passes through GPUBOARD_INVENTORY.

For nodes that are in no configuration: the simulated nodes of a demo, shared by all of its commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpuboard import files
from gpuboard.cluster.inventory.nodes import Node, check_node, expand_names
from gpuboard.errors import UsageError
from gpuboard.model.decoding import from_json
from gpuboard.model.text import shown

VARIABLE = "GPUBOARD_INVENTORY"
_BYTES_MAX = 4 << 20  # 10,000 nodes, including descriptions of simulated GPUs


def write_nodes(path: Path, nodes: Sequence[Node]) -> None:
    """Write the nodes to ``path``, for this user alone. Raises OSError."""
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(list(nodes)))


def read_nodes(path: Path, selected: Sequence[str] = ()) -> list[Node]:
    """Return the nodes in a file, or the subset ``selected`` (``--nodes``). Raises UsageError."""
    try:
        nodes = from_json(files.read(path, _BYTES_MAX), list[Node])
    except OSError as error:
        raise UsageError(f"{VARIABLE}={shown(path)}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{VARIABLE}={shown(path)}: not an inventory: {error}") from error
    for node in nodes:
        check_node(node, f"{VARIABLE}={shown(path)}")
    if not selected:
        return nodes
    by_name = {node.name: node for node in nodes}
    names = expand_names(selected)
    if unknown := [name for name in names if name not in by_name]:
        raise UsageError(f"no node {unknown[0]!r} in {VARIABLE}={shown(path)}; it has: {', '.join(by_name)}")
    return [by_name[name] for name in names]
