"""The preflight calls to every node, and their replies so far."""

from __future__ import annotations

from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.preflight.checks import Answers, Failure
from gpuboard.launch.preflight.interfaces import preferred
from gpuboard.launch.preflight.pairs import peers
from gpuboard.launch.supervisors import CallReply, SupervisorCall, Supervisors
from gpuboard.launch.timing import DEFAULT_TIMING, HeadTiming
from gpuboard.model.replies import LaunchFacts, Listening, Ports, Probed, ProbeResult, RanksStarted
from gpuboard.model.snapshot import Snapshot
from gpuboard.transport.base import CallFailed, LinkLost

_NAMED = 5  # nodes that a message lists
_PORTS = 2  # random high ports that each node opens for the others to connect to


class PreflightCalls:
    """Two steps, each to be awaited: ``start`` (``started``), ``probe_connect`` (``probed``).

    Pass every reply to ``take``.
    """

    def __init__(self, plan: LaunchPlan, supervisors: Supervisors, timing: HeadTiming = DEFAULT_TIMING) -> None:
        self._plan = plan
        self._supervisors = supervisors
        self._timing = timing
        self._nodes = [config.node for config in plan.nodes]
        self._first = plan.nodes[0]
        self._ranks = not plan.options.preflight_only
        self._replies: dict[tuple[str, str], object] = {}  # (node, call) → value or error
        self._facts: dict[str, LaunchFacts] = {}
        self.failures: dict[str, Failure] = {}
        self.snapshot: Snapshot | None = None

    def start(self) -> None:
        """Start store and ranks, collect each node's facts, and open random high ports for the others.

        The ranks, none with --preflight-only, import torch during all further checks.
        """
        port, start_s = self._plan.rank_map.master_port, self._timing.start_s
        self._supervisors.call(
            self._first.node, "listen", {"host": self._first.master_addr, "port": port}, start_s, Listening
        )
        for node in self._nodes:
            if self._ranks:
                self._supervisors.call(node, "spawn", {}, start_s, RanksStarted)
            if len(self._nodes) > 1:
                self._supervisors.call(node, "probe-listen", {"count": _PORTS}, start_s, Ports)
            self._supervisors.call(node, "check", {}, start_s, LaunchFacts)

    def probe_connect(self) -> None:
        """Connect from every node to those ports of its peers, and to the master port of the first node."""
        addresses = {node.name: node.address for node in self._plan.rank_map.nodes}
        for node, others in peers(self._nodes, self._plan.run).items():
            targets = [
                {"node": peer, "address": address, "port": port}
                for peer in others
                for address in (addresses[peer], *preferred(self._facts.get(peer), addresses[peer]))
                for port in self._ports(peer)
            ]
            port = self.port
            if node != self._first.node and port is not None:
                targets.insert(0, {"node": self._first.node, "address": self._first.master_addr, "port": port})
            self._supervisors.call(
                node,
                "probe-connect",
                {"targets": targets, "timeout_s": self._timing.connect_s},
                self._timing.probe_s,
                Probed,
            )

    def take(self, reply: CallReply) -> None:
        """Record a reply."""
        value = reply.value
        self._replies[reply.node, reply.op] = value
        if isinstance(value, (CallFailed, LinkLost)):
            if reply.op != "listen":  # which has a check of its own, "master port"
                self.failures.setdefault(reply.node, failure(value))
        elif isinstance(value, LaunchFacts):
            self._facts[reply.node] = value

    def lost(self, node: str, error: str) -> None:
        """Record that the connection to a node is lost."""
        self.failures.setdefault(node, Failure("connection", error))

    def started(self) -> bool:
        """Whether every node has replied or failed."""
        listening = len(self._nodes) == 1 or self._all("probe-listen")
        spawned = not self._ranks or self._all("spawn")
        return spawned and listening and self._all("check") and self._has(self._first.node, "listen")

    def waiting_for(self) -> str:
        """Return the nodes that have neither replied nor failed, as text."""
        calls: list[SupervisorCall] = ["check", "spawn"] if self._ranks else ["check"]
        missing = [node for node in self._nodes if not all(self._has(node, op) for op in calls)] or [self._first.node]
        return ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more nodes" if missing[_NAMED:] else "")

    def probed(self) -> bool:
        """Whether every node has tried all connections or failed."""
        return self._all("probe-connect")

    @property
    def port(self) -> int | None:
        """The master port; None while it is not bound."""
        bound = self._replies.get((self._first.node, "listen"))
        return bound.port if isinstance(bound, Listening) else None

    def collect(self) -> Answers:
        """Return all replies so far."""
        probes: dict[str, list[ProbeResult]] = {}
        for node in self._nodes:
            tried = self._replies.get((node, "probe-connect"))
            probes[node] = tried.results if isinstance(tried, Probed) else []
        listen = self._replies.get((self._first.node, "listen"))
        refused = failure(listen) if isinstance(listen, (CallFailed, LinkLost)) else None
        return Answers(self._facts, self.failures, refused, probes, self.snapshot)

    def _all(self, op: SupervisorCall) -> bool:
        return all(self._has(node, op) for node in self._nodes)

    def _has(self, node: str, op: SupervisorCall) -> bool:
        return (node, op) in self._replies or node in self.failures

    def _ports(self, node: str) -> list[int]:
        opened = self._replies.get((node, "probe-listen"))
        return opened.ports[:_PORTS] if isinstance(opened, Ports) else []


def failure(error: CallFailed | LinkLost) -> Failure:
    """Return a refused call, or one without a reply, as a Failure."""
    if isinstance(error, LinkLost):
        return Failure("connection", error.words)
    return Failure(error.kind, error.message, (error.detail.holder or "") if error.detail else "")
