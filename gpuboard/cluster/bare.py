"""A first run: no node is configured, and this machine, which stands in for one, has no GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from gpuboard import paths
from gpuboard.agent.nvml_terms import NO_DRIVER
from gpuboard.cluster.inventory import local_node, own_uuids

if TYPE_CHECKING:
    from gpuboard.cluster.inventory import Node
    from gpuboard.config import Settings
    from gpuboard.model.snapshot import NodeView, Snapshot

EXAMPLE = "gpu[01-04]"


def bare_machine(nodes: Collection[Node], settings: Settings, snapshot: Snapshot) -> NodeView | None:
    """Return this machine when it was read, has no GPU and is all there is, without any configured node; else None.

    A driver that is there and fails is not this: its GPUs are unknown. Nor is one whose library alone is missing.
    """
    here = local_node(list(nodes))
    if settings.nodes or here is None or here.job is not None or len(snapshot.nodes) != 1:
        return None
    [node] = snapshot.nodes
    read = node.state == "up" and node.age_s is not None and not node.gpus
    return node if read and node.error in {None, f"NVML: {NO_DRIVER}"} and not own_uuids() else None


def why_bare(node: NodeView) -> str:
    """Return why a machine that :func:`bare_machine` found has no GPU."""
    return node.error.removeprefix("NVML: ") if node.error else "the NVIDIA driver lists none"


def how_to_name(env: Mapping[str, str]) -> str:
    """Return how to name the nodes that have GPUs."""
    file = env.get("GPUBOARD_CONFIG") or paths.user_config(env)
    return f"name the GPU nodes with --nodes '{EXAMPLE}', or in {file}: nodes = [\"{EXAMPLE}\"]"
