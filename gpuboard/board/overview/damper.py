"""What happens to the same node or GPU again and again becomes few events (pure)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpuboard.recording.events import ClusterEvent

MOST = 4  # events of one thing in WINDOW_S that are listed one by one; later ones are counted
WINDOW_S = 600.0
CALM_S = 60.0  # the last one is listed, with their number, after this long without another, at the latest in WINDOW_S
_TOPICS = {"stale": "connection", "unreachable": "connection", "back": "connection", "lost": "state",
           "broken": "state", "recovered": "state"}  # fmt: skip


class _Trail(msgspec.Struct):
    """The events of one thing."""

    times: list[float]  # of the listed ones in the window
    held: ClusterEvent | None = None  # the last one that was not listed
    at: float = 0.0  # its time
    count: int = 0  # how many were not listed


class Damper:
    """Lets the first events of each thing pass, then one now and then."""

    def __init__(self) -> None:
        self._trails: dict[tuple[str, tuple[str, ...], str, str], _Trail] = {}

    def listed(self, events: Iterable[ClusterEvent], now: float) -> list[ClusterEvent]:
        """Return what to list of new ``events``, and what was held back. ``now``: monotonic seconds."""
        found = []
        for event in events:
            key = (_TOPICS.get(event.kind, event.kind), event.nodes, event.gpus, event.user)
            trail = self._trails.setdefault(key, _Trail([]))
            trail.times = [time for time in trail.times if now - time < WINDOW_S]
            if trail.held is None and len(trail.times) < MOST:
                trail.times.append(now)
                found.append(event)
            else:
                trail.held, trail.at, trail.count = event, now, trail.count + 1
        for key, trail in list(self._trails.items()):
            calm = now - trail.at >= CALM_S
            last_s = now - trail.times[-1] if trail.times else WINDOW_S  # since the last listed one
            if trail.held is not None and (calm or last_s >= WINDOW_S):
                more = f"{trail.count} changes since the event before" if trail.count > 1 else ""
                words = "; ".join(filter(None, (trail.held.words, more)))
                found.append(msgspec.structs.replace(trail.held, words=words))
                trail.times = [*trail.times, now] if calm else [now] * MOST  # while it lasts, one per window
                trail.held, trail.count = None, 0
            elif trail.held is None and last_s >= WINDOW_S:
                del self._trails[key]
        return found
