"""The keeper's socket: connected gpuboard commands and their requests, each a line."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial

from gpuboard.keeper.daemon.loop import KeeperLoop, log
from gpuboard.keeper.runtime_dir import peer_uid, send

_LONGEST = 1 << 20  # bytes of a request


class ConnectedCommand:
    """A gpuboard command that is connected."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.data = b""

    def reply(self, error: str = "", node: str | None = None) -> None:
        """Confirm a request, or send why it failed; ``node``: the node that did."""
        try:
            send(self.connection, {"error": error, "node": node} if error else {"ok": True})
        except OSError:
            log("a command disconnected before it was answered")


class Commands:
    """All connected commands. ``requested`` gets each request of one, ``left`` one that has disconnected."""

    def __init__(
        self,
        loop: KeeperLoop,
        requested: Callable[[ConnectedCommand, bytes], None],
        left: Callable[[ConnectedCommand], None],
    ) -> None:
        self._loop = loop
        self._requested = requested
        self._left = left
        self._connected: set[ConnectedCommand] = set()

    def __len__(self) -> int:
        return len(self._connected)

    def listen(self, listener: socket.socket) -> None:
        """Accept commands on this socket."""
        listener.setblocking(False)
        self._loop.watch(listener.fileno(), partial(self._accept, listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the command has disconnected
        if peer_uid(connection) != os.geteuid():
            connection.close()
            return
        connection.settimeout(1.0)
        command = ConnectedCommand(connection)
        self._connected.add(command)
        self._loop.watch(connection.fileno(), partial(self._receive, command))

    def _receive(self, command: ConnectedCommand) -> None:
        try:
            data = command.connection.recv(65536)
        except OSError:
            data = b""
        command.data += data
        if not data or len(command.data) > _LONGEST:
            self._loop.unwatch(command.connection.fileno())
            command.connection.close()
            self._connected.discard(command)
            self._left(command)
            return
        *lines, command.data = command.data.split(b"\n")
        for line in lines:
            self._requested(command, line)
