"""Files: bounded reading of those that a user names, atomic replacement of gpuboard's own."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would delay the agent, which starts after the config file was looked at
    from collections.abc import Iterator
    from typing import BinaryIO

PIPE_S = 30.0  # the most that the command of a `<(command)` may take
_NO_PATH = "a path cannot contain a NUL or half of a surrogate pair"

CONFIG_MAX = 256 << 10  # bytes: thousands of nodes, listed singly, which tomllib reads in half a second
SSH_CONFIG_MAX = 4 << 20  # bytes: 10,000 hosts with ten lines each
KEY_MAX = 64 << 10  # bytes: a key of 16,384 bits has 12 KiB
KNOWN_HOSTS_MAX = 32 << 20  # bytes: 10,000 hosts with keys of every kind, under two names

Path = str | os.PathLike[str]


def read(path: Path, most: int) -> bytes:
    """Return the content of a regular file, ``/dev/null`` or an unnamed pipe (``/dev/stdin``, ``<(command)``).

    Raises OSError with the reason as strerror, also for any other kind of file (a FIFO or a device may never end), for
    more than ``most`` bytes, for a pipe that is still open after PIPE_S, and for an invalid path.
    """
    fd = _open(path)
    try:
        facts = os.fstat(fd)
        if not (stat.S_ISFIFO(facts.st_mode) and os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")):
            _check(facts, most)
        return _read(fd, most)
    finally:
        os.close(fd)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file of any size, or ``/dev/null``, to be read. Raises OSError as ``read`` does."""
    fd = _open(path)
    try:
        _check(os.fstat(fd), sys.maxsize)
        return open(fd, "rb")
    except OSError:
        os.close(fd)
        raise


@contextlib.contextmanager
def open_private(path: Path) -> Iterator[BinaryIO]:
    """Open a file that may have been replaced by anything. Raises OSError if another user could have written it."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "not a private file of this user", str(path))
        yield file


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``; a single write may write a part. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically by one that only its owner can read. The folder must exist.

    Raises OSError; the old file is unchanged then.
    """
    folder, name = os.path.split(os.fspath(path))
    temporary = os.path.join(folder, f".{name}.{os.urandom(6).hex()}")  # unique among threads, processes and hosts
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def trouble(path: Path, most: int) -> str:
    """Return why a program must not read ``path``; "" where nothing is wrong or its kind is unknown."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError):
        return ""
    try:
        _check(facts, most)
    except OSError as error:
        return str(error.strerror)
    return ""


def included(word: str, folder: str) -> list[str]:
    """Return the files that a pattern of ssh's Include matches, sorted; relative ones are in ``folder``."""
    from glob import glob  # late: only where there is an ssh_config

    try:
        return sorted(glob(os.path.join(os.path.expanduser(folder), os.path.expanduser(word))))
    except ValueError:  # a NUL
        return []


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:
        raise OSError(errno.EINVAL, _NO_PATH) from None


def _check(facts: os.stat_result, most: int) -> None:
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(facts.st_mode) and facts.st_rdev != os.stat(os.devnull).st_rdev:
        raise OSError(errno.EINVAL, "not a regular file")
    if facts.st_size > most:
        raise _too_large(most)


def _read(fd: int, most: int) -> bytes:
    found = bytearray()
    until = time.monotonic() + PIPE_S
    while len(found) <= most:
        try:
            data = os.read(fd, min(1 << 16, most + 1 - len(found)))
        except BlockingIOError:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            if not poller.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError(errno.ETIMEDOUT, f"the pipe was still open after {PIPE_S:.0f} s") from None
            continue
        if not data:
            return bytes(found)
        found += data
    raise _too_large(most)


def _too_large(most: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than {most >> 10} KiB")
