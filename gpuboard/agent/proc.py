"""The one reader of /proc, for the agent and its client: processes, the boot id, addresses and load of this host.

``root`` is where /proc is mounted; tests pass a folder of their own.
"""

import os

MYPY = False
if MYPY:
    from typing import Any, Dict, List, NamedTuple, Optional, Tuple

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

else:
    from collections import namedtuple

    ProcessStat = namedtuple("ProcessStat", "pid name state parent group session cpu_s start rss")

COMMAND_LIMIT = 512  # characters of a command line that travel
_ENVIRON_LIMIT = 8 * 1024 * 1024  # bytes; execve(2) takes 6 MiB at most
TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_HEX = frozenset("0123456789abcdef")
_PF_EXITING = 4  # linux/sched.h; set before the files of a process are closed
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

    found = text_of("/etc/machine-id", 64).strip()
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
    for line in text_of("/proc/net/fib_trie", 4 * 1024 * 1024).splitlines():
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
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
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


def is_exiting(pid: int) -> bool:
    """Whether a process has begun to exit, or has ended."""
    try:
        fields = read("/proc/%d/stat" % pid).rpartition(b")")[2].split()
        return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return True


def read_environ(pid: int, root: str = "/proc") -> "Optional[List[bytes]]":
    """Return the environment that ``pid`` was started with, as ``NAME=value``; None where it cannot be read."""
    try:
        return [entry for entry in read("%s/%d/environ" % (root, pid), _ENVIRON_LIMIT).split(b"\0") if entry]
    except OSError:
        return None


def ptrace_scope(root: str = "/proc") -> int:
    """Return kernel.yama.ptrace_scope where it applies to this user, else 0: root is subject to 3 only."""
    try:
        scope = int(read("%s/sys/kernel/yama/ptrace_scope" % root, 16))
    except (OSError, ValueError):
        return 0  # a kernel without Yama
    return scope if os.geteuid() or scope > 2 else 0


def parse_cgroup(text: str) -> "Tuple[Optional[str], Optional[str]]":
    """Return (Slurm job id, container id of 12 digits) named by /proc/PID/cgroup.

    Names below user.slice are ignored: users choose them there, and Slurm's jobs are elsewhere.
    """
    job = container = None
    for line in text.split("\n"):  # without re, whose import takes a tenth of an agent's start
        for name in line.split("/"):
            if job is None and name.startswith("job_") and name[4:].isdecimal() and "/user.slice/" not in line:
                job = name[4:]
            whole = name[: -len(".scope")] if name.endswith(".scope") else name
            if container is None and len(whole) >= 64 and _HEX.issuperset(whole[-64:]) and whole[-65:-64] in "-:":
                container = whole[-64:-52]
    return job, container


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


class Host:
    """Load and memory of the host; CPU utilization is measured between readings."""

    def __init__(self, root: str = "/proc") -> None:
        self.root = root
        self._before = self._times()

    def reading(self) -> "Dict[str, Any]":
        """Return ``cpu_percent, memory_used, memory_total, load1``; None for what cannot be read."""
        used, total = memory(text_of(self.root + "/meminfo", 512))
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


def text_of(path: str, limit: int = 65536) -> str:
    """Return the text of a file, ``limit`` bytes at most; "" where it cannot be read."""
    try:
        return read(path, limit).decode("utf-8", "replace")
    except OSError:
        return ""
