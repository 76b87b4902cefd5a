"""The keeper's event loop: descriptors, processes and other threads all lead to calls on the main thread."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")
Action = Callable[[], None]
_LOG_LIMIT = 1 << 20  # bytes


class KeeperLoop:
    """Waits for events and calls their actions."""

    def __init__(self) -> None:
        self._actions: dict[int, Action] = {}
        self._poller = select.poll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._later: deque[Action] = deque()
        self.watch(self._wake, self._woken)

    def watch(self, fd: int, action: Action) -> None:
        """Call ``action`` whenever ``fd`` is readable."""
        self._actions[fd] = action
        self._poller.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Remove the action of ``fd``."""
        if self._actions.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def watch_process(self, pid: int, ended: Action) -> int | None:
        """Call ``ended`` when ``pid`` has ended, which it may have already; return a pidfd to unwatch and close.

        None: this kernel has no pidfds (before 5.3), or ``pid`` has been reaped: the caller polls.
        """
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return None
        self.watch(fd, ended)
        return fd

    def report(self, action: Callable[[T], None]) -> Callable[[T], None]:
        """Return a thread-safe function that passes its argument to ``action`` on the main thread."""

        def take(value: T) -> None:
            self._later.append(partial(action, value))
            os.eventfd_write(self._wake, 1)

        return take

    def wait(self, seconds: float) -> None:
        """Wait for events, ``seconds`` at most, and call their actions."""
        events = self._poller.poll(0 if self._later else max(0.0, seconds) * 1000 + 1)
        for fd, action in [(fd, self._actions[fd]) for fd, _ in events]:
            # An earlier action may have unwatched it, and another file may have its number now.
            if self._actions.get(fd) is action:
                action()
        while self._later:
            self._later.popleft()()

    def _woken(self) -> None:
        os.eventfd_read(self._wake)


def boottime() -> float:
    """Return seconds since boot including suspend, during which claims age too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def log(message: str) -> None:
    """Write a line to the log. On a full disk there is none, and the keeper goes on."""
    with suppress(OSError):
        os.write(2, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n".encode(errors="replace"))


def write_log_to(path: str) -> None:
    """Let this process write its log, and the output of what it starts, to ``path``. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    if os.fstat(fd).st_size > _LOG_LIMIT:
        os.ftruncate(fd, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
