"""The history on disk: a thread that loads it at the start of the board and appends each bucket that has ended.

Every board of a user on a host writes a file of its own, as long as there are not more than ``_FILES``; all read the
files of all boards and hosts. A file is locked while a board writes it. Nothing here is an error: a file that cannot be
read or written is a message, and the history goes on in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpuboard import files, paths
from gpuboard.board.history.codec import VERSION, columns_frame, read, record_frame
from gpuboard.board.history.records import HistoryRecord, Past, only
from gpuboard.board.history.rings import DAY, SPANS, History

_FILES = 4  # boards of a user and host that write
_POLL_S = 15.0  # between looks for buckets that have ended
_SIZE_MAX = 256 << 20  # bytes of a file that are read
_SLACK = 64 << 10  # bytes that are out of date before a file is rewritten, besides as many as are not
_Key = tuple[int, float]  # of a record: the index of its span, its time


def folder(env: Mapping[str, str]) -> Path:
    return paths.state_dir(env) / "history"


class Recorder:
    """Keeps a History on disk. ``notify`` is called in the thread with each message, once."""

    def __init__(self, history: History, env: Mapping[str, str], notify: Callable[[str], object]) -> None:
        self._history = history
        self._folder = folder(env)
        self._notify = notify
        self._told: set[str] = set()
        self._closed = threading.Event()
        self._file: _File | None = None

    def start(self) -> None:
        """Load what is kept and continue it, in a background thread."""
        threading.Thread(target=self._run, name="history", daemon=True).start()

    def close(self) -> None:
        """Stop; returns at once. Files are whole at any moment, so nothing has to be finished."""
        self._closed.set()

    def _run(self) -> None:
        self.load()
        while not self._closed.wait(_POLL_S):
            self.write()
        if self._file is not None:
            self._file.close()

    def load(self) -> None:
        """Add what the files of all boards contain; those that cannot be read are left out."""
        for path in sorted(self._folder.glob("*.ring")):
            with contextlib.suppress(OSError):
                kept = read(files.read(path, _SIZE_MAX), len(SPANS)).past
                self._history.load(_with_values(kept), time.time())

    def write(self) -> None:
        """Write what is new since the last call."""
        past = self._history.past
        if not any(past.records[1:]):
            return
        try:
            if self._file is not None and not self._file.is_current():  # removed or replaced
                self._file.close()
                self._file = None
            if self._file is None:
                paths.make_private(self._folder)
                self._remove_old()
                self._file = self._open()
            if self._file is not None:
                self._file.write(past)
        except OSError as error:
            self._say(f"{self._folder}: {error.strerror}; graphs of the last day are kept in memory only")

    def _open(self) -> _File | None:
        host = os.uname().nodename.replace("/", "_")
        for number in range(_FILES):
            file = _File.lock(self._folder / f"{host}-{number}.ring")
            if file is not None:
                if file.error:
                    self._say(f"{file.path}: {file.error}; set aside as {file.path.name}.bad")
                return file
        return None  # others record enough

    def _remove_old(self) -> None:
        """Remove files, of hosts and boards that are no more, in which nothing is of the last day."""
        for path in self._folder.glob("*.ring*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > 2 * DAY.seconds:
                    path.unlink()

    def _say(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            self._notify(words)


class _File:
    """A locked file and what it contains."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self.error = ""  # why an older content was set aside
        self._columns: list[str] = []
        self._sizes: dict[_Key, int] = {}  # of the frames of records that are in use
        self._end = 0  # 0: nothing of the content is known

    @classmethod
    def lock(cls, path: Path) -> _File | None:
        """Open a file and lock it; None if another board writes it. Raises OSError."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            except OSError:
                os.close(fd)
                raise
            file = cls(path, fd)
            if file.is_current():  # else it was replaced between open and lock
                file.set_aside()
                return file
            file.close()

    def close(self) -> None:
        os.close(self._fd)

    def write(self, past: Past) -> None:
        """Append what the file lacks, or rewrite it where columns moved or much is out of date. Raises OSError."""
        uuids, known = list(past.columns), len(self._columns)
        records = {(span, record.at): record for span in range(1, len(SPANS)) for record in past.records[span]}
        self._sizes = {key: size for key, size in self._sizes.items() if key in records}
        if not self._end or uuids[:known] != self._columns or self._end > 2 * sum(self._sizes.values()) + _SLACK:
            self._replace(records, uuids)
            return
        new = {key: record_frame(key[0], record) for key, record in records.items() if key not in self._sizes}
        columns = columns_frame(uuids[known:]) if len(uuids) > known else b""
        data = b"".join([columns, *new.values()])
        try:
            _write(self._fd, data, self._end)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._columns, self._end = uuids, self._end + len(data)
        self._sizes |= {key: len(frame) for key, frame in new.items()}

    def _replace(self, records: Mapping[_Key, HistoryRecord], uuids: list[str]) -> None:
        frames = {key: record_frame(key[0], record) for key, record in records.items()}
        data = b"".join([VERSION, columns_frame(uuids), *frames.values()])
        temporary = f"{self.path}.new"  # only the owner of the lock writes it
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            _write(fd, data, 0)
            os.fsync(fd)
            os.replace(temporary, self.path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        os.close(self._fd)
        self._fd, self._end, self._columns = fd, len(data), uuids
        self._sizes = {key: len(frame) for key, frame in frames.items()}

    def set_aside(self) -> None:
        """Rename a damaged or foreign file; ``error`` has the reason. Raises OSError."""
        try:
            self.error = read(files.read(self.path, _SIZE_MAX), len(SPANS)).error
        except OSError as error:
            self.error = str(error.strerror)
        if self.error:
            os.replace(self.path, f"{self.path}.bad")

    def is_current(self) -> bool:
        """Return whether the path still names this file, which was not removed or replaced."""
        try:
            there, here = os.stat(self.path, follow_symlinks=False), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _write(fd: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _with_values(past: Past) -> Past:
    """Return a past without GPUs of which nothing is known any more."""
    planes = (plane for records in past.records for record in records for plane in record.planes)
    found = 0
    for plane in planes:
        found |= int.from_bytes(plane, "little")
    some = found.to_bytes(len(past.columns), "little")
    return only(past, {uuid for uuid, codes in zip(past.columns, some, strict=True) if codes})
