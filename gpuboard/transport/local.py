"""Agents on this machine: child processes with pipes and one reader thread each; no asyncio (40 ms)."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable

from gpuboard.transport.base import Handler, TransportError
from gpuboard.transport.spawn import Child, agent_command, spawn, take_prestarted

_CHUNK = 262144
_STDERR_KEPT = 65536
_END_WAIT_S = 2.0  # an agent ends within this after its connection, whatever NVML does


class LocalTransport:
    """Starts agents as children. ``command`` makes the command line (tests replace it)."""

    def __init__(self, command: Callable[[], list[str]] = agent_command) -> None:
        self._command = command
        self._channels: list[LocalChannel] = []

    def open(self, host: str, role: str, handler: Handler) -> LocalChannel:
        """Start an agent. A program that cannot be started ends the channel with kind ``no-python``."""
        channel = LocalChannel(handler)
        self._channels = [c for c in self._channels if not c.over] + [channel]
        try:
            ahead = take_prestarted() if role == "node" and self._command is agent_command else None
            child = ahead or spawn(self._command())
        except OSError as error:
            channel.fail(TransportError("no-python", f"the agent cannot be started: {error}"))
            return channel
        channel.start(child)
        return channel

    def close(self) -> None:
        """End every child at once."""
        for channel in self._channels:
            channel.close()


class LocalChannel:
    """One child process, its pipes and the thread that reads them."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._child: Child | None = None
        self._wake = -1
        self.over = False

    def start(self, child: Child) -> None:
        """Take over a child that has just been started."""
        self._child = child
        self._handler.connected()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._run, args=(child,), name=f"agent-{child.pid}", daemon=True).start()

    def fail(self, error: TransportError) -> None:
        """Tell the handler, from a thread of its own as always, that nothing was started."""
        self.over = True
        threading.Thread(target=self._handler.ended, args=(error,), daemon=True).start()

    def write(self, data: bytes) -> None:
        """Send bytes; what the pipe does not take now goes out from the thread."""
        with self._lock:
            if self.over or self._child is None:
                return
            if not self._unsent:
                try:
                    data = data[os.write(self._child.stdin, data) :]
                except BlockingIOError:
                    pass  # the pipe is full: the thread goes on when it drains
                except OSError:
                    return  # the child is gone: the thread reads the end of its output and says so
            if data:
                self._unsent += data
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the connection: the child sees end-of-file, and the thread takes care that it ends."""
        with self._lock:
            if self.over:
                return
            self.over = True
            if self._child is not None:
                os.eventfd_write(self._wake, 1)

    def _run(self, child: Child) -> None:
        poller = select.poll()
        poller.register(child.stdout, select.POLLIN)
        poller.register(child.stderr, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        stderr = b""
        reading = True
        while reading and not self.over:
            for fd, _ in poller.poll():
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
                        self._handler.received(data)
                else:
                    poller.unregister(fd)
                    reading = reading and fd != child.stdout
        with self._lock:
            closed_by_us, self.over = self.over, True
        if rest := _read(child.stderr):
            stderr = (stderr + rest)[-_STDERR_KEPT:]
        code = _end(child)
        os.close(self._wake)
        if not closed_by_us:
            from gpuboard.transport.exits import explain_exit  # late: only when something is wrong

            self._handler.ended(explain_exit(code, stderr, agent_command()[0]))

    def _flush(self, child: Child) -> bool:
        """Write what the pipe takes; return whether more is left."""
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


def _end(child: Child) -> int | None:
    """Close the pipes, wait for the child, kill it when it stays; return its exit code (negative: a signal)."""
    for fd in (child.stdin, child.stdout, child.stderr):
        os.close(fd)
    try:
        pidfd = os.pidfd_open(child.pid)
    except ProcessLookupError:
        return None  # this process ignores SIGCHLD, so the kernel has reaped the child
    try:
        if not select.select([pidfd], [], [], _END_WAIT_S)[0]:
            os.kill(child.pid, signal.SIGKILL)
            if not select.select([pidfd], [], [], _END_WAIT_S)[0]:
                return None  # in an uninterruptible call of the driver: init will reap it
        return os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    except ChildProcessError:
        return None  # somebody else in this process has waited for it
    finally:
        os.close(pidfd)
