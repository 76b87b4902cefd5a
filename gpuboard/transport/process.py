"""A child process with three pipes as a channel: an agent here, or a program that leads to one elsewhere (ssh, srun).

One thread each that reads and writes; no asyncio (40 ms).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from gpuboard.transport.base import Handler, TransportError
from gpuboard.transport.spawn import Child, reap

_CHUNK = 262144
_STDERR_KEPT = 65536
_POLL_S = 0.05  # between two checks whether a child has ended, where no pidfd reports it
_KILLED_S = 2.0  # a killed process that is still there afterwards is in uninterruptible sleep (driver)


class Exit(NamedTuple):
    """How a child ended."""

    code: int | None  # exit code, negative for a signal; None: unknown, or it was killed here
    stderr: bytes  # the end of its output there
    late: bool  # it was ended because no byte of output came in time


class ChildChannel:
    """One child process, its pipes and the thread that reads them. ``explain`` returns the error for its end.

    ``first_byte_s`` None: the child is the agent, so the node is reached as soon as the child runs. Otherwise it is a
    program that connects to the node: its first byte of output means that it has, and after ``first_byte_s`` seconds
    without one it is ended. It is killed when it runs for ``end_s`` after its connection was closed here, or for
    ``exit_s`` after it has closed its output itself: on a busy machine the end of ssh takes seconds.
    """

    def __init__(
        self,
        handler: Handler,
        explain: Callable[[Exit], TransportError],
        *,
        first_byte_s: float | None = None,
        end_s: float = 2.0,
        exit_s: float = 10.0,
    ) -> None:
        self._handler = handler
        self._explain = explain
        self._first_byte_s = first_byte_s
        self._end_s = end_s
        self._exit_s = exit_s
        self._connected = False
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._child: Child | None = None
        self._wake = -1
        self.over = False

    def start(self, child: Child) -> None:
        """Take over a child that was just started; data written before is sent first."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with self._lock:
            self._child = child
            if self._unsent or self.over:
                os.eventfd_write(self._wake, 1)
        if self._first_byte_s is None:
            self._reached()
        threading.Thread(target=self._run, args=(child,), name=f"child-{child.pid}", daemon=True).start()

    def fail(self, error: TransportError) -> None:
        """Report to the handler, from another thread as always, that nothing was started."""
        with self._lock:
            if self.over:
                return
            self.over = True
        threading.Thread(target=self._handler.ended, args=(error,), daemon=True).start()

    def write(self, data: bytes) -> None:
        """Send bytes; the thread sends what the pipe cannot take now."""
        with self._lock:
            if self.over:
                return
            if self._child is not None and not self._unsent:
                try:
                    data = data[os.write(self._child.stdin, data) :]
                except BlockingIOError:
                    pass  # the pipe is full: the thread continues when it drains
                except OSError:
                    return  # the child has ended: the thread reads the end of its output and reports it
            if data:
                self._unsent += data
                if self._child is not None:
                    os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the connection: the child reads end-of-file, and the thread waits for it or kills it."""
        with self._lock:
            if self.over:
                return
            self.over = True
            if self._child is not None:
                if not self._connected:  # it is still connecting: it does not read end-of-file
                    _signal(self._child, signal.SIGTERM)
                os.eventfd_write(self._wake, 1)

    def _reached(self) -> None:
        self._connected = True
        self._handler.connected()

    def _run(self, child: Child) -> None:
        poller = select.poll()
        poller.register(child.stdout, select.POLLIN)
        poller.register(child.stderr, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        until = None if self._first_byte_s is None else time.monotonic() + self._first_byte_s
        stderr = b""
        reading = True
        late = False
        while reading and not self.over:
            left_s = None if self._connected or until is None else until - time.monotonic()
            if late := left_s is not None and left_s <= 0:
                _signal(child, signal.SIGTERM)
                break
            for fd, _ in poller.poll(None if left_s is None else left_s * 1000):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                    if self._unsent:
                        poller.register(child.stdin, select.POLLOUT)
                elif fd == child.stdin:
                    if not self._flush(child):
                        poller.unregister(child.stdin)
                elif data := _read(fd):
                    if fd == child.stderr:
                        stderr = (stderr + data)[-_STDERR_KEPT:]
                    elif not self.over:
                        if not self._connected:
                            self._reached()
                        self._handler.received(data)
                else:
                    poller.unregister(fd)
                    reading = reading and fd != child.stdout
        with self._lock:
            closed, self.over = self.over, True
        wait_s = self._end_s if closed or late else self._exit_s
        code, rest, killed = _end(child, wait_s)
        os.close(self._wake)
        if closed:
            return
        if killed and not late:
            rest += f"\nclosed its output but did not exit within {wait_s:g} s; gpuboard killed it\n".encode()
        self._handler.ended(self._explain(Exit(code, (stderr + rest)[-_STDERR_KEPT:], late)))

    def _flush(self, child: Child) -> bool:
        """Write what the pipe takes; return whether data is left."""
        with self._lock:
            try:
                del self._unsent[: os.write(child.stdin, self._unsent)]
            except BlockingIOError:
                return True
            except OSError:
                self._unsent.clear()
            return bool(self._unsent)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _CHUNK)
    except OSError:
        return b""


def _signal(child: Child, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # this process ignores SIGCHLD, so the kernel has reaped the child
        os.kill(child.pid, number)


def _end(child: Child, wait_s: float) -> tuple[int | None, bytes, bool]:
    """Close the pipes, read the rest of stderr until the child has ended, kill it after ``wait_s``.

    Return its exit code (negative: a signal; None: unknown), the rest of its stderr, and whether it was killed here.
    """
    os.close(child.stdin)
    os.close(child.stdout)
    poller = select.poll()
    poller.register(child.stderr, select.POLLIN)
    pidfd = -1
    with contextlib.suppress(OSError):  # reaped by the kernel, a kernel before 5.3, no free descriptor: it is polled
        pidfd = os.pidfd_open(child.pid)
        poller.register(pidfd, select.POLLIN)
    rest, ended, code = _await(child, poller, wait_s)
    killed = not ended
    if killed:
        _signal(child, signal.SIGKILL)
        more, _, code = _await(child, poller, _KILLED_S)  # if it has not ended then, init will reap it
        rest += more
        killed = code in {None, -signal.SIGKILL}
    if pidfd >= 0:
        os.close(pidfd)
    rest += _read(child.stderr)
    os.close(child.stderr)
    return None if killed else code, rest, killed


def _await(child: Child, poller: select.poll, wait_s: float) -> tuple[bytes, bool, int | None]:
    """Wait at most ``wait_s`` for the end of a child; return its stderr meanwhile, whether it ended, and its exit code.

    Its stderr is read because a full pipe would prevent its end.
    """
    rest = b""
    until = time.monotonic() + wait_s
    while True:
        ended, code = reap(child)
        left_s = until - time.monotonic()
        if ended or left_s <= 0:
            return rest, ended, code
        for fd, _ in poller.poll(min(left_s, _POLL_S) * 1000):
            if fd == child.stderr and (data := _read(fd)):
                rest = (rest + data)[-_STDERR_KEPT:]
            else:
                poller.unregister(fd)
