"""AgentLink: the client's end of the protocol (docs/agent-protocol.md). Nonce, frames, replies; no I/O of its own.

Messages are checked against gpuboard.model.reading and passed on unchanged: text in them is untrusted until
gpuboard.cluster.snapshot.views has cleaned it. The details of a delta are checked when they are decoded. Answers to
calls are typed and cleaned (gpuboard.model.replies).
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from gpuboard.model import replies
from gpuboard.model.decoding import json_decoder
from gpuboard.model.reading import Event, Hello, LateDelta, Message, Pushed, ReadingDelta, Reply
from gpuboard.model.text import clean
from gpuboard.transport import limits
from gpuboard.transport.base import CallFailed, Channel, LinkLost, TransportError

NOISE_LIMIT = 64 * 1024  # bytes of shell start-up files' output before the hello
LINE_LIMIT = 4 * 1024 * 1024  # bytes of one protocol line
_STDERR_KEPT = 65536
_LATE = 8192  # bytes of the longest delta that is decoded late; it takes memory until then

T = TypeVar("T")
M = TypeVar("M", Message, ReadingDelta)
Listener = Callable[[Pushed], None]

_decoder = json_decoder(Message)
_delta_decoder = json_decoder(ReadingDelta)  # nearly all; a third quicker than to choose by the tag
_encoder = msgspec.json.Encoder()


class Pending:
    """A pending call. Wait for it with :meth:`result`."""

    def __init__(self, node: str, op: str, no_answer: Callable[[float], str] = "no answer in {:.1f} s".format) -> None:
        """``no_answer`` returns the error message for no answer within that many seconds."""
        self._node = node
        self._op = op
        self.no_answer = no_answer
        self._done = threading.Event()
        self.sent = time.monotonic()
        self._answer: Reply | CallFailed | LinkLost | None = None

    @property
    def settled(self) -> bool:
        """Whether it has an answer or has failed."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is settled; return whether it is."""
        return self._done.wait(max(0.0, timeout_s))

    def settle(self, answer: Reply | CallFailed | LinkLost) -> None:
        self._answer = answer
        self._done.set()

    def result(self, timeout_s: float, kind: type[T]) -> T:
        """Return the reply's value as a ``kind``, with its text cleaned. Raises CallFailed and LinkLost."""
        if not self.wait(timeout_s):
            raise LinkLost(self._node, self.no_answer(time.monotonic() - self.sent))
        assert self._answer is not None
        if not isinstance(self._answer, Reply):
            raise self._answer
        error = self._answer.error
        try:
            if error is None:
                return replies.decode(self._answer.value, kind)
            detail = None if bytes(error.detail) == b"null" else replies.decode(error.detail, replies.Detail)
        except replies.Malformed as malformed:
            raise LinkLost(self._node, f"malformed answer to {self._op}: {malformed}") from None
        raise CallFailed(clean(error.kind, 64), clean(error.message), detail)


class Link(ABC):
    """The client's end of one connection to a node: an agent, or the shell that stands in for one.

    ``listener`` gets every message but replies, ``ended`` the reason when the link is over (once, and not after
    ``close``); both are called in the transport's thread and must not block. Use :meth:`attach` to give it a channel.
    """

    def __init__(self, node: str, opening: bytes, listener: Listener, ended: Callable[[TransportError], None]) -> None:
        """``opening``: the bytes that go first."""
        self.node = node
        self.hello: Hello | None = None
        self.connected_at: float | None = None  # when the transport reached the node; monotonic, as all times here
        self.last_line = 0.0  # when the last message arrived
        self._opening = opening
        self._listener = listener
        self._ended = ended
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._over: TransportError | None = None

    def attach(self, channel: Channel) -> None:
        """Start the conversation over ``channel``."""
        self._channel = channel
        channel.write(self._opening)
        if self._over is not None:
            channel.close()

    @property
    def over(self) -> TransportError | None:
        """Why the link has ended; None while it is open."""
        return self._over

    def submit(self, op: str, args: dict[str, Any]) -> Pending:
        """Send a call and return at once. On a link that is over the call fails with LinkLost."""
        pending = Pending(self.node, op, self._no_answer)
        with self._lock:
            over = self._over
            data = self._accept(pending, op, args) if over is None else b""
        if over is not None:
            pending.settle(LinkLost(self.node, over.words))
        self._write(data)
        return pending

    def close(self) -> None:
        """End the connection at once; pending calls fail with LinkLost."""
        self._finish(TransportError("lost", "closed"), notify=False)

    def drop(self, error: TransportError) -> None:
        """End the connection for the reason ``error``, and report that to ``ended``."""
        self._finish(error, notify=True)

    def connected(self) -> None:
        """Record that the transport has reached the node."""
        self.connected_at = time.monotonic()

    def ended(self, error: TransportError) -> None:
        """Handle the end of the transport's channel."""
        self.drop(error)

    def late(self, seconds: float) -> TransportError:
        """Return the error for a link without an answer, or a first reading, for ``seconds``."""
        if self.hello is not None:
            return TransportError("timeout", f"connected, but received no reading within {seconds:.0f} s")
        from gpuboard.transport.exit_errors import not_started  # only when something is wrong

        return not_started(seconds, self._printed)

    @property
    def _printed(self) -> str:
        """The last line that start-up files printed before the hello."""
        return ""

    @abstractmethod
    def _accept(self, pending: Pending, op: str, args: dict[str, Any]) -> bytes:
        """Register a call, or settle it; return what to send for it. The lock is held, here and in ``_abandon``."""

    @abstractmethod
    def _abandon(self) -> Iterable[Pending]:
        """Forget all pending calls and return them."""

    def _no_answer(self, seconds: float) -> str:
        return f"no answer in {seconds:.1f} s"

    def _write(self, data: bytes) -> None:
        if data and self._channel is not None and self._over is None:
            self._channel.write(data)

    def _finish(self, error: TransportError, *, notify: bool) -> None:
        with self._lock:
            if self._over is not None:
                return
            self._over = error
            calls = self._abandon()
        if self._channel is not None:
            self._channel.close()
        for pending in calls:
            pending.settle(LinkLost(self.node, error.words))
        if notify:
            self._ended(error)


class AgentLink(Link):
    """One agent, from the start line to the end of its connection."""

    def __init__(
        self,
        node: str,
        role: str,
        config: dict[str, Any],
        listener: Listener,
        ended: Callable[[TransportError], None],
    ) -> None:
        nonce = os.urandom(8).hex()
        start = _encoder.encode({"t": "start", "nonce": nonce, "role": role, "config": config}) + b"\n"
        super().__init__(node, start, listener, ended)
        self.stderr = ""  # the end of what the agent wrote to its fds 1 and 2
        self._budget = limits.Budget() if role == "node" else None  # the output of ranks has no such limit
        self._prefix = b"@" + nonce.encode()
        self._whole = self._prefix + b'{"t":"reading"'
        self._delta = self._prefix + b'{"t":"delta"'
        self._buffer = bytearray()
        self._scanned = 0  # bytes of the buffer known to hold no line end
        self._noise = 0
        self._noise_line = ""  # the last line of that before the hello
        self._calls: dict[int, Pending] = {}
        self._last_id = 0

    @property
    def silent_since(self) -> float | None:
        """Since when calls have been pending without any message from the agent; None: no call is pending."""
        with self._lock:
            first = next(iter(self._calls.values()), None)
        return None if first is None else max(first.sent, self.last_line)

    def call(self, op: str, args: dict[str, Any], timeout_s: float, kind: type[T]) -> T:
        """Send a call and wait for its value, a ``kind``. Raises CallFailed and LinkLost."""
        return self.submit(op, args).result(timeout_s, kind)

    def tick(self, in_ms: int) -> None:
        """Send the agent the time until its next reading; it also shows that the client is alive."""
        self._write(_encoder.encode({"t": "tick", "in_ms": in_ms}) + b"\n")

    def received(self, data: bytes) -> None:
        """Handle bytes from the transport."""
        try:
            self._received(data)
        except TransportError as error:  # also what the listener raises
            self.drop(error)

    def _received(self, data: bytes) -> None:
        self._spend(len(data) + limits.PIECE)
        buffer = self._buffer
        if not buffer and data.startswith(self._prefix) and data.find(b"\n") == len(data) - 1:
            if self._over is None:
                self._line(data)  # the usual case, one line: without a copy
            return
        if not buffer and data.endswith(b"\n"):
            lines = data.split(b"\n")
            lines.pop()
        else:
            buffer += data
            if buffer.find(b"\n", self._scanned) < 0:
                self._scanned = len(buffer)
                self._check_length()
                return
            lines = bytes(buffer).split(b"\n")
            self._buffer = bytearray(lines.pop())
            self._scanned = len(self._buffer)
        for line, after in zip(lines, [*lines[1:], b""], strict=True):
            if self._over is not None:
                return
            if not self._outdated(line, after):
                self._line(line)
        self._check_length()

    def _outdated(self, line: bytes, after: bytes) -> bool:
        """Return whether a reading is followed by one that does not refer to it; a delta refers to a whole reading."""
        if after.startswith(self._delta):
            return line.startswith(self._delta)
        return after.startswith(self._whole) and line.startswith((self._whole, self._delta))

    def ended(self, error: TransportError) -> None:
        """Handle the end of the transport's channel."""
        if self.hello is not None and error.kind == "no-python":  # a message of a start-up file: python3 did start
            error = TransportError("exited", "the agent ended")
        if self.stderr and error.kind in {"exited", "lost"}:
            last = [clean(line) for line in self.stderr.splitlines() if line.strip()][-1:]
            error = TransportError(error.kind, f"{error.words}: {last[0]}" if last else error.words, error.remedy)
        if self.hello is None and error.kind == "exited" and ": " not in error.words:
            # nothing on stderr: nologin, a ForceCommand
            printed = self._printed
            words = f"{error.words}: {printed}" if printed else error.words
            remedy = (
                error.remedy
                or f"the agent did not start: does `python3 --version` work on {self.node} without a terminal?"
            )
            error = TransportError(error.kind, words, remedy)
        self.drop(error)

    @property
    def _printed(self) -> str:
        return clean(self._buffer.decode("utf-8", "replace").strip(), 200) or self._noise_line

    def _no_answer(self, seconds: float) -> str:
        starting = self.hello is None and self.connected_at is not None
        return str(self.late(seconds)) if starting else super()._no_answer(seconds)

    def _line(self, line: bytes) -> None:
        at = line.find(self._prefix)
        if at:  # a background job of a start-up file may print part of a line at any time
            self._noisy(line if at < 0 else line[:at])
            if at < 0 or self._over is not None:
                return
            line = line[at:]
        if len(line) > LINE_LIMIT:
            raise self._malformed(f"a line of {len(line)} bytes")
        if line.startswith(self._delta) and len(line) <= _LATE and self._budget is not None and self.hello is not None:
            self.last_line = time.monotonic()
            self._spend(limits.DECODED)
            self._listener(LateDelta(line, self._delta_of))
            return
        message = self._decoded(line, _decoder.decode)
        self.last_line = time.monotonic()
        greets = isinstance(message, Hello)
        if (self.hello is None) != greets and not isinstance(message, Event):
            raise self._malformed("a second hello" if greets else "the first message is not a hello")
        if isinstance(message, Reply):
            self._reply(message)
            return
        self._spend(limits.DECODED)
        if isinstance(message, Hello):
            self.hello = message
        elif isinstance(message, Event) and message.kind == "stderr":
            self._keep_stderr(message)
        self._listener(message)

    def _delta_of(self, line: bytes) -> ReadingDelta:
        return self._decoded(line, _delta_decoder.decode)

    def _decoded(self, line: bytes, decode: Callable[[memoryview], M]) -> M:
        """Return the message of a line. Raises TransportError."""
        body = memoryview(line)[len(self._prefix) :]
        try:
            if self._budget is not None:
                limits.check_line(body)
            message = decode(body)
            if self._budget is not None:
                limits.check_message(message, len(line))
        except msgspec.DecodeError as error:
            raise self._malformed(clean(str(error), 200)) from None
        except (RecursionError, UnicodeDecodeError) as error:
            raise self._malformed(type(error).__name__) from None
        return message

    def _reply(self, reply: Reply) -> None:
        with self._lock:
            pending = self._calls.pop(reply.id, None)
        if pending is not None:
            pending.settle(reply)
        else:  # its caller no longer waits, or the node invents answers
            self._spend(limits.DECODED)

    def _spend(self, count: int) -> None:
        if self._budget is not None:
            self._budget.spend(count, time.monotonic())

    def _keep_stderr(self, event: Event) -> None:
        try:
            text = replies.parse(event.data, dict[str, str]).get("text", "")
        except replies.Malformed:
            return
        self.stderr = (self.stderr + text)[-_STDERR_KEPT:]

    def _noisy(self, line: bytes) -> None:
        """Count output outside frames; after the hello an agent sends nothing but frames."""
        self._noise += len(line) + 1
        if self.hello is None:
            self._noise_line = clean(line[-800:].decode("utf-8", "replace").strip(), 200) or self._noise_line
        if self._noise > NOISE_LIMIT:
            words = "the node's shell start-up files print more than 64 kB" if self.hello is None else "no frames"
            raise self._malformed(words)

    def _check_length(self) -> None:
        kept = len(self._buffer)
        if kept > LINE_LIMIT or (self.hello is None and kept > NOISE_LIMIT and self._buffer[:1] != b"@"):
            raise self._malformed("a line without end")

    def _malformed(self, words: str) -> TransportError:
        remedy = "run `ssh NODE true` and see what it prints" if self.hello is None else ""
        return TransportError("lost", f"malformed answer: {words}", remedy)

    def _accept(self, pending: Pending, op: str, args: dict[str, Any]) -> bytes:
        self._last_id += 1
        self._calls[self._last_id] = pending
        return _encoder.encode({"t": "call", "id": self._last_id, "op": op, "args": args}) + b"\n"

    def _abandon(self) -> Iterable[Pending]:
        calls, self._calls = self._calls, {}
        self._buffer = bytearray()
        return calls.values()
