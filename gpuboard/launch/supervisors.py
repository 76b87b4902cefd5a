"""The supervisors of one run: one link per node; events and replies arrive as items of one queue."""

from __future__ import annotations

import base64
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.launch import events
from gpuboard.launch.events import LaunchEvent
from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.stalls.evidence import Inspection, RankEvidence
from gpuboard.launch.timing import DEFAULT_TIMING, HeadTiming
from gpuboard.model.reading import Event, Pushed
from gpuboard.model.replies import Done, Malformed
from gpuboard.transport.base import CallFailed, LinkLost, TransportError
from gpuboard.transport.connector import Connector
from gpuboard.transport.link import AgentLink, Pending

# characters of output not yet handled, above and below which the ranks are paused and resumed
_HOLD_ABOVE, _HOLD_BELOW = 8 * 2**20, 2**20
_EVENT_SIZE = 256  # bytes of an event beside its text: many short lines need memory too
_CONNECTING_S = 1.0  # seconds between looks at whether a node is connected

# docs/launch-protocol.md, "Calls"
SupervisorCall = Literal[
    "check",
    "listen",
    "probe-listen",
    "probe-connect",
    "spawn",
    "go",
    "hold",
    "signal",
    "stdin",
    "stop",
    "inspect",
    "py-spy",
    "pace",
    "ping",
]


class SupervisorEvent(msgspec.Struct, frozen=True):
    """An event from a supervisor."""

    node: str
    event: LaunchEvent


class CallReply(msgspec.Struct, frozen=True):
    """The reply to a call: a value of the type given with the call, or the error."""

    node: str
    op: SupervisorCall
    value: object


class SupervisorLost(msgspec.Struct, frozen=True):
    """The connection to a supervisor has ended."""

    node: str
    error: str


class SupervisorSeen(msgspec.Struct, frozen=True):
    """A look at a supervisor's process. ``found``: what it does, or why that is not known."""

    node: str
    pid: int
    found: RankEvidence | str


class Supervisors:
    """Starts one supervisor per node of the plan. All they send arrives on ``inbox``, in order for each node."""

    def __init__(
        self,
        plan: LaunchPlan,
        nodes: Mapping[str, Node],
        connector: Connector,
        inbox: queue.SimpleQueue[Any],
        timing: HeadTiming = DEFAULT_TIMING,
        *,
        backlog: Callable[[], int] = lambda: 0,
    ) -> None:
        """``nodes``: how to reach each node of the plan, by its name there. ``backlog`` returns the characters of
        output that were taken from ``inbox`` and are not yet written."""
        self._plan = plan
        self._nodes = nodes
        self._connector = connector
        self._inbox = inbox
        self._timing = timing
        self._backlog = backlog
        self._holding = False  # the ranks' output is paused
        self._queued = 0  # size of the output on the inbox
        self._queue_lock = threading.Lock()
        self._closed = threading.Event()
        self._links: dict[str, AgentLink] = {}
        self._unanswered: dict[str, int] = {}  # pings in a row without any line from the node
        self._ping: dict[str, tuple[float, Pending]] = {}  # the oldest ping without a reply, and when it was sent
        self._complete: dict[str, float] = {}  # when the newest ping with a reply was sent
        self._pinged = 0.0

    def open(self) -> None:
        """Start every supervisor without waiting for it, and ping each until ``close``."""
        for config in self._plan.nodes:
            self._links[config.node] = self._open(config.node, msgspec.to_builtins(config))
        threading.Thread(target=self._keep_pinging, name="pings", daemon=True).start()

    def sweep(self, node: str) -> None:
        """End what a lost supervisor may have left on ``node``; its NodeEnded or SupervisorLost follows.

        When guard and supervisor are killed together, processes without a death signal survive. A second supervisor
        of the run finds them by their GPUBOARD_RUN.
        """
        config = next(config for config in self._plan.nodes if config.node == node)
        self._unanswered[node] = 0
        self._links[node] = self._open(node, msgspec.to_builtins(config))
        self._links[node].submit("stop", {"grace_s": 0.0})

    def call(self, node: str, op: SupervisorCall, args: Mapping[str, Any], timeout_s: float, kind: type) -> None:
        """Call a supervisor; exactly one :class:`CallReply` follows on the inbox.

        ``timeout_s`` counts from the connection: until then its own timeout applies, and many nodes queue for it.
        """
        link = self._links[node]
        pending = link.submit(op, dict(args))

        def wait() -> None:
            value: object
            while link.connected_at is None and not pending.wait(_CONNECTING_S):
                pass
            pending.sent = max(pending.sent, link.connected_at or 0.0)
            try:
                value = pending.result(pending.sent + timeout_s - time.monotonic(), kind)
            except (CallFailed, LinkLost) as error:
                value = error
            self._inbox.put(CallReply(node, op, value))

        try:
            threading.Thread(target=wait, name=f"{op}-{node}", daemon=True).start()
        except RuntimeError as error:  # the user's limit of processes is reached: that must not end a run
            self._inbox.put(CallReply(node, op, CallFailed("no-thread", str(error))))

    def write_stdin(self, node: str, data: bytes) -> bool:
        """Send input to the rank of ``node`` that gets it, b"" for end-of-file; return whether it still reads.

        Blocks until the input is in the rank's pipe: one piece at a time is on its way.
        """
        args = {"data": base64.b64encode(data).decode(), "end": not data}
        try:
            self._links[node].submit("stdin", args).result(threading.TIMEOUT_MAX, Done)
        except (CallFailed, LinkLost):
            return False
        return True

    def call_all(self, op: SupervisorCall, args: Mapping[str, Any]) -> None:
        """Call every reachable supervisor and ignore the replies."""
        for link in self._links.values():
            if link.over is None:
                link.submit(op, dict(args))

    def handled(self, event: LaunchEvent) -> None:
        """Record that an event of the inbox was handled."""
        if isinstance(event, events.Output):
            self._count(-_size(event))

    def regulate(self) -> None:
        """Pause the ranks while too much of their output waits to be handled or written; resume them after that."""
        with self._queue_lock:
            backlog = max(self._queued, self._backlog())
            if backlog > _HOLD_ABOVE if not self._holding else backlog < _HOLD_BELOW:
                self._holding = not self._holding
                self.call_all("hold", {"on": self._holding})

    def silent(self) -> dict[str, float]:
        """Return for how long each reachable supervisor has sent nothing, as the number of pings since then says."""
        return {
            node: (self._unanswered.get(node, 1) - 1) * self._timing.ping_s
            for node, link in self._links.items()
            if self.reachable(node) and link.hello is not None
        }

    def reachable(self, node: str) -> bool:
        """Return whether the connection to a supervisor stands."""
        return self._links[node].over is None

    def look(self, node: str) -> None:
        """Look at a supervisor's process over a second connection; one :class:`SupervisorSeen` follows on the inbox."""
        there, hello = self._nodes[node], self._links[node].hello
        assert hello is not None
        pid = hello.pid
        link = self._connector.open(
            node, there.host, role="runs", config={}, listener=lambda _: None, ended=lambda _: None, job=there.job
        )
        pending = link.submit("inspect", {"ranks": [[0, pid]]})

        def wait() -> None:
            found: RankEvidence | str
            try:
                found = next(iter(pending.result(self._timing.look_s, Inspection).ranks), "it was not found")
            except (CallFailed, LinkLost) as error:
                found = str(error).removeprefix(f"{node}: ")
            link.close()
            self._inbox.put(SupervisorSeen(node, pid, found))

        try:
            threading.Thread(target=wait, name=f"look-{node}", daemon=True).start()
        except RuntimeError as error:
            link.close()
            self._inbox.put(SupervisorSeen(node, pid, str(error)))

    def complete_until(self) -> float:
        """Return the moment (monotonic) up to which the events of every reachable supervisor are on the inbox.

        A link keeps the order: with the reply to a ping, all that was sent before the ping has arrived. Without
        reachable supervisors: now.
        """
        times = [time.monotonic()]
        for node, link in self._links.items():
            if link.over is None and link.hello is not None:
                sent, pending = self._ping.get(node, (0.0, None))
                if pending is not None and pending.settled:
                    self._complete[node] = sent
                times.append(self._complete.get(node, 0.0))
        return min(times)

    def close(self) -> None:
        """Close every connection; the processes left on a node end with it."""
        self._closed.set()
        for link in self._links.values():
            link.close()

    def _keep_pinging(self) -> None:
        """Ping from a thread that touches no file: a file system that hangs must not cost the ranks their head."""
        while not self._closed.wait(self._timing.ping_s):
            self._ping_all()

    def _ping_all(self) -> None:
        """Ping every supervisor; those that have sent nothing for ``lost_head_s`` are lost.

        The limit counts pings, not time: while suspended this process sends none.
        """
        limit_s = self._plan.options.lost_head_s
        for node, link in list(self._links.items()):  # the main thread may add one
            if link.over is not None or link.hello is None:  # connecting has a timeout of its own
                continue
            if link.last_line >= self._pinged:
                self._unanswered[node] = 0
            self._unanswered[node] = self._unanswered.get(node, 0) + 1
            if limit_s is not None and self._unanswered[node] > limit_s / self._timing.ping_s + 1:
                # Not a report and then close(): the link may end in between, and a second report ends the sweep.
                link.drop(TransportError("lost", f"no response for {limit_s:.0f} s"))
            else:
                now, pending = time.monotonic(), link.submit("ping", {})
                if node not in self._ping or self._ping[node][1].settled:
                    self._ping[node] = now, pending
        self._pinged = time.monotonic()

    def _count(self, size: int) -> None:
        with self._queue_lock:
            self._queued += size
        self.regulate()

    def _open(self, node: str, config: dict[str, Any]) -> AgentLink:
        def listener(message: Pushed) -> None:
            if not isinstance(message, Event):
                return
            try:
                event = events.decode(message.kind, message.data)
            except Malformed as error:
                event = events.RunNotice(f"malformed event {message.kind}: {error}")
            if isinstance(event, events.Output):
                self._count(_size(event))
            if event is not None:
                self._inbox.put(SupervisorEvent(node, event))

        def ended(error: TransportError) -> None:
            self._inbox.put(SupervisorLost(node, str(error)))

        there = self._nodes[node]
        return self._connector.open(
            node, there.host, role="launch", config=config, listener=listener, ended=ended, job=there.job
        )


def _size(output: events.Output) -> int:
    return len(output.text) + len(output.data) + _EVENT_SIZE
