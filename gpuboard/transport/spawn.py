"""The agent as a process of this machine. Imports next to nothing, so that it can run before everything else does."""

from __future__ import annotations

import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # collections.abc would load before the agent starts
    from collections.abc import Mapping

# Isolated (-I) and without site (-S). The agent must import the same code as this process, so it gets the same path.
_BOOT = "import sys; sys.path += {path!r}; {preload}from gpuboard.agent.main import main; main()"
# What role `node` imports, pynvml included: the NVML process is a fork and inherits the loaded modules.
_PRELOAD = (
    "import json, gpuboard.agent.node, gpuboard.agent.nvml.reader, gpuboard.agent.claims.store, gpuboard.agent.proc; "
)

# Slurm's variables for its configuration and authentication; all others describe a job, a step or a task.
SLURM_SETUP = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET"})

_prestarted: list[Child] = []


class Child:
    """A started process: its pid and the parent's ends of its three pipes, non-blocking."""

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr


def prestart() -> None:
    """Start an agent for role ``node`` now; the next local channel of that role takes it.

    It loads its modules on another core during this process's imports, then waits for the start line. An agent that is
    never taken ends with this process.
    """
    _prestarted.append(spawn(agent_command(preload=True)))


def take_prestarted() -> Child | None:
    """Return the prestarted agent, once; None when there is none."""
    return _prestarted.pop() if _prestarted else None


def agent_command(*, preload: bool = False) -> list[str]:
    """Return the command line of an agent on this machine; ``preload``: import before reading the start line."""
    boot = _BOOT.format(path=import_path(), preload=_PRELOAD if preload else "")
    return [sys.executable, "-I", "-S", "-c", boot]


def import_path() -> list[str]:
    """Return the folders for sys.path of an isolated Python (-I -S) that is to import what this process does."""
    library = os.path.dirname(os.__file__)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    found = [entry for entry in dict.fromkeys(sys.path) if entry.startswith("/")]
    if root not in found:  # gpuboard was imported from the current folder or by an import hook
        found.insert(0, root)
    return [entry for entry in found if entry not in (library, library + "/lib-dynload")]


def spawn(command: list[str], environ: Mapping[str, str] | None = None) -> Child:
    """Start ``command`` in its own session, with three pipes and no other descriptor of this process.

    ``environ``: its variables; None: those of this process. In its own session ctrl-C and ctrl-Z at the terminal reach
    only this process: the agent must still release claims then. Raises OSError when the program cannot be started.
    """
    ours: list[int] = []
    theirs: list[int] = []
    try:
        for fd in range(3):
            read_end, write_end = os.pipe()
            ours.append(read_end if fd else write_end)
            theirs.append(write_end if fd else read_end)
        # The child's ends can be 0 to 2 themselves (a caller without stdin); dup2 would overwrite them.
        for fd, end in enumerate(theirs):
            theirs[fd] = _above_two(end)
        pid = os.posix_spawn(
            command[0],
            command,
            os.environ if environ is None else environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, end, fd) for fd, end in enumerate(theirs)]
            + [(os.POSIX_SPAWN_CLOSE, fd) for fd in inheritable()],
            setsid=True,
            setsigdef=range(1, 32),  # an ignored SIGPIPE or SIGINT would be inherited
            setsigmask=(),
        )
    except BaseException:
        for fd in ours:
            os.close(fd)
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    for fd in ours:
        os.set_blocking(fd, False)
    return Child(pid, *ours)


def readable(fd: int, timeout_s: float) -> bool:
    """Return whether ``fd`` becomes readable or ends within ``timeout_s``.

    With poll(): select() fails for descriptors above 1023, and an ssh process for every node needs more.
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def reap(child: Child) -> tuple[bool, int | None]:
    """Return whether ``child`` has ended, and its exit code: negative for a signal, None if it was reaped elsewhere.

    The kernel reaps it where this process ignores SIGCHLD.
    """
    try:
        pid, status = os.waitpid(child.pid, os.WNOHANG)
    except ChildProcessError:
        return True, None
    return bool(pid), os.waitstatus_to_exitcode(status) if pid else None


def _above_two(fd: int) -> int:
    if fd > 2:
        return fd
    import fcntl  # late: rarely needed

    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def inheritable() -> list[int]:
    """Return the descriptors above 2 that a child would inherit: it must not hold a caller's pipe or lock."""
    found = []
    limit = os.sysconf("SC_OPEN_MAX")
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if fd > 2 and os.get_inheritable(fd):
                if fd < limit:
                    found.append(fd)
                else:  # opened under a higher limit: posix_spawn refuses it
                    os.set_inheritable(fd, False)
        except OSError:
            continue  # the descriptor of the listing itself
    return found
