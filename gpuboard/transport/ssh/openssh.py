"""The system's ssh, with all its features (Kerberos, smart cards, host-based keys, MFA, …).

One ssh process and one thread per agent. The connection is shared (ControlMaster): further agents, other commands of
gpuboard and its keeper reach the same node without logging in again. Details: docs/transports.md.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from gpuboard.transport import bundle
from gpuboard.transport.base import Handler, TransportError
from gpuboard.transport.exit_errors import not_started
from gpuboard.transport.process import ChildChannel, Exit
from gpuboard.transport.spawn import spawn
from gpuboard.transport.ssh import errors
from gpuboard.transport.ssh.command_line import SshRoute, SshRoutes
from gpuboard.transport.ssh.openssh_errors import SSH_FAILED, explain_ssh
from gpuboard.transport.ssh.single_flight import Dropped, retry_dropped

if TYPE_CHECKING:
    from gpuboard.config import Settings

_ANSWER_S = 10.0  # from the login to the agent's first byte, at least
_POLL_S = 0.1  # between two checks whether the connection is open
_FILES = 65536  # limit of open files: four per agent


class OpensshTransport:
    """Opens agents through ssh processes, which never ask for anything; ssh/login.py does."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where there is no ssh."""
        self.python = settings.python
        self.routes = SshRoutes(settings, os.environ)
        self.slots = threading.BoundedSemaphore(settings.max_connections)
        self._channels: list[SshProcess] = []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard == resource.RLIM_INFINITY or soft < min(hard, _FILES):
            most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))

    def open(self, host: str, role: str, handler: Handler, command: str | None = None) -> SshProcess:
        """Connect to ``host`` (as ssh accepts it), start the agent there, send the bundle."""
        channel = SshProcess(self, host, handler, command or bundle.command_line(self.python))
        if command is None:
            channel.write(bundle.bundle(role))
        self._channels = [c for c in self._channels if not c.over] + [channel]
        threading.Thread(target=channel.connect, name=f"ssh-{host}", daemon=True).start()
        return channel

    def close(self) -> None:
        """End every session at once; their connections end with them."""
        for channel in self._channels:
            channel.close()
        self.routes.close()


class SshProcess:
    """One agent's session: one ssh process after the other until one logs in."""

    def __init__(self, transport: OpensshTransport, host: str, handler: Handler, command: str) -> None:
        self.handler = handler
        self.over = False
        self._transport = transport
        self._host = host
        self._command = command
        self._lock = threading.Lock()
        self._written = bytearray()  # until the agent's first output: a further attempt sends it again
        self._attempt: _Attempt | None = None
        self._closed = threading.Event()

    def write(self, data: bytes) -> None:
        with self._lock:
            if self.over:
                return
            if self._attempt is None or not self._attempt.connected_yet:
                self._written += data
            if self._attempt is not None:
                self._attempt.child.write(data)

    def close(self) -> None:
        with self._lock:
            self.over = True
            attempt = self._attempt
        self._closed.set()
        if attempt is not None:
            attempt.child.close()
            attempt.settled.set()

    def fail(self, error: TransportError) -> None:
        """End with an error, once."""
        with self._lock:
            if self.over:
                return
            self.over = True
        self.handler.ended(error)

    def agent_started(self) -> None:
        """Handle the agent's first output."""
        with self._lock:
            self._written.clear()

    def connect(self) -> None:
        """Log in, or report why that failed. Runs in its own thread."""
        try:
            with self._transport.slots:
                route = self._transport.routes.open_jumps(self._host)
            retry_dropped(lambda: self._try(route), self._transport.routes.timeout_s, self._closed)
        except Exception as error:  # the limit of open files or processes here, for example
            self.fail(errors.any_error(error))

    def _try(self, route: SshRoute) -> None:
        """Start one process. Returns when it has logged in, or when the session was closed. Raises TransportError."""
        attempt = _Attempt(self, route, self._transport)
        routes = self._transport.routes
        with self._transport.slots:
            with self._lock:
                if self.over:
                    return
                child = spawn(route.session(self._command), routes.environ)
                self._attempt = attempt
                attempt.child.write(bytes(self._written))
                attempt.child.start(child)
            until = time.monotonic() + routes.timeout_s
            while not attempt.settled.wait(_POLL_S) and not route.alive():
                if time.monotonic() > until:
                    attempt.child.close()
                    raise errors.no_answer(routes.timeout_s)
        attempt.logged_in()
        attempt.settled.wait()
        if isinstance(attempt.error, Dropped) and route.via is not None:
            raise routes.jump_failure(route) or attempt.error
        if attempt.error is not None and not attempt.connected_yet:
            raise attempt.error


class _Attempt:
    """Handles one ssh process of a session."""

    def __init__(self, session: SshProcess, route: SshRoute, transport: OpensshTransport) -> None:
        self.settled = threading.Event()  # the agent has sent output, or the process has ended
        self.error: TransportError | None = None
        self.connected_yet = False
        self._reporting = threading.Lock()  # the handler's ``connected`` is called once, before its other methods
        self._reported = False
        self._session = session
        self._route = route
        self._transport = transport
        self._answer_s = max(_ANSWER_S, transport.routes.timeout_s)
        self.child = ChildChannel(self, self._explain, first_byte_s=transport.routes.timeout_s + self._answer_s)

    def logged_in(self) -> None:
        """Report the login: from now on the node's shell is what takes time. It has sent no output yet."""
        if not self.settled.is_set():
            self._report_connected()

    def connected(self) -> None:
        self.connected_yet = True
        self._session.agent_started()
        self._report_connected()
        self.settled.set()

    def received(self, data: bytes) -> None:
        self._session.handler.received(data)

    def ended(self, error: TransportError) -> None:
        self.error = error
        if self.connected_yet:
            self._session.fail(error)
        self.settled.set()

    def _report_connected(self) -> None:
        with self._reporting:
            if not self._reported:
                self._reported = True
                self._session.handler.connected()

    def _explain(self, ending: Exit) -> TransportError:
        if ending.late:
            return not_started(self._answer_s, "")
        return explain_ssh(
            ending.stderr,
            ending.code,
            self._route.host,
            hop=self._route.hop,
            python=self._transport.python,
            timeout_s=self._transport.routes.timeout_s,
            connected=self.connected_yet,
            was_alive=self._reported,
            alive=ending.code == SSH_FAILED and self._route.answers(),
        )
