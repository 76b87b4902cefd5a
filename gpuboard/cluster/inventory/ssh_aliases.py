"""The host names that ssh resolves nodes' names to: a scheduler may know a node only by that name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuboard.cluster.snapshot.scheduler_jobs import known_as, names
from gpuboard.model.schedule import Schedule
from gpuboard.transport.base import TransportError

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.config import Settings
    from gpuboard.transport.ssh.resolve import Resolver


class Aliases:
    """Queries ssh about nodes (`ssh -G`, 8 ms), each once per process. For one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self._ssh_config = settings.ssh_config
        self._resolver: Resolver | None = None
        self._found: dict[str, str | None] = {}
        self._failed = False  # there is no ssh, or it does not answer: it is not queried again

    def of(self, node: Node) -> str | None:
        """Return the host name or address that ssh resolves a node to; None if that is its name, or unknown."""
        spec = node.host
        if spec is None:
            return None
        if spec not in self._found and not self._failed:
            self._found[spec] = self._resolve(spec, node)
        return self._found.get(spec)

    def _resolve(self, spec: str, node: Node) -> str | None:
        from gpuboard.transport.ssh import (
            resolve,  # late: only for nodes that the scheduler does not know by name
        )

        if self._resolver is None:
            self._failed = not resolve.available()
            self._resolver = resolve.Resolver(self._ssh_config, cache=resolve.cache_file())
        if self._failed:
            return None
        try:
            found = self._resolver.get(spec).hostname
        except TransportError:
            self._failed = True  # ssh cannot read its config, or a `Match exec` hangs: the same for every node
            return None
        return found if found != node.address else None

    def save(self) -> None:
        """Save the answers for the next process."""
        if self._resolver is not None:
            self._resolver.save()


def scheduler_names(nodes: Sequence[Node], schedule: Schedule, settings: Settings) -> dict[str, str]:
    """Return the scheduler's names of the nodes known to it, by node."""
    known, aliases = names(schedule), Aliases(settings)
    found = {
        node.name: name
        for node in nodes
        if (name := known_as(known, node.name) or known_as(known, aliases.of(node) or "")) is not None
    }
    aliases.save()
    return found
