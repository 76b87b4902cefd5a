"""Connections of the board in a browser, and which of them have shown the token. With server.py and session.py the only
importer of aiohttp.

Every user of the machine can connect, send half a request and wait. aiohttp has a deadline for idle connections, but
limits neither their number nor the bytes of a head, and asyncio logs a traceback for each connection without a file
descriptor. So connections are accepted here. One that has not shown the token has a deadline and few bytes; where there
are many, the oldest is closed for the newest, and a person with the token always gets in.
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

TOKEN_S = 10.0  # for a connection to show the token, or to read why it is refused
IDLE_S = 30.0  # until the next request on a connection that has shown it
_HEAD_BYTES = 65536  # before the token; browsers send less than 16 kB, most of it cookies
_MOST_STRANGERS = 1024  # connections without the token, if file descriptors suffice; each takes some 10 kB
_FILES = 8192  # open files
_FULL_S = 0.1  # pause where no connection can be accepted
_QUIET_S = 60.0


class Log:
    """Lines on stderr. Of what any client can cause, one line of a kind is written every 60 s; others are counted."""

    def __init__(self, write: Callable[[str], object], now: Callable[[], float] = time.monotonic) -> None:
        self.line = write
        self._now = now
        self._kinds: dict[str, tuple[float, int]] = {}  # when the last line was written, how many were omitted since

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
    """Writes what aiohttp and asyncio log: a bad request in one line, anything else with its traceback."""

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
    """One connection: a stranger until it shows the token."""

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
        """Parse what was sent; of a stranger only so much."""
        self._bytes += len(data)
        if self._bytes > _HEAD_BYTES and self in self._clients.strangers:
            self.drop()
        else:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it."""
        self.admit()
        super().connection_lost(exc)

    def admit(self) -> None:
        """It has shown the token: lift the limits."""
        self._deadline.cancel()
        self._clients.strangers.pop(self, None)

    def drop(self) -> None:
        """Close it at once, whatever it still has to read."""
        self.admit()
        if self._connection is not None:
            self._connection.abort()


class Clients:
    """All connections. ``server``: who answers their requests."""

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
            except OSError as error:  # no file descriptor or memory for it, or it has gone again
                self._log.limited("accept", f"a connection cannot be accepted: {error.strerror}")
                self._drop_oldest()
                await asyncio.sleep(_FULL_S)
                continue
            if len(self.strangers) >= self._most:
                self._log.limited(
                    "full", f"{self._most} connections without the token: closing the oldest for new ones"
                )
                self._drop_oldest()
            try:
                await loop.connect_accepted_socket(lambda: WebClient(self), connection)
            except OSError:
                connection.close()  # it has gone again

    def _drop_oldest(self) -> None:
        for client in self.strangers:
            client.drop()
            return


def _raise_file_limit() -> int:
    """Raise the limit of open files as far as we need and may; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return most if soft == resource.RLIM_INFINITY else soft
