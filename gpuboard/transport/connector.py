"""Opens links: the local transport for this machine, srun into the user's jobs, ssh for the rest; each when needed."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gpuboard.errors import ConfigError
from gpuboard.transport.base import Handler, Transport, TransportError
from gpuboard.transport.link import AgentLink, Listener
from gpuboard.transport.process import ChildChannel, Exit
from gpuboard.transport.spawn import agent_command, spawn, take_prestarted

if TYPE_CHECKING:
    from gpuboard.config import Settings

# Seconds without a message after which an agent in a job step exits. A step does not notice that srun was killed
# together with srun's cleanup process, or that srun's host has crashed. Feeds and the keeper send messages more often.
STEP_SILENCE_S = 300.0
_END_S = 2.0  # an agent ends this soon after its connection, whatever NVML does
_LAUNCH_END_S = 10.0  # a guard killed sooner may leave orphaned processes: 1.6 s of grace, 4 s until all are killed


class Connector:
    """All transports of one process. Used by feeds, the keeper and launches; closing it ends every link at once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._local: Transport | None = None
        self._ssh: Transport | None = None
        self._steps: dict[str, Transport] = {}  # by job

    def open(
        self,
        node: str,
        host: str | None,
        *,
        role: str,
        config: dict[str, Any],
        listener: Listener,
        ended: Callable[[TransportError], None],
        job: str | None = None,
    ) -> AgentLink:
        """Return a link to a new agent of ``role`` on ``host`` (None: this machine), at once, while it connects.

        ``job``: through a step of this Slurm job (``123``, or ``123+1``: a component of a heterogeneous one), where
        ``host`` is the node's name in Slurm. This machine needs no step: this process is in the job.
        ``listener`` and ``ended`` are called in the transport's thread (see :class:`AgentLink`).
        """
        if job is not None and host is not None and role in {"node", "runs"}:
            config = {**config, "silence_s": STEP_SILENCE_S}
        link = AgentLink(node, role, config, listener, ended)
        transport = self.transport(host, job)
        link.attach(transport.open(host or "localhost", role, link))
        return link

    def close(self) -> None:
        """End every link and stop the transports' threads; takes less than 0.5 s, whatever hangs."""
        with self._lock:
            transports = [self._local, self._ssh, *self._steps.values()]
            self._local = self._ssh = None
            self._steps = {}
        for transport in transports:
            if transport is not None:
                transport.close()

    def transport(self, host: str | None, job: str | None) -> Transport:
        """Return the transport to ``host``, created at first use; the arguments as in :meth:`open`."""
        with self._lock:
            if host is None:
                self._local = self._local or LocalTransport()
                return self._local
            if job is not None:
                if job not in self._steps:
                    from gpuboard.transport.slurm.srun import SrunTransport  # 10 ms: only with Slurm

                    self._steps[job] = SrunTransport(self._settings, job)
                return self._steps[job]
            self._ssh = self._ssh or ssh_transport(self._settings)
            return self._ssh


def ssh_transport(settings: Settings) -> Transport:
    """Return the ssh transport that the settings name. Raises ConfigError."""
    if settings.transport == "openssh":
        from gpuboard.transport.ssh.openssh import OpensshTransport

        return OpensshTransport(settings)
    if settings.transport == "paramiko":
        try:
            from gpuboard.transport.ssh.paramiko import ParamikoTransport  # 200 ms
        except ModuleNotFoundError as error:
            raise ConfigError(
                f'transport = "paramiko" needs the library {error.name}, which is not installed here; '
                "install it with `pip install 'gpuboard[paramiko]'`, or set transport = \"asyncssh\""
            ) from None
        return ParamikoTransport(settings)
    with _without_extras():
        from gpuboard.transport.ssh.asyncssh import AsyncsshTransport  # 150 ms: only for other machines

    return AsyncsshTransport(settings)


@contextlib.contextmanager
def _without_extras() -> Iterator[None]:
    """Let asyncssh be imported without what OpenSSH does not have or does not require, which takes 90 ms.

    It searches for liboqs and nettle with ldconfig, a compiler and a linker, and reads X.509 certificates if the
    library for them can be imported. A program that needs those from asyncssh itself imports it before.
    """
    import ctypes.util  # late: only with asyncssh, which imports it

    find_library, x509 = ctypes.util.find_library, "cryptography.x509"
    ctypes.util.find_library = lambda name: None
    hidden = x509 not in sys.modules
    if hidden:
        sys.modules[x509] = None  # type: ignore[assignment]  # makes the import fail, as if not installed
    try:
        yield
    finally:
        ctypes.util.find_library = find_library
        if hidden:
            del sys.modules[x509]


class LocalTransport:
    """Starts agents as child processes, without a shell. ``command`` returns the command line (tests replace it)."""

    def __init__(self, command: Callable[[], list[str]] = agent_command) -> None:
        self._command = command
        self._channels: list[ChildChannel] = []

    def open(self, host: str, role: str, handler: Handler, command: str | None = None) -> ChildChannel:
        """Start an agent; where the program cannot be started, the channel ends with kind ``no-python``."""
        channel = ChildChannel(handler, _explain, end_s=_LAUNCH_END_S if role == "launch" else _END_S)
        self._channels = [c for c in self._channels if not c.over] + [channel]
        try:
            usual = command is None and role == "node" and self._command is agent_command
            child = (take_prestarted() if usual else None) or spawn(
                ["/bin/sh", "-c", command] if command else self._command()
            )
        except OSError as error:
            if error.errno == errno.EMFILE:
                words = f"too many open files here: the limit is {os.sysconf('SC_OPEN_MAX')}"
                channel.fail(TransportError("no-python", words, "raise it with `ulimit -n`"))
            else:
                channel.fail(TransportError("no-python", f"the agent cannot be started: {error}"))
            return channel
        channel.start(child)
        return channel

    def close(self) -> None:
        """End every child at once."""
        for channel in self._channels:
            channel.close()


def _explain(ending: Exit) -> TransportError:
    from gpuboard.transport.exit_errors import explain_exit  # late: only when something is wrong

    return explain_exit(ending.code, ending.stderr, agent_command()[0])
