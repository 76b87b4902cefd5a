"""The files of a run as they grow."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

_CHUNK = 2**20  # bytes read at a time
_TAIL = 2**18  # bytes at the end of a file that are searched for its last lines


class FollowedFile:
    """A growing text file, read from its last lines on. It may not exist yet."""

    def __init__(self, path: Path, lines: int) -> None:
        """``lines``: how many of the lines that are there already will be read."""
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
        self._offset = self._last(lines)

    def read(self) -> str:
        """Return the next part of what has been written since; "" for nothing new."""
        text = ""
        while not text and (data := self._data(self._offset)):  # a piece of one character has no text yet
            self._offset += len(data)
            text = self._decoder.decode(data)
        return text

    def _last(self, lines: int) -> int:
        try:
            size = self._path.stat().st_size
        except OSError:
            return 0
        start = max(0, size - _TAIL)
        data = self._data(start)[: size - start]
        at = len(data) - data.endswith(b"\n")  # the end of the last line
        for _ in range(lines):
            at = data.rfind(b"\n", 0, at)
            if at < 0:
                return start
        return size if not lines else start + at + 1

    def _data(self, offset: int) -> bytes:
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(offset, os.SEEK_SET)
                return file.read(_CHUNK)
        except FileNotFoundError:
            return b""  # created at the first output
