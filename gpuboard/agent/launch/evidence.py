"""Evidence of why a rank ended: its cgroup's counters, the kernel's log, /dev/shm, the file of torch's ``@record``."""

import json
import os
import re

from gpuboard.agent.launch.rank.traceback_text import last_traceback

MYPY = False
if MYPY:
    from typing import Dict, List, Optional, Tuple

_RECORD = 2**20  # bytes that are read of one file
_MIB = 2.0**20
_KILLED = re.compile(r"[Oo]ut of memory: Killed process (\d+) |oom-kill:.*[,=]pid=(\d+)\b")


def recorded(path: str) -> "Optional[str]":
    """Return the exception that ``@record`` wrote, with its place; None if there is none."""
    try:
        with open(path, "rb") as file:
            message = json.loads(file.read(_RECORD).decode("utf-8", "replace"))["message"]
        if isinstance(message, str):
            return message[:_RECORD] or None
        last = last_traceback(message["extraInfo"]["py_callstack"])
        if last is None:
            return str(message["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    kind, text, place = last
    return kind + (": " + text if text else "") + (" at %s:%s" % place[:2] if place[0] else "")


def child_death(text: str, killed_for_memory: "KilledForMemory") -> "Optional[str]":
    """Return evidence for an exception about the death of a process of the rank: torch's DataLoader or subprocess
    reports one, the latter without a pid."""
    if re.search(
        r"Bus error|SIGBUS|shared memory ?\(shm\)|shared memory (object|limit|file)|allocate shared memory", text
    ):
        return shared_memory()
    killed = re.search(
        r"\(pid (\d+)\) (?:is killed by signal: Killed|was killed by SIGKILL)|died with <Signals.SIGKILL|"
        r"process pool was terminated abruptly|terminated with signal SIGKILL",
        text,
    )
    oom = killed_for_memory.evidence(int(killed.group(1) or 0)) if killed else None
    return None if oom is None else "out of memory: " + oom


def shared_memory() -> "Optional[str]":
    """Return how full /dev/shm is; None if there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    size, free = found.f_blocks * found.f_frsize / _MIB, found.f_bavail * found.f_frsize / _MIB
    return "/dev/shm: %.0f of %.0f MiB in use" % (size - free, size)


class KilledForMemory:
    """Evidence that processes were killed for memory since this was created: the kernel's log and the cgroup's counter.

    ``log``: the log's file, a record a line, which may be unreadable. ``folders``: the cgroup and its ancestors.
    """

    def __init__(self, log: str = "/dev/kmsg", folders: "Optional[List[str]]" = None) -> None:
        self._folders = cgroups("memory") if folders is None else folders
        self._before = _oom_kills(self._folders)
        self._killed: "Dict[int, str]" = {}  # by pid, the record
        self._log = -1
        try:
            self._log = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)  # earlier ones may have the pid of another process
        except OSError:
            pass

    @property
    def readable(self) -> bool:
        """Whether there would be evidence: in a container both may be hidden."""
        return self._log >= 0 or self._before is not None

    def evidence(self, pid: int) -> "Optional[str]":
        """Return the evidence that ``pid`` was killed for memory, or None."""
        self._read_log()
        if pid in self._killed:
            return "kernel: " + self._killed[pid]
        before, now = self._before, _oom_kills(self._folders)
        if before is None or now is None or now[1] <= before[1]:
            return None
        return "%s: oom_kill %d -> %d" % (now[0], before[1], now[1])

    def _read_log(self) -> None:
        while self._log >= 0:
            try:
                data = os.read(self._log, 8192).decode("utf-8", "replace")
            except BrokenPipeError:
                continue  # records were overwritten meanwhile: continue with the oldest left
            except OSError:  # EAGAIN: read to the end
                return
            if not data:
                return
            for record in data.splitlines():
                found = _KILLED.search(record)
                if found:
                    self._killed[int(found.group(1) or found.group(2))] = record.partition(";")[2]


def _oom_kills(folders: "List[str]") -> "Optional[Tuple[str, int]]":
    """Return the first folder that counts kills for memory, and its count; None without one.

    The folders above it also count the kills of other jobs. cgroup v2 counts in memory.events (kernel:
    Documentation/admin-guide/cgroup-v2.rst), v1 in memory.oom_control.
    """
    for folder in folders:
        for name in ("memory.events", "memory.oom_control"):
            count = _count(os.path.join(folder, name))
            if count is not None:
                return folder, count
    return None


def cgroups(controller: str) -> "List[str]":
    """Return the folders of this process's cgroups with ``controller``, of v2 and v1, each with its ancestors."""
    try:
        with open("/proc/self/cgroup") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = "/sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = "/sys/fs/cgroup/" + controller
        else:
            continue
        while True:
            found.append(base + path.rstrip("/"))
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
    return found


def _count(path: str) -> "Optional[int]":
    try:
        with open(path) as file:
            found = re.search(r"^oom_kill (\d+)$", file.read(), re.M)
    except OSError:
        return None
    return int(found.group(1)) if found else None
