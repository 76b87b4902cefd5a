"""The scheduler's newest answer, shared by all processes of a user on this host: one file, one lock.

The file is replaced atomically; a torn, foreign or invalid one counts as missing. Its times are CLOCK_BOOTTIME, which
setting the date does not change; the boot id identifies another boot or another host (a shared home).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from gpuboard import files
from gpuboard.agent.proc import boot_id
from gpuboard.model.decoding import from_msgpack
from gpuboard.model.schedule import Schedule
from gpuboard.paths import cache_dir, make_private

_BYTES_MAX = 2**28
_FORMAT = 5  # increase with every change of CachedAnswer or of the values in it
_KEPT_S = 86400.0  # seconds that files of other configurations are kept


class CachedAnswer(msgspec.Struct, frozen=True, gc=False):
    """What is known after the newest query. Times: ``now()``."""

    boot: str
    asked: float = 0.0  # when the newest query began
    schedule: Schedule | None = None  # the newest answer
    answered: float = 0.0  # when that was queried
    error: str | None = None  # why the newest query failed
    contact: bool = False  # that query did not reach the controller
    failures: int = 0  # in a row
    took_s: float = 0.0  # the newest query's time in Slurm's commands
    credit_s: float = 0.0  # token bucket: time that Slurm's commands may take now; below 0: overdrawn


def now() -> float:
    """Return seconds since this host was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Cache:
    """The file of one configuration. Nothing here raises: without a file every process queries for itself."""

    def __init__(self, env: Mapping[str, str], key: str) -> None:
        self.boot = ""  # unknown: nothing is stored
        with contextlib.suppress(OSError):
            self.boot = boot_id()
        self._folder = cache_dir(env)
        self._name = f"slurm-{os.uname().nodename}-"
        self._path = self._folder / f"{self._name}{_FORMAT}-{key}"
        # A file of its own: no answer that is stored at the same moment can undo it.
        self._mark = self._folder / f"{self._path.name}-outdated"
        self._read: tuple[tuple[int, int, int], CachedAnswer] | None = None

    def load(self) -> CachedAnswer | None:
        """Return what was stored last, the same object while the file is unchanged; None where there is nothing."""
        try:
            with files.open_private(self._path) as file:
                status = os.fstat(file.fileno())
                mark = (status.st_ino, status.st_mtime_ns, status.st_size)
                if self._read is not None and self._read[0] == mark:
                    return self._read[1]
                record = from_msgpack(file.read(_BYTES_MAX), CachedAnswer)
        except (OSError, ValueError, msgspec.MsgspecError):
            return None
        if not self.boot or record.boot != self.boot or max(record.asked, record.answered) > now():
            return None
        self._read = (mark, record)
        return record

    def store(self, record: CachedAnswer) -> None:
        """Replace the file."""
        self._write(self._path, record)

    def outdate(self) -> None:
        """Record that a command of this user changed what Slurm holds just now."""
        self._write(self._mark, (self.boot, now()))

    @property
    def outdated(self) -> float:
        """When a command of this user last changed what Slurm holds; 0.0 if none did since this host was started."""
        try:
            with files.open_private(self._mark) as file:
                boot, at = from_msgpack(file.read(_BYTES_MAX), tuple[str, float])
        except (OSError, ValueError, msgspec.MsgspecError):
            return 0.0
        return at if self.boot and boot == self.boot and at <= now() else 0.0

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Hold the lock of the process that queries; yields False at once if another process has it."""
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

    def _write(self, path: Path, value: object) -> None:
        try:
            make_private(self._folder)
            files.write_private(path, msgspec.msgpack.encode(value))
            self._sweep()
        except OSError:
            return  # full or read-only home: every process queries for itself

    def _sweep(self) -> None:
        """Remove files of older configurations and of killed writers."""
        for path in self._folder.glob(f"*{self._name}*"):
            if path not in (self._path, self._mark, self._path.with_name(f"{self._name}lock")):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > _KEPT_S:
                        path.unlink()
