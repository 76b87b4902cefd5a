"""The nodes that a program which starts us hands on in a file, named by GPUBOARD_INVENTORY.

For nodes that no configuration has: the simulated ones of a demo, for every command that is to work on the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpuboard.cluster.inventory import Node, expand_names
from gpuboard.errors import UsageError

VARIABLE = "GPUBOARD_INVENTORY"


def write_nodes(path: Path, nodes: Sequence[Node]) -> None:
    """Write the nodes to ``path``, for this user alone. Raises OSError."""
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(list(nodes)))


def read_nodes(path: Path, said: Sequence[str] = ()) -> list[Node]:
    """Return the nodes in a file, or of them those that ``said`` (``--nodes``) names. Raises UsageError."""
    try:
        nodes = msgspec.json.decode(path.read_bytes(), type=list[Node])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{VARIABLE}={path}: not an inventory: {error}") from error
    if not said:
        return nodes
    by_name = {node.name: node for node in nodes}
    names = expand_names(said)
    if unknown := [name for name in names if name not in by_name]:
        raise UsageError(f"no node {unknown[0]!r} in {VARIABLE}={path}; it has: {', '.join(by_name)}")
    return [by_name[name] for name in names]
