"""The scheduler's data on each node in scope, rebuilt only when its answer or the node's GPUs have changed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from gpuboard.cluster.snapshot import scheduler_jobs
from gpuboard.cluster.snapshot.views import NodeFacts, Scheduled, in_order
from gpuboard.model.gpu import GpuReading
from gpuboard.model.late import base_of
from gpuboard.model.schedule import Schedule, SchedulerNode, Seen
from gpuboard.model.state import Ruling
from gpuboard.model.text import clean
from gpuboard.model.units import day_time


class _Joined(msgspec.Struct, frozen=True, gc=False):
    """What was built for one node, and from what."""

    known: object
    hello: object
    gpus: object  # their processes are the evidence where the scheduler's answer is not sure
    scheduled: Scheduled
    sure: bool

    def holds(self, facts: NodeFacts) -> bool:
        """Return whether it would be built alike again."""
        alike = self.sure or (self.hello is facts.hello and self.gpus is _base(facts))
        return alike and self.known is facts.known


class Join:
    """Joins one scheduler's answers with the nodes of a fleet. For one thread at a time."""

    def __init__(self) -> None:
        self._schedule: Schedule | None = None
        self._held: dict[str, list[scheduler_jobs.Held]] = {}
        self._names: dict[str, str] = {}
        self._aliases: dict[str, str] = {}  # by a node's name: the host name that ssh resolves it to
        self._error: str | None = None
        self._queried = 0.0
        self._jobs: frozenset[int] = frozenset()
        self._memo: dict[str, _Joined] = {}
        self._unknown: dict[str, object] = {}  # nodes unknown to it, with the hello they were looked up by

    def take(self, seen: Seen, now: float, at: float) -> None:
        """Set what is known of the scheduler; ``now``: monotonic, ``at``: epoch seconds."""
        schedule = seen.schedule
        error = None
        if not seen.current(now):
            since = f" since {day_time(at - (now - seen.arrived))}" if schedule is not None else ""
            error = f"no answer{since}: {clean(seen.error or 'not queried yet', 300)}"
        if schedule is self._schedule and error == self._error:
            return
        if schedule is not self._schedule and schedule is not None:
            self._held = scheduler_jobs.by_node(schedule)
            self._names = scheduler_jobs.names(schedule)
            self._queried = seen.arrived
            self._jobs = scheduler_jobs.numbers(schedule)
        self._schedule, self._error = schedule, error
        self._memo.clear()
        self._unknown.clear()

    def alias(self, name: str, alias: str) -> None:
        """Set the host name that ssh resolves a node's name to."""
        if self._aliases.get(name) != alias:
            self._aliases[name] = alias
            self._unknown.pop(name, None)

    def node(self, facts: NodeFacts) -> SchedulerNode | None:
        """Return the scheduler's node, found by its name, its own hostname or its alias; None where it is unknown."""
        if self._schedule is None:
            return None
        hello = facts.hello
        more = [*([hello.hostname] if hello else []), *filter(None, [self._aliases.get(facts.name)])]
        found = scheduler_jobs.known_as(self._names, facts.name, *more)
        return None if found is None else self._schedule.nodes[found]

    def of(self, facts: NodeFacts) -> Scheduled | None:
        """Return the scheduler's data on a node; None when the node is unknown to it."""
        joined = self._memo.get(facts.name)
        if joined is not None and joined.holds(facts):
            return joined.scheduled
        if joined is None and self._unknown.get(facts.name, self) is facts.hello:
            return None
        joined = self._build(facts)
        if joined is None:
            self._unknown[facts.name] = facts.hello
            return None
        self._memo[facts.name] = joined
        return joined.scheduled

    def _build(self, facts: NodeFacts) -> _Joined | None:
        if self._schedule is None:
            return _Joined(facts.known, None, None, Scheduled(error=self._error), sure=True)
        hello = facts.hello
        node = self.node(facts)
        if node is None:
            return None
        gpus = in_order(facts)
        unseen = not gpus
        held = self._held.get(node.name, [])
        shown = scheduler_jobs.alone(node) if unseen else []
        if not unseen and hello and hello.job:
            shown = scheduler_jobs.whole(node, gpus, held, hello.job)
        gpus = shown or gpus
        ruled = scheduler_jobs.rule(node, held, gpus, {} if unseen else _evidence(facts))
        rulings = ruled.gpus if self._error is None else _aged(ruled.gpus, self._schedule.at)
        doubt = scheduler_jobs.node_words(node)[1]
        sure = self._error is None and not doubt and not any(r.hidden or r.doubt for r in ruled.gpus.values())
        scheduled = Scheduled(
            state=clean(node.state, 96),
            reason=clean(node.reason, 300),
            reservation=clean(node.reservation, 96),
            gpus=rulings,
            shown=shown,
            doubt=doubt,
            error=self._error,
            asked=self._queried,
            jobs=self._jobs if sure else None,
        )
        return _Joined(facts.known, hello, _base(facts), scheduled, ruled.sure)


def _base(facts: NodeFacts) -> Sequence[GpuReading]:
    """Return the GPUs of the newest reading; the same object while only their numbers change."""
    return base_of(facts.reading.gpus) if facts.reading is not None else ()


def _evidence(facts: NodeFacts) -> dict[str, set[str]]:
    """Return the numbers of the jobs whose processes run on each GPU."""
    found: dict[str, set[str]] = {}
    for gpu in _base(facts):
        for uuid, processes in [(gpu.uuid, gpu.processes), *((part.uuid, part.processes) for part in gpu.mig)]:
            if numbers := {process.job for process in processes or [] if process.job}:
                found[uuid] = numbers
    return found


def _aged(rulings: dict[str, Ruling], at: float) -> dict[str, Ruling]:
    """Return what an old answer still proves: who held which GPU. A GPU that was free then may be held by now."""
    note = f"as of {day_time(at)}"
    return {
        uuid: replace(ruling, note="; ".join(filter(None, (ruling.note, note))))
        for uuid, ruling in rulings.items()
        if ruling.jobs or ruling.hidden
    }
