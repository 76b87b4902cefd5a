"""Where the keeper of this user on this host is found: its folder, its lock and its socket. Both of its sides use it.

    <state>/keeper/<hostname>-<boot id>/    0700, may be on a home that several hosts share
        <lease>.json                        a record of each lease that is kept
        lock                                flock'd by the keeper that runs; holds its pid
        socket                              a JSON line in, a JSON line out
        log, lost                           what it did; words for the next gpuboard command

Where the file system cannot hold locks or sockets, those two lie in ``/tmp/gpuboard-<uid>`` instead.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gpuboard.errors import GpuboardError
from gpuboard.ledger.holder import boot_id

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # linux/proc_ns.h: PROC_PID_INIT_INO
_LINE_LIMIT = 1 << 20
_OF_JOB = "-job"
_FORGOTTEN_S = 86400.0  # so old may a folder of a job be that has no keeper
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EACCES)


class KeeperError(GpuboardError):
    """The keeper does not run or does not take a lease; the message says why and what to do."""


def folder_name(env: Mapping[str, str]) -> str:
    """Return the name of this host's folder. A keeper sees the pids of one boot and one pid namespace, no others.

    Inside a Slurm job it is one of the job's own: Slurm kills everything there when the job ends, and a keeper that was
    started in it would leave the leases of other shells behind.
    """
    name = f"{os.uname().nodename.replace('/', '_')}-{boot_id()[:8]}"
    namespace = os.stat("/proc/self/ns/pid").st_ino
    if namespace != _INITIAL_PID_NAMESPACE:
        name += f"-{namespace}"
    job = env.get("SLURM_JOB_ID", "")
    return f"{name}{_OF_JOB}{job}" if job.isdecimal() else name


def make_private(folder: str) -> None:
    """Make ``folder`` with mode 0700. Raises KeeperError when it is somebody else's or cannot be made."""
    from gpuboard import paths  # late: pathlib takes 10 ms, and the keeper itself makes no folder

    try:
        paths.make_private(folder)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise KeeperError(f"{folder} is not a folder of yours, so no keeper can run there; remove it")
        if found.st_mode & 0o077:
            os.chmod(folder, 0o700)
    except OSError as error:
        raise KeeperError(
            f"{folder}: {error.strerror}; the keeper needs a folder it can write: set XDG_STATE_HOME to one"
        ) from error


def prune(folder: str) -> None:
    """Remove what keepers in other jobs have left on this host; nothing unless ``folder`` is a job's."""
    home, _, name = folder.rpartition("/")
    host = os.uname().nodename.replace("/", "_") + "-"
    if _OF_JOB not in name:
        return
    for other in [entry for entry in os.listdir(home) if entry.startswith(host) and _OF_JOB in entry and entry != name]:
        with suppress(OSError):  # another job's keeper does the same
            if time.time() - os.stat(f"{home}/{other}").st_mtime < _FORGOTTEN_S:
                continue
            running = connect(f"{home}/{other}")
            if running is not None:
                running.close()
                continue
            for file in os.listdir(f"{home}/{other}"):
                os.unlink(f"{home}/{other}/{file}")
            os.rmdir(f"{home}/{other}")


def connect(folder: str) -> socket.socket | None:
    """Return a connection to the keeper of ``folder``; None when none runs."""
    for home in (folder, _fallback()):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(home) as path:
                connection.connect(f"{path}/{_name(home, folder, 'socket')}")
        except OSError:
            connection.close()
            continue
        if peer_uid(connection) == os.geteuid():
            return connection
        connection.close()
    return None


def occupy(folder: str, patience_s: float) -> tuple[int, socket.socket] | None:
    """Become the one keeper of ``folder``: return its lock and its listening socket, or None when another runs.

    A keeper that is about to end still holds the lock: it is waited for, ``patience_s`` at most. Raises KeeperError.
    """
    try:
        return _occupy(folder, folder, patience_s)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise KeeperError(f"{folder}: {error.strerror}; the keeper needs a folder it can write") from error
    home = _fallback()
    make_private(home)
    try:
        return _occupy(home, folder, patience_s)
    except OSError as error:
        raise KeeperError(f"{folder} and {home} cannot hold the keeper's lock and socket: {error}") from error


def write_file(path: str, text: str) -> None:
    """Replace the file ``path``: a reader sees the old text or the new, also after a crash in between."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message. Raises OSError."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """Return the next message; None at the end of the connection. Raises TimeoutError and other OSErrors."""
    data = b""
    deadline = time.monotonic() + timeout_s
    while not data.endswith(b"\n") and len(data) < _LINE_LIMIT:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = connection.recv(65536)
        if not chunk:
            return None
        data += chunk
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise OSError("its answer is malformed") from None
    return message if isinstance(message, dict) else None


def peer_uid(connection: socket.socket) -> int:
    """Return the uid of the process at the other end, the kernel's word."""
    size = struct.calcsize("3i")
    uid: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    return uid


def _occupy(home: str, folder: str, patience_s: float) -> tuple[int, socket.socket] | None:
    deadline = time.monotonic() + patience_s
    lock = os.open(
        f"{home}/{_name(home, folder, 'lock')}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            running = connect(folder)
            if running is not None:
                running.close()
                return None
            if time.monotonic() > deadline:
                pid = os.pread(lock, 20, 0).decode("ascii", "replace")
                raise KeeperError(
                    f"the keeper, pid {pid}, holds its lock but does not answer; end it: kill {pid}"
                ) from None
            time.sleep(0.01)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    with _short(home) as path:
        name = f"{path}/{_name(home, folder, 'socket')}"
        if os.path.lexists(name):
            os.unlink(name)  # of a keeper that was killed: its lock was free
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
    listener.listen(64)
    return lock, listener


def withdraw(folder: str) -> None:
    """Remove the socket, so that whoever comes next starts a new keeper."""
    for home in (folder, _fallback()):
        path = f"{home}/{_name(home, folder, 'socket')}"
        if os.path.lexists(path):
            os.unlink(path)


def _fallback() -> str:
    """Return the folder of all keepers of this user; what lies in it is told apart by name."""
    return f"/tmp/gpuboard-{os.geteuid()}"


def _name(home: str, folder: str, what: str) -> str:
    return what if home == folder else f"{zlib.crc32(folder.encode()):08x}.{what}"


@contextmanager
def _short(folder: str) -> Iterator[str]:
    """Give a path of ``folder`` that fits into a socket's address (108 bytes)."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "not ours", folder)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
