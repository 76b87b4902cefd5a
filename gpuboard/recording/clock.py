"""The time of the frames of a recording, which never goes back."""

from __future__ import annotations

import time
from collections.abc import Callable

_SET_BACK_S = 2.0  # less is not reported


class ForwardClock:
    """The time of day; it continues where the clock is set back, as a recording has one frame for each moment."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        """``wall``: epoch seconds. ``monotonic``: seconds."""
        self._wall, self._monotonic = wall, monotonic
        self._at, self._read = wall(), monotonic()
        self._reported_s = 0.0

    def read(self) -> tuple[float, float]:
        """Return epoch seconds, and by how many seconds they are ahead where that is to be reported, else 0."""
        now, read = self._wall(), self._monotonic()
        self._at, self._read = max(now, self._at + read - self._read), read
        ahead_s = self._at - now
        if ahead_s < max(_SET_BACK_S, 2 * self._reported_s):
            return self._at, 0.0
        self._reported_s = ahead_s
        return self._at, ahead_s
