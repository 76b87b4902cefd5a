"""SSH through paramiko (200 ms to import), with three threads per agent.

With paramiko_login.py the only module that imports paramiko. Its limits: docs/transports.md.
"""

from __future__ import annotations

import logging
import queue
import select
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import paramiko

from gpuboard.transport import bundle
from gpuboard.transport.base import Handler, TransportError
from gpuboard.transport.exit_errors import explain_exit
from gpuboard.transport.ssh import errors
from gpuboard.transport.ssh.paramiko_login import ParamikoLogins, drop, explain

if TYPE_CHECKING:
    from gpuboard.config import Settings

_STDERR_KEPT = 65536
_CHUNK = 262144
_EXIT_CODE_S = 30.0  # wait for the exit code after the end of output; the end of the connection stops the wait, too

# Failures are reported as TransportError; log lines would overwrite the screen.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)


class ParamikoTransport:
    """Opens agents as the user's ssh configuration says. Host keys are verified; it never asks for passwords."""

    def __init__(self, settings: Settings) -> None:
        self.python = settings.python
        self.logins = ParamikoLogins(settings)
        self.slots = threading.BoundedSemaphore(settings.max_connections)
        self._channels: list[ParamikoChannel] = []

    def open(self, host: str, role: str, handler: Handler, command: str | None = None) -> ParamikoChannel:
        """Connect to ``host`` (a name of ssh_config or a host name), start the agent there, send the bundle."""
        channel = ParamikoChannel(self, host, handler, command or bundle.command_line(self.python))
        if command is None:
            channel.write(bundle.bundle(role))
        self._channels = [c for c in self._channels if not c.over] + [channel]
        threading.Thread(target=channel.run, name=f"ssh-{host}", daemon=True).start()
        return channel

    def close(self) -> None:
        """Drop all connections at once."""
        for channel in self._channels:
            channel.close()
        self.logins.close()


class ParamikoChannel:
    """One agent's session: a thread that logs in and then reads, and a thread that writes."""

    def __init__(self, transport: ParamikoTransport, host: str, handler: Handler, command: str) -> None:
        self.over = False
        self._transport = transport
        self._host = host
        self._handler = handler
        self._command = command
        self._lock = threading.Lock()
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._connection: paramiko.Transport | None = None

    def write(self, data: bytes) -> None:
        if not self.over:
            self._unsent.put(data)

    def close(self) -> None:
        with self._lock:
            self.over = True
            connection = self._connection
        self._unsent.put(None)
        if connection is not None:
            drop(connection)

    def run(self) -> None:
        """Log in, start the agent, and read its output until its end."""
        session = None
        try:
            session = self._open()
            if session is None:
                return
            self._handler.connected()
            threading.Thread(target=self._send, args=(session,), name=f"to-{self._host}", daemon=True).start()
            error = self._read(session)
        except Exception as failed:  # the limit of open files or threads here, for example
            error = errors.any_error(failed)
        with self._lock:
            closed, self.over = self.over, True
        self._unsent.put(None)
        if self._connection is not None:
            drop(self._connection)
        if session is not None and session.closed:  # else paramiko's thread may still write to its pipe
            session.close()  # frees the pipe: passes of the cycle collector, which would, are rare
        if not closed:
            self._handler.ended(error)

    def _open(self) -> paramiko.Channel | None:
        """Return the session; None when the channel was closed meanwhile. Raises TransportError."""
        logins = self._transport.logins
        with self._transport.slots:
            if self.over:
                return None
            host = logins.find(self._host)
            connection = logins.log_in(host)
            if not self._take(connection):
                return None
            until = time.monotonic() + logins.timeout_s
            limit = threading.Timer(logins.timeout_s, drop, [connection])  # exec_command has no limit
            limit.daemon = True
            limit.start()
            try:
                session = connection.open_session(timeout=logins.timeout_s)
                session.exec_command(self._command)
            except Exception as error:  # any failure of a node
                if time.monotonic() >= until:
                    raise errors.no_answer(logins.timeout_s) from error
                raise explain(error, host, hop="", timeout_s=logins.timeout_s) from error
            finally:
                limit.cancel()
        return session

    def _take(self, connection: paramiko.Transport) -> bool:
        """Keep a connection until the channel ends; return False, and drop it, when the channel has been closed."""
        with self._lock:
            if not self.over:
                self._connection = connection
                return True
        drop(connection)
        return False

    def _read(self, session: paramiko.Channel) -> TransportError:
        """Pass the agent's output on; return why the session has ended."""
        poller = select.poll()
        poller.register(session.fileno(), select.POLLIN)
        stderr = b""
        while not self.over:
            poller.poll()
            done = session.eof_received or session.closed  # read first: output from before it is available now
            while session.recv_stderr_ready():
                stderr = (stderr + session.recv_stderr(_CHUNK))[-_STDERR_KEPT:]
            if session.recv_ready():
                data = session.recv(_CHUNK)
                if not self.over:
                    self._handler.received(data)
            elif done:
                break
        if session.status_event.wait(_EXIT_CODE_S) and session.exit_status >= 0:
            return explain_exit(session.exit_status, stderr, self._transport.python)
        if (why := self._lost()) is not None:
            return TransportError("lost", f"the connection was lost: {why}")
        # paramiko ignores exit-signal: a session without an exit code was ended by a signal
        return explain_exit(None, stderr + b"\nkilled by a signal\n", self._transport.python)

    def _lost(self) -> str | None:
        """Return why the connection has ended; None while it is open."""
        connection = self._connection
        # paramiko's thread stores the error that ended the connection, closes its sessions, and only then is inactive
        error = connection.get_exception() if connection is not None else None
        if connection is None or (error is None and connection.is_active()):
            return None
        return str(error or "") or (type(error).__name__ if error else "closed by the other side")

    def _send(self, session: paramiko.Channel) -> None:
        with suppress(OSError, EOFError, paramiko.SSHException):  # the session has ended: the reading thread reports it
            while (data := self._unsent.get()) is not None:
                session.sendall(data)
