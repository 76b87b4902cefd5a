"""The head's part of watching a run: inspections that are due, the verdict that stands, explanations on request."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.launch import events
from gpuboard.launch.failure import FailureWatch
from gpuboard.launch.runs.folder import VerdictView
from gpuboard.launch.stalls.differences import silent_difference
from gpuboard.launch.stalls.evidence import Inspection, store_of
from gpuboard.launch.stalls.inspect import Inspections
from gpuboard.launch.stalls.verdict import Explanation, elsewhere, explain
from gpuboard.launch.stalls.watch import StallReport, StallWatch
from gpuboard.launch.supervisors import CallReply, Supervisors
from gpuboard.model.units import iso

_KEPT = 100  # files with the evidence of stalls in one run's folder


class ExplainRequest(msgspec.Struct, frozen=True):
    """A request for what the ranks are doing now; the explanation is put into ``reply``."""

    reply: queue.SimpleQueue[Explanation]


class StallFollower:
    """``keep`` stores a file in the run's folder, ``notify`` prints a message."""

    def __init__(
        self,
        supervisors: Supervisors,
        nodes: Mapping[str, Node],
        ranks: FailureWatch,
        *,
        on_gpus: bool,
        keep: Callable[[str, object], object],
        notify: Callable[[str], None],
        kept: int = 0,
    ) -> None:
        """``kept``: how many files earlier attempts of the run have kept."""
        self.verdict: VerdictView | None = None  # the one that stands
        self._ranks = ranks
        self._watch = StallWatch(on_gpus=on_gpus)
        self._inspections = Inspections(supervisors, nodes)
        self._begun = 0.0  # when the newest inspection was started, monotonic
        self._identity: object = None  # of the verdict that stands
        self._count = kept
        self._leaving: list[events.Leaving] = []
        self._requests: list[ExplainRequest] = []
        self._keep = keep
        self._notify = notify

    def quiet(self, event: events.Quiet, now: float) -> None:
        """Record that a rank has been quiet for some time, or is active again."""
        self._watch.quiet(event.rank, event.quiet_s, event.load, now)

    def ended(self, rank: int, now: float) -> None:
        """Record the end of a rank."""
        self._watch.ended(rank, now)

    def left(self, event: events.Leaving) -> None:
        """Record what a rank called until its end."""
        self._leaving.append(event)

    def terminated(self) -> None:
        """Record that the ranks were sent SIGTERM."""
        self._watch.ending = True

    def succeeded(self) -> None:
        """Print a difference that no rank noticed, now that all have ended."""
        labels = {rank: f"rank {rank} ({view.node}:{view.index})" for rank, view in self._ranks.ranks.items()}
        if (message := silent_difference(self._leaving, labels)) is not None:
            self._notify(message)

    @property
    def stalled(self) -> bool:
        """Whether the verdict that stands is about a stall, and not about ranks that compute for long."""
        return self.verdict is not None and self.verdict.kind != "slow"

    def tick(self, now: float) -> bool:
        """Inspect if that is due, print what is new; return whether the verdict has changed."""
        if self._watch.due(now):
            self._inspect()
        for line in self._watch.messages:
            self._notify(line)
        self._watch.messages.clear()
        report = self._watch.report
        identity = None if report is None else report.identity
        if identity == self._identity:
            return False
        self._identity = identity
        self.verdict = None if report is None else self._new_verdict(report, now)
        return True

    def compare(self) -> None:
        """Read the newest collectives of the ranks that are still there, since another one has failed."""
        self._inspect()

    def explain(self, request: ExplainRequest) -> None:
        """Answer a request when all nodes have replied."""
        self._requests.append(request)
        if not self._inspect():
            self._answer([], time.monotonic(), judge=False)

    def take(self, reply: CallReply, now: float, *, judge: bool) -> None:
        """Process a node's reply to a call; ``judge``: the run has started and is not being stopped."""
        if reply.op != "inspect":
            return  # py-spy: the next inspection shows whether it works
        found = self._inspections.take(reply)
        if found is not None:
            self._answer(found, now, judge=judge)

    def _answer(self, found: Sequence[Inspection], now: float, *, judge: bool) -> None:
        self._ranks.comparing = False
        statuses = self._ranks.statuses(self._watch.quiet_s, now)
        if judge:
            self._watch.inspected(statuses, found, now, self._begun)
        evidence = {one.rank: one for inspection in found for one in inspection.ranks}
        self._ranks.note_collectives(evidence.values())
        if self._ranks.cause is None and not self._ranks.all_well:
            self._ranks.elsewhere = elsewhere(statuses, evidence)
        for request in self._requests:
            request.reply.put(explain(statuses, evidence, store_of(found)))
        self._requests.clear()

    def _inspect(self) -> bool:
        """Start an inspection of all ranks unless one is in progress; return whether one is."""
        nodes = self._ranks.running_nodes
        if nodes and not self._inspections.running:
            self._ranks.comparing = True
            self._begun = time.monotonic()
            self._inspections.start(nodes)
        return self._inspections.running

    def _new_verdict(self, report: StallReport, now: float) -> VerdictView:
        """Return the verdict on a stall; its evidence is kept in the run's folder."""
        stall = report.stall
        verdict = VerdictView(
            iso(time.time()),
            "slow" if report.computes else stall.kind,
            stall.ranks[0] if len(stall.ranks) == 1 else None,
            stall.node,
            report.text(now),
            "\n".join([*report.picture, *([f"→ {stall.remedy}"] if stall.remedy else [])]),
            report.groups,
        )
        self._count += 1
        if self._count <= _KEPT:
            self._keep(f"stall-{self._count}.json", {"schema": 1, "verdict": verdict, "ranks": report.evidence})
        return verdict
