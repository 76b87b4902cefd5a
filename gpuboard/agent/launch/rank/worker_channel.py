"""The link of a worker or the store to its supervisor: a socket and a death signal.

This source is executed in the node's training interpreter (Python 3.8 or later), without other modules of gpuboard.
"""

import ctypes
import json
import os
import signal
import threading

MYPY = False
if MYPY:
    from typing import Any, Dict

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h, Yama


class WorkerChannel:
    """The socket to the supervisor: JSON lines both ways. Only the process that created it uses it."""

    def __init__(self, fd: int, config: "Dict[str, Any]") -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._forked_in_main = True
        self._forked_by = self._pid
        os.set_inheritable(fd, False)
        self._identity = _identity(fd)
        self._libc = ctypes.CDLL(None)
        self.supervisor = int(config["supervisor"])
        self.die_with_parent(None if config["wrapped"] else self.supervisor)
        # py-spy runs as a child of the supervisor, a sibling: Yama's ptrace_scope 1 requires our permission.
        self._libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(self.supervisor), 0, 0, 0)

    def die_with_parent(self, parent: "int | None") -> None:
        """Have the kernel send SIGKILL when the parent ends; end now if the parent is no longer ``parent``."""
        self._libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if parent is not None and os.getppid() != parent:
            os._exit(1)

    def send(self, message: "Dict[str, Any]") -> None:
        """Send a message; does nothing in a forked child, or if the script has closed the descriptor."""
        if os.getpid() != self._pid or _identity(self._fd) != self._identity:
            return  # after the script closed it, the number may be another file's
        data = json.dumps(message).encode("ascii") + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:  # the supervisor has ended, so the death signal follows
            return

    def receive(self) -> "Dict[str, Any]":
        """Wait for a message of the supervisor. Ends the process when the supervisor has ended."""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._fd, 1)
            if not byte:
                os._exit(1)
            line += byte
        message = json.loads(line.decode("ascii"))
        assert isinstance(message, dict)
        return message

    def follow_forks(self) -> None:
        """Give processes that multiprocessing forks the death signal too, and close the socket in them.

        Not plain forks: a script may daemonize a helper that outlives it. Not forks in other threads: the signal
        fires when the creating *thread* ends.
        """
        from multiprocessing import util  # late: the store does not need it

        os.register_at_fork(before=self._note_thread)  # novm: a rank has torch, so Python 3.8 or later
        util.register_after_fork(self, WorkerChannel._in_child)

    def _note_thread(self) -> None:
        self._forked_in_main = threading.current_thread() is threading.main_thread()
        self._forked_by = os.getpid()

    def _in_child(self) -> None:
        parent = self._pid
        if _identity(self._fd) == self._identity:
            os.close(self._fd)
        if self._forked_in_main and self._forked_by == parent:  # not getppid: the rank may have ended
            self.die_with_parent(parent)


def _identity(fd: int) -> "tuple[int, int] | None":
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
