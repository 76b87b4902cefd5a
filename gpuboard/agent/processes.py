"""What readings say of processes on the GPUs: owner, command, lease, container, load; and which carry a lease."""

import os
import time

from gpuboard.agent import proc

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

    from gpuboard.agent.proc import ProcessStat

    class _Load(NamedTuple):
        """A process's CPU time as last measured."""

        start: int  # clock ticks since boot: pids are reused
        at: float  # monotonic
        cpu_s: float
        percent: Optional[float]  # of one CPU, until ``at``
        rss: int

else:
    from collections import namedtuple

    _Load = namedtuple("_Load", "start at cpu_s percent rss")

CPU_SPAN_S = 0.4  # CPU utilization is measured over this time at least: the kernel counts in steps of 10 ms
_LEASE = b"GPUBOARD_LEASE="


def first_person(login_defs: str) -> int:
    """Return the lowest uid of a person by /etc/login.defs (UID_MIN); lower ones are system accounts."""
    for line in login_defs.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "UID_MIN" and words[1].isdigit():
            return int(words[1])
    return proc.FIRST_PERSON


def delegated_to(uid: int, subuid: str) -> "Optional[str]":
    """Return the user whose containers own a uid by /etc/subuid (subuid(5)); None if there is no such user."""
    for line in subuid.splitlines():
        name, _, span = line.partition(":")
        first, _, count = span.partition(":")
        if first.isdigit() and count.isdigit() and int(first) <= uid < int(first) + int(count):
            return name
    return None


class Processes:
    """Facts about processes; constant ones are read once per process."""

    def __init__(self, root: str = "/proc", clock: "Callable[[], float]" = time.monotonic) -> None:
        self.root = root
        self._clock = clock
        self._known: "Dict[int, Tuple[Tuple[str, int, int], Dict[str, Any]]]" = {}
        self._loads: "Dict[int, _Load]" = {}
        self._names: "Dict[int, str]" = {}
        self._people: "Optional[int]" = None  # the lowest uid of a person
        self._boot: "Optional[float]" = None

    def describe(self, pid: int, kind: str, memory: "Optional[int]") -> "Dict[str, Any]":
        """Return the Process (gpuboard/model/gpu.py) of ``pid``.

        Its owner is hidden (``user`` None) when /proc does not show it (it has just ended, or is in another PID
        namespace), and when it is root's in a container and has no readable lease.
        """
        process = {"pid": pid, "type": kind, "memory": memory}
        path = "%s/%d" % (self.root, pid)
        stat = proc.read_process(pid, self.root)
        try:
            uid = os.stat(path).st_uid
        except OSError:
            stat = None
        if stat is None:
            self._known.pop(pid, None)
            self._loads.pop(pid, None)
            return process
        self._measure(pid, stat, self._clock())
        key = (stat.name, stat.start, uid)
        known = self._known.get(pid)
        if known is None or known[0] != key:
            environ = proc.read_environ(pid, self.root)
            known = (key, self._facts(path, stat, uid, environ))
            if known[1]["command"] and environ != []:  # during its exec a process has neither yet
                self._known[pid] = known
        process.update(known[1])
        return process

    def forget(self, alive: "Any") -> None:
        """Drop the facts of processes that are not in the set ``alive``."""
        for pid in [pid for pid in self._known if pid not in alive]:
            del self._known[pid]
        for pid in [pid for pid in self._loads if pid not in alive]:
            del self._loads[pid]

    def load(self, pid: int) -> "Tuple[Optional[float], Optional[int]]":
        """Return (CPU utilization in percent of one CPU, bytes of host memory) as of the last ``describe``.

        The utilization is that between two descriptions, None at the first.
        """
        load = self._loads.get(pid)
        return (None, None) if load is None else (load.percent, load.rss)

    def _measure(self, pid: int, stat: "ProcessStat", now: float) -> None:
        before = self._loads.get(pid)
        if before is None or before.start != stat.start:
            self._loads[pid] = _Load(stat.start, now, stat.cpu_s, None, stat.rss)
        elif now - before.at < CPU_SPAN_S:
            self._loads[pid] = before._replace(rss=stat.rss)
        else:
            percent = round(100.0 * (stat.cpu_s - before.cpu_s) / (now - before.at), 1)
            self._loads[pid] = _Load(stat.start, now, stat.cpu_s, percent, stat.rss)

    def _facts(self, path: str, stat: "ProcessStat", uid: int, environ: "Optional[List[bytes]]") -> "Dict[str, Any]":
        job, container = proc.parse_cgroup(proc.text_of(path + "/cgroup"))
        lease = _lease(environ)
        command = proc.text_of(path + "/cmdline", 4 * proc.COMMAND_LIMIT)
        hidden = uid == 0 and container is not None and lease is None
        return {
            "uid": uid,
            "system": self._is_system(uid),
            "user": None if hidden else self.user(uid),
            "name": stat.name,
            "command": command.replace("\0", " ").strip()[: proc.COMMAND_LIMIT],
            "started": round(self.boot() + stat.start / proc.TICKS, 2),
            "lease": lease,
            "job": job,
            "container": container,
        }

    def user(self, uid: int) -> str:
        """Return this node's name for a uid, or the name of the user whose containers have it; else its digits."""
        if uid not in self._names:
            name = proc.user_name(uid)
            delegated = delegated_to(uid, proc.text_of("/etc/subuid", 1024 * 1024)) if name == str(uid) else None
            self._names[uid] = delegated or name
        return self._names[uid]

    def _is_system(self, uid: int) -> bool:
        if self._people is None:
            self._people = first_person(proc.text_of("/etc/login.defs"))
        return uid < self._people

    def boot(self) -> float:
        """Return the host's boot time, epoch seconds."""
        if self._boot is None:
            lines = proc.text_of(self.root + "/stat", 1024 * 1024).splitlines()
            found = [line for line in lines if line.startswith("btime ")]
            self._boot = float(found[0].split()[1]) if found else 0.0
        return self._boot

    def started(self, pid: int) -> "Optional[float]":
        """Return the start time of a process, epoch seconds as in its description; None when it has ended."""
        stat = proc.read_process(pid, self.root)
        return None if stat is None else self.boot() + stat.start / proc.TICKS

    def carriers(self, lease: str, on_gpus: "Any", uid: int, leave_out: "Any" = ()) -> "List[Dict[str, Any]]":
        """Return the processes of ``uid`` that carry ``lease`` in their environment or are in ``on_gpus`` (pids).

        Each as ``{"pid", "start", "name", "why"}``; ``start`` in clock ticks since boot.
        """
        found = []
        for pid in proc.pids(self.root):
            if pid in leave_out:
                continue
            try:
                if os.stat("%s/%d" % (self.root, pid)).st_uid != uid:
                    continue
            except OSError:
                continue  # it has ended
            carries = _lease(proc.read_environ(pid, self.root)) == lease
            stat = proc.read_process(pid, self.root) if carries or pid in on_gpus else None
            if stat is not None:
                why = "environment" if carries else "gpu"
                found.append({"pid": pid, "start": stat.start, "name": stat.name, "why": why})
        return found


def _lease(environ: "Optional[List[bytes]]") -> "Optional[str]":
    for entry in environ or ():
        if entry.startswith(_LEASE):
            return entry[len(_LEASE) :].decode("utf-8", "replace")[:64] or None
    return None
