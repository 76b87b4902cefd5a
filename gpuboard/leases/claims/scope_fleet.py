"""The fleet of an allocation's nodes. Imports little: it reads the nodes during the other imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import local_node, node_by_uuids, own_uuids

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.leases.ledger import Scope
    from gpuboard.model.snapshot import Snapshot


class ScopeFleet:
    """Feeds of the nodes of ``scope``, started at once; only this machine's if it is a node and scope is not explicit.

    ``running``: an open fleet of exactly these nodes, used instead of new connections.
    """

    def __init__(self, scope: Scope, settings: Settings, *, running: Fleet | None = None) -> None:
        here = local_node(scope.nodes)
        alone = here is not None and not scope.explicit
        self.nodes = {node.name: node for node in scope.nodes if not alone or node is here}
        self.left_out = [node.name for node in scope.nodes if node.name not in self.nodes]
        self.here = here.name if here else None  # the node that is this machine, if known
        self.job = scope.job
        self._by_uuid = own_uuids() if here is None and not scope.explicit else []
        self.is_running = running is not None
        self.fleet = running or Fleet(list(self.nodes.values()), settings, interval_s=None)
        if running is None:
            self.fleet.start()

    def snapshot(self) -> Snapshot:
        """Return the newest readings of the nodes in scope. This machine is recognized by its GPUs' UUIDs too."""
        found = self.fleet.snapshot()
        if self._by_uuid and (here := node_by_uuids(found, self._by_uuid)):
            self.here = here
            self.left_out = [name for name in self.nodes if name != here]
            return msgspec.structs.replace(found, nodes=[node for node in found.nodes if node.name == here])
        return found

    def close(self) -> None:
        """Close the connections that were opened here."""
        if not self.is_running:
            self.fleet.close()
