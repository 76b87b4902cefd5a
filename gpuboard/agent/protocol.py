"""The agent's end of the connection: nonce frames out, JSON lines in, and nothing else on either.

A frame is ``@``, the connection's nonce, one JSON object, a line end. The protocol is moved off fds 0 to 2 first, so
that no print, orphaned child or library can write into it.
"""

import errno
import fcntl
import os

from gpuboard.agent import json_text
from gpuboard.agent.event_loop import IN, OUT, Loop, poll

MYPY = False
if MYPY:  # typing costs start-up, and nothing here needs it at run time
    from typing import Any, Dict, List, Optional

LINE_LIMIT = 4 * 1024 * 1024  # bytes of one line, either way
_CHUNK = 65536


class BadStream(Exception):
    """A line from the client is too long or not a JSON object."""


class AgentChannel:
    """The connection of one agent.

    A role polls ``fd_in`` and ``fd_noise`` for reading and, while ``pending`` is not 0, ``fd_out`` for writing. It then
    calls ``read_available``, ``pass_noise`` or ``flush``, and ends when ``closed`` is true.
    """

    def __init__(self, fd_in: int, fd_out: int, fd_noise: int) -> None:
        self.fd_in = fd_in
        self.fd_out = fd_out
        self.fd_noise = fd_noise  # the read end of fds 1 and 2
        self.nonce = ""
        self.closed = False  # the client is gone: end-of-file, or it has stopped reading
        self._broken = False  # writes fail; after end-of-file on fd_in they may still succeed
        self._in = bytearray()
        self._out = bytearray()
        self._noise_cut = 0  # bytes of noise that were dropped

    @property
    def pending(self) -> int:
        """Bytes the client has not read yet; above about 1 MiB, producers should wait."""
        return len(self._out)

    def read_start(self) -> "Optional[Dict[str, Any]]":
        """Wait for the start line and return it; None when the client is gone. Sets ``nonce``."""
        while not self.closed:
            poll({self.fd_in: IN})
            self._fill()
            line = self._line()
            if line is not None:
                start = _decode(line)
                self.nonce = str(start.get("nonce", ""))
                self._out += b"\n"  # output of the login shell's start-up files may lack a line end
                return start
        return None

    def read_available(self) -> "List[Dict[str, Any]]":
        """Return the complete messages received so far, without waiting. Raises BadStream."""
        self._fill()
        found = []
        line = self._line()
        while line is not None:
            if line.strip():
                found.append(_decode(line))
            line = self._line()
        if len(self._in) > LINE_LIMIT:
            raise BadStream("a line from the client is longer than %d bytes" % LINE_LIMIT)
        return found

    def send(self, message: "Dict[str, Any]") -> None:
        """Queue one message and write as much as the client accepts; never blocks."""
        if not self._broken:
            # Lone surrogates (file names that are not UTF-8) become `?`: JSON readers may reject them.
            self._out += ("@" + self.nonce + json_text.compact(message) + "\n").encode("utf-8", "replace")
            self.flush()

    def event(self, kind: str, data: "Dict[str, Any]") -> None:
        """Send an event message."""
        self.send({"t": "event", "kind": kind, "data": data})

    def reply(self, call_id: int, value: "Any") -> None:
        """Answer call ``call_id``."""
        self.send({"t": "reply", "id": call_id, "value": value})

    def refuse(self, call_id: int, kind: str, message: str, detail: "Any" = None) -> None:
        """Answer call ``call_id`` with an error."""
        self.send({"t": "reply", "id": call_id, "error": {"kind": kind, "message": message, "detail": detail}})

    def serve(self, loop: Loop) -> None:
        """Turn ``loop`` until the channel is closed, and send what there is to send."""
        while not self.closed:
            if self.pending:
                loop.watch(self.fd_out, OUT, self.flush)
            else:
                loop.unwatch(self.fd_out)
            loop.turn()

    def flush(self) -> None:
        """Write as much as the client accepts; never blocks."""
        while self._out and not self._broken:
            try:
                count = os.write(self.fd_out, bytes(self._out[:_CHUNK]))
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return
                self.closed = self._broken = True  # EPIPE, ECONNRESET
                return
            del self._out[:count]

    def drain(self, timeout_s: float) -> None:
        """Wait until the queue is written or the client has stopped reading, at most ``timeout_s``."""
        import time

        until = time.monotonic() + timeout_s
        while self._out and not self._broken and time.monotonic() < until:
            poll({self.fd_out: OUT}, min(1.0, until - time.monotonic()))  # at most 1 s: ``until`` may be infinite
            self.flush()

    def pass_noise(self) -> None:
        """Send what was written to fds 1 and 2 as a ``stderr`` event."""
        try:
            data = os.read(self.fd_noise, _CHUNK)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return
            raise
        if self.pending > LINE_LIMIT:  # the client is not reading: drop it
            self._noise_cut += len(data)
        elif data:
            cut = "[%d bytes dropped]\n" % self._noise_cut if self._noise_cut else ""
            self._noise_cut = 0
            self.event("stderr", {"text": cut + data.decode("utf-8", "replace")})

    def _fill(self) -> None:
        while not self.closed:
            try:
                data = os.read(self.fd_in, _CHUNK)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return
                data = b""  # ECONNRESET and others end the connection like end-of-file
            if not data:
                self.closed = True
                return
            self._in += data
            if len(self._in) > 2 * LINE_LIMIT:
                return

    def _line(self) -> "Optional[bytes]":
        end = self._in.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._in[:end])
        del self._in[: end + 1]
        return line


def take_over() -> AgentChannel:
    """Move the protocol from fds 0 and 1 to private close-on-exec ones and return the channel.

    Afterwards 0 is /dev/null, and 1 and 2 are a pipe that only ``AgentChannel.pass_noise`` reads.
    """
    fd_in = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
    fd_out = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 10)
    read_end, write_end = os.pipe()
    fd_noise = fcntl.fcntl(read_end, fcntl.F_DUPFD_CLOEXEC, 10)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(write_end, 1)
    os.dup2(write_end, 2)
    for fd in (null, read_end, write_end):
        if fd > 2:
            os.close(fd)
    for fd in (fd_in, fd_out, fd_noise):
        os.set_blocking(fd, False)
    return AgentChannel(fd_in, fd_out, fd_noise)


def _decode(line: bytes) -> "Dict[str, Any]":
    try:
        message = json_text.parsed(line.decode("utf-8"))
    except ValueError as error:
        raise BadStream("a line from the client is not JSON: %s" % error)
    if not isinstance(message, dict):
        raise BadStream("a line from the client is not a JSON object")
    return message
