"""The seam between the keeper and a ledger: heartbeat (``touch``), look (``read``, ``carriers``), end (``release``).

Claims on a node (:mod:`gpuboard.keeper.nodes`) and jobs of a scheduler (:mod:`gpuboard.keeper.jobs`) are the two kinds.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import queue


class NodeAnswer(NamedTuple):
    """The answer to a call: ``kind`` is empty, or why there is no ``value`` (``lost``: it was not reached)."""

    value: Any
    kind: str = ""
    words: str = ""


Report = Callable[[NodeAnswer], None]
Call = tuple[str, dict[str, Any], Report]


class Calls(ABC):
    """Calls to one node or job, answered one at a time by a thread that starts with the first.

    ``name`` is the node's, or the scheduler's; ``every_s``: seconds between two heartbeats.
    """

    idle_s: float | None = None  # after so long without a call :meth:`_let_go` is called

    def __init__(self, name: str, every_s: float) -> None:
        self.name = name
        self.every_s = every_s
        self._queue: queue.SimpleQueue[Call | None] | None = None

    def call(self, op: str, args: dict[str, Any], report: Report) -> None:
        """Ask; ``report`` is called with the answer, from the thread. Never raises."""
        if self._queue is None:
            import queue  # late, as threads: most keepers keep leases of this host only

            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._queue,), name=self.name, daemon=True).start()
        self._queue.put((op, args, report))

    def close(self) -> None:
        """Close the connection once the calls that wait are answered."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    @abstractmethod
    def _answer(self, op: str, args: dict[str, Any]) -> NodeAnswer:
        """Return the answer to a call. Never raises."""

    def _let_go(self) -> None:  # noqa: B027 (most have nothing to close)
        """Close what was opened for calls; the next call opens it again."""

    def _serve(self, calls: queue.SimpleQueue[Call | None]) -> None:
        import queue

        while True:
            try:
                call = calls.get(timeout=self.idle_s)
            except queue.Empty:
                self._let_go()
                call = calls.get()
            if call is None:
                self._let_go()
                return
            op, args, report = call
            report(self._answer(op, args))
