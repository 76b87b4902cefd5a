"""Evidence of why a rank ended: its cgroup's counters, the kernel's log, /dev/shm, the file of torch's ``@record``."""

import json
import os
import re

from gpuboard.agent.launch.rank.traceback_text import last_traceback

MYPY = False
if MYPY:
    from typing import Dict, List, Optional

_RECORD = 2**20  # bytes that are read of one file
_MIB = 2.0**20


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


def child_death(text: str, oom_before: "Dict[str, int]") -> "Optional[str]":
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
    oom = oom_text(int(killed.group(1) or 0), oom_before) if killed else None
    return None if oom is None else "out of memory: " + oom


def shared_memory() -> "Optional[str]":
    """Return how full /dev/shm is; None if there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    size, free = found.f_blocks * found.f_frsize / _MIB, found.f_bavail * found.f_frsize / _MIB
    return "/dev/shm: %.0f of %.0f MiB in use" % (size - free, size)


def oom_counts() -> "Dict[str, int]":
    """Return oom_kill of this process's cgroup and of its ancestors, by folder; unreadable ones are left out.

    cgroup v2 counts in memory.events (kernel: Documentation/admin-guide/cgroup-v2.rst), v1 in memory.oom_control.
    """
    found: "Dict[str, int]" = {}
    for folder in cgroups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            count = _count(os.path.join(folder, name))
            if count is not None:
                found[folder] = count
    return found


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


def oom_text(pid: int, before: "Dict[str, int]") -> "Optional[str]":
    """Return the evidence that ``pid`` was killed for memory, or None."""
    kernel = _kernel_line(pid)
    if kernel:
        return "kernel: " + kernel
    now = oom_counts()
    grown = sorted((folder for folder in now if now[folder] > before.get(folder, 0)), key=len)
    if grown:
        folder = grown[-1]  # v2 also counts in the ancestors: the deepest one has the limit
        return "%s: oom_kill %d -> %d" % (folder, before.get(folder, 0), now[folder])
    return None


def _count(path: str) -> "Optional[int]":
    try:
        with open(path) as file:
            found = re.search(r"^oom_kill (\d+)$", file.read(), re.M)
    except OSError:
        return None
    return int(found.group(1)) if found else None


def _kernel_line(pid: int) -> "Optional[str]":
    """Return the kernel's message about killing ``pid`` for memory, if this user may read the log."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found = None
    pattern = re.compile(r"[Oo]ut of memory: Killed process %d |oom-kill:.*[,=]pid=%d\b" % (pid, pid))
    try:
        while True:
            try:
                record = os.read(fd, 8192).decode("utf-8", "replace")
            except BrokenPipeError:
                continue  # records were overwritten meanwhile: continue with the oldest left
            text = record.partition(";")[2].partition("\n")[0]
            if pattern.search(text):
                found = text
    except OSError:  # EAGAIN: read to the end
        return found
    finally:
        os.close(fd)
