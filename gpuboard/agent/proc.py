"""What /proc says: who owns a process and what it is, and how busy the host is.

``root`` is where /proc is mounted; tests read a folder of their own there.
"""

import os

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Tuple

COMMAND_LIMIT = 512  # characters of a command line that travel
_ENVIRON_LIMIT = 1024 * 1024
_LEASE = b"GPUBOARD_LEASE="
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
    """Take the processors only when nobody else wants them, from now on."""
    try:
        os.nice(19)
    except OSError:
        pass  # refused in some containers; we are light anyway


def parse_stat(data: bytes) -> "Tuple[str, int]":
    """Return (comm, start time in clock ticks since boot) of /proc/PID/stat; comm may hold blanks and brackets."""
    comm = data[data.index(b"(") + 1 : data.rindex(b")")]
    fields = data[data.rindex(b")") + 2 :].split()
    return comm.decode("utf-8", "replace"), int(fields[19])  # field 22 of proc(5), counted from 3


def activity(pid: int) -> "Tuple[str, float]":
    """Return (state letter, seconds of processor time used so far) of a process; ("X", 0) when it has ended."""
    try:
        data = read("/proc/%d/stat" % pid)
        fields = data[data.rindex(b")") + 2 :].split()
        return fields[0].decode("ascii"), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return "X", 0.0


def parse_cgroup(text: str) -> "Tuple[Optional[str], Optional[str]]":
    """Return (Slurm job id, container id of 12 digits) named by /proc/PID/cgroup.

    Below user.slice systemd lets each user name cgroups as he likes: no job of Slurm's is there.
    """
    import re  # json has loaded it by the time there is a process to look at

    job = re.search(r"^(?!.*/user\.slice/).*?/job_(\d+)(?:/|$)", text, re.MULTILINE)
    container = re.search(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?:/|$)", text, re.MULTILINE)
    return job.group(1) if job else None, container.group(1)[:12] if container else None


def cpu_times(line: str) -> "Optional[Tuple[int, int]]":
    """Return (idle, all) in clock ticks since boot, of the first line of /proc/stat; guests' are in user time."""
    try:
        fields = [int(word) for word in line.split()[1:9]]
        return fields[3] + fields[4], sum(fields)
    except (ValueError, IndexError):
        return None


def cpu_percent(before: "Optional[Tuple[int, int]]", now: "Optional[Tuple[int, int]]") -> "Optional[float]":
    """Return the processors' share in use between two ``cpu_times``; a few ticks say nothing."""
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
    """Return the lowest uid of a person, by /etc/login.defs (UID_MIN): those below are system accounts."""
    for line in login_defs.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "UID_MIN" and words[1].isdigit():
            return int(words[1])
    return FIRST_PERSON


def delegated_to(uid: int, subuid: str) -> "Optional[str]":
    """Return to whom /etc/subuid gives a uid, for his containers (subuid(5)); None: to nobody."""
    for line in subuid.splitlines():
        name, _, span = line.partition(":")
        first, _, count = span.partition(":")
        if first.isdigit() and count.isdigit() and int(first) <= uid < int(first) + int(count):
            return name
    return None


def pci_slot(address: "Tuple[int, ...]") -> "Tuple[Optional[int], Optional[str]]":
    """Return (NUMA node, processors beside it as ``0-15,32-47``) of a PCI device (domain, bus, device), from sysfs.

    The processors are None where there is no such device; the node is where the system does not number them.
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
    """Facts about processes; those that cannot change are read once a process."""

    def __init__(self, root: str = "/proc") -> None:
        self.root = root
        self._known: "Dict[int, Tuple[Tuple[str, int, int], Dict[str, Any]]]" = {}
        self._names: "Dict[int, str]" = {}
        self._people: "Optional[int]" = None  # the lowest uid of a person
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._boot: "Optional[float]" = None

    def describe(self, pid: int, kind: str, memory: "Optional[int]") -> "Dict[str, Any]":
        """Return the Process (gpuboard/model/gpu.py) of ``pid``.

        Its owner is hidden (``user`` None) when /proc does not show it: it has just ended, or lives in another PID
        namespace; and when it is root's in a container and carries no lease that can be read.
        """
        process = {"pid": pid, "type": kind, "memory": memory}
        try:
            path = "%s/%d" % (self.root, pid)
            comm, start = parse_stat(read(path + "/stat"))
            uid = os.stat(path).st_uid
        except (OSError, ValueError, IndexError):
            self._known.pop(pid, None)
            return process
        key = (comm, start, uid)
        known = self._known.get(pid)
        if known is None or known[0] != key:
            environ = self._environ(path)
            known = (key, self._facts(path, comm, start, uid, environ))
            if known[1]["command"] and environ != b"":  # in the middle of its exec a process has neither yet
                self._known[pid] = known
        process.update(known[1])
        return process

    def forget(self, alive: "Any") -> None:
        """Drop what is known of processes that are not in the set ``alive``."""
        for pid in [pid for pid in self._known if pid not in alive]:
            del self._known[pid]

    def _facts(self, path: str, comm: str, start: int, uid: int, environ: "Optional[bytes]") -> "Dict[str, Any]":
        job, container = parse_cgroup(_text(path + "/cgroup"))
        lease = _lease(environ)
        hidden = uid == 0 and container is not None and lease is None
        return {
            "uid": uid,
            "system": self._is_system(uid),
            "user": None if hidden else self.user(uid),
            "name": comm,
            "command": _text(path + "/cmdline", 4 * COMMAND_LIMIT).replace("\0", " ").strip()[:COMMAND_LIMIT],
            "started": round(self.boot() + start / self._ticks, 2),
            "lease": lease,
            "job": job,
            "container": container,
        }

    def lease(self, path: str) -> "Optional[str]":
        """Return GPUBOARD_LEASE in the environment of the process at ``path``; None where it cannot be read."""
        return _lease(self._environ(path))

    def _environ(self, path: str) -> "Optional[bytes]":
        """Return the environment of the process at ``path``, None where it cannot be read."""
        try:
            return read(path + "/environ", _ENVIRON_LIMIT)
        except OSError:
            return None

    def user(self, uid: int) -> str:
        """Return this node's name for a uid, or the name of who has it for his containers; else its digits."""
        if uid not in self._names:
            import pwd  # asks the directory service, which may be slow: once for everybody new

            try:
                self._names[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._names[uid] = delegated_to(uid, _text("/etc/subuid", 1024 * 1024)) or str(uid)
        return self._names[uid]

    def _is_system(self, uid: int) -> bool:
        if self._people is None:
            self._people = first_person(_text("/etc/login.defs"))
        return uid < self._people

    def boot(self) -> float:
        """Return when the host was started, epoch seconds."""
        if self._boot is None:
            lines = _text(self.root + "/stat", 1024 * 1024).splitlines()
            found = [line for line in lines if line.startswith("btime ")]
            self._boot = float(found[0].split()[1]) if found else 0.0
        return self._boot

    def started(self, pid: int) -> "Optional[float]":
        """Return when a process was started, epoch seconds as in its description; None when it has ended."""
        try:
            _, start = parse_stat(read("%s/%d/stat" % (self.root, pid)))
        except (OSError, ValueError, IndexError):
            return None
        return self.boot() + start / self._ticks

    def carriers(self, lease: str, on_gpus: "Any", uid: int, leave_out: "Any" = ()) -> "List[Dict[str, Any]]":
        """Return the processes of ``uid`` that carry ``lease`` in their environment or are in ``on_gpus`` (pids).

        Each as ``{"pid", "start", "name", "why"}``; ``start`` in clock ticks since boot.
        """
        found = []
        for name in os.listdir(self.root):
            if not name.isdigit() or int(name) in leave_out:
                continue
            path = self.root + "/" + name
            try:
                if os.stat(path).st_uid != uid:
                    continue
                carries = self.lease(path) == lease
                if carries or int(name) in on_gpus:
                    comm, start = parse_stat(read(path + "/stat"))
                    why = "environment" if carries else "gpu"
                    found.append({"pid": int(name), "start": start, "name": comm, "why": why})
            except (OSError, ValueError, IndexError):
                continue  # it has ended meanwhile
        return found


class Host:
    """Load and memory of the host; the processors' share is measured from one reading to the next."""

    def __init__(self, root: str = "/proc") -> None:
        self.root = root
        self._before = self._times()

    def reading(self) -> "Dict[str, Any]":
        """Return ``cpu_percent, memory_used, memory_total, load1``; None for what cannot be told."""
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


def _lease(environ: "Optional[bytes]") -> "Optional[str]":
    for entry in (environ or b"").split(b"\0"):
        if entry.startswith(_LEASE):
            return entry[len(_LEASE) :].decode("utf-8", "replace")[:64] or None
    return None


def _text(path: str, limit: int = 65536) -> str:
    try:
        return read(path, limit).decode("utf-8", "replace")
    except OSError:
        return ""
