"""What ssh makes of a node's name: a scheduler may know the host by that alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuboard.cluster.snapshot.scheduler_jobs import known_as, names
from gpuboard.transport.base import TransportError

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.config import Settings
    from gpuboard.model.schedule import Schedule
    from gpuboard.transport.ssh.resolve import Resolver


class Aliases:
    """Asks ssh about nodes (`ssh -G`, 8 ms), each once in a process. For one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self._ssh_config = settings.ssh_config
        self._resolver: Resolver | None = None
        self._found: dict[str, str | None] = {}
        self._over = False  # there is no ssh, or it does not answer: it is not asked again

    def of(self, node: Node) -> str | None:
        """Return the host name or address that ssh goes to for a node; None where that is its name, or not told."""
        spec = node.host
        if spec is None:
            return None
        if spec not in self._found and not self._over:
            self._found[spec] = self._ask(spec, node)
        return self._found.get(spec)

    def _ask(self, spec: str, node: Node) -> str | None:
        from gpuboard.transport.ssh import (
            resolve,  # late: only for nodes that the scheduler does not know by their names
        )

        if self._resolver is None:
            self._over = not resolve.available()
            self._resolver = resolve.Resolver(self._ssh_config, cache=resolve.cache_file())
        if self._over:
            return None
        try:
            found = self._resolver.get(spec).hostname
        except TransportError:
            self._over = True  # a file that ssh cannot read, or a `Match exec` that hangs: so for every node
            return None
        return found if found != node.address else None

    def save(self) -> None:
        """Keep what ssh said for the next process."""
        if self._resolver is not None:
            self._resolver.save()


def scheduler_names(nodes: Sequence[Node], schedule: Schedule, settings: Settings) -> dict[str, str]:
    """Return the scheduler's name of each node that it knows, by its name here."""
    known, aliases = names(schedule), Aliases(settings)
    found = {
        node.name: name
        for node in nodes
        if (name := known_as(known, node.name) or known_as(known, aliases.of(node) or "")) is not None
    }
    aliases.save()
    return found
