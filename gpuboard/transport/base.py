"""The seam between gpuboard and the wire: how bytes reach the agent on a node, and how that can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gpuboard.errors import GpuboardError

if TYPE_CHECKING:
    from gpuboard.model.replies import Detail

KINDS = (
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
)


class TransportError(GpuboardError):
    """A channel that could not be opened, or has ended. ``kind`` is one of KINDS; ``remedy`` says what to do next."""

    def __init__(self, kind: str, words: str, remedy: str = "") -> None:
        super().__init__(f"{words}; {remedy}" if remedy else words)
        self.kind = kind
        self.words = words
        self.remedy = remedy


class LinkLost(GpuboardError):
    """A call without an answer: the connection is gone, the time is up, or what came is malformed."""

    def __init__(self, node: str, words: str) -> None:
        super().__init__(f"{node}: {words}")
        self.node = node
        self.words = words


class CallFailed(GpuboardError):
    """The agent says no. ``kind`` is for programs, ``message`` for people; ``detail``: what more it gives, if any."""

    def __init__(self, kind: str, message: str, detail: Detail | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.detail = detail


class Handler(Protocol):
    """Who listens to a channel. Its methods are called in the transport's thread and must not block or raise."""

    def connected(self) -> None:
        """Take note that the agent's process has been asked for: from now on it is the node that is waited for."""

    def received(self, data: bytes) -> None:
        """Take bytes that the agent wrote."""

    def ended(self, error: TransportError) -> None:
        """Take note that the channel is over, for whatever reason; called exactly once, unless we closed it."""


class Channel(Protocol):
    """An open (or still opening) connection to one agent."""

    def write(self, data: bytes) -> None:
        """Send bytes; what cannot go out yet is kept. Never blocks, and does nothing after the end."""

    def close(self) -> None:
        """End the connection at once. Never blocks; the handler hears nothing more."""


class Transport(Protocol):
    """A way to reach nodes."""

    def open(self, host: str, role: str, handler: Handler, command: str | None = None) -> Channel:
        """Start an agent for ``role`` on ``host`` and return the channel to it at once, before it is connected.

        With ``command``, a line for the user's login shell there, that is started in the agent's place, and nothing is
        sent ahead of what its caller writes.
        """

    def close(self) -> None:
        """End every channel at once and stop the transport's thread."""
