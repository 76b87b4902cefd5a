"""The nodes an allocation looks at, and their feeds. Imports little: NVML is read while the rest of us loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node, local_node, node_by_uuids, own_uuids

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.model.snapshot import Snapshot


class Scope:
    """Feeds of ``nodes``, started at once. ``said``: the user named them; else one of them looks at itself alone.

    ``running``: a fleet of exactly these nodes that somebody keeps open (the board's): no second set of connections is
    made, and it stays open when the scope is closed.
    """

    def __init__(self, nodes: Sequence[Node], settings: Settings, *, said: bool, running: Fleet | None = None) -> None:
        here = local_node(nodes)
        self.nodes = {node.name: node for node in ([here] if here and not said else nodes)}
        self.left_out = [node.name for node in nodes if node.name not in self.nodes]
        self.here = here.name if here else None  # the node that is this machine, as far as that is known
        self.job = next((node.job for node in nodes if node.job is not None), None)  # all nodes are of one, or of none
        self._by_uuid = own_uuids() if here is None and not said else []
        self.is_running = running is not None
        self.fleet = running or Fleet(list(self.nodes.values()), settings, interval_s=None)
        if running is None:
            self.fleet.start()

    def snapshot(self) -> Snapshot:
        """Return the nodes in scope as they are now. A machine with GPUs of the inventory is recognised by them."""
        found = self.fleet.snapshot()
        if self._by_uuid and (here := node_by_uuids(found, self._by_uuid)):
            self.here = here
            self.left_out = [name for name in self.nodes if name != here]
            return msgspec.structs.replace(found, nodes=[node for node in found.nodes if node.name == here])
        return found

    def close(self) -> None:
        """End all connections that are ours."""
        if not self.is_running:
            self.fleet.close()
