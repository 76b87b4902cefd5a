"""Keys come first: other threads make way for those through which a key passes. All share Python's lock.

A thread that wants the lock waits up to 5 ms for each other one that works, and a key passes through three threads,
each of which wants it several times. With 1,000 nodes two other threads work for up to 0.2 s at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf

_WORK_S, _PAUSE_S = 2e-3, 50e-6  # of a thread with much work: in any pause another one gets the lock
_QUIET_S = 10.0  # without a key, after which none is expected: pauses cost a twentieth of the time
_KEY_S = 0.03  # what a key takes at most until it is drawn, where nothing else works


class KeyFirst:
    """When the last key was pressed, and pauses of threads with much work. For any thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._key_at = -inf
        self._own = threading.local()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last key."""
        return self._clock() - self._key_at

    @property
    def pressed(self) -> bool:
        """Whether keys are pressed at this time, so that the next one may come any moment."""
        return self.quiet_s <= _QUIET_S

    def key(self) -> None:
        """Take note of a key."""
        self._key_at = self._clock()

    def make_way(self) -> None:
        """Pause if it is time to: once for each key, until it is drawn, and shortly every 2 ms while keys are pressed.

        Called again and again by a thread with much work, which is not the one that draws.
        """
        now, key_at = self._clock(), self._key_at
        if now - key_at > _QUIET_S:
            return
        own, left_s = self._own.__dict__, key_at + _KEY_S - now
        if left_s > 0 and own.get("key_at") != key_at:
            own["key_at"] = key_at
            self._sleep(left_s)
        elif now - own.get("paused_at", -inf) >= _WORK_S:
            self._sleep(_PAUSE_S)
        else:
            return
        own["paused_at"] = self._clock()
