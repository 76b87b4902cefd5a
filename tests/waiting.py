"""Waiting for a condition, in place of a sleep; and time as it passes where everybody gets a processor.

The files of tests run side by side, on whatever machine there is. What is promised to be over in 2 s may then take 6,
and nothing is wrong: so a moment in which six processes want one of two processors counts for a third of its length,
and one in which the whole machine stands still does not count.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_STEP_S = 0.02
_MOST_S = 5 * _STEP_S  # a sleep of a step that took longer was the machine's doing, which then stood still for all


class Clock:
    """Seconds since it was made, each counted for as much as the machine had processors for; read it often."""

    def __init__(self) -> None:
        self._read = time.monotonic()
        self._spent_s = 0.0

    def spent_s(self, most_s: float = math.inf) -> float:
        """Return the seconds so far, of those since the last reading at most ``most_s``."""
        now = time.monotonic()
        self._spent_s += min(now - self._read, most_s) * _share()
        self._read = now
        return self._spent_s

    def sleep(self) -> None:
        """Sleep for a moment. Of a machine that stands still meanwhile nobody can want that something is over."""
        self.spent_s()
        time.sleep(_STEP_S)
        self.spent_s(_MOST_S)


class Stopwatch:
    """Such a clock that reads itself from now on until it is stopped; ``seconds`` have passed so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Return the seconds since it was made."""
        self._over.set()
        self._thread.join()
        return self.seconds

    def _run(self) -> None:
        clock = Clock()
        while not self._over.is_set():
            clock.sleep()
            self.seconds = clock.spent_s()


def until(condition: Callable[[], T], what: str = "", timeout_s: float = 60.0) -> T:
    """Wait until ``condition`` gives something true and return that; fail after ``timeout_s``, saying ``what`` is."""
    clock = Clock()
    while True:
        over = clock.spent_s() >= timeout_s  # read before the last look, for we may stand still between the two
        if value := condition():
            return value
        assert not over, f"not in {timeout_s} s: {what or 'it did not happen'}"
        clock.sleep()


def _share() -> float:
    """Return which part of the processors that are wanted right now there is (proc(5), loadavg's fourth field)."""
    wanted = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    return min(1.0, len(os.sched_getaffinity(0)) / max(wanted, 1))
