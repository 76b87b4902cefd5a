"""A small event loop over poll: descriptors and timers, one thread, no asyncio (it costs 64 ms to import)."""

import select
import time

MYPY = False
if MYPY:
    from typing import Callable, Dict, List, Tuple

IN = select.POLLIN
OUT = select.POLLOUT


class Loop:
    """Call-backs for descriptors that are ready and for moments that have come."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: "Dict[int, Tuple[int, Callable[[], None]]]" = {}
        self._timers: "List[Tuple[float, int, Callable[[], None]]]" = []
        self._count = 0

    def watch(self, fd: int, events: int, callback: "Callable[[], None]") -> None:
        """Call ``callback`` whenever ``fd`` is ready for ``events`` or broken; replaces an earlier watch."""
        if self._watched.get(fd, (None, None))[0] != events:
            self._poll.register(fd, events)
        self._watched[fd] = (events, callback)

    def unwatch(self, fd: int) -> None:
        """Forget ``fd``; before it is closed."""
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def after(self, seconds: float, callback: "Callable[[], None]") -> int:
        """Call ``callback`` once, ``seconds`` from now; returns a handle for ``cancel``."""
        self._count += 1
        self._timers.append((time.monotonic() + seconds, self._count, callback))
        return self._count

    def cancel(self, handle: int) -> None:
        """Forget a timer; one that has fired or was forgotten is no error."""
        self._timers = [timer for timer in self._timers if timer[1] != handle]

    def turn(self) -> None:
        """Wait for the next thing that happens and handle all that is ready."""
        timeout = None
        if self._timers:
            timeout = max(0.0, min(timer[0] for timer in self._timers) - time.monotonic()) * 1000 + 1
        for fd, _ in self._poll.poll(timeout):
            watched = self._watched.get(fd)
            if watched is not None:  # an earlier call-back of this turn may have forgotten it
                watched[1]()
        now = time.monotonic()
        for timer in sorted(self._timers, key=lambda timer: timer[:2]):
            if timer[0] <= now and timer in self._timers:
                self._timers.remove(timer)
                timer[2]()
