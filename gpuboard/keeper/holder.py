"""Which process a lease lives with, read from /proc.

The rule, first match wins:

1. ``--holder PID``.
2. The process that reads our stdout pipe: the shell that evaluates ``$(gpuboard allocate …)``, whatever stands
   between (subshells, ``timeout``, ``env``). Readers that only hand the text on are climbed over, for whoever reads
   *their* stdout: known filters (``$(gpuboard … | tee log)``), any command of a pipeline within ``$(…)``, and a
   subshell that the shell reading it was forked into (a shell function called as ``$(f)``).
   When only filters are left that write elsewhere (``gpuboard … | tee log``), rule 3 decides.
3. Our parent; while that is a mere fork of its own parent (same executable, command line and session) or a wrapper
   that only waits for us (``timeout``, ``flock``), the one above.

On allocate's measured path: os and sys only, nothing of ours.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from gpuboard.errors import UsageError

# Programs that pass text on and end with it. A reader that is none of them (a subshell of `| while read`, a consumer
# written in Python) uses what it reads, so the lease is its own.
_FILTERS = """
    awk base64 cat column cut dd egrep expand fgrep fold gawk grep head jq less logger mawk mbuffer more nl original-awk
    paste pv rg sed sort split tac tail tee tr ts uniq wc xclip yq
""".split()  # noqa: SIM905 (words to read, not 40 lines)
_WRAPPERS = ("doas", "flock", "ltrace", "script", "strace", "sudo", "time", "timeout", "unbuffer", "uv", "uvx")
_REAPERS = ("catatonit", "docker-init", "dumb-init", "init", "systemd", "tini")
_boot_id = ""
_MAX_DEPTH = 64  # processes climbed: more only in a loop, and /proc is read while it changes


class Holder(NamedTuple):
    """A process that cannot be mistaken for a later one of the same pid; the same fields as a claim's holder."""

    host: str
    boot_id: str
    pid: int
    start: int  # field 22 of /proc/PID/stat: clock ticks since boot


class ProcessStat(NamedTuple):
    """A line of /proc/PID/stat (proc(5)), as far as we need it."""

    pid: int
    name: str  # at most 15 bytes, chosen by the process: never trust it
    state: str
    parent: int
    group: int
    session: int
    start: int  # clock ticks since boot


def find_holder(holder_pid: int | None = None, stdout_fd: int = 1) -> Holder:
    """Return the process that a lease taken by this process lives with; ``holder_pid`` is what the user asked for.

    Raises UsageError when that process does not exist, or when nobody is left to hold the lease.
    """
    pid = holder_pid if holder_pid is not None else _evaluator(stdout_fd) or _starter()
    holder = identify(pid)
    if holder is None:
        raise UsageError(f"--holder {pid}: no such process on {os.uname().nodename}")
    return holder


def identify(pid: int) -> Holder | None:
    """Return who process ``pid`` is; None when there is none (any more; a zombie is none)."""
    process = read_process(pid)
    if process is None or process.state in "ZX":
        return None
    return Holder(os.uname().nodename, boot_id(), pid, process.start)


def alive(holder: Holder) -> bool | None:
    """Return whether ``holder`` still lives; None when it ran on another machine, where we cannot look."""
    if holder.boot_id != boot_id():
        return False if holder.host == os.uname().nodename else None
    process = read_process(holder.pid)
    return process is not None and process.state not in "ZX" and process.start == holder.start


def shell_kind(pid: int) -> str:
    """Return the format that the shell ``pid`` evaluates: ``csh``, ``fish`` or ``shell`` (all others)."""
    name = _program(pid)
    if name in {"csh", "tcsh", "bsd-csh"}:
        return "csh"
    return "fish" if name == "fish" else "shell"


def evaluator_kind() -> str:
    """Return the format for whoever evaluates our output; ``shell`` where that cannot be told."""
    try:
        return shell_kind(find_holder().pid)
    except UsageError:
        return "shell"


def boot_id() -> str:
    """Return this machine's boot id, which every boot makes anew."""
    global _boot_id  # noqa: PLW0603 (it outlives this process; read anew it took a third of listing 250 leases)
    if not _boot_id:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            _boot_id = file.read().strip()
    return _boot_id


def read_process(pid: int) -> ProcessStat | None:
    """Return the process ``pid``; None when it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    head, _, tail = text.rpartition(b")")  # the name may hold blanks and brackets itself
    fields = tail.split()
    if len(fields) < 20:
        return None
    name = head.partition(b"(")[2].decode("utf-8", "replace")
    state = fields[0].decode("ascii", "replace")
    return ProcessStat(pid, name, state, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def own_pids() -> list[int]:
    """Return the pids of this user's processes. Those that hide their memory (setuid programs) belong to root there."""
    uid = os.geteuid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    found.append(int(name))
            except OSError:
                continue  # it has ended meanwhile
    return found


def ancestors(pid: int) -> list[int]:
    """Return the pids above ``pid``, the parent first."""
    found: list[int] = []
    process = read_process(pid)
    while process is not None and process.parent > 0 and len(found) < _MAX_DEPTH:
        found.append(process.parent)
        process = read_process(process.parent)
    return found


def _evaluator(stdout_fd: int) -> int | None:
    """Return who takes in what we write to ``stdout_fd``; None when that is no pipe or only filters read it."""
    above = ancestors(os.getpid())
    chain = _readers("self", stdout_fd, above)
    consumer = next((pid for pid in chain if pid not in above and _program(pid) not in _FILTERS), None)
    # A consumer within `$(…)` hands the text on to the shell; one that merely shares its script's stdout does not.
    if chain and chain[-1] in above and (consumer is None or chain[-1] in _starters()):
        return _over_forks(chain[-1])
    return consumer


def _readers(pid: int | str, fd: int, above: list[int]) -> list[int]:
    """Return the process that reads the pipe behind ``fd`` of ``pid``, the one that reads its stdout, and so on."""
    found: list[int] = []
    while len(found) < _MAX_DEPTH:
        pipe = _pipe(f"/proc/{pid}/fd/{fd}")
        reader = pipe and _reader(pipe, above)
        if not reader or reader in found:
            break
        found.append(reader)
        if reader in above:
            break
        pid, fd = reader, 1
    return found


def _over_forks(pid: int) -> int:
    """Climb from a subshell to the shell that it was forked from, while that shell reads what the subshell writes."""
    while True:
        pipe = _pipe(f"/proc/{pid}/fd/1")
        process = read_process(pid)
        while pipe and process and _is_fork(process):
            if _reads(process.parent, pipe):
                break
            process = read_process(process.parent)
        else:
            return pid
        pid = process.parent


def _starter() -> int:
    """Return our parent, or whom it stands for. Raises UsageError when the real parent has gone."""
    pid = _starters()[-1]
    name = _program(pid)
    if pid == 0 or (name in _REAPERS and (pid == 1 or name == "systemd")):
        raise UsageError(
            "the process that started gpuboard has gone, so there is none that the lease could live with; "
            "name one with --holder PID, or take the lease for a time with --detach --for D"
        )
    return pid


def _starters() -> list[int]:
    """Return our parent, whom it stands for, and so on: up to the first that is neither a fork nor a wrapper."""
    found = [os.getppid()]
    while len(found) < _MAX_DEPTH:
        process = read_process(found[-1])
        if process is None or process.parent <= 0:
            break
        if not _is_fork(process) and _program(process.pid) not in _WRAPPERS:
            break
        found.append(process.parent)
    return found


def _is_fork(process: ProcessStat) -> bool:
    """Tell whether ``process`` runs the very program of its parent: a subshell, not a command."""
    parent = read_process(process.parent)
    if parent is None or parent.session != process.session:
        return False
    try:
        if os.readlink(f"/proc/{process.pid}/exe") != os.readlink(f"/proc/{parent.pid}/exe"):
            return False
        with open(f"/proc/{process.pid}/cmdline", "rb") as file, open(f"/proc/{parent.pid}/cmdline", "rb") as above:
            return file.read() == above.read()
    except OSError:
        return False


def _program(pid: int) -> str:
    """Return the base name of the file that ``pid`` runs, or its own word for it where the file cannot be read."""
    try:
        return os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)").rpartition("/")[2]
    except OSError:
        process = read_process(pid)
        return process.name if process else ""


def _pipe(link: str) -> str | None:
    """Return what /proc calls the pipe behind the fd ``link``; None when it is no pipe."""
    try:
        if stat.S_ISFIFO(os.stat(link).st_mode):
            return os.readlink(link)
    except OSError:
        pass  # closed, gone, or not ours to see: no pipe that we could follow
    return None


def _reader(pipe: str, above: list[int]) -> int | None:
    """Return the process of ours that reads ``pipe``: ancestors are looked at first, it nearly always is one."""
    uid, own = os.geteuid(), os.getpid()
    for pid in above:
        try:
            if os.stat(f"/proc/{pid}").st_uid == uid and _reads(pid, pipe):
                return pid
        except OSError:
            continue
    for pid in sorted(own_pids(), key=lambda pid: abs(pid - own)):  # a pipeline's processes are born together
        if pid != own and pid not in above and _reads(pid, pipe):
            return pid
    return None


def _reads(pid: int, pipe: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}") == pipe and _readable(pid, name):
                return True
    except OSError:
        return False  # ended, or an fd was closed while we looked: it does not sit and read
    return False


def _readable(pid: int, fd: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii") as file:
        for line in file:
            if line.startswith("flags:"):
                return int(line.split()[1], 8) & os.O_ACCMODE != os.O_WRONLY
    return False
