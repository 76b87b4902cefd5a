"""The one reader of /proc, for the agent and its client: processes, the boot id, addresses and load of this host.

``root`` is where /proc is mounted; tests pass a folder of their own.
"""

import os
import time

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

    class ProcessStat(NamedTuple):
        """A line of /proc/PID/stat (proc(5))."""

        pid: int
        name: str  # at most 15 bytes, chosen by the process: never trust it
        state: str  # one letter
        parent: int
        group: int
        session: int
        cpu_s: float
        start: int  # clock ticks since boot
        rss: int  # bytes

    class _Load(NamedTuple):
        """A process's CPU time as last measured."""

        start: int  # clock ticks since boot: pids are reused
        at: float  # monotonic
        cpu_s: float
        percent: Optional[float]  # of one CPU, until ``at``
        rss: int

else:
    from collections import namedtuple

    ProcessStat = namedtuple("ProcessStat", "pid name state parent group session cpu_s start rss")
    _Load = namedtuple("_Load", "start at cpu_s percent rss")

CPU_SPAN_S = 0.4  # CPU utilization is measured over this time at least: the kernel counts in steps of 10 ms
COMMAND_LIMIT = 512  # characters of a command line that travel
_ENVIRON_LIMIT = 8 * 1024 * 1024  # bytes; execve(2) takes 6 MiB at most
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LEASE = b"GPUBOARD_LEASE="
_boot_id = ""
FIRST_PERSON = 1000  # UID_MIN where login.defs does not set it


def read(path: str, limit: int = 65536) -> bytes:
    """Return at most ``limit`` bytes of a file of /proc. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while len(data) < limit:
            more = os.read(fd, limit - len(data))
            if not more:
                break
            data += more
        return data
    finally:
        os.close(fd)


def be_gentle() -> None:
    """Lower this process's priority: it runs when CPUs are idle."""
    try:
        os.nice(19)
    except OSError:
        pass  # refused in some containers


def boot_id() -> str:
    """Return the kernel's id of this boot. Raises OSError."""
    global _boot_id  # noqa: PLW0603 (reading it each time took a third of listing 250 leases)
    if not _boot_id:
        _boot_id = read("/proc/sys/kernel/random/boot_id", 64).decode("ascii").strip()
    return _boot_id


def machine_id() -> str:
    """Return an id of this machine, equal after reboots and under another host name; "" where it has none.

    machine-id(5): it is not to be shown as it is.
    """
    import hashlib  # late: 3 ms that only heads of runs need

    found = _text("/etc/machine-id", 64).strip()
    return hashlib.sha256(b"gpuboard " + found.encode()).hexdigest()[:16] if len(found) == 32 else ""


def pid_namespace() -> str:
    """Return the id of this process's PID namespace, unique within a boot; "" where /proc does not show it."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def user_name(uid: int) -> str:
    """Return this host's name for a uid, its digits when it has none. May be slow: it asks the directory service."""
    import pwd  # late: not every reader needs names

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def ipv4_addresses() -> "List[str]":
    """Return this host's IPv4 addresses, loopback included; empty where /proc does not list them."""
    found: "Dict[str, None]" = {}  # in order, each once
    address = ""
    for line in _text("/proc/net/fib_trie", 4 * 1024 * 1024).splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            address = words[1]
        elif words == ["/32", "host", "LOCAL"]:
            found[address] = None
    return list(found)


def pids(root: str = "/proc") -> "List[int]":
    """Return all processes of this PID namespace."""
    return [int(name) for name in os.listdir(root) if name.isdigit()]


def own_pids() -> "List[int]":
    """Return this user's processes. Those that hide their memory (setuid programs) belong to root there."""
    uid = os.geteuid()
    found = []
    for pid in pids():
        try:
            if os.stat("/proc/%d" % pid).st_uid == uid:
                found.append(pid)
        except OSError:
            continue  # it has ended
    return found


def parse_stat(data: bytes) -> "ProcessStat":
    """Return a line of /proc/PID/stat. Raises ValueError or IndexError."""
    head, _, tail = data.rpartition(b")")  # the name may contain blanks and brackets
    pid, _, name = head.partition(b" (")
    fields = tail.split()  # the first is field 3 of proc(5)
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
    return ProcessStat(
        int(pid), name.decode("utf-8", "replace"), fields[0].decode("ascii", "replace"), int(fields[1]), int(fields[2]),
        int(fields[3]), cpu_s, int(fields[19]), int(fields[21]) * _PAGE,
    )  # fmt: skip


def read_process(pid: int, root: str = "/proc") -> "Optional[ProcessStat]":
    """Return process ``pid``; None when it does not exist."""
    try:
        return parse_stat(read("%s/%d/stat" % (root, pid)))
    except (OSError, ValueError, IndexError):
        return None


def read_environ(pid: int, root: str = "/proc") -> "Optional[List[bytes]]":
    """Return the environment that ``pid`` was started with, as ``NAME=value``; None where it cannot be read."""
    try:
        return [entry for entry in read("%s/%d/environ" % (root, pid), _ENVIRON_LIMIT).split(b"\0") if entry]
    except OSError:
        return None


def parse_cgroup(text: str) -> "Tuple[Optional[str], Optional[str]]":
    """Return (Slurm job id, container id of 12 digits) named by /proc/PID/cgroup.

    Names below user.slice are ignored: users choose them there, and Slurm's jobs are elsewhere.
    """
    import re  # late: json has loaded it by the time a process is described

    job = re.search(r"^(?!.*/user\.slice/).*?/job_(\d+)(?:/|$)", text, re.MULTILINE)
    container = re.search(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?:/|$)", text, re.MULTILINE)
    return job.group(1) if job else None, container.group(1)[:12] if container else None


def cpu_times(line: str) -> "Optional[Tuple[int, int]]":
    """Return (idle, all) clock ticks since boot from the first line of /proc/stat; user time includes guests'."""
    try:
        fields = [int(word) for word in line.split()[1:9]]
        return fields[3] + fields[4], sum(fields)
    except (ValueError, IndexError):
        return None


def cpu_percent(before: "Optional[Tuple[int, int]]", now: "Optional[Tuple[int, int]]") -> "Optional[float]":
    """Return the CPUs' utilization between two ``cpu_times``; None for fewer than 5 ticks."""
    if now is None or before is None or now[1] - before[1] < 5:
        return None
    return round(100.0 * (1 - (now[0] - before[0]) / float(now[1] - before[1])), 1)


def memory(text: str) -> "Tuple[Optional[int], Optional[int]]":
    """Return (used, total) bytes of /proc/meminfo."""
    values = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[1].isdigit():
            values[words[0]] = int(words[1]) * 1024
    total, available = values.get("MemTotal:"), values.get("MemAvailable:")
    return (None if total is None or available is None else total - available), total


def first_person(login_defs: str) -> int:
    """Return the lowest uid of a person by /etc/login.defs (UID_MIN); lower ones are system accounts."""
    for line in login_defs.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "UID_MIN" and words[1].isdigit():
            return int(words[1])
    return FIRST_PERSON


def delegated_to(uid: int, subuid: str) -> "Optional[str]":
    """Return the user whose containers own a uid by /etc/subuid (subuid(5)); None if there is no such user."""
    for line in subuid.splitlines():
        name, _, span = line.partition(":")
        first, _, count = span.partition(":")
        if first.isdigit() and count.isdigit() and int(first) <= uid < int(first) + int(count):
            return name
    return None


def pci_slot(address: "Tuple[int, ...]") -> "Tuple[Optional[int], Optional[str]]":
    """Return (NUMA node, its CPUs as ``0-15,32-47``) of a PCI device (domain, bus, device), from sysfs.

    The CPUs are None if there is no such device; the node is None if the system does not number its nodes.
    """
    if len(address) != 3:
        return None, None
    folder = "/sys/bus/pci/devices/%04x:%02x:%02x.0/" % address
    try:
        node = int(read(folder + "numa_node", 64))
        return (node if node >= 0 else None), read(folder + "local_cpulist", 4096).decode("ascii", "replace").strip()
    except (OSError, ValueError):
        return None, None


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
        stat = read_process(pid, self.root)
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
            environ = read_environ(pid, self.root)
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
        job, container = parse_cgroup(_text(path + "/cgroup"))
        lease = _lease(environ)
        hidden = uid == 0 and container is not None and lease is None
        return {
            "uid": uid,
            "system": self._is_system(uid),
            "user": None if hidden else self.user(uid),
            "name": stat.name,
            "command": _text(path + "/cmdline", 4 * COMMAND_LIMIT).replace("\0", " ").strip()[:COMMAND_LIMIT],
            "started": round(self.boot() + stat.start / _TICKS, 2),
            "lease": lease,
            "job": job,
            "container": container,
        }

    def user(self, uid: int) -> str:
        """Return this node's name for a uid, or the name of the user whose containers have it; else its digits."""
        if uid not in self._names:
            name = user_name(uid)
            delegated = delegated_to(uid, _text("/etc/subuid", 1024 * 1024)) if name == str(uid) else None
            self._names[uid] = delegated or name
        return self._names[uid]

    def _is_system(self, uid: int) -> bool:
        if self._people is None:
            self._people = first_person(_text("/etc/login.defs"))
        return uid < self._people

    def boot(self) -> float:
        """Return the host's boot time, epoch seconds."""
        if self._boot is None:
            lines = _text(self.root + "/stat", 1024 * 1024).splitlines()
            found = [line for line in lines if line.startswith("btime ")]
            self._boot = float(found[0].split()[1]) if found else 0.0
        return self._boot

    def started(self, pid: int) -> "Optional[float]":
        """Return the start time of a process, epoch seconds as in its description; None when it has ended."""
        stat = read_process(pid, self.root)
        return None if stat is None else self.boot() + stat.start / _TICKS

    def carriers(self, lease: str, on_gpus: "Any", uid: int, leave_out: "Any" = ()) -> "List[Dict[str, Any]]":
        """Return the processes of ``uid`` that carry ``lease`` in their environment or are in ``on_gpus`` (pids).

        Each as ``{"pid", "start", "name", "why"}``; ``start`` in clock ticks since boot.
        """
        found = []
        for pid in pids(self.root):
            if pid in leave_out:
                continue
            try:
                if os.stat("%s/%d" % (self.root, pid)).st_uid != uid:
                    continue
            except OSError:
                continue  # it has ended
            carries = _lease(read_environ(pid, self.root)) == lease
            stat = read_process(pid, self.root) if carries or pid in on_gpus else None
            if stat is not None:
                why = "environment" if carries else "gpu"
                found.append({"pid": pid, "start": stat.start, "name": stat.name, "why": why})
        return found


class Host:
    """Load and memory of the host; CPU utilization is measured between readings."""

    def __init__(self, root: str = "/proc") -> None:
        self.root = root
        self._before = self._times()

    def reading(self) -> "Dict[str, Any]":
        """Return ``cpu_percent, memory_used, memory_total, load1``; None for what cannot be read."""
        used, total = memory(_text(self.root + "/meminfo", 512))
        return {
            "cpu_percent": self._percent(),
            "memory_used": used,
            "memory_total": total,
            "load1": self._load(),
        }

    def _times(self) -> "Optional[Tuple[int, int]]":
        try:
            return cpu_times(read(self.root + "/stat", 512).split(b"\n")[0].decode("ascii", "replace"))
        except OSError:
            return None

    def _percent(self) -> "Optional[float]":
        now = self._times()
        percent = cpu_percent(self._before, now)
        if percent is not None:
            self._before = now
        return percent

    def _load(self) -> "Optional[float]":
        try:
            return float(read(self.root + "/loadavg", 64).split()[0])
        except (OSError, ValueError, IndexError):
            return None


def _lease(environ: "Optional[List[bytes]]") -> "Optional[str]":
    for entry in environ or ():
        if entry.startswith(_LEASE):
            return entry[len(_LEASE) :].decode("utf-8", "replace")[:64] or None
    return None


def _text(path: str, limit: int = 65536) -> str:
    try:
        return read(path, limit).decode("utf-8", "replace")
    except OSError:
        return ""
