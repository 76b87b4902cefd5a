"""A rank's output on its way to the head: whole lines, or pieces of progress bars and prompts; unchanged bytes."""

import base64
import os

MYPY = False
if MYPY:
    from typing import Dict, List

PIECE = 65536  # bytes in one event at most
_READ = 65536
_PROMPT_S = 1.0  # text without a line end is sent after this time: a prompt, or a part of a progress bar
_BAR_S = 0.2  # the same for text with a carriage return: a progress bar has to move


class Stream:
    """One pipe of one rank. ``feed`` and ``overdue`` return the pieces to send; their concatenation is the output."""

    def __init__(self, fd: int, rank: int, name: str) -> None:
        self.fd = fd
        self.rank = rank
        self.name = name  # "out" or "err"
        self.closed = False
        self._held = b""  # after the last line end
        self._since = 0.0  # when the oldest of it arrived, monotonic

    def read(self, now: float) -> "List[bytes] | None":
        """Read once without blocking; return the complete pieces, None if there was nothing to read.

        Sets ``closed`` at end-of-file.
        """
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            return self.finish()
        return self.feed(data, now)

    def feed(self, data: bytes, now: float) -> "List[bytes]":
        """Add bytes; return whole lines, several of them in one piece."""
        end = data.rfind(b"\n") + 1
        if end == 0:
            if not self._held:
                self._since = now
            self._held += data
            if len(self._held) < PIECE:
                return []
            end = _complete(self._held)
            whole, self._held = self._held[:end], self._held[end:]
        else:
            whole, self._held = self._held + data[:end], data[end:]
            self._since = now
        return _cut(whole)

    def due(self) -> "float | None":
        """When held text is to be sent without its line end (monotonic seconds); None when nothing is held."""
        if not self._held:
            return None
        return self._since + (_BAR_S if b"\r" in self._held else _PROMPT_S)

    def restart_wait(self, now: float) -> None:
        """Restart the time of held text, after a pause in which the pipe was not read."""
        self._since = now

    def overdue(self, now: float) -> "List[bytes]":
        """Return held text that is due."""
        due = self.due()
        if due is None or due > now:
            return []
        self._since = now  # for the rest of an incomplete character
        return self.release()

    def release(self) -> "List[bytes]":
        """Return held text at once, up to the last complete character: the rest of it may follow."""
        end = _complete(self._held) or len(self._held)
        held, self._held = self._held[:end], self._held[end:]
        return _cut(held)

    def finish(self) -> "List[bytes]":
        """Close the pipe; return the held text."""
        if self.closed:
            return []
        self.closed = True
        os.close(self.fd)
        held, self._held = self._held, b""
        return _cut(held)


def content(piece: bytes) -> "Dict[str, str]":
    """Return a piece as the fields of an event: ``text``, or base64 as ``data`` for what is not UTF-8."""
    try:
        return {"text": piece.decode("utf-8")}
    except UnicodeDecodeError:
        return {"data": base64.b64encode(piece).decode("ascii")}


def _cut(data: bytes) -> "List[bytes]":
    """Cut data into pieces of at most PIECE bytes, at line ends where there are any, else between characters."""
    pieces = []
    while len(data) > PIECE:
        end = data.rfind(b"\n", 0, PIECE) + 1 or _complete(data[:PIECE])
        pieces.append(data[:end])
        data = data[end:]
    if data:
        pieces.append(data)
    return pieces


def _complete(data: bytes) -> int:
    """Return the length of ``data`` without a last UTF-8 character whose end is missing."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # not a continuation: the first byte of a character
            size = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if size > back else len(data)
    return len(data)
