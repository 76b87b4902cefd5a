"""All that the overview shows, gathered from a scene and the past."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from gpuboard.board.history import Cluster, History, Span
from gpuboard.board.overview.log import EventLog
from gpuboard.board.overview.people import People, Person
from gpuboard.board.overview.upcoming import Upcoming, UpcomingEnd
from gpuboard.board.scene import Scene
from gpuboard.model.units import seconds_of
from gpuboard.recording.events import ClusterEvent


class OverviewFacts(NamedTuple):
    """What the boxes show."""

    past: Callable[[float], Cluster]  # for a plot that stays the same until the time that it is given changes
    newest: Cluster  # its newest sample; empty before the first
    free: int  # GPUs
    people: Sequence[Person]
    endings: Sequence[UpcomingEnd]
    events: Sequence[ClusterEvent]  # oldest first
    no_events: str  # shown in place of events
    problem: str  # why events are not kept
    now: float  # epoch seconds
    span: Span  # of the past
    order: str  # of the people, one of ORDERS


class Gatherer:
    """Gathers facts; what was counted on unchanged nodes is kept for the next scene."""

    def __init__(self, history: History, events: EventLog) -> None:
        self.order = "held"
        self._history = history
        self._events = events
        self._people = People()
        self._upcoming = Upcoming()
        self._past: tuple[tuple[Span, float], Cluster] | None = None  # and what it is of

    def facts(self, scene: Scene, span: Span) -> OverviewFacts:
        """Return the facts of a scene and of the ``span`` before it."""
        now = seconds_of(scene.snapshot.at)
        return OverviewFacts(
            partial(self._past_until, span),
            self._history.newest(),
            scene.sums.free,
            self._people.of(scene, self.order),
            self._upcoming.of(scene, now),
            self._events.events,
            self._events.empty,
            self._events.problem,
            now,
            span,
            self.order,
        )

    def _past_until(self, span: Span, until: float) -> Cluster:
        """Return the past as it was when ``until`` last changed."""
        if self._past is None or self._past[0] != (span, until):
            self._past = (span, until), self._history.cluster(span)
        return self._past[1]
