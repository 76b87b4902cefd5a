"""Runs one command on this machine to its end: output and exit code. ctrl-C does not interrupt it.

It runs in its own session, so that ctrl-C at the terminal reaches only this process: the job's
number that sbatch prints must be read, for example, or the job could not be cancelled.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpuboard.transport.spawn import Child, readable, reap, spawn

_CHUNK = 65536
_MOST = 512 << 20  # bytes kept of its output; squeue prints a fifth of that for 100,000 jobs
_SLICE_S = 0.05  # a command is killed within this after ``stopped`` was set, and polled this often without a pidfd
_KILL_S = 2.0  # after SIGKILL; a process in uninterruptible sleep (file system) is left to init
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ran(NamedTuple):
    """The result of a command."""

    code: int | None  # exit code, negative for a signal; None: unknown
    out: str
    err: str
    took_s: float = 0.0
    ended: bool = True  # False: it was killed, and this is its output until then

    @property
    def ok(self) -> bool:
        """Whether it succeeded: exit code 0, or no code (SIGCHLD is ignored here) and nothing on stderr."""
        return self.code == 0 or (self.code is None and self.ended and not self.err)


class Command:
    """A running command. ``wait`` may be interrupted and called again."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], data: bytes = b"") -> None:
        """Start it with ``data`` as its stdin. Raises OSError when the program cannot be started."""
        self._data = data
        self._begun = time.monotonic()
        self._took_s = 0.0
        self._code: int | None = None
        self._ended = False
        self._pidfd = -1
        # A KeyboardInterrupt between the start and the assignment would orphan the process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            self._child: Child = spawn(list(argv), environ)
            with contextlib.suppress(OSError):  # it ended and SIGCHLD is ignored here, or a kernel before 5.3
                self._pidfd = os.pidfd_open(self._child.pid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._texts = {self._child.stdout: bytearray(), self._child.stderr: bytearray()}
        self._open = set(self._texts)

    def wait(self, timeout_s: float) -> Ran | None:
        """Return its result; None when it still runs after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while not self._ended:
            left_s = until - time.monotonic()
            self._step(max(0.0, min(left_s, _SLICE_S)))
            if left_s <= 0 and not self._ended:  # after one more poll: it may have ended during a suspend
                return None
        return self._ran()

    def kill(self) -> Ran:
        """Kill its process group at once and return its output so far; a command that has ended keeps its result."""
        if (ran := self.wait(0.0)) is not None:
            return ran
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self.wait(_KILL_S)
        return self._ran()._replace(code=None, ended=False)

    def _ran(self) -> Ran:
        out, err = (bytes(text).decode("utf-8", "replace") for text in self._texts.values())
        return Ran(self._code, out, err, self._took_s if self._ended else time.monotonic() - self._begun)

    def _step(self, seconds: float) -> None:
        """Move data between the pipes; wait at most ``seconds`` for an event."""
        poller = select.poll()  # select() fails for descriptors above 1023
        if self._child.stdin >= 0:
            poller.register(self._child.stdin, select.POLLOUT)
        for fd in (*self._open, *([self._pidfd] if self._pidfd >= 0 else [])):
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(seconds * 1000)}
        if self._child.stdin in ready:
            self._write()
        for fd in [fd for fd in ready if fd in self._open]:
            if not self._read(fd):
                self._open.discard(fd)
        # Processes that it started may keep its pipes open forever: the end of the command itself counts.
        if self._pidfd in ready or self._pidfd < 0:
            self._end()

    def _write(self) -> None:
        try:
            self._data = self._data[os.write(self._child.stdin, self._data) :] if self._data else b""
        except BlockingIOError:
            return
        except OSError:
            self._data = b""  # it has closed its stdin: its exit code shows why
        if not self._data:
            stdin, self._child.stdin = self._child.stdin, -1
            os.close(stdin)

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        if len(self._texts[fd]) < _MOST:
            self._texts[fd] += data
        return bool(data)

    def _end(self) -> None:
        """Keep the result if it has ended."""
        ended, code = reap(self._child)
        if not ended:
            return
        self._code = code if self._code is None else self._code  # known already if this was interrupted
        for fd in list(self._open):
            while readable(fd, 0) and self._read(fd):
                pass
        self._took_s = time.monotonic() - self._begun
        # Before they are closed: an interrupt may then leave some open, but none is used or closed again, which would
        # fail in place of the interrupt, or hit a file that has got the same number.
        self._ended = True
        for fd in (self._child.stdin, *self._texts, self._pidfd):
            if fd >= 0:
                os.close(fd)


def run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    data: bytes = b"",
    stopped: threading.Event | None = None,
) -> Ran:
    """Run a command to its end with ``data`` as stdin; kill it after ``timeout_s`` or when ``stopped`` is set.

    Raises OSError when it cannot be started.
    """
    until = time.monotonic() + timeout_s
    command = Command(argv, environ, data)
    try:
        while (left_s := until - time.monotonic()) > 0 and not (stopped and stopped.is_set()):
            if (ran := command.wait(left_s if stopped is None else min(left_s, _SLICE_S))) is not None:
                return ran
        return command.kill()
    finally:
        command.kill()
