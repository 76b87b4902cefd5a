"""SchedulerMonitor: the scheduler's answer for each node in scope, and the routes that it permits to the node."""

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

_NOTES = 20  # of an answer that are shown


class Permitted(NamedTuple):
    """The routes by which a node may be reached."""

    ssh: bool = True
    jobs: Sequence[str] = ()  # of this user, that hold GPUs there
    visits: Sequence[str] = ()  # of this user, without GPUs: the node accepts ssh, but their steps see no GPU
    known_as: str = ""  # its name in the scheduler, for steps of these jobs


RoutesOf = Callable[[Node, NodeFacts], Permitted]


class SchedulerMonitor:
    """Queries the scheduler, joins its answers with the nodes, and decides which routes to each node are permitted.

    With the setting ``ssh = "own"`` ssh is permitted only to those of its nodes where this user has a job. ``permit``
    is called after every answer, from another thread, with the function that returns a node's routes.
    """

    def __init__(self, scheduler: Scheduler, settings: Settings, permit: Callable[[RoutesOf], None]) -> None:
        self.answered = False  # whether the scheduler has answered or failed once
        self._scheduler = scheduler
        self._ssh = settings.ssh
        self._permit = permit
        self._aliases = Aliases(settings)  # used only by the thread that calls ``permit``
        self._lock = threading.Lock()
        self._join = Join()
        self._own: tuple[Schedule, dict[str, list[str]]] | None = None  # this user's jobs by Slurm's node name

    def start(self, *, once: bool) -> None:
        """Start querying and return. ``once``: a single query, else repeatedly until closed."""
        if self._ssh == "all":
            self._permit(lambda node, facts: Permitted())
        if once:
            threading.Thread(target=self._query_once, name="scheduler", daemon=True).start()
        else:
            self._scheduler.start(self._changed)

    def of(self, nodes: Sequence[NodeFacts], now: float, at: float) -> dict[str, Scheduled]:
        """Return the scheduler's data on ``nodes``, by name; nodes unknown to it are left out.

        Before its first answer only the GPUs of nodes with a reading (``ssh = "all"``) depend on it: they are unknown.
        """
        with self._lock:
            self._join.take(self._scheduler.seen, now, at)
            nodes = [facts for facts in nodes if self.answered or facts.reading is not None]
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
        """Return the age and the errors of its answers."""
        seen = self._scheduler.seen
        age_s = None if seen.schedule is None else max(0.0, round(now - seen.arrived, 1))
        error = None if seen.error is None else clean(seen.error, 500)
        notes = [clean(note, 300) for note in seen.schedule.notes[:_NOTES]] if seen.schedule is not None else []
        return SchedulerView("slurm", age_s, error, seen.current(now), notes)

    def close(self) -> None:
        """Stop querying."""
        self._scheduler.close()

    def _query_once(self) -> None:
        self._scheduler.look()
        self._changed()

    def _changed(self) -> None:
        with self._lock:
            self._join.take(self._scheduler.seen, time.monotonic(), time.time())
            self.answered = True
        self._permit(self._routes_of)
        self._aliases.save()

    def _routes_of(self, node: Node, facts: NodeFacts) -> Permitted:
        """Return the routes by which a node may be reached.

        Before the scheduler's first answer every configured node may be reached: which of them are its is unknown.
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
        """Return the scheduler's node, found by the node's name or by the host name that ssh resolves it to."""
        with self._lock:
            found = self._join.node(facts)
        if found is not None or (alias := self._aliases.of(node)) is None:
            return found
        with self._lock:
            self._join.alias(facts.name, alias)
            return self._join.node(facts)


def _jobs_of(schedule: Schedule, uid: int) -> dict[str, list[str]]:
    """Return a user's running jobs by node, as srun takes them: ``123``, or ``123+1`` in a heterogeneous job."""
    found: dict[str, list[str]] = {}
    for job in schedule.jobs:
        if job.uid == uid and job.state == "running":
            for grant in job.grants:
                found.setdefault(grant.node, []).append(job.id if "+" in job.id else str(job.number))
    return found
