"""The agent's end of the connection: nonce frames out, JSON lines in, and nothing else on either.

A frame is ``@``, the connection's nonce, one JSON object, a line end. The protocol is moved off fds 0 to 2 first, so
that no print, no leftover child and no library can write into it.
"""

import errno
import fcntl
import os

from gpuboard.agent.event_loop import IN, OUT, poll

MYPY = False
if MYPY:  # typing costs start-up, and nothing here needs it at run time
    from typing import Any, Dict, List, Optional

LINE_LIMIT = 4 * 1024 * 1024  # bytes of one line, either way
_CHUNK = 65536


class BadStream(Exception):
    """The client's stream is out of step: a line is too long or no JSON object."""


class AgentChannel:
    """The connection of one agent.

    A role's loop polls ``fd_in`` and ``fd_noise`` for reading and, while ``pending`` is not 0, ``fd_out`` for writing;
    it calls ``read_available``, ``pass_noise`` and ``flush`` in turn and ends when ``closed`` is true.
    """

    def __init__(self, fd_in: int, fd_out: int, fd_noise: int) -> None:
        self.fd_in = fd_in
        self.fd_out = fd_out
        self.fd_noise = fd_noise  # what was written to fds 1 and 2
        self.nonce = ""
        self.closed = False  # the client is gone: end-of-file, or nobody reads any more
        self._deaf = False  # nobody reads; after an end-of-file somebody still may
        self._in = bytearray()
        self._out = bytearray()
        self._noise_cut = 0  # bytes of noise that were not passed on

    @property
    def pending(self) -> int:
        """Bytes that wait for the client to read: a producer that can wait should, above 1 MiB or so."""
        return len(self._out)

    def read_start(self) -> "Optional[Dict[str, Any]]":
        """Wait for the start line and return it; None when the client went away. Sets ``nonce``."""
        while not self.closed:
            poll({self.fd_in: IN})
            self._fill()
            line = self._line()
            if line is not None:
                start = _decode(line)
                self.nonce = str(start.get("nonce", ""))
                self._out += b"\n"  # what a start-up file of the login shell has printed may have no line end
                return start
        return None

    def read_available(self) -> "List[Dict[str, Any]]":
        """Return the objects that have arrived whole, without waiting. Raises BadStream."""
        self._fill()
        found = []
        line = self._line()
        while line is not None:
            if line.strip():
                found.append(_decode(line))
            line = self._line()
        if len(self._in) > LINE_LIMIT:
            raise BadStream("a line of the client is longer than %d bytes" % LINE_LIMIT)
        return found

    def send(self, message: "Dict[str, Any]") -> None:
        """Queue one message and write what the client takes at once; never blocks."""
        import json  # 10 ms: the NVML child is already at work when the first message is sent

        if not self._deaf:
            text = json.dumps(message, separators=(",", ":"), ensure_ascii=False)
            # Lone surrogates (a file name that is no UTF-8) become `?`: no JSON reader need take them.
            self._out += ("@" + self.nonce + text + "\n").encode("utf-8", "replace")
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

    def flush(self) -> None:
        """Write what the client takes now; never blocks."""
        while self._out and not self._deaf:
            try:
                count = os.write(self.fd_out, bytes(self._out[:_CHUNK]))
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return
                self.closed = self._deaf = True  # EPIPE, ECONNRESET
                return
            del self._out[:count]

    def drain(self, timeout_s: float) -> None:
        """Wait until everything queued is written or nobody reads any more, at most ``timeout_s``."""
        import time

        until = time.monotonic() + timeout_s
        while self._out and not self._deaf and time.monotonic() < until:
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
        if self.pending > LINE_LIMIT:  # a client that does not read gets no more of it
            self._noise_cut += len(data)
        elif data:
            cut = "[%d bytes left out]\n" % self._noise_cut if self._noise_cut else ""
            self._noise_cut = 0
            self.event("stderr", {"text": cut + data.decode("utf-8", "replace")})

    def _fill(self) -> None:
        while not self.closed:
            try:
                data = os.read(self.fd_in, _CHUNK)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return
                data = b""  # ECONNRESET and the like end the connection as end-of-file does
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

    Afterwards 0 is /dev/null, and 1 and 2 are a pipe that nobody but ``Channel.pass_noise`` reads.
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
    import json  # late: see Channel.send

    try:
        message = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise BadStream("a line of the client is no JSON: %s" % error)
    if not isinstance(message, dict):
        raise BadStream("a line of the client is no JSON object")
    return message
