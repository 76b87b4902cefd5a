"""The bytes that the shell's lines send (gpuboard/shellprobe/script.py) → whole answers. No I/O."""

from __future__ import annotations

from typing import NamedTuple

from gpuboard.agent.smi import parse as smi

NOISE_LIMIT = 64 * 1024  # bytes of shell start-up files' output before the hello


class MalformedFrame(Exception):
    """What came cannot be an answer; its words say why."""


class ShellAnswer(NamedTuple):
    """A whole answer: to which request, what stood below each heading, and how the program that was asked ended."""

    request: str
    said: dict[str, bytes]
    code: int


class Frames:
    """Cuts a stream into answers; a line of ours begins with ``@`` and the nonce, all others belong to the last one."""

    def __init__(self, nonce: bytes) -> None:
        self._prefix = b"@" + nonce + b" "
        self._rest = bytearray()
        self._size = 0  # kept and not yet handed on
        self._said: dict[str, dict[str, list[bytes]]] = {}
        self._below: list[bytes] | None = None  # where a line belongs; None: it is noise of start-up files

    def take(self, data: bytes) -> list[ShellAnswer]:
        """Return the answers that ``data`` completes. Raises Malformed."""
        self._size += len(data)
        self._rest += data
        if b"\n" not in data:
            self._check()
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        found = [answer for line in lines if (answer := self._line(line)) is not None]
        self._check()
        return found

    def _line(self, line: bytes) -> ShellAnswer | None:
        if not line.startswith(self._prefix):
            if self._below is not None:
                self._below.append(line)
            return None
        words = line[len(self._prefix) :].decode("ascii", "replace").split()
        if len(words) < 2:
            raise MalformedFrame("an empty heading")
        request, heading = words[0], words[1]
        if heading != "end":
            self._below = self._said.setdefault(request, {}).setdefault(heading, [])
            return None
        said = self._said.pop(request, {})
        self._below = []
        self._size = sum(len(line) for part in self._said.values() for lines in part.values() for line in lines)
        code = int(words[2]) if len(words) > 2 and words[2].isdecimal() and len(words[2]) < 4 else -1
        return ShellAnswer(request, {heading: b"\n".join(lines) for heading, lines in said.items()}, code)

    def _check(self) -> None:
        if self._below is None and self._size > NOISE_LIMIT:
            raise MalformedFrame("the node's shell start-up files print more than 64 kB")
        if self._size > 2 * smi.LIMIT:
            raise MalformedFrame("an answer without end")
