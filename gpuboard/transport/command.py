"""One command of this machine, run to its end: what it printed and how it ended. Never interrupted halfway.

It runs in a session of its own, so that ctrl-C at the terminal reaches us alone: whoever started something elsewhere
(a job, say) must learn what became of it before giving it back.
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

from gpuboard.transport.spawn import Child, readable, spawn

_CHUNK = 65536
_MOST = 512 << 20  # bytes kept of its output; what Slurm says of 100,000 jobs is a fifth of that
_SLICE_S = 0.05  # so soon a command is ended after ``stopped`` was set
_KILL_S = 2.0  # in an uninterruptible call of a file system it stays; init will reap it
_HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ran(NamedTuple):
    """What became of a command."""

    code: int | None  # exit code, negative for a signal; None: not known
    out: str
    err: str
    took_s: float = 0.0
    ended: bool = True  # by itself; else it was killed, and this is what it had printed by then

    @property
    def ok(self) -> bool:
        """Whether it did what it was told, as far as anybody knows: where SIGCHLD is ignored its code is lost."""
        return self.code == 0 or (self.code is None and self.ended and not self.err)


class Command:
    """A command that runs. ``wait`` may be interrupted and called again."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], data: bytes = b"") -> None:
        """Start it with ``data`` as its stdin. Raises OSError when the program cannot be started."""
        self._data = data
        self._begun = time.monotonic()
        self._took_s = 0.0
        self._code: int | None = None
        self._ended = False
        self._pidfd = -1
        # An interrupt between the start and the next line would leave a process that nobody knows.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        try:
            self._child: Child = spawn(list(argv), environ)
            with contextlib.suppress(OSError):  # ended, and reaped because we ignore SIGCHLD; or a kernel before 5.3
                self._pidfd = os.pidfd_open(self._child.pid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._texts = {self._child.stdout: bytearray(), self._child.stderr: bytearray()}
        self._open = set(self._texts)

    def wait(self, timeout_s: float) -> Ran | None:
        """Return what became of it; None when it still runs after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while not self._ended:
            left_s = until - time.monotonic()
            self._step(max(0.0, min(left_s, 0.2)))
            if left_s <= 0 and not self._ended:  # that was a last look: we may have stood still since it ended
                return None
        return self._ran()

    def kill(self) -> Ran:
        """End it and what it has started in its session, at once, without learning what it did.

        One that has ended by itself is as it was.
        """
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
        """Hand on what can be handed on; wait ``seconds`` at most for something to do."""
        poller = select.poll()  # not select(), which takes no descriptor above 1023
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
        # What it has started may hold its pipes open for ever: its own end is the end.
        if self._pidfd in ready or (self._pidfd < 0 and not self._open):
            self._end()

    def _write(self) -> None:
        try:
            self._data = self._data[os.write(self._child.stdin, self._data) :] if self._data else b""
        except BlockingIOError:
            return
        except OSError:
            self._data = b""  # it does not want to read: its exit code says why
        if not self._data:
            os.close(self._child.stdin)
            self._child.stdin = -1

    def _read(self, fd: int) -> bool:
        """Take what is there; return whether more may come."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        if len(self._texts[fd]) < _MOST:
            self._texts[fd] += data
        return bool(data)

    def _end(self) -> None:
        with contextlib.suppress(ChildProcessError):  # reaped by the kernel: nobody knows its code
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._child.pid, 0)[1])
        for fd in list(self._open):
            while readable(fd, 0) and self._read(fd):
                pass
        for fd in (self._child.stdin, *self._texts, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._took_s = time.monotonic() - self._begun
        self._ended = True


def run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    data: bytes = b"",
    stopped: threading.Event | None = None,
) -> Ran:
    """Run a command with ``data`` as its stdin to its end, or kill it after ``timeout_s`` or when ``stopped`` is set.

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
