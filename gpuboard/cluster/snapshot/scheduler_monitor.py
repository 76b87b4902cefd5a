"""A fleet's view of the scheduler: what it says of the nodes in scope, and which of them may be connected to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.inventory.ssh_aliases import Aliases
from gpuboard.cluster.snapshot.scheduler_join import Join
from gpuboard.cluster.snapshot.views import NodeFacts, Scheduled
from gpuboard.config import Settings
from gpuboard.model.schedule import Schedule, SchedulerNode
from gpuboard.model.snapshot import SchedulerView
from gpuboard.model.text import clean
from gpuboard.scheduler.base import Scheduler

_NOTES = 20  # shown of what an answer leaves open


class Permitted(NamedTuple):
    """In which ways a node may be reached."""

    ssh: bool = True
    jobs: Sequence[str] = ()  # of ours, that hold GPUs there
    visits: Sequence[str] = ()  # of ours, that run there without GPUs: they open ssh; a step of theirs may see none
    known_as: str = ""  # its name for the scheduler, which steps of these jobs are asked for by


Ways = Callable[[Node, NodeFacts], Permitted]


class SchedulerMonitor:
    """Asks the scheduler, joins its answers with the nodes, and says which nodes may be reached in which way.

    The setting ``ssh`` "own": ssh goes only to those of its nodes where we have a job. ``permit`` is called after
    every answer, from another thread, with what tells a node's ways.
    """

    def __init__(self, scheduler: Scheduler, settings: Settings, permit: Callable[[Ways], None]) -> None:
        self.answered = False  # whether the scheduler has been heard, or has failed, once
        self._scheduler = scheduler
        self._ssh = settings.ssh
        self._permit = permit
        self._aliases = Aliases(settings)  # for the thread that permits
        self._lock = threading.Lock()
        self._join = Join()
        self._own: tuple[Schedule, dict[str, list[str]]] | None = None  # our jobs by Slurm's node name

    def start(self, *, once: bool) -> None:
        """Ask; returns at once. ``once``: a single time, else again and again until closed."""
        if self._ssh == "all":
            self._permit(lambda node, facts: Permitted())
        if once:
            threading.Thread(target=self._look, name="scheduler", daemon=True).start()
        else:
            self._scheduler.start(self._changed)

    def of(self, nodes: Sequence[NodeFacts], now: float, at: float) -> dict[str, Scheduled]:
        """Return what the scheduler says of ``nodes``, by name; those it does not know are left out."""
        with self._lock:
            if not self.answered:
                return {}
            self._join.take(self._scheduler.seen, now, at)
            return {facts.name: found for facts in nodes if (found := self._join.of(facts)) is not None}

    @property
    def schedule(self) -> Schedule | None:
        """The newest answer, however old."""
        return self._scheduler.seen.schedule

    def known_as(self, facts: NodeFacts) -> str | None:
        """Return the scheduler's name for a node; None when it does not know it."""
        with self._lock:
            node = self._join.node(facts)
        return None if node is None else node.name

    def view(self, now: float) -> SchedulerView:
        """Return how current its answers are."""
        seen = self._scheduler.seen
        age_s = None if seen.schedule is None else max(0.0, round(now - seen.arrived, 1))
        error = None if seen.error is None else clean(seen.error, 500)
        notes = [clean(note, 300) for note in seen.schedule.notes[:_NOTES]] if seen.schedule is not None else []
        return SchedulerView("slurm", age_s, error, seen.current(now), notes)

    def close(self) -> None:
        """Ask no more."""
        self._scheduler.close()

    def _look(self) -> None:
        self._scheduler.look()
        self._changed()

    def _changed(self) -> None:
        with self._lock:
            self._join.take(self._scheduler.seen, time.monotonic(), time.time())
            self.answered = True
        self._permit(self._ways)
        self._aliases.save()

    def _ways(self, node: Node, facts: NodeFacts) -> Permitted:
        """Return in which ways a node may be reached.

        Where the scheduler has never answered it is not known whose the nodes are: those that a person has configured
        are connected to.
        """
        schedule = self._scheduler.seen.schedule
        if schedule is None:
            return Permitted()
        found = self._find(node, facts)
        if found is None:
            return Permitted()
        with self._lock:
            if self._own is None or self._own[0] is not schedule:
                self._own = (schedule, _jobs_of(schedule, os.geteuid()))
            jobs = self._own[1].get(found.name, [])
        visits = [str(number) for number in schedule.visited.get(found.name, ())]
        return Permitted(self._ssh == "all" or bool(jobs or visits), jobs, visits, found.name)

    def _find(self, node: Node, facts: NodeFacts) -> SchedulerNode | None:
        """Return the scheduler's node; what it does not know by name it may know by what ssh makes of that."""
        with self._lock:
            found = self._join.node(facts)
        if found is not None or (alias := self._aliases.of(node)) is None:
            return found
        with self._lock:
            self._join.alias(facts.name, alias)
            return self._join.node(facts)


def _jobs_of(schedule: Schedule, uid: int) -> dict[str, list[str]]:
    """Return a person's running jobs by node, as srun is told them: ``123``, or ``123+1`` of a heterogeneous one."""
    found: dict[str, list[str]] = {}
    for job in schedule.jobs:
        if job.uid == uid and job.state == "running":
            for grant in job.grants:
                found.setdefault(grant.node, []).append(job.id if "+" in job.id else str(job.number))
    return found
