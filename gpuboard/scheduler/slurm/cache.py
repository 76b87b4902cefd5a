"""What one process has learnt of the scheduler, for all others of the same user on this host: one file, one lock.

The file is replaced, never written into, so nobody reads half of one; what is torn, foreign or garbage is not there.
Times in it are of the clock that counts from the host's start, sleep included: the date may be set, and another start
or another host (a shared home) is known by its boot id.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from gpuboard.model.schedule import Schedule
from gpuboard.paths import cache_dir, make_private

_BYTES_MAX = 2**28
_FORMAT = 4  # of the file: one more with every change of Record or of what it holds
_KEPT_S = 86400.0  # files of other configurations, since they were written


class CachedAnswer(msgspec.Struct, frozen=True, gc=False):
    """What is known after the newest try. Times: ``now()``."""

    boot: str
    asked: float = 0.0  # when the newest try began
    schedule: Schedule | None = None  # the newest answer
    answered: float = 0.0  # when that was asked for
    error: str | None = None  # why the newest try failed
    contact: bool = False  # it failed to reach the controller
    failures: int = 0  # tries in a row
    took_s: float = 0.0  # Slurm's part of the newest try
    credit_s: float = 0.0  # how much time Slurm's commands may take now; below 0: so much more was taken
    outdated: float = 0.0  # when one of us changed what Slurm holds


def now() -> float:
    """Return seconds since this host was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return what tells one start of this host from all others, "" where that cannot be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


class Cache:
    """The file of one configuration. Nothing here raises: where there can be no file, everybody asks for himself."""

    def __init__(self, env: Mapping[str, str], key: str) -> None:
        self.boot = boot_id()
        self._folder = cache_dir(env)
        self._name = f"slurm-{os.uname().nodename}-"
        self._path = self._folder / f"{self._name}{_FORMAT}-{key}"
        self._read: tuple[tuple[int, int, int], CachedAnswer] | None = None

    def load(self) -> CachedAnswer | None:
        """Return what was stored last, the same object as long as it is the same; None where there is nothing."""
        try:
            with open(self._path, "rb", opener=_open) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    return None
                mark = (status.st_ino, status.st_mtime_ns, status.st_size)
                if self._read is not None and self._read[0] == mark:
                    return self._read[1]
                record = msgspec.msgpack.decode(file.read(_BYTES_MAX), type=CachedAnswer)
        except (OSError, ValueError, msgspec.MsgspecError):
            return None
        if not self.boot or record.boot != self.boot or max(record.asked, record.answered) > now():
            return None
        self._read = (mark, record)
        return record

    def store(self, record: CachedAnswer) -> None:
        """Replace what is there."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}-{id(record):x}")
        try:
            make_private(self._folder)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with open(fd, "wb") as file:
                    file.write(msgspec.msgpack.encode(record))
                os.replace(temporary, self._path)
            except BaseException:
                os.unlink(temporary)
                raise
            self._sweep()
        except OSError:
            return  # a full or read-only home: everybody asks for himself

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Hold the lock of those who ask; gives False at once where another process has it."""
        try:
            make_private(self._folder)
            lock = self._path.with_name(f"{self._name}lock")
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            yield True
            return
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:
                pass  # a file system without locks
            yield True
        finally:
            os.close(fd)

    def _sweep(self) -> None:
        """Remove what an older configuration or a killed writer has left."""
        for path in self._folder.glob(f"*{self._name}*"):
            if path != self._path and path.name != f"{self._name}lock":
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > _KEPT_S:
                        path.unlink()


def _open(path: str, flags: int) -> int:
    """Open a file that may be anything by now: not through a link, and without waiting for a writer."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
