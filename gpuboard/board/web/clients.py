"""Connections of the board in a browser. Only this module, server.py and session.py import aiohttp.

Every user of the machine can connect, send half a request and wait. aiohttp has a timeout for idle connections, but no
limit for their number or for the size of a head, and asyncio logs a traceback for each connection that lacks a file
descriptor. So connections are accepted here. Without the token a connection has a deadline and a size limit; when there
are many, the oldest is closed for the newest, so that a user with the token can always connect.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web
from aiohttp.http import HttpProcessingError

TOKEN_S = 10.0  # to present the token, or to read the refusal
IDLE_S = 30.0  # until the next request on an authenticated connection
_HEAD_BYTES = 65536  # before authentication; browsers send less than 16 kB, most of it cookies
_MOST_STRANGERS = 1024  # unauthenticated connections, if file descriptors suffice; each takes about 10 kB
_FILES = 8192  # open files
_FULL_S = 0.1  # back-off when no connection can be accepted
_QUIET_S = 60.0  # per kind of log line


class Log:
    """Log lines on stderr. Lines that any client can cause are limited to one of each kind per 60 s."""

    def __init__(self, write: Callable[[str], object], now: Callable[[], float] = time.monotonic) -> None:
        self.line = write
        self._now = now
        self._kinds: dict[str, tuple[float, int]] = {}  # time of the last line, lines omitted since

    def limited(self, kind: str, words: str) -> None:
        """Write ``words`` unless a line of this kind was written within 60 s."""
        now = self._now()
        last, omitted = self._kinds.get(kind, (now - _QUIET_S, 0))
        if now - last < _QUIET_S:
            self._kinds[kind] = (last, omitted + 1)
            return
        self._kinds[kind] = (now, 0)
        self.line(f"{words} ({omitted} more like this in the last {now - last:.0f} s)" if omitted else words)


class LogHandler(logging.Handler):
    """Writes the log of aiohttp and asyncio: bad requests in one line, other errors with traceback."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or count it."""
        error = record.exc_info[1] if record.exc_info else None
        name = type(error).__name__
        words = f"bad request: {name}" if isinstance(error, HttpProcessingError) else self.format(record)
        self._log.limited(f"{record.msg} {name}", words)


class WebClient(web.RequestHandler):
    """One connection; a stranger until it is authenticated."""

    def __init__(self, clients: Clients) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(clients.server, loop=loop, keepalive_timeout=IDLE_S)
        self._clients = clients
        self._deadline = loop.call_later(TOKEN_S, self.drop)
        self._connection: asyncio.Transport | None = None
        self._bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it among the strangers."""
        assert isinstance(transport, asyncio.Transport)
        self._connection = transport
        self._clients.strangers[self] = None
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Parse input; drop a stranger that sends too much."""
        self._bytes += len(data)
        if self._bytes > _HEAD_BYTES and self in self._clients.strangers:
            self.drop()
        else:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.admit()
        super().connection_lost(exc)

    def admit(self) -> None:
        """Lift the limits: the connection is authenticated."""
        self._deadline.cancel()
        self._clients.strangers.pop(self, None)

    def drop(self) -> None:
        """Close it at once, without flushing."""
        self.admit()
        if self._connection is not None:
            self._connection.abort()


class Clients:
    """All connections. ``server`` answers their requests."""

    def __init__(self, server: web.Server, log: Log) -> None:
        self.server = server
        self.strangers: dict[WebClient, None] = {}  # the oldest first
        self._log = log
        self._most = max(8, min(_MOST_STRANGERS, _raise_file_limit() // 2))

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no file descriptor or memory, or the client has disconnected
                self._log.limited("accept", f"cannot accept a connection: {error.strerror}")
                self._drop_oldest()
                await asyncio.sleep(_FULL_S)
                continue
            if len(self.strangers) >= self._most:
                self._log.limited("full", f"{self._most} unauthenticated connections: closing the oldest for new ones")
                self._drop_oldest()
            try:
                await loop.connect_accepted_socket(lambda: WebClient(self), connection)
            except OSError:
                connection.close()  # the client has disconnected

    def _drop_oldest(self) -> None:
        for client in self.strangers:
            client.drop()
            return


def _raise_file_limit() -> int:
    """Raise the limit of open files to what we need, as far as allowed; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return most if soft == resource.RLIM_INFINITY else soft
