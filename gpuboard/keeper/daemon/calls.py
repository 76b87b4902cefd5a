"""The interface between the keeper and a ledger.

Operations, arguments → value of the answer:

    touch     leases → {alive, lapsed, claims, unread, words}: a heartbeat; which leases live, which expired; the UUIDs
              that each living lease has claims on, and why claims of a lease cannot be read (of nodes only); a
              scheduler's reason
    release   lease → {released}: UUIDs
    read      → a reading, with the processes on the lease's GPUs; {} where there is none
    carriers  lease → {processes}: the pids with the lease in their environment

Kinds of failure: ``lost`` (no answer), ``not-found`` (no such lease), others of the agent (docs/agent-protocol.md).
Claims on a node (``nodes``) and jobs of a scheduler (``jobs``) are the two kinds.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import queue


class NodeAnswer(NamedTuple):
    """The result of a call. ``kind`` is empty or the kind of failure, without a ``value`` (``lost``: not reached)."""

    value: Any
    kind: str = ""
    message: str = ""  # of a failure


Report = Callable[[NodeAnswer], None]
Call = tuple[str, dict[str, Any], Report]


class Calls(ABC):
    """Calls to one node, for all leases there, or to one job, executed one at a time by a thread of its own.

    ``name``: the node or the scheduler; ``every_s``: seconds between two heartbeats.
    """

    idle_s: float | None = None  # seconds without a call until :meth:`_disconnect`; None: never

    def __init__(self, name: str, every_s: float) -> None:
        self.name = name
        self.every_s = every_s
        self._queue: queue.SimpleQueue[Call | None] | None = None

    def call(self, op: str, args: dict[str, Any], report: Report) -> None:
        """Queue a call; the thread calls ``report`` with the answer. Never raises."""
        if self._queue is None:
            import queue  # late, as threads start late: most keepers have leases of this host only

            calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
            try:
                threading.Thread(target=self._serve, args=(calls,), name=self.name, daemon=True).start()
            except RuntimeError as error:  # the user's limit of processes: the next call tries again
                report(NodeAnswer(None, "lost", str(error)))
                return
            self._queue = calls
        self._queue.put((op, args, report))

    def close(self) -> None:
        """Close the connection once the queued calls are answered."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    @abstractmethod
    def _answer(self, op: str, args: dict[str, Any]) -> NodeAnswer:
        """Return the answer to a call. Never raises."""

    def _disconnect(self) -> None:  # noqa: B027 (most have nothing to close)
        """Close the connection; the next call opens it again."""

    def _serve(self, calls: queue.SimpleQueue[Call | None]) -> None:
        import queue

        while True:
            try:
                call = calls.get(timeout=self.idle_s)
            except queue.Empty:
                self._disconnect()
                call = calls.get()
            if call is None:
                self._disconnect()
                return
            op, args, report = call
            report(self._answer(op, args))
