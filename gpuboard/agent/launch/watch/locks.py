"""The file lock that a process waits for, and its holder, from /proc/locks (proc(5))."""

import os

from gpuboard.agent import proc

MYPY = False
if MYPY:
    from typing import Any, Dict, List, NamedTuple, Optional

    Lock = NamedTuple("Lock", [("number", str), ("waits", bool), ("write", bool), ("pid", int), ("inode", int)])
else:
    from collections import namedtuple

    Lock = namedtuple("Lock", "number waits write pid inode")

_LOCKS = 1024 * 1024  # bytes of /proc/locks that are read
_OPEN = 1000  # files of a process that are looked at


def read() -> "List[Lock]":
    """Return all file locks of this machine, [] where they cannot be read."""
    try:
        return parse(proc.read("/proc/locks", _LOCKS).decode("ascii", "replace"))
    except OSError:
        return []


def parse(text: str) -> "List[Lock]":
    """Return the locks in the text of /proc/locks; a process that waits for one is listed with its number.

    >>> parse("1: FLOCK  ADVISORY  WRITE 42 fe:00:7 0 EOF\\n1: -> FLOCK  ADVISORY  WRITE 43 fe:00:7 0 EOF")[1].waits
    True
    """
    found = []
    for line in text.splitlines():
        words = line.split()
        waits = words[1:2] == ["->"]
        words = [word for word in words if word != "->"]
        try:
            if words[1] in ("FLOCK", "POSIX", "OFDLCK"):
                inode = int(words[5].rpartition(":")[2])
                found.append(Lock(words[0], waits, words[3] == "WRITE", int(words[4]), inode))
        except (IndexError, ValueError):
            continue  # another format of another kernel
    return found


def awaited(pid: int, locks: "List[Lock]") -> "Optional[Dict[str, Any]]":
    """Return the lock for which a process waits: ``file``, ``pid`` of its holder (0: unknown), its ``name``, ``waits``.

    ``waits`` is false for a lock of another process on a file that this one has open: programs that try a lock again
    and again (sqlite) do not wait for it in the kernel.
    """
    mine = [at for at, lock in enumerate(locks) if lock.waits and lock.pid == pid]
    held = []
    for at in mine:  # below its holder; the numbers shift when locks come and go between two reads of the file
        above = [lock for lock in locks[:at] if not lock.waits][-1:]
        held += [lock for lock in above if lock.number == locks[at].number]
    if not mine:
        held = [lock for lock in locks if not lock.waits and lock.write and lock.pid not in (pid, os.getpid())]
    files = _open_files(pid) if held else {}
    for lock in held:
        if mine or lock.inode in files:
            holder = proc.read_process(lock.pid) if lock.pid > 0 else None
            return {
                "file": files.get(lock.inode, ""),
                "pid": max(0, lock.pid),
                "name": holder.name if holder else "",
                "waits": bool(mine),
            }
    return None


def _open_files(pid: int) -> "Dict[int, str]":
    """Return the regular files that a process has open, by inode: a device may have two numbers (overlayfs, btrfs)."""
    found = {}
    try:
        for fd in os.listdir("/proc/%d/fd" % pid)[:_OPEN]:
            path = os.readlink("/proc/%d/fd/%s" % (pid, fd))
            if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")):
                found[os.stat("/proc/%d/fd/%s" % (pid, fd)).st_ino] = path
    except OSError:
        pass  # it has ended, or closed one meanwhile
    return found
