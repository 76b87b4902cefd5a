"""What ties a worker or the store to its supervisor: a death signal and a socket. Travels into that interpreter.

It runs under the node's training interpreter (Python 3.8 and later) and imports nothing of ours.
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


class Bond:
    """The socket to the supervisor: JSON lines both ways. Only the process that made it may speak on it."""

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
        # py-spy is the supervisor's child, so our sibling: under Yama's scope 1 it may look at us only if we allow it.
        self._libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(self.supervisor), 0, 0, 0)

    def die_with_parent(self, parent: "int | None") -> None:
        """Ask the kernel for SIGKILL when the parent ends; end now if it is no longer ``parent``."""
        self._libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if parent is not None and os.getppid() != parent:
            os._exit(1)

    def send(self, message: "Dict[str, Any]") -> None:
        """Tell the supervisor; silent in a forked child, and when the script closed our descriptor."""
        if os.getpid() != self._pid or _identity(self._fd) != self._identity:
            return  # a script that closes all descriptors may have another file under this number by now
        data = json.dumps(message).encode("ascii") + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:  # the supervisor is gone, and so shall we be: the death signal is on its way
            return

    def receive(self) -> "Dict[str, Any]":
        """Wait for a line of the supervisor. Ends the process when the supervisor is gone."""
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
        """Let the processes that multiprocessing forks die with us, and let go of the socket.

        Not plain forks: a script may daemonize a helper that is to outlive it. Not those made in other threads: the
        signal fires when the creating *thread* ends.
        """
        from multiprocessing import util  # late: the store needs none of it

        os.register_at_fork(before=self._note_thread)  # novm: a rank has torch, so Python 3.8 or later
        util.register_after_fork(self, Bond._in_child)

    def _note_thread(self) -> None:
        self._forked_in_main = threading.current_thread() is threading.main_thread()
        self._forked_by = os.getpid()

    def _in_child(self) -> None:
        parent = self._pid
        if _identity(self._fd) == self._identity:
            os.close(self._fd)
        if self._forked_in_main and self._forked_by == parent:  # by getppid a rank that has ended already is none
            self.die_with_parent(parent)


def _identity(fd: int) -> "tuple[int, int] | None":
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
