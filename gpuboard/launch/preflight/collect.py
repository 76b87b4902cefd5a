"""What the head asks every node before the gate opens, and the answers as far as they have come."""

from __future__ import annotations

from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.preflight.checks import Answers, Failure
from gpuboard.launch.supervisors import CallAnswer, Crew, SupervisorCall
from gpuboard.launch.timing import DEFAULT_TIMING, HeadTiming
from gpuboard.model.replies import LaunchFacts, Listening, Ports, Probed, ProbeResult, RanksStarted
from gpuboard.model.snapshot import Snapshot
from gpuboard.transport.base import CallFailed, LinkLost

_PORTS = 2  # that every node opens for the others to try
_PEERS = 16  # nodes that a node tries to reach: all of a small run, a ring of neighbours in a large one


class PreflightQuestions:
    """Asks in three steps; ``take`` every answer, then go on when ``started``, ``listening`` and ``probed`` say so."""

    def __init__(self, plan: LaunchPlan, crew: Crew, timing: HeadTiming = DEFAULT_TIMING) -> None:
        self._plan = plan
        self._crew = crew
        self._timing = timing
        self._nodes = [config.node for config in plan.nodes]
        self._first = plan.nodes[0]
        self._answers: dict[tuple[str, str], object] = {}
        self._facts: dict[str, LaunchFacts] = {}
        self.failures: dict[str, Failure] = {}
        self.snapshot: Snapshot | None = None

    def start(self) -> None:
        """Start store and ranks, and ask what a node is like; the ranks' import of torch overlaps all that follows."""
        port, start_s = self._plan.rank_map.master_port, self._timing.start_s
        self._crew.ask(self._first.node, "listen", {"host": self._first.master_addr, "port": port}, start_s, Listening)
        for node in self._nodes:
            self._crew.ask(node, "spawn", {}, start_s, RanksStarted)
            self._crew.ask(node, "check", {}, start_s, LaunchFacts)

    def probe_listen(self) -> None:
        """Let every node open high ports for the others to try."""
        for node in self._nodes:
            self._crew.ask(node, "probe-listen", {"count": _PORTS}, self._timing.probe_s, Ports)

    def probe_connect(self) -> None:
        """Let every node try to reach the others on those, and the first one on the master port."""
        addresses = {node.name: node.address for node in self._plan.rank_map.nodes}
        count = len(self._nodes)
        for at, node in enumerate(self._nodes):
            peers = [self._nodes[(at + step) % count] for step in range(1, min(count, _PEERS + 1))]
            targets = [
                {"node": peer, "address": addresses[peer], "port": port} for peer in peers for port in self._ports(peer)
            ]
            port = self.port
            if node != self._first.node and port is not None:
                targets.insert(0, {"node": self._first.node, "address": self._first.master_addr, "port": port})
            self._crew.ask(
                node,
                "probe-connect",
                {"targets": targets, "timeout_s": self._timing.connect_s},
                self._timing.probe_s,
                Probed,
            )

    def take(self, answer: CallAnswer) -> None:
        """Take an answer in."""
        value = answer.value
        self._answers[answer.node, answer.op] = value
        if isinstance(value, (CallFailed, LinkLost)):
            if answer.op != "listen":  # which has its own check: the port's holder, the addresses there are
                self.failures.setdefault(answer.node, failure(value))
        elif isinstance(value, LaunchFacts):
            self._facts[answer.node] = value

    def lost(self, node: str, words: str) -> None:
        """Take in that the connection to a node is gone."""
        self.failures.setdefault(node, Failure("connection", words))

    def started(self) -> bool:
        """Whether every node has answered, or failed."""
        return self._all("spawn") and self._all("check") and self._has(self._first.node, "listen")

    def listening(self) -> bool:
        """Whether every node has opened its ports, or failed."""
        return self._all("probe-listen")

    def probed(self) -> bool:
        """Whether every node has tried all, or failed."""
        return self._all("probe-connect")

    @property
    def port(self) -> int | None:
        """The master port; None when it is not bound."""
        bound = self._answers.get((self._first.node, "listen"))
        return bound.port if isinstance(bound, Listening) else None

    def collect(self) -> Answers:
        """Return all that is known by now."""
        probes: dict[str, list[ProbeResult]] = {}
        for node in self._nodes:
            tried = self._answers.get((node, "probe-connect"))
            probes[node] = tried.results if isinstance(tried, Probed) else []
        listen = self._answers.get((self._first.node, "listen"))
        refused = failure(listen) if isinstance(listen, (CallFailed, LinkLost)) else None
        return Answers(self._facts, self.failures, refused, probes, self.snapshot)

    def _all(self, op: SupervisorCall) -> bool:
        return all(self._has(node, op) for node in self._nodes)

    def _has(self, node: str, op: SupervisorCall) -> bool:
        return (node, op) in self._answers or node in self.failures

    def _ports(self, node: str) -> list[int]:
        """Return the ports that a node has opened, no more than it was asked for."""
        opened = self._answers.get((node, "probe-listen"))
        return opened.ports[:_PORTS] if isinstance(opened, Ports) else []


def failure(error: CallFailed | LinkLost) -> Failure:
    """Return a refused or unanswered call as preflight takes it."""
    if isinstance(error, LinkLost):
        return Failure("connection", str(error))
    return Failure(error.kind, error.message, (error.detail.holder or "") if error.detail else "")
