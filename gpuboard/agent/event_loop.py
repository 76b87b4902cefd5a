"""A small event loop over poll(2): descriptors and timers, one thread. asyncio costs 64 ms to import.

Not ``selectors``: it has no timers, and it cannot watch a descriptor for its end alone (an event mask of 0).
"""

import itertools
import select
import time

MYPY = False
if MYPY:
    from typing import Callable, Dict, List, Optional, Tuple

IN = select.POLLIN
OUT = select.POLLOUT


def poll(watched: "Dict[int, int]", timeout_s: "Optional[float]" = None) -> "Dict[int, int]":
    """Wait until one of ``watched`` (descriptor: events) is ready, ``timeout_s`` at most; return the same of the ready.

    POLLHUP and POLLERR are always reported, with events 0 nothing else.
    """
    poller = select.poll()
    for fd, events in watched.items():
        poller.register(fd, events)
    return dict(poller.poll(None if timeout_s is None else _milliseconds(timeout_s)))


class Loop:
    """Callbacks for descriptors that are ready and for timers that are due."""

    def __init__(self, clock: "Callable[[], float]" = time.monotonic) -> None:
        self._clock = clock
        self._poll = select.poll()
        self._watched: "Dict[int, Tuple[int, Callable[[], None]]]" = {}
        self._timers: "List[Tuple[float, int, Callable[[], None]]]" = []
        self._handles = itertools.count(1)

    def watch(self, fd: int, events: int, callback: "Callable[[], None]") -> None:
        """Call ``callback`` whenever ``fd`` is ready for ``events`` or has failed; replaces an earlier watch."""
        if self._watched.get(fd, (None, None))[0] != events:
            self._poll.register(fd, events)
        self._watched[fd] = (events, callback)

    def unwatch(self, fd: int) -> None:
        """Stop watching ``fd``; call before it is closed."""
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def after(self, seconds: float, callback: "Callable[[], None]") -> int:
        """Call ``callback`` once, ``seconds`` from now; return a handle for ``cancel``. Signal handlers may call it."""
        handle = next(self._handles)  # in one step: a handler that interrupts this gets another one
        self._timers.append((self._clock() + seconds, handle, callback))
        return handle

    def cancel(self, handle: int) -> None:
        """Drop a timer; one that has fired or was dropped is no error."""
        for timer in self._timers:
            if timer[1] == handle:
                self._timers.remove(timer)  # from this list: a new one would lack what a signal handler adds meanwhile
                return

    def turn(self) -> None:
        """Wait for the next event and handle all that are ready."""
        timeout = None
        if self._timers:
            timeout = _milliseconds(min(timer[0] for timer in self._timers) - self._clock())
        ready = [(fd, self._watched[fd]) for fd, _ in self._poll.poll(timeout)]
        for fd, watched in ready:
            # An earlier callback of this turn may have unwatched it, and another file may have its number now.
            if self._watched.get(fd) is watched:
                watched[1]()
        now = self._clock()
        for timer in sorted(self._timers, key=lambda timer: timer[:2]):
            if timer[0] <= now and timer in self._timers:
                self._timers.remove(timer)
                timer[2]()


def _milliseconds(seconds: float) -> int:
    """Return a timeout of poll(2), rounded up: what waits for this moment is then due."""
    return int(max(0.0, seconds) * 1000) + 1
