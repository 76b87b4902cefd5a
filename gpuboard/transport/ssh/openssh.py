"""The system's ssh: whatever ``ssh gpu01`` can do (Kerberos, smart cards, host-based keys, MFA, …), this can.

An ssh process and a thread for every agent. The connection is shared (ControlMaster): further agents, other commands
of gpuboard and its keeper reach the same node without logging in again. docs/transports.md has the details.
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
from gpuboard.transport.process import ChildChannel, Ending
from gpuboard.transport.spawn import spawn
from gpuboard.transport.ssh import errors
from gpuboard.transport.ssh.command_line import SshRoute, Ways
from gpuboard.transport.ssh.openssh_errors import explain_ssh
from gpuboard.transport.ssh.single_flight import Dropped, again

if TYPE_CHECKING:
    from gpuboard.config import Settings

_ANSWER_S = 10.0  # from a connection that stands to the first byte of the agent, at least
_LOOK_S = 0.1  # how often it is looked whether a connection stands
_FILES = 65536  # open files: four an agent


class OpensshTransport:
    """Opens agents through ssh processes. Nobody is asked for anything: see ssh/login.py."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where there is no ssh."""
        self.python = settings.python
        self.ways = Ways(settings, os.environ)
        self.slots = threading.BoundedSemaphore(settings.max_connections)
        self._channels: list[SshProcess] = []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard == resource.RLIM_INFINITY or soft < min(hard, _FILES):
            most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))

    def open(self, host: str, role: str, handler: Handler, command: str | None = None) -> SshProcess:
        """Connect to ``host`` (whatever ssh takes for one), start the agent there, send the bundle."""
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
        self.ways.close()


class SshProcess:
    """One agent's session: one ssh process after the other until one gets in."""

    def __init__(self, transport: OpensshTransport, host: str, handler: Handler, command: str) -> None:
        self.handler = handler
        self.over = False
        self._transport = transport
        self._host = host
        self._command = command
        self._lock = threading.Lock()
        self._written = bytearray()  # until the agent speaks: all that another attempt has to say again
        self._attempt: _Attempt | None = None
        self._closed = threading.Event()

    def write(self, data: bytes) -> None:
        """Send bytes."""
        with self._lock:
            if self.over:
                return
            if self._attempt is None or not self._attempt.connected_yet:
                self._written += data
            if self._attempt is not None:
                self._attempt.child.write(data)

    def close(self) -> None:
        """End the session."""
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

    def spoke(self) -> None:
        """Take note that the agent has said something."""
        with self._lock:
            self._written.clear()

    def connect(self) -> None:
        """Get in, or say why not. Runs in a thread of its own."""
        try:
            with self._transport.slots:
                way = self._transport.ways.to(self._host)
            again(lambda: self._try(way), self._transport.ways.timeout_s, self._closed)
        except Exception as error:  # no more files or processes to be had here, say
            self.fail(errors.any_error(error))

    def _try(self, way: SshRoute) -> None:
        """Start one process. Returns when it got in, or when nobody wants it any more. Raises TransportError."""
        attempt = _Attempt(self, way, self._transport)
        ways = self._transport.ways
        with self._transport.slots:
            with self._lock:
                if self.over:
                    return
                child = spawn(way.session(self._command), ways.environ)
                self._attempt = attempt
                attempt.child.write(bytes(self._written))
                attempt.child.start(child)
            until = time.monotonic() + ways.timeout_s
            while not attempt.settled.wait(_LOOK_S) and not way.alive():
                if time.monotonic() > until:
                    attempt.child.close()
                    raise errors.no_answer(ways.timeout_s)
        attempt.logged_in()
        attempt.settled.wait()
        if isinstance(attempt.error, Dropped) and way.via is not None:
            raise ways.seen_from(way) or attempt.error
        if attempt.error is not None and not attempt.connected_yet:
            raise attempt.error


class _Attempt:
    """Listens to one ssh process for a session."""

    def __init__(self, session: SshProcess, way: SshRoute, transport: OpensshTransport) -> None:
        self.settled = threading.Event()  # the agent has spoken, or it is over
        self.error: TransportError | None = None
        self.connected_yet = False
        self._telling = threading.Lock()  # while the handler is told that it is connected: once, and before all else
        self._told = False
        self._session = session
        self._way = way
        self._transport = transport
        self._answer_s = max(_ANSWER_S, transport.ways.timeout_s)
        self.child = ChildChannel(self, self._explain, patience_s=transport.ways.timeout_s + self._answer_s)

    def logged_in(self) -> None:
        """Tell that the connection stands, so that now the node's shell is waited for; without words from it yet."""
        if not self.settled.is_set():
            self._tell()

    def connected(self) -> None:
        self.connected_yet = True
        self._session.spoke()
        self._tell()
        self.settled.set()

    def received(self, data: bytes) -> None:
        self._session.handler.received(data)

    def ended(self, error: TransportError) -> None:
        self.error = error
        if self.connected_yet:
            self._session.fail(error)
        self.settled.set()

    def _tell(self) -> None:
        with self._telling:
            if not self._told:
                self._told = True
                self._session.handler.connected()

    def _explain(self, ending: Ending) -> TransportError:
        if ending.late:
            return not_started(self._answer_s, "")
        return explain_ssh(
            ending.stderr,
            ending.code,
            self._way.host,
            hop=self._way.hop,
            python=self._transport.python,
            timeout_s=self._transport.ways.timeout_s,
            connected=self.connected_yet,
            stood=self._told,
            stands=self._way.alive(),
        )
