"""SSH through asyncssh (200 ms to import), in one event loop thread for all nodes.

With asyncssh_config.py the only module that imports asyncssh.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

import asyncssh

from gpuboard.model.units import parse_duration
from gpuboard.transport import bundle
from gpuboard.transport.base import Handler, TransportError
from gpuboard.transport.exit_errors import explain_exit
from gpuboard.transport.ssh import errors, resolve
from gpuboard.transport.ssh.asyncssh_config import HostConfig, SshHost
from gpuboard.transport.ssh.pace import Pace, Turn
from gpuboard.transport.ssh.single_flight import RETRY_S

if TYPE_CHECKING:
    from gpuboard.config import Settings

_STDERR_KEPT = 65536
_END_S = 0.3  # for closing everything; what takes longer is abandoned
_TURNS = 3  # of the loop until an aborted connection has closed its socket: asyncssh takes one, asyncio another
_MAX_TIMEOUTS = 4.0  # a connection whose handshake makes progress may take this many timeouts in all
_KEEPALIVE_S, _KEEPALIVE_COUNT = 15, 3  # a path that drops packets is detected within a minute

# Failures are reported as TransportError; log lines would overwrite the screen.
logging.getLogger("asyncssh").setLevel(logging.CRITICAL + 1)
# asyncio's warnings, too: one about an unknown child process when the connection of a ProxyCommand is dropped.
logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)


class AsyncsshTransport:
    """Opens agents as the user's ssh configuration says. Host keys are verified; it never asks for passwords."""

    def __init__(self, settings: Settings) -> None:
        self._python = settings.python
        self._timeout_s = parse_duration(settings.connect_timeout)
        self._config = HostConfig(settings.ssh_config, settings.known_hosts, resolve.cache_file())
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_DaemonExecutor())
        self._loop.set_exception_handler(lambda loop, context: None)  # of connections dropped during setup
        self._slots = asyncio.Semaphore(settings.max_connections)  # for calls of `ssh -G`
        self._pace = Pace(settings.max_connections)
        self._jumps: dict[tuple[str, ...], asyncio.Task[asyncssh.SSHClientConnection]] = {}
        self._connections: set[asyncssh.SSHClientConnection] = set()
        self._lock = threading.Lock()
        self._channels: weakref.WeakSet[SshChannel] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ssh", daemon=True)
        self._thread.start()

    def open(self, host: str, role: str, handler: Handler, command: str | None = None) -> SshChannel:
        """Connect to ``host`` (a name of ssh_config or a host name), start the agent there, send the bundle."""
        channel = SshChannel(self._loop, self._thread, handler, self._python)
        with self._lock:
            self._channels.add(channel)
        if command is None:
            channel.write(bundle.bundle(role))
        self._loop.call_soon_threadsafe(self._start, host, channel, command)
        return channel

    def close(self) -> None:
        """Drop all connections and stop the thread. A DNS lookup that hangs is abandoned."""
        self._config.close()
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _start(self, host: str, channel: SshChannel, command: str | None) -> None:
        channel.task = self._loop.create_task(self._connect(host, channel, command))

    async def _end(self) -> None:
        for connection in list(self._connections):
            connection.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S / 2)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        self._loop.stop()

    async def _connect(self, name: str, channel: SshChannel, command: str | None) -> None:
        """Connect, at most ``max_connections`` at a time, and start ``command`` or the agent."""
        host = None
        try:
            async with self._slots:  # in a thread: `ssh -G` may be called, 8 ms a host
                host = await self._loop.run_in_executor(None, self._config.host, name)
                chain = await self._loop.run_in_executor(None, self._config.jumps, host) if host.jumps else ()
            tunnel = await self._jump(chain) if chain else None
            await self._set_up(host, tunnel, channel, command or bundle.command_line(self._python), agent=not command)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # any failure of a node, its keys or the user's ssh_config
            channel.fail(explain(error, name, host, self._timeout_s))

    async def _set_up(
        self,
        host: SshHost,
        tunnel: asyncssh.SSHClientConnection | None,
        channel: SshChannel,
        command: str,
        *,
        agent: bool,
    ) -> None:
        """Connect in turn; a turn lasts until the agent has started, because its start is most of the work."""
        turn, begun = await self._pace.enter(), False
        try:
            async with _Deadline(self._timeout_s, turn) as deadline:
                channel.connection = connection = await self._log_in(host, tunnel, deadline)
                try:
                    await connection.create_session(lambda: channel, command, encoding=None, request_pty=False)
                except asyncssh.ChannelOpenError as error:
                    raise errors.no_session(host.name, error.reason) from error
            if agent:
                turn.starting = True
                await channel.begun.wait()
            begun = True
        finally:
            self._pace.leave(turn, succeeded=begun)

    async def _log_in(
        self, host: SshHost, tunnel: asyncssh.SSHClientConnection | None, deadline: _Deadline
    ) -> asyncssh.SSHClientConnection:
        """Return a connection, with retries for a server that drops new ones (MaxStartups)."""
        until = time.monotonic() + self._timeout_s
        for wait_s in RETRY_S:
            try:
                return await self._log_in_once(host, tunnel, deadline)
            except (asyncssh.ConnectionLost, ConnectionResetError, BrokenPipeError):
                if errors.job_required(host.name, host.banner) or time.monotonic() + wait_s > until:
                    raise
                await asyncio.sleep(random.uniform(0.5, 1.0) * wait_s)
        return await self._log_in_once(host, tunnel, deadline)

    async def _log_in_once(
        self, host: SshHost, tunnel: asyncssh.SSHClientConnection | None, deadline: _Deadline
    ) -> asyncssh.SSHClientConnection:
        options: dict[str, Any] = dict(host.options)
        options.setdefault("keepalive_interval", _KEEPALIVE_S)
        options.setdefault("keepalive_count_max", _KEEPALIVE_COUNT)
        with host.configuration() as configuration:
            connection = await asyncssh.connect(
                host.name,
                **options,
                **configuration,
                known_hosts=host.known_hosts,
                tunnel=tunnel,
                client_factory=lambda: _Client(host, self._connections, deadline),
                agent_forwarding=False,
                x11_forwarding=False,
                connect_timeout=None,  # see _Deadline
                login_timeout=0,
            )
        self._connections.add(connection)
        return connection

    async def _jump(self, chain: tuple[str, ...]) -> asyncssh.SSHClientConnection:
        """Return the connection to the last host of ``chain``, which all nodes behind it share."""
        task = self._jumps.get(chain)
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().is_closed())):
            task = self._jumps[chain] = self._loop.create_task(self._open_jump(chain))
        return await asyncio.shield(task)

    async def _open_jump(self, chain: tuple[str, ...]) -> asyncssh.SSHClientConnection:
        tunnel = await self._jump(chain[:-1]) if chain[:-1] else None
        host = await self._loop.run_in_executor(None, self._config.host, chain[-1])
        try:
            async with _Deadline(self._timeout_s) as deadline:
                return await self._log_in(host, tunnel, deadline)
        except Exception as error:  # reported about the jump host, to all nodes behind it
            raise explain(error, host.name, host, self._timeout_s) from error


class _Deadline:
    """Ends the block with TimeoutError ``timeout_s`` after its start, or after the last ``progress`` in it.

    With continuous progress it ends after _MAX_TIMEOUTS times as long.
    """

    def __init__(self, timeout_s: float, turn: Turn | None = None) -> None:
        self._timeout_s = timeout_s
        self._turn = turn
        self._limit = asyncio.timeout(timeout_s)
        self._latest = 0.0

    async def __aenter__(self) -> _Deadline:
        await self._limit.__aenter__()
        self._latest = asyncio.get_running_loop().time() + _MAX_TIMEOUTS * self._timeout_s
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._limit.__aexit__(kind, error, trace)

    def progress(self) -> bool:
        """Record that the server has sent something; return whether the block is still running."""
        if self._turn is not None:
            self._turn.progress()
        try:
            self._limit.reschedule(min(self._latest, asyncio.get_running_loop().time() + self._timeout_s))
        except RuntimeError:
            return False
        return True


class _Client(asyncssh.SSHClient):
    """Records what error messages need: the key of a server that cannot be verified, whether it asks for a password.

    Until the deadline's block ends, everything that the server sends is progress.
    """

    def __init__(self, host: SshHost, connections: set[asyncssh.SSHClientConnection], deadline: _Deadline) -> None:
        self._host = host
        self._connections = connections
        self._deadline = deadline
        self._connection: asyncssh.SSHClientConnection | None = None

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self._connection = conn
        received = conn.data_received

        def data_received(data: bytes, datatype: int | None = None) -> None:
            if not self._deadline.progress():
                del conn.data_received  # restores the class's method
            received(data, datatype)

        conn.data_received = data_received  # type: ignore[method-assign]  # asyncssh has no hook for it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._connections.discard(self._connection)

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self._host.offered = f"{key.get_algorithm()} {key.get_fingerprint()}"
        return False

    def auth_banner_received(self, msg: str, lang: str) -> None:
        self._host.banner = (self._host.banner + msg)[-_STDERR_KEPT:]

    def password_auth_requested(self) -> None:
        self._host.needs_user = True  # returns None: no answer

    def kbdint_auth_requested(self) -> None:
        self._host.needs_user = True


class SshChannel(asyncssh.SSHClientSession[bytes]):
    """One agent's session. The methods of :class:`Channel` may be called from any thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, handler: Handler, python: str
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self.connection: asyncssh.SSHClientConnection | None = None
        self.begun = asyncio.Event()  # the agent has sent output, or has ended
        self._loop = loop
        self._thread = thread
        self._handler = handler
        self._python = python
        self._unsent: list[bytes] = []  # written before the session was open
        self._chan: asyncssh.SSHClientChannel[bytes] | None = None
        self._stderr = b""
        self._exit: int | None = None
        self._over = False

    def write(self, data: bytes) -> None:
        self._in_loop(self._write, data)

    def close(self) -> None:
        self._over = True
        self._in_loop(self._drop)

    def fail(self, error: TransportError) -> None:
        """End with an error, once."""
        if not self._over:
            self._over = True
            self._handler.ended(error)
        self._drop()

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        self._chan = chan

    def session_started(self) -> None:
        assert self._chan is not None
        if not self._over:
            self._handler.connected()
            unsent, self._unsent = b"".join(self._unsent), []
            self._write(unsent)

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self.begun.set()
        if datatype is not None:
            self._stderr = (self._stderr + data)[-_STDERR_KEPT:]
        elif not self._over:
            self._handler.received(data)

    def exit_status_received(self, status: int) -> None:
        self._exit = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self._stderr += f"\nkilled by SIG{signal}\n".encode()

    def connection_lost(self, exc: Exception | None) -> None:
        self.begun.set()
        if self._exit is not None or exc is None:
            self.fail(explain_exit(self._exit, self._stderr, self._python))
        else:
            why = str(exc) or type(exc).__name__
            why = "it was closed without notice" if why == "Connection lost" else why
            self.fail(TransportError("lost", f"the connection was lost: {why}"))

    def _write(self, data: bytes) -> None:
        if self._chan is None or self._unsent:
            self._unsent.append(data)
        elif not self._chan.is_closing():
            with contextlib.suppress(BrokenPipeError):  # the command has ended: connection_lost reports how
                self._chan.write(data)

    def _drop(self) -> None:
        if self.task is not None and not self.task.done() and asyncio.current_task(self._loop) is not self.task:
            self.task.cancel()
        if self.connection is not None:
            self.connection.abort()

    def _in_loop(self, act: Callable[..., None], *args: Any) -> None:
        if threading.current_thread() is self._thread:
            act(*args)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and this channel with it
                self._loop.call_soon_threadsafe(act, *args)


def explain(error: Exception, name: str, host: SshHost | None, timeout_s: float) -> TransportError:
    """Return the error for a failure to reach ``name``; ``host`` is None when its configuration could not be read."""
    if isinstance(error, TransportError):
        return error
    if host is not None and (refusal := errors.job_required(name, host.banner)):
        return refusal
    if isinstance(error, TimeoutError) and error.errno is None:
        return errors.no_answer(timeout_s)
    if isinstance(error, socket.gaierror):
        return errors.no_address(name)
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return _host_key(error, name, host)
    if isinstance(error, asyncssh.PermissionDenied):
        if host is not None and host.needs_user:
            return errors.interaction_required(name, host.user)
        return errors.key_refused(name, host.user if host else "")
    if isinstance(error, asyncssh.ChannelOpenError):
        return errors.not_through(name, host.jumps[-1] if host and host.jumps else "", error.reason)
    if isinstance(error, asyncssh.DisconnectError):
        return errors.dropped(name, error.reason)
    if isinstance(error, OSError):
        return errors.by_error(error)
    if host is None:
        return TransportError("resolve", f"ssh_config: {error}", "correct the file that `ssh_config` names")
    return TransportError("lost", f"ssh: {type(error).__name__}: {error}", f"try `ssh {name}`")


def _host_key(error: asyncssh.HostKeyNotVerifiable, name: str, host: SshHost | None) -> TransportError:
    offered = host.offered or "" if host else ""
    if "revoked" in error.reason.lower():
        return errors.revoked_key(name)
    if host is not None and host.key_is_known():
        return errors.changed_key(name, offered, host.key_name, host.port)
    return errors.unknown_key(name, offered)


class _DaemonExecutor(ThreadPoolExecutor):
    """A daemon thread for each job: a DNS lookup that hangs must not delay the exit."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the connection was abandoned meanwhile
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # the future raises it
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future
