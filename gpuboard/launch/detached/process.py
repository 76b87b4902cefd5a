"""The process of a detached run's head on this machine.

The command forks: the child launches as it would attached, and leaves session and terminal once the ranks run. The
command waits for that; until then the run ends with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from typing import Protocol

from gpuboard.agent.command_runner import SI_KERNEL
from gpuboard.launch.output import Screen
from gpuboard.launch.parent_watch import Lifeline
from gpuboard.transport.spawn import inheritable

_FORWARDED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
_POLL_S = 0.1


class WaitingCommand:
    """The command's side: it waits until the head detaches or ends."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid = pid
        self._connection = connection

    def wait(self) -> bytes | int:
        """Return the message with which the head detached, or the exit code of a head that ended before."""
        message = b""
        while not message.endswith(b"\n"):
            # Not its timeout: after a longer suspension (ctrl-Z, fg) it returns uninitialized memory.
            received = signal.sigtimedwait(_FORWARDED, 0)
            # The kernel sends ctrl-C to the head too, which is in the same process group.
            if received is not None and received.si_code != SI_KERNEL:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, received.si_signo)
            # A head on another node leaves nothing to do here: end-of-file then comes right after the message.
            while not message.endswith(b"\n") and select.select([self._connection], [], [], _POLL_S)[0]:
                data = self._connection.recv(65536)
                if not data:  # the head has ended
                    return _exit_code(os.waitpid(self._pid, 0)[1])
                message += data
        return message

    def admit_interrupts(self) -> None:
        """Let signals end this command: the head no longer gets them."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class Detaching(Protocol):
    """The process of a head that will detach. ``left``: it has done so."""

    left: bool

    def leave(self, screen: Screen, message: bytes) -> None:
        """Leave what ties it to its command, and send that command one line."""


class DetachingHead:
    """The head's side."""

    def __init__(self, connection: socket.socket, inherited: list[int]) -> None:
        self.left = False  # the session and the terminal
        self.reserved: str | None = None  # the lease that this launch has reserved and releases at its end
        self.line = Lifeline(connection.fileno(), lambda: os.kill(os.getpid(), signal.SIGINT))
        self._connection = connection
        self._inherited = inherited

    def leave(self, screen: Screen, message: bytes) -> None:
        """Leave session and terminal, close what the caller's shell had open, and send one line to the command.

        From then on neither the terminal's end nor the command's ends the run. In the main thread only.
        """
        self.left = True
        self.line.then(lambda: None)
        os.setsid()  # permitted: the child of a fork leads no process group
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        screen.settle(1.0)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for fd in (null, *self._inherited):
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(OSError):
            self._connection.sendall(message + b"\n")


def fork() -> WaitingCommand | DetachingHead:
    """Fork; return each side in its process. To be called while this process has one thread."""
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # of the command: it forwards them
    pid = os.fork()
    if pid:
        theirs.close()
        return WaitingCommand(pid, ours)
    ours.close()
    head = DetachingHead(theirs, inheritable())
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return head


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code
