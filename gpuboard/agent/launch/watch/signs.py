"""Cheap signs of a rank's activity, read each second from /proc: CPU time, bytes of input and output, process state."""

import os
import time

from gpuboard.agent import proc

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Optional, Tuple

INTERVAL_S = 1.0
QUIET_S = 3.0  # a rank without signs of activity for this long is reported
# Share of a core that counts as activity: a rank that waits in a collective of gloo uses less than 1 %, one that
# computes gets more even where eight processes compete for each core.
_ACTIVE = 0.05
# Bytes in an interval that do not count: a thread of torch that answers an inspection for the first time reads the list
# of CPUs in /sys, "0-127\n"
_FEW = 64
_CHILDREN = 64  # processes below a rank, for example DataLoader workers


class _Rank:
    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self.moved = now  # when it last showed activity, monotonic
        self.cpu_s: "Optional[float]" = None
        self.transferred = 0  # bytes
        self.recent = (0.0, 0)  # share of a core and bytes since the sample before
        self.reported: "Optional[str]" = None  # the state that was reported with `quiet`; None: active


class Signs:
    """Reports when a rank has been quiet for QUIET_S, when its state then changes, and when it is active again.

    ``emit`` sends an event to the head; nothing is sent while all ranks are active.
    """

    def __init__(
        self, emit: "Callable[[str, Dict[str, Any]], None]", clock: "Callable[[], float]" = time.monotonic
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._ranks: "Dict[int, _Rank]" = {}
        self._sampled = 0.0

    def follow(self, rank: int, pid: int) -> None:
        """Start to watch the process of a rank."""
        self._ranks[rank] = _Rank(pid, self._clock())

    def ended(self, rank: int) -> None:
        """Stop to watch a rank."""
        self._ranks.pop(rank, None)

    def wrote(self, rank: int) -> None:
        """Record output of a rank, which is activity."""
        if rank in self._ranks:
            self._ranks[rank].moved = self._clock()

    def recent(self, rank: int) -> "Tuple[float, int]":
        """Return the share of a core that a rank used between the two newest samples, and the bytes that it moved."""
        return self._ranks[rank].recent if rank in self._ranks else (0.0, 0)

    def sample(self) -> None:
        """Read the signs of every rank and report changes."""
        now = self._clock()
        elapsed, self._sampled = now - self._sampled, now
        for rank, seen in self._ranks.items():
            state, cpu_s, transferred = _read(seen.pid)
            if state is None:
                continue  # it has just ended
            if seen.cpu_s is None or elapsed > 3 * INTERVAL_S:  # first sample, or this process was suspended
                seen.moved = max(seen.moved, now - INTERVAL_S)
            else:
                moved = transferred - seen.transferred
                seen.recent = ((cpu_s - seen.cpu_s) / elapsed, moved if abs(moved) > _FEW else 0)
                if seen.recent[0] > _ACTIVE or seen.recent[1]:
                    seen.moved = now
            seen.cpu_s, seen.transferred = cpu_s, transferred
            quiet_s = now - seen.moved
            shown = state if quiet_s >= QUIET_S else None
            if shown != seen.reported:
                seen.reported = shown
                quiet = None if shown is None else round(quiet_s, 1)
                self._emit("quiet", {"rank": rank, "quiet_s": quiet, "state": state, "load": load()})


def load() -> "Optional[float]":
    """Return how many tasks compete for each CPU of the node, averaged over a minute."""
    try:
        return round(os.getloadavg()[0] / len(os.sched_getaffinity(0)), 2)
    except OSError:
        return None


def _read(pid: int) -> "Tuple[Optional[str], float, int]":
    """Return state, CPU seconds and bytes read and written of a rank with the processes below it (main threads').

    Those of a compiler that the rank has started count, too. A sum may decrease when a child ends; the parent then has
    its CPU time.
    """
    state, cpu_s, transferred = _read_one(pid)
    below = children(pid)
    for child in below:  # which grows
        _, child_cpu_s, child_transferred = _read_one(child)
        cpu_s += child_cpu_s
        transferred += child_transferred
        below += children(child)[: max(0, _CHILDREN - len(below))]
    return state, cpu_s, transferred


def _read_one(pid: int) -> "Tuple[Optional[str], float, int]":
    found = proc.read_process(pid)
    if found is None:
        return None, 0.0, 0
    try:
        lines = proc.read("/proc/%d/io" % pid, 512).split(b"\n")
        transferred = int(lines[0].split()[1]) + int(lines[1].split()[1])  # rchar, wchar (proc(5))
    except (OSError, ValueError, IndexError):
        transferred = 0  # another user's process, or a kernel without task accounting
    return found.state, found.cpu_s, transferred


def children(pid: int) -> "List[int]":
    """Return the processes that the main thread of a process has started."""
    try:
        return [int(word) for word in proc.read("/proc/%d/task/%d/children" % (pid, pid), 4096).split()[:_CHILDREN]]
    except (OSError, ValueError):
        return []  # a kernel without CONFIG_PROC_CHILDREN
