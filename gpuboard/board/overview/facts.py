"""All that the overview shows, gathered from a scene and the past."""

from __future__ import annotations

from collections.abc import Sequence
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

    past: Cluster
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

    def facts(self, scene: Scene, span: Span) -> OverviewFacts:
        """Return the facts of a scene and of the ``span`` before it."""
        now = seconds_of(scene.snapshot.at)
        return OverviewFacts(
            self._history.cluster(span),
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
