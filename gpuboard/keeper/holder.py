"""The holder of a lease: the process whose end ends the lease. Read from /proc.

The rule, first match wins:

1. ``--holder PID``.
2. The process that reads our stdout pipe: the shell that evaluates ``$(gpuboard allocate …)``, also through subshells,
   ``timeout`` or ``env``. Readers that only pass the text on are skipped in favour of the reader of *their* stdout:
   known filters (``$(gpuboard … | tee log)``), any command of a pipeline within ``$(…)``, and a subshell forked by the
   shell that reads it (a shell function called as ``$(f)``).
   If only filters remain, which write elsewhere (``gpuboard … | tee log``), rule 3 decides.
3. Our parent; if that is a plain fork of its own parent (same executable, command line and session) or a wrapper that
   only waits for us (``timeout``, ``flock``), its parent, and so on.

On allocate's measured path: imports only os, stat, the agent's reader of /proc and gpuboard.errors.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from gpuboard.agent.proc import ProcessStat, boot_id, own_pids, read_process
from gpuboard.errors import UsageError

# Programs that pass text on and end with it. Any other reader (a subshell of `| while read`, a consumer written in
# Python) uses what it reads, so it is the holder.
_FILTERS = """
    awk base64 cat column cut dd egrep expand fgrep fold gawk grep head jq less logger mawk mbuffer more nl original-awk
    paste pv rg sed sort split tac tail tee tr ts uniq wc xclip yq
""".split()  # noqa: SIM905 (more readable than 40 lines)
_WRAPPERS = ("doas", "flock", "ltrace", "script", "strace", "sudo", "time", "timeout", "unbuffer", "uv", "uvx")
_REAPERS = ("catatonit", "docker-init", "dumb-init", "init", "systemd", "tini")
_MAX_DEPTH = 64  # ancestors followed: more means a loop, as /proc changes while it is read


class Holder(NamedTuple):
    """A process, distinct from a later one with the same pid; the same fields as a claim's holder."""

    host: str
    boot_id: str
    pid: int
    start: int  # field 22 of /proc/PID/stat: clock ticks since boot


def find_holder(holder_pid: int | None = None) -> Holder:
    """Return the holder of a lease that this process reserves; ``holder_pid``: the user's choice.

    Raises UsageError when that process does not exist, or when there is no process to hold the lease.
    """
    pid = holder_pid if holder_pid is not None else _evaluator() or _starter()
    holder = identify(pid)
    if holder is None:
        raise UsageError(f"--holder {pid}: no such process on {os.uname().nodename}")
    return holder


def identify(pid: int) -> Holder | None:
    """Return process ``pid`` as a holder; None when it does not exist, has ended or is a zombie."""
    process = read_process(pid)
    if process is None or process.state in "ZX":
        return None
    return Holder(os.uname().nodename, boot_id(), pid, process.start)


def alive(holder: Holder) -> bool | None:
    """Return whether ``holder`` is alive; None on another machine, where that is unknown."""
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
    """Return the format for the shell that evaluates our output; ``shell`` where that is unknown."""
    try:
        return shell_kind(find_holder().pid)
    except UsageError:
        return "shell"


def ancestors(pid: int) -> list[int]:
    """Return the pids above ``pid``, the parent first."""
    found: list[int] = []
    process = read_process(pid)
    while process is not None and process.parent > 0 and len(found) < _MAX_DEPTH:
        found.append(process.parent)
        process = read_process(process.parent)
    return found


def _evaluator() -> int | None:
    """Return the final reader of stdout; None when it is not a pipe or only filters read it."""
    above = ancestors(os.getpid())
    chain = _readers("self", above)
    consumer = next((pid for pid in chain if pid not in above and _program(pid) not in _FILTERS), None)
    # A consumer within `$(…)` passes the text on to the shell; one that only shares its script's stdout does not.
    if chain and chain[-1] in above and (consumer is None or chain[-1] in _starters()):
        return _over_forks(chain[-1])
    return consumer


def _readers(pid: int | str, above: list[int]) -> list[int]:
    """Return the process that reads the pipe behind stdout of ``pid``, the one that reads its stdout, and so on."""
    found: list[int] = []
    while len(found) < _MAX_DEPTH:
        pipe = _pipe(f"/proc/{pid}/fd/1")
        reader = pipe and _reader(pipe, above)
        if not reader or reader in found:
            break
        found.append(reader)
        if reader in above:
            break
        pid = reader
    return found


def _over_forks(pid: int) -> int:
    """Return the outermost shell that forked the subshell ``pid`` and reads what it writes."""
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
    """Return the parent by rule 3. Raises UsageError when the real parent has ended."""
    pid = _starters()[-1]
    name = _program(pid)
    if pid == 0 or (name in _REAPERS and (pid == 1 or name == "systemd")):
        raise UsageError(
            "no holder for the lease: the process that started gpuboard has ended; name one with --holder PID, "
            "or reserve for a fixed time with --detach --for D"
        )
    return pid


def _starters() -> list[int]:
    """Return our parent and its ancestors up to the first that is neither a fork nor a wrapper."""
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
    """Return whether ``process`` executes the same command line as its parent: a subshell, not a command."""
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
    """Return the base name of the executable of ``pid``, or its process name where that is not readable."""
    try:
        return os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)").rpartition("/")[2]
    except OSError:
        process = read_process(pid)
        return process.name if process else ""


def _pipe(link: str) -> str | None:
    """Return the identity that /proc gives the pipe behind the fd ``link``; None when it is not a pipe."""
    try:
        if stat.S_ISFIFO(os.stat(link).st_mode):
            return os.readlink(link)
    except OSError:
        pass  # closed, ended, or not permitted: no pipe to follow
    return None


def _reader(pipe: str, above: list[int]) -> int | None:
    """Return the process of this user that reads ``pipe``: ancestors first, nearly always one of them does."""
    uid, own = os.geteuid(), os.getpid()
    for pid in above:
        try:
            if os.stat(f"/proc/{pid}").st_uid == uid and _reads(pid, pipe):
                return pid
        except OSError:
            continue
    for pid in sorted(own_pids(), key=lambda pid: abs(pid - own)):  # a pipeline's processes start together
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
        return False  # it ended or closed an fd meanwhile: not a blocked reader
    return False


def _readable(pid: int, fd: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii") as file:
        for line in file:
            if line.startswith("flags:"):
                return int(line.split()[1], 8) & os.O_ACCMODE != os.O_WRONLY
    return False
