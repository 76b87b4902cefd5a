"""A first run: no node is configured, and this machine, which is used instead, has no GPU."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpuboard import paths
from gpuboard.cluster.inventory.nodes import Node, local_node, own_uuids
from gpuboard.cluster.snapshot.views import hides_gpus
from gpuboard.errors import GpuboardError

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.model.snapshot import NodeView, Snapshot

EXAMPLE = "gpu[01-04]"


def bare_machine(nodes: Collection[Node], settings: Settings, snapshot: Snapshot) -> NodeView | None:
    """Return this machine if it is the only node, unconfigured, was read and has no GPU; else None.

    A driver that fails, or lacks only its library, does not count: then GPUs are unknown.
    """
    here = local_node(list(nodes))
    if settings.nodes or here is None or here.job is not None or len(snapshot.nodes) != 1:
        return None
    [node] = snapshot.nodes
    bare = node.age_s is not None and not node.gpus and not hides_gpus(node)
    return node if bare and not own_uuids() else None


def why_bare(node: NodeView) -> str:
    """Return why a machine that :func:`bare_machine` found has no GPU."""
    return node.error.removeprefix("NVML: ") if node.error else "the NVIDIA driver lists none"


def how_to_name(env: Mapping[str, str]) -> str:
    """Return how to name the nodes that have GPUs."""
    return f"list the GPU nodes with --nodes '{EXAMPLE}', or in {config_of(env)}: nodes = [\"{EXAMPLE}\"]"


def config_of(env: Mapping[str, str]) -> Path:
    """Return the path of this user's config file, whether it exists or not."""
    return Path(env.get("GPUBOARD_CONFIG") or paths.user_config(env))


def keep_nodes(env: Mapping[str, str], nodeset: str) -> Path:
    """Add ``nodes`` to the config file and return its path. Raises GpuboardError, also if the key is there already.

    The line goes first: below a table's heading it would belong to the table.
    """
    path = config_of(env)
    try:
        file = path.resolve()  # it may be a link into a folder of dotfiles
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        if "nodes" in tomllib.loads(before):
            raise GpuboardError(f"{path} has `nodes` already; change it there")
        paths.make_private(file.parent)
        new = file.with_name(f"{file.name}.new")
        new.write_text(f"nodes = {json.dumps([nodeset])}\n{before}", encoding="utf-8")
        if before:
            new.chmod(file.stat().st_mode & 0o777)
        new.replace(file)
    except (OSError, ValueError) as error:  # ValueError: neither UTF-8 nor TOML
        raise GpuboardError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    return path
