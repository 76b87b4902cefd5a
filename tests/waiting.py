"""Waiting for a condition instead of sleeping, with a clock that is weighted by the machine's load.

Test files run in parallel on machines of any speed, where an operation with a limit of 2 s may correctly take 6 s. The
clock therefore counts a moment in which six processes compete for two processors as a third of its length, and does
not count time in which the whole machine was suspended.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import AnyStr, TypeVar

T = TypeVar("T")

_STEP_S = 0.02
_STEP_MAX_S = 0.2  # of a longer wait: checking a condition costs processor time, which other tests need
_GROWTH = 1.2


class Clock:
    """Seconds since its creation, weighted by the share of processors available; read it often."""

    def __init__(self) -> None:
        self._read = time.monotonic()
        self._spent_s = 0.0

    def spent_s(self, most_s: float = math.inf) -> float:
        """Return the seconds so far, counting at most ``most_s`` since the last call."""
        now = time.monotonic()
        self._spent_s += min(now - self._read, most_s) * _share()
        self._read = now
        return self._spent_s

    def sleep(self, step_s: float = _STEP_S) -> None:
        """Sleep for a moment; time in which the machine was suspended does not count."""
        self.spent_s()
        time.sleep(step_s)
        self.spent_s(5 * step_s)  # a step that takes longer means that the machine was suspended


class Stopwatch:
    """A Clock that a thread reads until ``stop``; ``seconds`` have passed so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Stop; return the seconds since its creation."""
        self._over.set()
        self._thread.join()
        return self.seconds

    def _run(self) -> None:
        clock = Clock()
        while not self._over.is_set():
            clock.sleep()
            self.seconds = clock.spent_s()


def until(condition: Callable[[], T], what: str = "", timeout_s: float = 60.0) -> T:
    """Wait until ``condition`` returns a true value and return it; fail with ``what`` after ``timeout_s``."""
    clock, step_s = Clock(), _STEP_S
    while True:
        over = clock.spent_s() >= timeout_s  # read before the last check: we may be suspended in between
        if value := condition():
            return value
        assert not over, f"not in {timeout_s} s: {what or 'it did not happen'}"
        clock.sleep(step_s)
        step_s = next_step(step_s)


def next_step(step_s: float) -> float:
    """Return the pause after one of ``step_s`` seconds, between two checks of a condition."""
    return min(step_s * _GROWTH, _STEP_MAX_S)


def read_line(process: subprocess.Popen[AnyStr]) -> AnyStr:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def _share() -> float:
    """Return processors / runnable processes, at most 1 (proc(5): the fourth field of loadavg)."""
    wanted = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    return min(1.0, len(os.sched_getaffinity(0)) / max(wanted, 1))


def alive(pid: int) -> bool:
    """Return whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def stopped(pid: int) -> bool:
    """Return whether a process is suspended; after SIGSTOP it is once it leaves an uninterruptible sleep."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def kill_each(pids: Iterable[int]) -> None:
    """Send SIGKILL to processes, some of which may have ended together with another."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def full_pipe() -> tuple[int, int]:
    """Return both ends of a pipe that takes nothing more."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    return reading, writing
