"""Which processes belong to a run, and how all of them are ended.

A process belongs to a run if it descends from the caller (a subreaper, which adopts orphaned processes) or if its
environment has the run's id (a helper that another process has adopted), and no later attempt than the caller's: a
guard that ends late must not end the ranks of a restart.
"""

import ctypes
import os
import signal
import time

from gpuboard.agent.proc import pids, read_environ, read_process

MYPY = False
if MYPY:  # importing typing takes time and is not needed at run time
    from typing import Any, Callable, Collection, Dict, List, Set

    from gpuboard.agent.proc import ProcessStat

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_ATTEMPT = b"GPUBOARD_ATTEMPT="


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants (since Linux 3.4)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_text(number: int) -> str:
    """Return the meaning of a signal to the supervisor or its guard."""
    if number == signal.SIGTERM and os.environ.get("SLURM_JOB_ID"):
        return "Slurm is ending job %s: it was cancelled, or it reached its time limit" % os.environ["SLURM_JOB_ID"]
    return "the supervisor received signal %d" % number


def read_processes() -> "Dict[int, ProcessStat]":
    """Return every process of this PID namespace, by pid."""
    found = (read_process(pid) for pid in pids())
    return {process.pid: process for process in found if process is not None}


def descendants(root: int, processes: "Dict[int, ProcessStat]") -> "Set[int]":
    """Return the pids below ``root``, without it."""
    children: "Dict[int, List[int]]" = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: "Set[int]" = set()
    queue = [root]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in found:
                found.add(child)
                queue.append(child)
    return found


def carries(pid: int, run: bytes, attempt: int) -> bool:
    """Whether the initial environment of the process has ``run`` (GPUBOARD_RUN=…), and not a later attempt of it."""
    environ = read_environ(pid) or ()  # None: ended, or another user's
    if run not in environ:
        return False
    numbers = [entry[len(_ATTEMPT) :] for entry in environ if entry.startswith(_ATTEMPT)]
    return not any(number.isdigit() and int(number) > attempt for number in numbers)


def living(config: "Dict[str, Any]", root: int, spare: "Collection[int]") -> "List[ProcessStat]":
    """Return the processes of the run: below ``root`` or with its GPUBOARD_RUN, without zombies and ``spare``."""
    processes = read_processes()
    below = descendants(root, processes)
    run = b"GPUBOARD_RUN=" + config["run"].encode("utf-8", "surrogateescape")
    return [
        process
        for pid, process in processes.items()
        if process.state not in "ZX"
        and pid != root
        and pid not in spare
        and (pid in below or carries(pid, run, config["attempt"]))
    ]


def send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process; False if it has ended or is another user's."""
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def kill_all(
    config: "Dict[str, Any]", root: int, spare: "Collection[int]", reap: "Callable[[], None]", timeout_s: float
) -> int:
    """Send SIGKILL to every process of the run until none is found twice in a row; return how many are left.

    SIGKILL also ends stopped processes. Those in uninterruptible sleep after ``timeout_s`` are counted. ``reap`` is
    called in between: a zombie stays in the process tree until its parent waits for it.
    """
    until = time.monotonic() + timeout_s
    empty = 0
    while True:
        found = living(config, root, spare)
        empty = 0 if found else empty + 1
        if empty == 2:
            return 0
        if found and time.monotonic() > until:
            return len(found)
        for process in found:
            send_signal(process.pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)
