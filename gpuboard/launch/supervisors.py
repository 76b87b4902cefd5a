"""The supervisors of one run: a link to each, calls whose answers come back as items of one queue."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.launch import events
from gpuboard.launch.events import LaunchEvent
from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.timing import DEFAULT_TIMING, HeadTiming
from gpuboard.model.reading import Event, Hello, Reading, Static
from gpuboard.model.replies import Malformed
from gpuboard.transport.base import CallFailed, LinkLost, TransportError
from gpuboard.transport.connector import Connector
from gpuboard.transport.link import AgentLink, Pending

# docs/launch-protocol.md, "Calls"
SupervisorCall = Literal[
    "check", "listen", "probe-listen", "probe-connect", "spawn", "go", "hold", "signal", "stop", "processes", "ping"
]


class Heard(msgspec.Struct, frozen=True):
    """An event of a supervisor."""

    node: str
    event: LaunchEvent


class CallAnswer(msgspec.Struct, frozen=True):
    """The answer to a call, of the kind that was asked for, or why there is none."""

    node: str
    op: SupervisorCall
    value: object


class Lost(msgspec.Struct, frozen=True):
    """A supervisor's connection is over."""

    node: str
    words: str


class Crew:
    """Opens one supervisor a node of the plan. Everything they say arrives on ``inbox``, in order for each node."""

    def __init__(
        self,
        plan: LaunchPlan,
        nodes: Mapping[str, Node],
        connector: Connector,
        inbox: queue.SimpleQueue[Any],
        timing: HeadTiming = DEFAULT_TIMING,
    ) -> None:
        """``nodes``: how to reach each node of the plan, by its name there."""
        self._plan = plan
        self._nodes = nodes
        self._connector = connector
        self._inbox = inbox
        self._timing = timing
        self._links: dict[str, AgentLink] = {}
        self._unanswered: dict[str, int] = {}
        self._asked: dict[str, tuple[float, Pending]] = {}  # the ping that is on its way to a node, and since when
        self._heard: dict[str, float] = {}  # when the last one was sent that was answered
        self._pinged = 0.0

    def open(self) -> None:
        """Start every supervisor; returns at once."""
        for config in self._plan.nodes:
            self._links[config.node] = self._open(config.node, msgspec.to_builtins(config))

    def sweep(self, node: str) -> None:
        """Empty a node whose supervisor is out of reach; an Ended or Lost of the node follows.

        Killed at the same time, guard and supervisor leave those behind that the ranks' death signals do not reach.
        Another supervisor of the run knows them by their GPUBOARD_RUN.
        """
        config = next(config for config in self._plan.nodes if config.node == node)
        self._unanswered[node] = 0
        self._links[node] = self._open(node, msgspec.to_builtins(config))
        self._links[node].submit("stop", {"grace_s": 0.0})

    def ask(self, node: str, op: SupervisorCall, args: Mapping[str, Any], timeout_s: float, kind: type) -> None:
        """Call a supervisor; an :class:`CallAnswer` follows on the inbox whatever happens."""
        pending = self._links[node].submit(op, dict(args))

        def wait() -> None:
            value: object
            try:
                value = pending.result(timeout_s, kind)
            except (CallFailed, LinkLost) as error:
                value = error
            self._inbox.put(CallAnswer(node, op, value))

        threading.Thread(target=wait, name=f"{op}-{node}", daemon=True).start()

    def tell(self, op: SupervisorCall, args: Mapping[str, Any]) -> None:
        """Call every supervisor that still can be reached, without caring for the answers."""
        for link in self._links.values():
            if link.over is None:
                link.submit(op, dict(args))

    def ping(self) -> list[str]:
        """Say to every supervisor that we are there; return those that have said nothing for ``lost_head_s``.

        To be called every ``ping_s``. Counted in pings, not in time: while we are stopped (ctrl-Z) nobody could answer.
        """
        limit_s = self._plan.options.lost_head_s
        silent = []
        for node, link in self._links.items():
            if link.over is not None or link.hello is None:  # a connection that is being made has its own limit
                continue
            if link.last_line >= self._pinged:
                self._unanswered[node] = 0
            self._unanswered[node] = self._unanswered.get(node, 0) + 1
            if limit_s is not None and self._unanswered[node] > limit_s / self._timing.ping_s + 1:
                silent.append(node)
                link.close()
            else:
                now, asked = time.monotonic(), link.submit("ping", {})
                if node not in self._asked or self._asked[node][1].settled:
                    self._asked[node] = now, asked
        self._pinged = time.monotonic()
        return silent

    def heard_to(self) -> float:
        """Return until when (monotonic) every supervisor that can be reached has said all: it is on the inbox by now.

        Each says things in order, so all that came before its answer to a ping was said before. Now where nobody is.
        """
        heard = [time.monotonic()]
        for node, link in self._links.items():
            if link.over is None and link.hello is not None:
                sent, asked = self._asked.get(node, (0.0, None))
                if asked is not None and asked.settled:
                    self._heard[node] = sent
                heard.append(self._heard.get(node, 0.0))
        return min(heard)

    def close(self) -> None:
        """End every connection: what is left on a node ends with it."""
        for link in self._links.values():
            link.close()

    def _open(self, node: str, config: dict[str, Any]) -> AgentLink:
        def listener(message: Hello | Static | Reading | Event) -> None:
            if not isinstance(message, Event):
                return
            try:
                event = events.decode(message.kind, message.data)
            except Malformed as error:
                event = events.RunNotice(f"malformed event {message.kind}: {error}")
            if event is not None:
                self._inbox.put(Heard(node, event))

        def ended(error: TransportError) -> None:
            self._inbox.put(Lost(node, str(error)))

        there = self._nodes[node]
        return self._connector.open(
            node, there.host, role="launch", config=config, listener=listener, ended=ended, job=there.job
        )
