"""Moments of a recording: as people write them, and the position while it is played."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta

from gpuboard.errors import GpuboardError, UsageError
from gpuboard.model.text import quoted
from gpuboard.model.units import parse_duration
from gpuboard.recording.file import Cursor, Recording
from gpuboard.recording.frames import Frame

_CLOCK = {1: "%H:%M", 2: "%H:%M:%S"}
_SECOND = 1.0
SPEEDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


def moment_of(text: str, recording: Recording) -> float:
    """Return the epoch seconds of a moment of a recording. Raises UsageError.

    ``14:03`` and ``14:03:21`` are the latest such local time in it, ``2026-01-31T14:03`` is a time of a day, ``+90m``
    is after its beginning and ``-10m`` before its end.
    """
    begin, end = recording.begin, recording.end
    try:
        if text[:1] in {"+", "-"}:
            found = begin + parse_duration(text[1:]) if text[0] == "+" else end - parse_duration(text[1:])
        elif "-" in text:
            found = datetime.fromisoformat(text).timestamp()
        else:
            last = datetime.fromtimestamp(end)
            asked = datetime.combine(last.date(), datetime.strptime(text, _CLOCK[text.count(":")]).time())
            found = (asked - timedelta(days=asked > last + timedelta(seconds=_SECOND))).timestamp()
    except (ValueError, OverflowError, LookupError):
        raise UsageError(f"{quoted(text)} is no moment; write 14:03, 2026-01-31T14:03, +90m or -10m") from None
    written = 60.0 if text.count(":") == 1 else _SECOND  # 14:03 is any moment of that minute
    if not begin - written <= found <= end + _SECOND:
        span = f"from {local_time(begin)} to {local_time(end)}"
        raise UsageError(f"{quoted(text)} is not in {recording.path}, which is {span}")
    return found


def local_time(epoch: float) -> str:
    """Return epoch seconds as local date and time: ``2026-01-31 14:03:21``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch))


class Player:
    """Plays a recording. Not thread-safe. ``clock``: monotonic seconds."""

    def __init__(self, recording: Recording, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.recording = recording
        self.speed = speed
        self.paused = False
        self.jumps = 0  # how often the position was changed other than by playing
        self._clock = clock
        self._position = recording.begin
        self._since = clock()
        self._cursor: Cursor | None = None

    @property
    def position(self) -> float:
        """The moment that is played now, epoch seconds; at the end it stays there."""
        gone = 0.0 if self.paused else (self._clock() - self._since) * self.speed
        return min(self._position + gone, self.recording.end)

    @property
    def next_at(self) -> float | None:
        """The moment of the frame after the newest one that was returned, epoch seconds; None after the last one."""
        return self._cursor.next_at if self._cursor is not None else None

    @property
    def next_s(self) -> float | None:
        """Seconds until that frame is due; None while paused or after the last one."""
        if self.paused or self.next_at is None:
            return None
        return max(0.0, (self.next_at - self.position) / self.speed)

    def seek(self, moment: float) -> None:
        """Go to a moment, at most to the beginning or the end."""
        self.jumps += 1
        self._set(min(max(moment, self.recording.begin), self.recording.end))

    def pause(self) -> None:
        """Pause, or go on."""
        position = self.position
        self.paused = not self.paused
        self._set(position)

    def faster(self) -> None:
        """Play at the next higher of SPEEDS."""
        self._play_at(next((speed for speed in SPEEDS if speed > self.speed), self.speed))

    def slower(self) -> None:
        """Play at the next lower of SPEEDS."""
        self._play_at(next((speed for speed in reversed(SPEEDS) if speed < self.speed), self.speed))

    def frame(self) -> Frame:
        """Return the newest frame at the position. Raises GpuboardError for a damaged recording."""
        try:
            self._cursor = self._cursor or Cursor(self.recording)
            return self._cursor.frame(self.position)
        except GpuboardError:
            self._cursor = None  # the next call starts over, perhaps behind the damaged part
            raise

    def _play_at(self, speed: float) -> None:
        position = self.position
        self.speed = speed
        self._set(position)

    def _set(self, position: float) -> None:
        self._position, self._since = position, self._clock()
