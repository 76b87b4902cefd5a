"""The file of a recording: gzip members (RFC 1952) of JSON lines, so that ``zcat`` reads it.

Each member has a few seconds of frames, and its length and times in an extra field of its header: a reader goes to any
moment without decompressing what is before it, and a file whose last member is incomplete is good up to there. A member
with a key frame begins with the whole cluster and the newest events; frames after it are changes (changes.py) and the
events since the frame before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from gpuboard import files
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.model.decoding import convert, from_json
from gpuboard.model.text import clean
from gpuboard.model.units import day_time
from gpuboard.recording.changes import Tree, applied, difference
from gpuboard.recording.events import EVENTS_MOST, ClusterEvent, checked
from gpuboard.recording.frames import Frame, Restorer, cleaned, is_clean, to_tree

FORMAT = "gpuboard recording"
SCHEMA = 1
_HEAD = struct.Struct("<4sIBBH")  # magic, method and flags; time; extra flags; system; length of the extra field
_EXTRA = struct.Struct("<2sHIdd?")  # subfield's name and length; the member's length; first and last frame; key
_TAIL = struct.Struct("<II")  # CRC and length of the data
_START, _NAME = b"\x1f\x8b\x08\x04", b"GB"  # FLG.FEXTRA
_UNKNOWN_SYSTEM = 255
_MEMBER_S = 10.0  # what is lost with the power, at most
_MEMBER_BYTES = 2**20
_KEY_S = 300.0
_MOST_BYTES = 2**28  # of one member's data: a damaged or hostile file must not fill the memory


class GzipMember(NamedTuple):
    """A gzip member: where it is, and the times of its first and last frame in epoch seconds."""

    offset: int
    length: int
    first: float
    last: float
    key: bool


class RecordingWriter:
    """Writes a new recording. Frames are written every 10 s of their own time, the first at once, all by ``close``."""

    def __init__(self, path: Path, *, version: str = "", commands: bool = False) -> None:
        """Create the file; ``version``: of gpuboard. Raises UsageError where it exists or cannot be created."""
        self.path = path
        self.frames = 0
        self.bytes = 0
        self._head = {"format": FORMAT, "schema": SCHEMA, "version": version, "commands": commands}
        self._commands = commands
        self._tree: Tree = None
        self._events: Sequence[ClusterEvent] = ()  # of the newest frame
        self._lines: list[bytes] = []
        self._first = self._last = self._keyed = 0.0
        self._key = False
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise UsageError(f"{path} exists; name a new file") from None
        except OSError as error:
            raise UsageError(f"cannot create {path}: {error.strerror}") from None
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def add(self, frame: Frame) -> None:
        """Add a frame; one that is not later than the last one is left out. Raises GpuboardError."""
        if self.frames and frame.at <= self._last:
            return  # the clock was set back
        if self._lines and (frame.at - self._first >= _MEMBER_S or sum(map(len, self._lines)) >= _MEMBER_BYTES):
            self.flush()
        tree = to_tree(frame, self._tree, commands=self._commands)
        at = round(frame.at, 3)
        key = not self.frames or frame.at - self._keyed >= _KEY_S
        if key and self._lines:
            self.flush()
        line = {"at": at, "state": tree} if key else {"at": at, "change": difference(self._tree, tree)}
        if frame.events is not None:
            known = frozenset(self._events)
            new = frame.events if key else [event for event in frame.events if event not in known]
            line |= {"events": new} if key or new else {}
            self._events = frame.events
        if key:
            self._lines = [msgspec.json.encode(self._head)]
            self._keyed, self._key = at, True
        self._lines.append(msgspec.json.encode(line))
        self._first = at if len(self._lines) == 1 or key else self._first
        self._last, self._tree = at, tree
        self.frames += 1
        if self.frames == 1:
            self.flush()  # a file that exists can be replayed

    def flush(self) -> None:
        """Write what was added. Raises GpuboardError; the file then ends with the last complete member."""
        if not self._lines:
            return
        data = b"".join(line + b"\n" for line in self._lines)
        packed = zlib.compress(data, 9, wbits=-15)
        length = _HEAD.size + _EXTRA.size + len(packed) + _TAIL.size
        head = _HEAD.pack(_START, int(self._first) & 0xFFFFFFFF, 0, _UNKNOWN_SYSTEM, _EXTRA.size)
        extra = _EXTRA.pack(_NAME, _EXTRA.size - 4, length, self._first, self._last, self._key)
        member = memoryview(head + extra + packed + _TAIL.pack(zlib.crc32(data), len(data)))
        try:
            if not os.fstat(self._file.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was removed")
            written = 0
            while written < len(member):
                written += self._file.write(member[written:])
        except OSError as error:
            self._lines = []
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self.bytes)
            end = f"it ends at {day_time(self._first)}" if self.bytes else "nothing was recorded"
            raise GpuboardError(f"cannot write {self.path}: {error.strerror}; {end}") from None
        self.bytes += length
        self._lines, self._key = [], False

    def close(self) -> None:
        """Write the rest and close the file; one without frames is removed. Raises GpuboardError."""
        try:
            self.flush()
        finally:
            if not self.bytes:
                self._remove()
            self._file.close()

    def _remove(self) -> None:
        """Remove the file, unless another one has its name meanwhile."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._file.fileno()), os.lstat(self.path)):
                os.unlink(self.path)


class Recording:
    """A recording to read. ``begin`` and ``end``: of its first and last frame, epoch seconds."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises UsageError where it cannot be read or is no recording."""
        self.path = path
        try:
            self._file = files.open_regular(path)
            self._members, self.incomplete = _members(self._file)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        if not self._members or not self._members[0].key:
            self._file.close()
            raise UsageError(f"{path} is not a recording of gpuboard (`gpuboard record FILE` makes one)")
        self.begin, self.end = self._members[0].first, self._members[-1].last
        self._check_schema()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def at(self, moment: float) -> Frame:
        """Return the newest frame at or before ``moment``; before the beginning the first. Raises GpuboardError."""
        return Cursor(self).frame(moment)

    def frames(self) -> Iterator[Frame]:
        """Yield all frames. Raises GpuboardError for a damaged file."""
        cursor = Cursor(self)
        while cursor.next_at is not None:
            yield cursor.frame(cursor.next_at)

    def key_before(self, moment: float) -> int:
        """Return the number of the last member with a key frame at or before ``moment``, or of the first."""
        return max((n for n, member in enumerate(self._members) if member.key and member.first <= moment), default=0)

    def key_moments(self, first: float, end: float) -> Iterator[float]:
        """Yield the moments of the key frames from ``first`` on and before ``end``."""
        return (member.first for member in self._members if member.key and first <= member.first < end)

    def lines(self, number: int) -> Iterator[tuple[float, dict[str, Tree]]]:
        """Yield the moments and contents of the lines from a member on. Raises GpuboardError for a damaged file."""
        for member in self._members[number:]:
            try:
                for line in self._data(member).splitlines():
                    one = from_json(line)
                    if "format" not in one:
                        yield convert(one.pop("at"), float), one if is_clean(line) else cleaned(one)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error, OSError) as error:
                raise self.damaged(member.first, error) from error

    def damaged(self, at: float, error: Exception) -> GpuboardError:
        """Return the error for a damaged part."""
        return GpuboardError(f"{self.path} is damaged at {day_time(at)}: {error or type(error).__name__}")

    def _check_schema(self) -> None:
        try:
            head = from_json(self._data(self._members[0]).partition(b"\n")[0])
            schema = head["schema"] if head["format"] == FORMAT else None
        except (ValueError, KeyError, TypeError, zlib.error, OSError) as error:
            raise self.damaged(self.begin, error) from error
        if schema != SCHEMA:
            raise UsageError(
                f"{self.path} has schema {clean(str(schema), 16)}; this gpuboard reads schema {SCHEMA}: use the "
                f"gpuboard that recorded it, {clean(str(head.get('version')), 32)}"
            )

    def _data(self, member: GzipMember) -> bytes:
        self._file.seek(member.offset + _HEAD.size + _EXTRA.size)
        packed = self._file.read(member.length - _HEAD.size - _EXTRA.size - _TAIL.size)
        tail = self._file.read(_TAIL.size)
        if len(tail) < _TAIL.size:
            raise ValueError("it was cut after it was opened")
        crc, length = _TAIL.unpack(tail)
        data = zlib.decompressobj(wbits=-15).decompress(packed, _MOST_BYTES)
        if len(data) != length or zlib.crc32(data) != crc:
            raise ValueError("its checksum differs")
        return data


class Cursor:
    """Goes through a recording; makes only those frames that are asked for."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._restorer = Restorer()
        self._tree: Tree = None
        self._events: Sequence[ClusterEvent] | None = None
        self._at = -1.0  # of the newest line that is in the tree
        self._next: tuple[float, dict[str, Tree]] | None = None  # the line after it
        self._go_to(0)

    @property
    def next_at(self) -> float | None:
        """The moment of the frame after the last one that was returned, epoch seconds; None after the last of all."""
        return self._next[0] if self._next is not None else None

    def frame(self, moment: float) -> Frame:
        """Return the newest frame at or before ``moment``; before the beginning the first. Raises GpuboardError."""
        key = self._recording.key_before(moment)
        if moment < self._at or key > self._key:
            self._go_to(key)
        try:
            while self._next is not None and (self._next[0] <= moment or self._tree is None):
                self._at, one = self._next
                self._tree = one["state"] if "state" in one else applied(self._tree, one["change"])
                self._take_events(one)
                self._next = next(self._lines, None)
            return self._restorer.frame(self._tree, self._at, self._events)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._recording.damaged(self._at, error) from error

    def _take_events(self, line: dict[str, Tree]) -> None:
        """Add the events of a line; those of a key frame replace all. Known ones stay the same objects."""
        before = (self._events or ()) if "state" not in line else ()
        if "events" in line:
            known = {event: event for event in self._events or ()}
            new = [checked(event) for event in convert(line["events"], list[ClusterEvent])]
            self._events = [*dict.fromkeys(known.get(event, event) for event in (*before, *new))][-EVENTS_MOST:]
        elif "state" in line:
            self._events = None

    def _go_to(self, key: int) -> None:
        self._key, self._tree = key, None
        self._lines = self._recording.lines(key)
        self._next = next(self._lines, None)


def _members(file: BinaryIO) -> tuple[list[GzipMember], bool]:
    """Return the complete members of a file, and whether something incomplete or foreign follows them."""
    size = os.fstat(file.fileno()).st_size
    found: list[GzipMember] = []
    offset = 0
    while offset < size:
        file.seek(offset)
        head = file.read(_HEAD.size + _EXTRA.size)
        if len(head) < _HEAD.size + _EXTRA.size or head[:4] != _START:
            return found, True
        name, _, length, first, last, key = _EXTRA.unpack_from(head, _HEAD.size)
        least = _HEAD.size + _EXTRA.size + _TAIL.size
        fits = least <= length <= min(_MOST_BYTES, size - offset)
        if name != _NAME or not fits or not 0 <= first <= last < 2**40:
            return found, True
        found.append(GzipMember(offset, length, first, last, key))
        offset += length
    return found, False


_SET_BACK_S = 2.0  # less is not reported


class ForwardClock:
    """The time of day; it continues where the clock is set back, as a recording has one frame for each moment."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        """``wall``: epoch seconds. ``monotonic``: seconds."""
        self._wall, self._monotonic = wall, monotonic
        self._at, self._read = wall(), monotonic()
        self._reported_s = 0.0

    def read(self) -> tuple[float, float]:
        """Return epoch seconds, and by how many seconds they are ahead where that is to be reported, else 0."""
        now, read = self._wall(), self._monotonic()
        self._at, self._read = max(now, self._at + read - self._read), read
        ahead_s = self._at - now
        if ahead_s < max(_SET_BACK_S, 2 * self._reported_s):
            return self._at, 0.0
        self._reported_s = ahead_s
        return self._at, ahead_s
