"""A rank's output on its way to the head: whole lines, or pieces of progress bars and prompts."""

import codecs
import os

MYPY = False
if MYPY:
    from typing import List

PIECE = 65536  # bytes of text in one event at most
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
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # text after the last line end
        self._since = 0.0  # when the oldest of it arrived, monotonic

    def read(self, now: float) -> "List[str] | None":
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

    def feed(self, data: bytes, now: float) -> "List[str]":
        """Add bytes; return whole lines, several of them in one piece."""
        text = self._decoder.decode(data)
        end = text.rfind("\n") + 1
        if end == 0:
            if not self._held:
                self._since = now
            self._held += text
            if len(self._held) < PIECE:
                return []
            whole, self._held = self._held, ""
        else:
            whole, self._held = self._held + text[:end], text[end:]
            self._since = now
        return _cut(whole)

    def due(self) -> "float | None":
        """When held text is to be sent without its line end (monotonic seconds); None when nothing is held."""
        if not self._held:
            return None
        return self._since + (_BAR_S if "\r" in self._held else _PROMPT_S)

    def restart_wait(self, now: float) -> None:
        """Restart the time of held text, after a pause in which the pipe was not read."""
        self._since = now

    def overdue(self, now: float) -> "List[str]":
        """Return held text that is due."""
        due = self.due()
        return self.release() if due is not None and due <= now else []

    def release(self) -> "List[str]":
        """Return held text at once."""
        held, self._held = self._held, ""
        return _cut(held)

    def finish(self) -> "List[str]":
        """Close the pipe; return the held text."""
        if self.closed:
            return []
        self.closed = True
        os.close(self.fd)
        self._held += self._decoder.decode(b"", True)
        return self.release()


def _cut(text: str) -> "List[str]":
    """Cut text into pieces of at most PIECE bytes, at line ends where there are any."""
    pieces = []
    limit = PIECE // 4  # characters: none takes more than four bytes
    while len(text) > limit:
        end = text.rfind("\n", 0, limit) + 1 or limit
        pieces.append(text[:end])
        text = text[end:]
    if text:
        pieces.append(text)
    return pieces
