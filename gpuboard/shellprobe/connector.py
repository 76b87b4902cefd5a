"""NodeConnector opens the links that a feed needs: to agents, and to shells on nodes without python3."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuboard.transport.base import TransportError
from gpuboard.transport.connector import Connector
from gpuboard.transport.link import Listener

if TYPE_CHECKING:
    from gpuboard.shellprobe.link import ShellLink


class NodeConnector(Connector):
    """All transports of one process, with shells on nodes without python3."""

    def open_shell(
        self,
        node: str,
        host: str,
        why: str,
        interval_s: float | None,
        *,
        listener: Listener,
        ended: Callable[[TransportError], None],
        job: str | None = None,
    ) -> ShellLink:
        """Return a link to a shell on ``host``, where an agent cannot run because of ``why`` (see ShellLink)."""
        from gpuboard.shellprobe.link import ShellLink  # only where a node has no python3
        from gpuboard.shellprobe.script import COMMAND

        link = ShellLink(node, why, interval_s, listener, ended)
        link.attach(self.transport(host, job).open(host, "shell", link, COMMAND))
        return link
