"""The position in a recording while it is played: speed, pause, jumps (no I/O but the recording's)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from gpuboard.recording.file import Recording
from gpuboard.recording.frames import Frame

SPEEDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Player:
    """Plays a recording. Not thread-safe. ``clock``: monotonic seconds."""

    def __init__(self, recording: Recording, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.recording = recording
        self.speed = speed
        self.paused = False
        self._clock = clock
        self._position = recording.begin
        self._since = clock()
        self._frames: Iterator[Frame] = iter(())
        self._frame: Frame | None = None
        self._next: Frame | None = None

    @property
    def position(self) -> float:
        """The moment that is played now, epoch seconds; at the end it stays there."""
        gone = 0.0 if self.paused else (self._clock() - self._since) * self.speed
        return min(self._position + gone, self.recording.end)

    @property
    def next_s(self) -> float | None:
        """Seconds until the next frame is due; None while it is paused or after the last one."""
        if self.paused or self._next is None:
            return None
        return max(0.0, (self._next.at - self.position) / self.speed)

    def seek(self, moment: float) -> None:
        """Go to a moment, at most to the beginning or the end."""
        self._set(min(max(moment, self.recording.begin), self.recording.end))
        self._frame = None

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
        position = self.position
        if self._frame is None:
            self._frames = self.recording.frames(position)
            self._frame = next(self._frames)
            self._next = next(self._frames, None)
        while self._next is not None and self._next.at <= position:
            self._frame, self._next = self._next, next(self._frames, None)
        return self._frame

    def _play_at(self, speed: float) -> None:
        position = self.position
        self.speed = speed
        self._set(position)

    def _set(self, position: float) -> None:
        self._position, self._since = position, self._clock()
