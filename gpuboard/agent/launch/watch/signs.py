"""Cheap signs of a rank's activity, read each second from /proc: CPU time, bytes of input and output, process state."""

import os
import time

from gpuboard.agent import proc
from gpuboard.agent.launch.watch import sockets

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Optional, Tuple

    _Use = Tuple[float, int]  # CPU seconds; bytes read and written

INTERVAL_S = 1.0
QUIET_S = 3.0  # a rank without signs of activity for this long is reported
# Share of a core that counts as activity: a rank that waits in a collective of gloo uses less than 1 %, one that
# computes gets more even where eight processes compete for each core.
_ACTIVE = 0.05
# Bytes in an interval that do not count: a thread of torch that answers an inspection for the first time reads the list
# of CPUs in /sys, "0-127\n"
_FEW = 64
# Bytes over TCP in an interval that do not count: heartbeats of NCCL's monitor and of loggers
_HEARTBEAT = 4096
_CHILDREN = 64  # processes below a rank, for example DataLoader workers


class _Rank:
    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self.moved = now  # when it last showed activity, monotonic
        self.used: "Dict[int, _Use]" = {}  # by pid, of the rank and the processes below it; {}: not read yet
        self.transferred: "Dict[int, int]" = {}  # by inode, over TCP at the sample before, if it was quiet then
        self.of_threads: "List[int]" = []  # processes that other threads than the main one have started
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
        before, self._sampled = self._sampled, now
        elapsed = now - before
        for rank, seen in self._ranks.items():
            if seen.moved < before:  # nothing moved between the last two samples
                seen.of_threads = _of_threads(seen.pid)
            state, used = _read(seen.pid, seen.of_threads)
            if state is None:
                continue  # it has just ended
            if not seen.used or elapsed > 3 * INTERVAL_S:  # first sample, or this process was suspended
                seen.moved = max(seen.moved, now - INTERVAL_S)
            else:
                cpu_s, moved = (sum(used[pid][i] - seen.used.get(pid, (0, 0))[i] for pid in used) for i in (0, 1))
                if cpu_s / elapsed > _ACTIVE or moved > _FEW:
                    seen.transferred = {}
                else:
                    moved = self._transferred(seen, list(used))
                seen.recent = (cpu_s / elapsed, int(moved) if moved > _FEW else 0)
                if seen.recent[0] > _ACTIVE or seen.recent[1]:
                    seen.moved = now
            seen.used = used
            quiet_s = now - seen.moved
            shown = state if quiet_s >= QUIET_S else None
            if shown != seen.reported:
                seen.reported = shown
                quiet = None if shown is None else round(quiet_s, 1)
                self._emit("quiet", {"rank": rank, "quiet_s": quiet, "state": state, "load": load()})

    def _transferred(self, seen: _Rank, pids: "List[int]") -> int:
        """Return the bytes that a rank without other signs has moved over TCP since the sample before: a download."""
        before, seen.transferred = seen.transferred, sockets.moved(pids)
        moved = sum(count - before[inode] for inode, count in seen.transferred.items() if inode in before)
        return moved if moved > _HEARTBEAT else 0


def load() -> "Optional[float]":
    """Return how many tasks compete for each CPU of the node, averaged over a minute."""
    try:
        return round(os.getloadavg()[0] / len(os.sched_getaffinity(0)), 2)
    except OSError:
        return None


def _read(pid: int, of_threads: "List[int]") -> "Tuple[Optional[str], Dict[int, _Use]]":
    """Return the state of a rank, and what it and each process below it (main threads' and ``of_threads``) have used.

    A compiler that the rank has started counts, too.
    """
    state, cpu_s, transferred = _read_one(pid)
    used = {pid: (cpu_s, transferred)}
    below = children(pid) + of_threads
    for child in below:  # which grows
        if child not in used:
            found, cpu_s, transferred = _read_one(child)
            if found is not None:
                used[child] = (cpu_s, transferred)
            below += children(child)[: max(0, _CHILDREN - len(below))]
    return state, used


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


def children(pid: int, thread: "Optional[int]" = None) -> "List[int]":
    """Return the processes that a thread of a process has started; default: the main thread."""
    try:
        text = proc.read("/proc/%d/task/%d/children" % (pid, thread or pid), 4096)
        return [int(word) for word in text.split()[:_CHILDREN]]
    except (OSError, ValueError):
        return []  # a kernel without CONFIG_PROC_CHILDREN


def _of_threads(pid: int) -> "List[int]":
    """Return the processes that other threads of a process have started: of a pool, of a thread that loads data."""
    try:
        threads = os.listdir("/proc/%d/task" % pid)
    except OSError:
        return []
    found = [child for thread in threads if thread != str(pid) for child in children(pid, int(thread))]
    return found[:_CHILDREN]
