"""Run one command on one node of a lease: here, over ssh or in a Slurm job; forward signals, return its exit code."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuboard.keeper.processes import carriers
from gpuboard.model.units import parse_duration

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.config import Settings

_SI_KERNEL = 128  # sent by the terminal, to the command as well
_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_CONNECTION = 255  # exit code of an ssh whose connection ended
_LOOK_S = 0.5
_MAX_SENDERS = 2  # signals being delivered; one more ends the connection instead
_PYTHON_FLAGS = ("-I", "-S", "-c")


def local_command(argv: Sequence[str], environ: Mapping[str, str], cwd: str) -> list[str]:
    """Return the command line that runs ``argv`` on this machine under the runner, for this process to start."""
    return _local(argv, environ, cwd, hangup_only=False)


def _local(argv: Sequence[str], environ: Mapping[str, str], cwd: str, *, hangup_only: bool) -> list[str]:
    config = _config(argv, environ, cwd, remote=False, hangup_only=hangup_only, parent=os.getpid())
    return [sys.executable, *_PYTHON_FLAGS, _source(), config]


def remote_command(
    host: str, argv: Sequence[str], environ: Mapping[str, str], cwd: str, settings: Settings, *, terminal: bool
) -> list[str]:
    """Return the command line that runs ``argv`` on ``host``.

    It uses the system's ssh, not asyncssh: that forwards the terminal's size and modes, escapes and the agent as the
    user expects. The node's shell reads one python3 command of letters, digits and ``+/=`` in single quotes.
    """
    ssh = _ssh(host, _config(argv, environ, cwd, remote=True), settings, terminal=terminal)
    return _local(ssh, {}, cwd, hangup_only=True)


def remote_signal(host: str, lease: str, settings: Settings, number: int) -> list[str]:
    """Return the command line that sends a signal to the command of ``lease`` on ``host``; exit code 1: there is none.

    ssh does not forward signals; without this, the command would only get the end of the connection.
    """
    wait_s = max(1, round(parse_duration(settings.connect_timeout)))
    ssh = _ssh(host, _encoded({"signal": number, "lease": lease}), settings, terminal=False)
    return [ssh[0], "-n", "-o", f"ConnectTimeout={wait_s}", *ssh[1:]]


def _ssh(host: str, config: str, settings: Settings, *, terminal: bool) -> list[str]:
    """Return the command line that runs the runner on ``host``, with an encoded ``config``."""
    packed = base64.b64encode(zlib.compress(_source().encode(), 9)).decode()
    loader = f'import zlib,base64;exec(zlib.decompress(base64.b64decode("{packed}")))'
    words = f"{settings.python} {' '.join(_PYTHON_FLAGS)} '{loader}' {config}"
    ssh = ["ssh", "-t" if terminal else "-T", "-o", "ServerAliveInterval=15", "-o", "LogLevel=ERROR"]
    file = os.path.expanduser(settings.ssh_config)
    if file != os.path.expanduser("~/.ssh/config") and os.path.exists(file):
        ssh += ["-F", file]
    if settings.known_hosts != type(settings)().known_hosts:  # the default is ssh's own
        hosts = [os.path.expanduser(name) for name in settings.known_hosts]
        ssh += ["-o", f"UserKnownHostsFile={' '.join(hosts)}"]
    if settings.transport == "openssh":
        from gpuboard.transport.ssh.command_line import shared_options

        ssh += shared_options(host, settings, os.environ)  # an existing connection, e.g. one opened with a password
    return [*ssh, "-o", "BatchMode=yes", "--", host, words]


def step_command(
    node: Node, argv: Sequence[str], environ: Mapping[str, str], cwd: str, settings: Settings, *, terminal: bool
) -> list[str]:
    """Return the command line that runs ``argv`` in a step of the Slurm job through which ``node`` is reached.

    Raises TransportError where Slurm does not show the job's allocation.
    """
    from gpuboard.transport.slurm.srun import binds_tasks, counted, step

    assert node.job is not None and node.host is not None
    timeout_s = parse_duration(settings.connect_timeout)
    gpus = counted(node.job, timeout_s).get(node.host, 0)
    words = step(node.job, node.host, gpus, timeout_s, binds=binds_tasks(timeout_s))
    words += ["--pty"] if terminal else []
    runner = [settings.python, *_PYTHON_FLAGS, _source(), _config(argv, environ, cwd, remote=False)]
    return _local([*words, *runner], {}, cwd, hangup_only=True)


def step_signal(node: Node, lease: str, settings: Settings, number: int) -> list[str]:
    """Return the same as :func:`remote_signal` for a step of a Slurm job, which srun would abort."""
    from gpuboard.transport.slurm.srun import step

    assert node.job is not None and node.host is not None
    words = step(node.job, node.host, 0, parse_duration(settings.connect_timeout), binds=False)
    config = _encoded({"signal": number, "lease": lease})
    return [*words, "--input=none", settings.python, *_PYTHON_FLAGS, _source(), config]


def run_command(
    command: Sequence[str],
    environ: Mapping[str, str],
    lease: str,
    signal_command: Callable[[int], list[str]] | None = None,
) -> int:
    """Run one of the above on this terminal and return its exit code, 128 + n for signal n.

    Signals sent to this process only are forwarded. To another machine all signals are forwarded, by the command line
    that ``signal_command`` returns for one; when that fails or takes too long, the connection is closed. Call it from
    the main thread, whose end makes the runner end.
    """
    watched = (*_SIGNALS, signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    over = threading.Event()
    threading.Thread(target=_tick, args=(threading.get_ident(), over), name="tick", daemon=True).start()
    senders: dict[int, int] = {}  # by pid of a signal command: the signal
    cut = 0  # the signal for which the connection was closed
    try:
        pid = os.posix_spawn(
            command[0], list(command), dict(environ), setsigmask=watched
        )  # until the runner handles them
        while True:
            info = signal.sigwaitinfo(watched)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            number, lost = info.si_signo, _reap(senders)
            meant = number != signal.SIGCHLD and (info.si_code != _SI_KERNEL or signal_command is not None)
            if meant and signal_command is None:
                os.kill(pid, number)
            elif lost or (meant and (number == signal.SIGHUP or len(senders) == _MAX_SENDERS)):
                cut = cut or lost or number
                os.kill(pid, signal.SIGHUP)
            elif meant and signal_command is not None:
                words = signal_command(number)
                senders[os.posix_spawnp(words[0], words, dict(environ), setsigmask=_SIGNALS)] = number
    finally:
        for other in senders:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
        over.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if os.WIFEXITED(status):
        code = os.WEXITSTATUS(status)
        return 128 + cut if cut and code == _CONNECTION else code
    for left in carriers(lease):  # the runner itself was killed
        os.kill(left, signal.SIGKILL)
    return 128 + os.WTERMSIG(status)


def _reap(senders: dict[int, int]) -> int:
    """Remove the signal commands that have ended from ``senders``; return the signal of a failed one, else 0."""
    lost = 0
    for pid in list(senders):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            number = senders.pop(pid)
            lost = number if status else lost
    return lost


def _tick(thread: int, over: threading.Event) -> None:
    """Wake ``thread`` periodically: a thread left over from a connection may have received the signal it waits for.

    sigtimedwait's timeout would not do: after a longer suspension (ctrl-Z, fg) it returns uninitialized memory.
    """
    while not over.wait(_LOOK_S):
        signal.pthread_kill(thread, signal.SIGCHLD)


def _source() -> str:
    return (Path(__file__).parents[1] / "agent" / "command_runner.py").read_text(encoding="utf-8")


def _config(
    argv: Sequence[str],
    environ: Mapping[str, str],
    cwd: str,
    *,
    remote: bool,
    hangup_only: bool = False,
    parent: int | None = None,
) -> str:
    config = {"argv": list(argv), "environ": dict(environ), "cwd": cwd, "remote": remote, "hangup_only": hangup_only}
    return _encoded(config | {"parent": parent})


def _encoded(value: dict[str, Any]) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()
