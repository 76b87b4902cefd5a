"""The transport interface: how bytes reach the agent on a node, and how that can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from gpuboard.errors import GpuboardError

if TYPE_CHECKING:
    from gpuboard.model.replies import Detail

Kind = Literal[
    "refused",
    "unreachable",
    "timeout",
    "resolve",
    "auth",
    "host-key",
    "no-job",
    "no-python",
    "exited",
    "lost",
    "limits",
]


class TransportError(GpuboardError):
    """A channel that could not be opened, or has ended.

    ``words``: what failed and why, ``remedy``: what to do next (may be empty).
    """

    def __init__(self, kind: Kind, words: str, remedy: str = "") -> None:
        super().__init__(f"{words}; {remedy}" if remedy else words)
        self.kind = kind
        self.words = words
        self.remedy = remedy


class LinkLost(GpuboardError):
    """A call without an answer: the connection was lost, the timeout expired, or the answer is malformed."""

    def __init__(self, node: str, words: str) -> None:
        super().__init__(f"{node}: {words}")
        self.node = node
        self.words = words


class CallFailed(GpuboardError):
    """The agent refused a call. ``kind`` is for programs, ``message`` for people; ``detail``: further data, if any."""

    def __init__(self, kind: str, message: str, detail: Detail | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.detail = detail


class Handler(Protocol):
    """Receives the events of a channel. Its methods run in the transport's thread and must not block or raise."""

    def connected(self) -> None:
        """Called when the start of the agent's process was requested: what is slow from now on is the node."""

    def received(self, data: bytes) -> None:
        """Called with bytes that the agent wrote."""

    def ended(self, error: TransportError) -> None:
        """Called exactly once when the channel has ended, for any reason but a ``close`` from this side."""


class Channel(Protocol):
    """An open (or still opening) connection to one agent."""

    def write(self, data: bytes) -> None:
        """Send bytes; what cannot be sent yet is queued. Never blocks, and does nothing after the end."""

    def close(self) -> None:
        """End the connection at once. Never blocks; the handler gets no more events."""


class Transport(Protocol):
    """A way to reach nodes."""

    def open(self, host: str, role: str, handler: Handler, command: str | None = None) -> Channel:
        """Start an agent for ``role`` on ``host``; return its channel at once, before it is connected.

        ``command``: a line for the user's login shell there, run in the agent's place; the bundle is not sent then.
        """

    def close(self) -> None:
        """End every channel at once and stop the transport's thread."""
