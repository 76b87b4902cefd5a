"""One command on one node of a lease: how it is started here, over ssh or in a Slurm job; what became of it."""

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

_SI_KERNEL = 128  # the terminal has sent it to the command as well
_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_CONNECTION = 255  # the exit code of an ssh that was ended
_LOOK_S = 0.5
_TELLERS = 2  # signals on their way; whoever sends one more has waited long enough
_PYTHON_FLAGS = ("-I", "-S", "-c")


def local_command(argv: Sequence[str], environ: Mapping[str, str], cwd: str) -> list[str]:
    """Return the command line that runs ``argv`` on this machine under the runner, for this process to start."""
    return _local(argv, environ, cwd, deaf=False)


def _local(argv: Sequence[str], environ: Mapping[str, str], cwd: str, *, deaf: bool) -> list[str]:
    config = _config(argv, environ, cwd, remote=False, deaf=deaf, parent=os.getpid())
    return [sys.executable, *_PYTHON_FLAGS, _source(), config]


def remote_command(
    host: str, argv: Sequence[str], environ: Mapping[str, str], cwd: str, settings: Settings, *, terminal: bool
) -> list[str]:
    """Return the command line that runs ``argv`` on ``host``.

    The system's ssh and not asyncssh: the terminal's size and modes, escapes and agent are handed on as the user is
    used to. What the node's shell reads is one python3 command of letters, digits and ``+/=`` in single quotes.
    """
    ssh = _ssh(host, _config(argv, environ, cwd, remote=True), settings, terminal=terminal)
    return _local(ssh, {}, cwd, deaf=True)


def remote_signal(host: str, lease: str, settings: Settings, number: int) -> list[str]:
    """Return the command line that sends the command that runs in ``lease`` on ``host`` a signal; 1: there is none.

    An ssh does not hand signals on, and what it runs would be told of nothing but the connection's end.
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
    if settings.known_hosts != type(settings)().known_hosts:  # else ssh knows where to look
        hosts = [os.path.expanduser(name) for name in settings.known_hosts]
        ssh += ["-o", f"UserKnownHostsFile={' '.join(hosts)}"]
    if settings.transport == "openssh":
        from gpuboard.transport.ssh.command_line import shared_options

        ssh += shared_options(host, settings, os.environ)  # such as one opened with a password
    return [*ssh, "-o", "BatchMode=yes", "--", host, words]


def step_command(
    node: Node, argv: Sequence[str], environ: Mapping[str, str], cwd: str, settings: Settings, *, terminal: bool
) -> list[str]:
    """Return the command line that runs ``argv`` in a step of the Slurm job that leads to ``node``.

    Raises TransportError where Slurm does not say what the job has.
    """
    from gpuboard.transport.slurm.srun import binds_tasks, counted, step

    assert node.job is not None and node.host is not None
    timeout_s = parse_duration(settings.connect_timeout)
    gpus = counted(node.job, timeout_s).get(node.host, 0)
    words = step(node.job, node.host, gpus, timeout_s, binds=binds_tasks(timeout_s))
    words += ["--pty"] if terminal else []
    runner = [settings.python, *_PYTHON_FLAGS, _source(), _config(argv, environ, cwd, remote=False)]
    return _local([*words, *runner], {}, cwd, deaf=True)


def step_signal(node: Node, lease: str, settings: Settings, number: int) -> list[str]:
    """Return the same as :func:`remote_signal`, for a step of a Slurm job: srun would abort it."""
    from gpuboard.transport.slurm.srun import step

    assert node.job is not None and node.host is not None
    words = step(node.job, node.host, 0, parse_duration(settings.connect_timeout), binds=False)
    config = _encoded({"signal": number, "lease": lease})
    return [*words, "--input=none", settings.python, *_PYTHON_FLAGS, _source(), config]


def run_command(
    command: Sequence[str],
    environ: Mapping[str, str],
    lease: str,
    teller: Callable[[int], list[str]] | None = None,
) -> int:
    """Run one of the above on our terminal and return its exit code, 128 + n for signal n.

    Signals that come to us alone are handed on. To another machine all are, by the command line that ``teller`` returns
    for one; when that does not work, or takes too long, the connection is ended. Call from the main thread: its end is
    the runner's signal to end.
    """
    watched = (*_SIGNALS, signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    over = threading.Event()
    threading.Thread(target=_tick, args=(threading.get_ident(), over), name="tick", daemon=True).start()
    telling: dict[int, int] = {}  # by pid of a teller: the signal
    cut = 0  # the signal for which the connection was ended
    try:
        pid = os.posix_spawn(command[0], list(command), dict(environ), setsigmask=watched)  # until it heeds them itself
        while True:
            info = signal.sigwaitinfo(watched)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            number, lost = info.si_signo, _reap(telling)
            meant = number != signal.SIGCHLD and (info.si_code != _SI_KERNEL or teller is not None)
            if meant and teller is None:
                os.kill(pid, number)
            elif lost or (meant and (number == signal.SIGHUP or len(telling) == _TELLERS)):
                cut = cut or lost or number
                os.kill(pid, signal.SIGHUP)
            elif meant and teller is not None:
                words = teller(number)
                telling[os.posix_spawnp(words[0], words, dict(environ), setsigmask=_SIGNALS)] = number
    finally:
        for other in telling:
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


def _reap(telling: dict[int, int]) -> int:
    """Take the tellers that have ended out of ``telling``; return the signal of one that has failed, else 0."""
    lost = 0
    for pid in list(telling):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            number = telling.pop(pid)
            lost = number if status else lost
    return lost


def _tick(thread: int, over: threading.Event) -> None:
    """Wake ``thread`` now and then: another one, left over from a connection, may have taken the signal it waits for.

    Not by sigtimedwait's timeout: after ctrl-Z and fg that are further apart it returns what was on the stack.
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
    deaf: bool = False,
    parent: int | None = None,
) -> str:
    config = {"argv": list(argv), "environ": dict(environ), "cwd": cwd, "remote": remote, "deaf": deaf}
    return _encoded(config | {"parent": parent})


def _encoded(value: dict[str, Any]) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()
