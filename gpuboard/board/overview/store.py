"""The events of this user's boards, kept between starts: ``events.jsonl`` in the state folder, a JSON object a line.

Several boards append to one file. At SIZE_MAX it becomes ``events.jsonl.1``, in place of the older one. What a killed
board left half-written, or anybody else wrote, is skipped. All access is in a thread of its own: a home folder may be
on a file system that hangs.
"""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from gpuboard import files, paths
from gpuboard.board.overview.events import OF_NODES
from gpuboard.model.decoding import from_json
from gpuboard.model.units import seconds_of
from gpuboard.recording.events import ClusterEvent, checked

SIZE_MAX = 512 * 1024  # bytes: some 4,000 events; with the older file twice that
KEPT = 2000  # events in memory
_READ_MAX = 4 * SIZE_MAX  # bytes
_SAME_S = 30.0  # two boards see one event at most this far apart
_WAITING = 100  # events that wait for a file system that hangs


def read(file: Path) -> list[ClusterEvent]:
    """Return the kept events, oldest first. Raises OSError for a file that cannot be read."""
    found: list[ClusterEvent] = []
    for part in (_older(file), file):
        try:
            data = files.read(part, _READ_MAX)
        except FileNotFoundError:
            continue
        found += (event for line in data.splitlines() if (event := _decoded(line)) is not None)
    return distinct(found)[-KEPT:]


def append(file: Path, events: Iterable[ClusterEvent]) -> None:
    """Write events to the end of the file. Raises OSError."""
    data = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
    paths.make_private(file.parent)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(file, flags, 0o600)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data  # after half a line, of a board that was killed
        os.write(fd, data)  # one call: lines of two boards do not mix
        if size + len(data) > SIZE_MAX:
            _rotate(file, fd)
    finally:
        os.close(fd)


def distinct(events: Iterable[ClusterEvent]) -> list[ClusterEvent]:
    """Return events in the order of their times, without those that another board had seen just before."""
    last: dict[tuple[object, ...], tuple[float, str]] = {}
    found = []
    for event in sorted(events, key=lambda event: event.at):
        words = "" if event.kind in OF_NODES else event.words
        key = (event.kind, event.nodes, event.gpus, event.user, words)
        at = seconds_of(event.at)
        before, by = last.get(key, (float("-inf"), ""))
        if by == event.by or at - before > _SAME_S:
            found.append(event)
            last[key] = (at, event.by)
    return found


class EventStore:
    """Reads the kept events and writes new ones, in the background."""

    def __init__(self, file: Path, nodes: Collection[str]) -> None:
        """``nodes``: of this board. The file may also have events of other clusters, which are not shown."""
        self._path = file
        self._nodes = frozenset(nodes)
        self._by = os.urandom(4).hex()
        self._waiting: queue.Queue[Sequence[ClusterEvent]] = queue.Queue(_WAITING)
        self._lock = threading.Lock()
        self.events: Sequence[ClusterEvent] = ()  # all that are known, oldest first; replaced, never changed
        self.problem = ""  # why events cannot be read or written; "": they can
        self._started = False

    def start(self) -> None:
        """Begin to read, then to write; without it, events are in memory only."""
        self._started = True
        threading.Thread(target=self._run, name="events", daemon=True).start()

    def add(self, events: Sequence[ClusterEvent]) -> None:
        """Keep events; never waits."""
        if not events:
            return
        events = [msgspec.structs.replace(event, by=self._by) for event in events]
        with self._lock:
            self.events = [*self.events, *events][-KEPT:]
        if not self._started:
            return
        try:
            self._waiting.put_nowait(events)
        except queue.Full:
            self.problem = f"{self._path}: the file system does not respond; events are not kept"

    def _run(self) -> None:
        unread = ""
        try:
            kept = [event for event in read(self._path) if not self._nodes.isdisjoint(event.nodes)]
        except OSError as error:
            self.problem = unread = f"{self._path}: {error.strerror}; older events are not shown"
        else:
            with self._lock:
                self.events = distinct([*kept, *self.events])[-KEPT:]
        while True:
            events = self._waiting.get()
            try:
                append(self._path, events)
            except OSError as error:
                self.problem = f"{self._path}: {error.strerror}; events are not kept"
            else:
                self.problem = unread


def _decoded(line: bytes) -> ClusterEvent | None:
    """Return the event in a line, its texts cleaned; None for anything else."""
    try:
        return checked(from_json(line, ClusterEvent))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None


def _older(file: Path) -> Path:
    return file.with_name(f"{file.name}.1")


def _rotate(file: Path, fd: int) -> None:
    """Move the file away, unless another board does or has done so."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError:
        pass  # a file system without locks
    if os.path.samestat(os.fstat(fd), os.stat(file)):
        os.replace(file, _older(file))
