"""A window into a log that may be huge and may grow: reads only around what is shown. No textual.

Lines are identified by the byte they start at, not by number: counting the lines of 2 GB takes too long. A line starts
at 0, after each line end, and at each multiple of a block with no line end in the block before it. So no line is
longer than two blocks, and the two blocks before a position suffice to find the start of its line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from rich.text import Text

from gpuboard.board.text.detail.log_line import drawn, matches, visible
from gpuboard.errors import GpuboardError

if TYPE_CHECKING:
    from gpuboard.launch.runs.access import RunAccess


class ReadSizes(NamedTuple):
    """What is read at a time, in bytes."""

    block: int = 64 * 1024
    lines: int = 256 * 1024  # when looking for lines
    search: int = 4 * 2**20


SIZES = ReadSizes()


class LogGone(Exception):
    """The log cannot be read; the message is the reason."""


class LogPosition(msgspec.Struct, frozen=True):
    """The top of a page: the line that starts at byte ``start``, from its wrapped row ``row`` on."""

    start: int
    row: int = 0


class Window(msgspec.Struct, frozen=True):
    """Size and horizontal position of the visible part, in terminal cells."""

    width: int
    height: int
    wrap: bool = False
    left: int = 0  # cells scrolled to the right; 0 with ``wrap``


class Page(msgspec.Struct, frozen=True):
    """The rows in a window, each with the start of its line."""

    rows: list[tuple[int, Text]]
    place: LogPosition
    size: int  # bytes of the file
    at_end: bool
    shrunk: bool = False  # truncated since the last read


class LogFile:
    """One log. Every call opens the file again: it can be replaced, truncated or removed meanwhile."""

    def __init__(self, path: Path, far: RunAccess | None = None, sizes: ReadSizes = SIZES) -> None:
        """``far``: the run on another host in whose folder it is."""
        self.path = path
        self._sizes = sizes
        self._far = far
        self._size = 0

    def _open(self) -> _Reader:
        return _Reader(self.path, self._sizes) if self._far is None else _FarReader(self._far, self.path.name)

    def stamp(self) -> tuple[int, int, int]:
        """Return a value that differs when the file has changed. Raises LogGone."""
        with self._open() as file:
            return file.stamp

    def end(self, window: Window) -> Page:
        """Return the last page. Raises LogGone."""
        with self._open() as file:
            return self._page(file, file.back(LogPosition(file.size), window.height, window), window)

    def page(self, place: LogPosition, window: Window, rows: int = 0) -> Page:
        """Return the page ``rows`` below (above, if negative) ``place``; never beyond the last one. Raises LogGone."""
        with self._open() as file:
            last = file.back(LogPosition(file.size), window.height, window)
            if place.start > file.size or file.size < self._size:
                place = last
            elif rows < 0:
                place = file.back(place, -rows, window)
            else:
                place = file.on(place, rows, window)
            if (place.start, place.row) > (last.start, last.row):
                place = last
            return self._page(file, place, window)

    def at(self, offset: int, window: Window, above: int = 0) -> Page:
        """Return the page with the line that byte ``offset`` is in, ``above`` rows below its top. Raises LogGone."""
        with self._open() as file:
            start = file.start_of(min(max(0, offset), file.size) + 1)
        return self.page(LogPosition(start), window, -above)

    def find(
        self, words: str, start: int | None, *, backwards: bool, go_on: Callable[[int], bool], rest: bool = False
    ) -> int | None:
        """Return the start of the next line with ``words``, after (before) the one at ``start``; None: no match.

        ``rest``: search the part that such a search leaves out, from the beginning (end) to the line at ``start``.
        ``start`` None: search everything. Case matters only if ``words`` has capitals; words that change colour inside
        are not found. ``go_on`` gets the byte reached and returns whether to continue. Raises LogGone.
        """
        with self._open() as file:
            if start is None:
                middle = file.size if backwards else 0
            else:
                middle = start if backwards else file.next_start(start)
            part = range(middle) if backwards != rest else range(middle, file.size)
            return file.search(words, part, backwards, go_on)

    def _page(self, file: _Reader, place: LogPosition, window: Window) -> Page:
        rows: list[tuple[int, Text]] = []
        start, skip = place.start, place.row
        while len(rows) < window.height and start < file.size:
            end = file.next_start(start)
            rows += [(start, row) for row in file.rows(start, end, window)[skip:]]
            start, skip = end, 0
        shrunk, self._size = file.size < self._size, file.size
        at_end = start >= file.size and len(rows) <= window.height
        return Page(rows[: window.height], place, file.size, at_end, shrunk)


class Match(NamedTuple):
    """A match of a search in logs."""

    log: int  # index of the log
    start: int
    wrapped: bool  # past the end (beginning), found before (after) the start of the search


def find_in(
    logs: Sequence[LogFile], words: str, start: int, *, backwards: bool, go_on: Callable[[int, int], bool]
) -> Match | None:
    """Return the next match: from ``start`` in the first log, in the others, in the rest of the first.

    ``go_on``: as of :meth:`LogFile.find`, with the log before the byte. Raises LogGone for the first log alone.
    """
    for log, begin, rest in [(0, start, False), *((k, None, False) for k in range(1, len(logs))), (0, start, True)]:
        try:
            found = logs[log].find(words, begin, backwards=backwards, go_on=partial(go_on, log), rest=rest)
        except LogGone:
            if log == 0:
                raise
            continue
        if found is not None:
            return Match(log, found, rest)
    return None


class _Reader:
    """The open file and the piece read last."""

    def __init__(self, path: Path, sizes: ReadSizes) -> None:
        self._sizes = sizes
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            gone = not path.parent.is_dir()
            raise LogGone("the run's folder was removed" if gone else "empty") from None
        except OSError as error:
            raise LogGone(f"cannot be read: {error.strerror}") from error
        status = os.fstat(self._fd)
        self.size = status.st_size
        self.stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        self._at, self._data = 0, b""

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, low: int, high: int) -> bytes:
        """Return bytes ``low`` to ``high``, fewer where the file ends."""
        high = min(high, self.size)
        if not (self._at <= low and high <= self._at + len(self._data)):
            self._at = max(0, low - self._sizes.lines // 2)
            self._data = self._pread(max(high, low + self._sizes.lines // 2) - self._at, self._at)
            if self._at + len(self._data) < high:  # truncated meanwhile
                self.size = min(self.size, self._at + len(self._data))
        return self._data[low - self._at : high - self._at]

    def _pread(self, count: int, at: int) -> bytes:
        try:
            return os.pread(self._fd, count, at)
        except OSError as error:
            raise LogGone(f"cannot be read: {error.strerror}") from error

    def start_of(self, offset: int) -> int:
        """Return the last start of a line before ``offset``, at least 0."""
        size = self._sizes.block
        block = max(0, offset - 1) // size * size
        low = max(0, block - size)
        at = self.read(low, offset - 1).rfind(b"\n")  # a line end at offset - 1 ends the line in question
        return low + at + 1 if at >= 0 else block

    def next_start(self, start: int) -> int:
        """Return the start of the line after the one at ``start``; the file's size after the last one."""
        size = self._sizes.block
        limit = -(-start // size) * size + size
        at = self.read(start, limit).find(b"\n")
        return start + at + 1 if at >= 0 else min(limit, self.size)

    def rows(self, start: int, end: int, window: Window) -> list[Text]:
        """Return a line as it is drawn: one row, or with ``wrap`` as many as it takes."""
        return drawn(self._text(start, end), window.width if window.wrap else None, window.left + window.width)

    def _text(self, start: int, end: int) -> str:
        return visible(self.read(start, end).decode("utf-8", "replace"))

    def back(self, place: LogPosition, rows: int, window: Window) -> LogPosition:
        """Return the place ``rows`` rows above, or the beginning."""
        start, left = place.start, rows - place.row
        while left > 0 and start > 0:
            end, start = start, self.start_of(start)
            left -= len(self.rows(start, end, window)) if window.wrap else 1
        return LogPosition(start, max(0, -left))

    def on(self, place: LogPosition, rows: int, window: Window) -> LogPosition:
        """Return the place ``rows`` rows below, or the last row."""
        start, left = place.start, rows + place.row
        while start < self.size:
            end = self.next_start(start)
            count = len(self.rows(start, end, window)) if window.wrap else 1
            if left < count or end >= self.size:
                return LogPosition(start, min(left, count - 1))
            left -= count
            start = end
        return LogPosition(start)

    def search(self, words: str, part: range, backwards: bool, go_on: Callable[[int], bool]) -> int | None:
        """Return the start of the first (last) line with ``words`` in a part of the file that ends between lines."""
        fold = words == words.lower()
        wanted = words.encode()
        steps = range(part.start, part.stop, self._sizes.search)
        for at in reversed(steps) if backwards else steps:
            if not go_on(at):
                return None
            data = self._pread(min(self._sizes.search + len(wanted) - 1, part.stop - at), at)
            if fold:
                data = data.lower()
            hit = data.rfind(wanted) if backwards else data.find(wanted)
            while hit >= 0:
                start = self.start_of(at + hit + 1)
                end = self.next_start(start)
                if matches(self._text(start, end), words):
                    return start
                hit = data.rfind(wanted, 0, max(0, start - at)) if backwards else data.find(wanted, end - at)
        return None


class _FarReader(_Reader):
    """A log in the folder of a run on another host; such a log only grows."""

    def __init__(self, run: RunAccess, name: str) -> None:
        self._sizes = SIZES
        self._run, self._name = run, name
        try:
            size = run.sizes([name]).get(name)
        except GpuboardError as error:
            raise LogGone(str(error)) from error
        if size is None:
            raise LogGone("empty")
        self.size = size
        self.stamp = (0, size, 0)
        self._at, self._data = 0, b""

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def _pread(self, count: int, at: int) -> bytes:
        data = b""
        try:
            while len(data) < count and (piece := self._run.read({self._name: at + len(data)}).get(self._name)):
                data += piece
        except GpuboardError as error:
            raise LogGone(str(error)) from error
        return data[:count]
