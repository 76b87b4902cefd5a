"""The folder, lock and socket of a user's keeper on this host, for the keeper and its clients.

    <state>/keeper/<hostname>-<boot id>/    0700, may be on a home that several hosts share
        <lease>.json                        the record of each lease
        lock                                flock'd by the running keeper; holds its pid
        socket                              a JSON line in, a JSON line out
        log, lost                           its log; messages for the next gpuboard command

Where the file system does not support locks or sockets, those two are in ``/tmp/gpuboard-<uid>`` instead.

All of it can be removed or replaced while a keeper runs. A keeper therefore compares these files with the ones it has
open, and unlinks only its own.
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

from gpuboard.agent.proc import boot_id, read_process
from gpuboard.errors import GpuboardError

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # linux/proc_ns.h: PROC_PID_INIT_INO
_LINE_LIMIT = 1 << 20
_JOB_SUFFIX = "-job"
_PRUNE_AFTER_S = 86400.0  # age at which the folder of a job without a keeper is removed
RETRIES = 3  # if the folder is removed while a keeper starts
_CONNECT_S = 1  # for a keeper to accept a connection, while its queue of them is full
_NO_ANSWER = (errno.EIO, errno.ETIMEDOUT)  # of a file server, to a mount that is "soft": nothing was removed
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EACCES)


class KeeperError(GpuboardError):
    """The keeper does not run or refuses a lease; the message has the reason and the remedy."""


def folder_name(env: Mapping[str, str]) -> str:
    """Return the name of this host's folder: a keeper sees the pids of one boot and one pid namespace only.

    A Slurm job has its own folder and keeper: Slurm kills every process of a job when it ends, and a keeper started
    there must not have the leases of other shells.
    """
    name = f"{os.uname().nodename.replace('/', '_')}-{boot_id()[:8]}"
    namespace = os.stat("/proc/self/ns/pid").st_ino
    if namespace != _INITIAL_PID_NAMESPACE:
        name += f"-{namespace}"
    job = env.get("SLURM_JOB_ID", "")
    return f"{name}{_JOB_SUFFIX}{job}" if job.isdecimal() else name


def make_private(folder: str) -> None:
    """Create ``folder`` with mode 0700. Raises KeeperError when it is another user's or cannot be created."""
    from gpuboard import paths  # late: pathlib takes 10 ms, and a keeper creates its folder only after a removal

    parent = os.path.dirname(folder)
    try:
        for above in (os.path.dirname(parent), parent):
            if os.path.lexists(above) and os.stat(above).st_uid not in (os.geteuid(), 0):
                raise KeeperError(f"the keeper cannot run in {folder}: {above} belongs to another user; remove it")
        paths.make_private(folder)
        check_owner(folder)
        if os.lstat(folder).st_mode & 0o777 != 0o700:
            os.chmod(folder, 0o700)
    except OSError as error:
        raise KeeperError(
            f"cannot create the keeper's folder {folder}: {error.strerror}; set XDG_STATE_HOME to a writable folder"
        ) from error


def check_owner(folder: str) -> None:
    """Raise KeeperError when ``folder`` is a link or another user's: its content is not trustworthy."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise KeeperError(f"the keeper cannot run in {folder}: it is not a folder owned by you; remove it")


def prune(folder: str) -> None:
    """Remove the folders that keepers of other jobs left on this host, if ``folder`` is a job's."""
    home, _, name = folder.rpartition("/")
    host = os.uname().nodename.replace("/", "_") + "-"
    if _JOB_SUFFIX not in name:
        return
    for other in [
        entry for entry in os.listdir(home) if entry.startswith(host) and _JOB_SUFFIX in entry and entry != name
    ]:
        with suppress(OSError, KeeperError):  # another job's keeper may remove it at the same time, or be suspended
            if time.time() - os.stat(f"{home}/{other}").st_mtime < _PRUNE_AFTER_S:
                continue
            running = connect(f"{home}/{other}")
            if running is not None:
                running.close()
                continue
            for file in os.listdir(f"{home}/{other}"):
                os.unlink(f"{home}/{other}/{file}")
            os.rmdir(f"{home}/{other}")


def connect(folder: str) -> socket.socket | None:
    """Return a connection to the keeper of ``folder``; None when none is running.

    Raises KeeperError when it accepts no connection, as one that has been suspended for long.
    """
    for home in (folder, _fallback()):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _set_send_timeout(connection, _CONNECT_S)  # settimeout() would fail at once where the queue is full
        try:
            with _short_path(home) as path:
                connection.connect(f"{path}/{_name(home, folder, 'socket')}")
        except BlockingIOError:
            connection.close()
            raise KeeperError(_locker(f"{home}/{_name(home, folder, 'lock')}")) from None
        except OSError:
            connection.close()
            continue
        _set_send_timeout(connection, 0)
        if peer_uid(connection) == os.geteuid():
            return connection
        connection.close()
    return None


class RuntimeDir:
    """The lock and the socket, in ``home``, of the only keeper of ``folder``."""

    def __init__(self, home: str, folder: str, lock: int) -> None:
        self._home = home
        self._folder = folder
        self._lock = lock
        self.listener = self._bind()

    @property
    def locked(self) -> bool:
        """Whether the lock file that others find is still this keeper's."""
        try:
            with _short_path(self._home) as path:
                return _is_open(f"{path}/{_name(self._home, self._folder, 'lock')}", self._lock)
        except OSError:
            return False

    @property
    def reachable(self) -> bool:
        """Whether commands find this keeper: folder, lock and socket are unchanged, as far as a file server answers."""
        try:
            with _short_path(self._home) as path:
                return (
                    _is_open(f"{path}/{_name(self._home, self._folder, 'lock')}", self._lock)
                    and _identity(os.lstat(f"{path}/{_name(self._home, self._folder, 'socket')}")) == self._bound
                    and os.stat(self._folder).st_mode & 0o777 == 0o700
                )
        except OSError as error:
            return error.errno in _NO_ANSWER

    def restore(self) -> RuntimeDir | None:
        """Return a RuntimeDir that commands find, with a new listener; None when another keeper has it.

        Raises KeeperError.
        """
        make_private(self._folder)
        if not self.locked:
            place = acquire(self._folder, 0.0)
            if place is not None:
                self.close()
            return place
        old, self.listener = self.listener, self._bind()
        old.close()
        return self

    def close(self) -> None:
        """Remove the socket unless another keeper has the lock, and release the lock."""
        if self.locked:
            with suppress(OSError), _short_path(self._home) as path:
                os.unlink(f"{path}/{_name(self._home, self._folder, 'socket')}")
        self.listener.close()
        os.close(self._lock)

    def _bind(self) -> socket.socket:
        with _short_path(self._home) as path:
            name = f"{path}/{_name(self._home, self._folder, 'socket')}"
            if os.path.lexists(name):
                os.unlink(name)  # of a keeper that was killed or has lost its lock
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(name)
            self._bound = _identity(os.lstat(name))
        listener.listen(64)
        return listener


def acquire(folder: str, timeout_s: float) -> RuntimeDir | None:
    """Become the only keeper of ``folder``; None when another one is running.

    Waits ``timeout_s`` at most for a keeper that is ending and still holds the lock. Raises KeeperError.
    """
    for _ in range(RETRIES):
        try:
            return _acquire(folder, folder, timeout_s)
        except FileNotFoundError:
            make_private(folder)  # it was removed meanwhile
        except OSError as error:
            if error.errno in _NO_LOCKS:
                break
            raise KeeperError(
                f"the keeper cannot write to its folder {folder}: {error.strerror}; set XDG_STATE_HOME to a folder "
                "that you can write to"
            ) from error
    home = _fallback()
    make_private(home)
    try:
        return _acquire(home, folder, timeout_s)
    except OSError as error:
        raise KeeperError(f"cannot create the keeper's lock and socket in {folder} or {home}: {error}") from error


def unresponsive(pid: int) -> str:
    """Return why the keeper ``pid`` may not answer, and what to do."""
    process = read_process(pid)
    if process is not None and process.state in "Tt":
        return f"the keeper, pid {pid}, is suspended; resume it with `kill -CONT {pid}`"
    return (
        f"the keeper, pid {pid}, does not respond; end it with `kill {pid}`, the next gpuboard command starts another"
    )


def _locker(path: str) -> str:
    """Return why the process that has locked ``path`` may not answer, and what to do."""
    with suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return unresponsive(int(file.read(20)))
    return f"there is no pid in {path}; `fuser {path}` shows the process that has locked it"


def _set_send_timeout(connection: socket.socket, seconds: int) -> None:
    """Limit how long connecting and sending may take; 0: no limit."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))


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
        raise OSError("malformed answer") from None
    return message if isinstance(message, dict) else None


def peer_uid(connection: socket.socket) -> int:
    """Return the uid of the process at the other end, from the kernel."""
    return _peer(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """Return the pid of the process at the other end; for a server, the one that listens."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def _acquire(home: str, folder: str, timeout_s: float) -> RuntimeDir | None:
    deadline = time.monotonic() + timeout_s
    path = f"{home}/{_name(home, folder, 'lock')}"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        place = None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open(path, lock):  # else the file was removed, and another keeper would lock a new one
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                place = RuntimeDir(home, folder, lock)
                return place
        except BlockingIOError:
            running = connect(folder)
            if running is not None:
                running.close()
                return None
            if time.monotonic() >= deadline:
                words = f"{path} is locked, but nothing listens on the socket beside it; {_locker(path)}"
                raise KeeperError(words) from None
            time.sleep(0.01)
        finally:
            if place is None:
                os.close(lock)


def _is_open(path: str, descriptor: int) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return _identity(found) == _identity(os.fstat(descriptor))


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _fallback() -> str:
    """Return the folder of all keepers of this user, whose files have different names."""
    return f"/tmp/gpuboard-{os.geteuid()}"


def _name(home: str, folder: str, what: str) -> str:
    return what if home == folder else f"{zlib.crc32(os.fsencode(folder)):08x}.{what}"


@contextmanager
def _short_path(folder: str) -> Iterator[str]:
    """Yield a path of ``folder`` that fits into a socket's address (108 bytes)."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "owned by another user", folder)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
