"""Where the keeper of this user on this host is found: its folder, its lock and its socket. Both of its sides use it.

    <state>/keeper/<hostname>-<boot id>/    0700, may be on a home that several hosts share
        <lease>.json                        a record of each lease that is kept
        lock                                flock'd by the keeper that runs; holds its pid
        socket                              a JSON line in, a JSON line out
        log, lost                           what it did; words for the next gpuboard command

Where the file system cannot hold locks or sockets, those two lie in ``/tmp/gpuboard-<uid>`` instead.

All of it can be removed or replaced while a keeper runs. So a keeper compares what lies there with what it has open,
and unlinks only what is its own.
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
from gpuboard.keeper.holder import boot_id, read_process

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # linux/proc_ns.h: PROC_PID_INIT_INO
_LINE_LIMIT = 1 << 20
_OF_JOB = "-job"
_FORGOTTEN_S = 86400.0  # so old may a folder of a job be that has no keeper
RETRIES = 3  # where the folder is removed while a keeper starts
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
    """Make ``folder`` with mode 0700. Raises KeeperError when it is another user's or cannot be made."""
    from gpuboard import paths  # late: pathlib takes 10 ms, and a keeper makes a folder only where it was removed

    parent = os.path.dirname(folder)
    try:
        for above in (os.path.dirname(parent), parent):
            if os.path.lexists(above) and os.stat(above).st_uid not in (os.geteuid(), 0):
                raise KeeperError(f"{above} belongs to another user, so no keeper can run below it; remove it")
        paths.make_private(folder)
        check_owner(folder)
        if os.lstat(folder).st_mode & 0o777 != 0o700:
            os.chmod(folder, 0o700)
    except OSError as error:
        raise KeeperError(
            f"{folder}: {error.strerror}; the keeper needs a folder it can write: set XDG_STATE_HOME to one"
        ) from error


def check_owner(folder: str) -> None:
    """Raise KeeperError when ``folder`` is a link or another user's: what lies there is not to be trusted."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise KeeperError(f"{folder} is not a folder of yours, so no keeper can run there; remove it")


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


class RuntimeDir:
    """The lock and the socket of the one keeper of ``folder``. They lie in ``home``."""

    def __init__(self, home: str, folder: str, lock: int) -> None:
        self._home = home
        self._folder = folder
        self._lock = lock
        self.listener = self._bind()

    @property
    def locked(self) -> bool:
        """Whether the lock that commands and other keepers find is ours."""
        try:
            with _short(self._home) as path:
                return _is_open(f"{path}/{_name(self._home, self._folder, 'lock')}", self._lock)
        except OSError:
            return False

    @property
    def reachable(self) -> bool:
        """Whether commands that look for the keeper find us."""
        try:
            with _short(self._home) as path:
                return (
                    _is_open(f"{path}/{_name(self._home, self._folder, 'lock')}", self._lock)
                    and _identity(os.lstat(f"{path}/{_name(self._home, self._folder, 'socket')}")) == self._bound
                    and os.stat(self._folder).st_mode & 0o777 == 0o700
                )
        except OSError:
            return False

    def restore(self) -> RuntimeDir | None:
        """Return a place that commands find, ``self`` or another; None when another keeper has taken ours.

        The listener is new then. Raises KeeperError.
        """
        make_private(self._folder)
        if not self.locked:
            place = occupy(self._folder, 0.0)
            if place is not None:
                self.close()
            return place
        old, self.listener = self.listener, self._bind()
        old.close()
        return self

    def close(self) -> None:
        """Leave: remove the socket unless another keeper has the place, and release the lock."""
        if self.locked:
            with suppress(OSError), _short(self._home) as path:
                os.unlink(f"{path}/{_name(self._home, self._folder, 'socket')}")
        self.listener.close()
        os.close(self._lock)

    def _bind(self) -> socket.socket:
        with _short(self._home) as path:
            name = f"{path}/{_name(self._home, self._folder, 'socket')}"
            if os.path.lexists(name):
                os.unlink(name)  # of a keeper that was killed, or that has lost its lock
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(name)
            self._bound = _identity(os.lstat(name))
        listener.listen(64)
        return listener


def occupy(folder: str, patience_s: float) -> RuntimeDir | None:
    """Become the one keeper of ``folder``; None when another runs.

    A keeper that is about to end still holds the lock: it is waited for, ``patience_s`` at most. Raises KeeperError.
    """
    for _ in range(RETRIES):
        try:
            return _occupy(folder, folder, patience_s)
        except FileNotFoundError:
            make_private(folder)  # it was removed since it was made
        except OSError as error:
            if error.errno in _NO_LOCKS:
                break
            raise KeeperError(f"{folder}: {error.strerror}; the keeper needs a folder it can write") from error
    home = _fallback()
    make_private(home)
    try:
        return _occupy(home, folder, patience_s)
    except OSError as error:
        raise KeeperError(f"{folder} and {home} cannot hold the keeper's lock and socket: {error}") from error


def unresponsive(pid: int) -> str:
    """Return why the keeper ``pid`` may not answer, and what to do."""
    process = read_process(pid)
    if process is not None and process.state in "Tt":
        return f"the keeper, pid {pid}, is stopped: continue it with `kill -CONT {pid}`"
    return (
        f"the keeper, pid {pid}, does not respond: end it with `kill {pid}`, the next gpuboard command starts another"
    )


def write_file(path: str, text: str) -> None:
    """Replace the file ``path``: a reader sees the old text or the new, also after a crash in between."""
    try:
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(path + ".new", path)
    except OSError:
        with suppress(OSError):  # a part of it on a full disk
            os.unlink(path + ".new")
        raise


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
    return _peer(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """Return the pid of the process at the other end: of a server, the one that listens."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def _occupy(home: str, folder: str, patience_s: float) -> RuntimeDir | None:
    deadline = time.monotonic() + patience_s
    path = f"{home}/{_name(home, folder, 'lock')}"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open(path, lock):  # else it was removed, and the next one to come would lock another
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return RuntimeDir(home, folder, lock)
        except BlockingIOError:
            running = connect(folder)
            if running is not None:
                running.close()
                os.close(lock)
                return None
            if time.monotonic() >= deadline:
                pid = os.pread(lock, 20, 0)
                words = unresponsive(int(pid)) if pid.isdigit() else f"`fuser {path}` names its process"
                raise KeeperError(f"{path} is locked, and nothing listens at the socket beside it; {words}") from None
            time.sleep(0.01)
        except OSError:
            os.close(lock)
            raise
        os.close(lock)


def _is_open(path: str, descriptor: int) -> bool:
    """Return whether what lies at ``path`` is the file that ``descriptor`` has open."""
    return os.path.lexists(path) and _identity(os.lstat(path)) == _identity(os.fstat(descriptor))


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


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
