"""The filter of events; rows are an event and the time now in epoch seconds (pure)."""

from __future__ import annotations

from gpuboard.board.filter.conditions import own_name
from gpuboard.board.filter.language import Language
from gpuboard.board.filter.matchers import gpu_index, person, place, quantity, word
from gpuboard.leases.picks import parse_picks
from gpuboard.model.units import parse_duration, seconds_of
from gpuboard.recording.events import KINDS, ClusterEvent


def _indexes(event: ClusterEvent, now: float) -> list[int]:
    """Return the indexes of an event's GPUs, for a MIG device that of its GPU."""
    try:
        return [pick.index for pick in parse_picks(event.gpus) if pick.index is not None]
    except ValueError:  # an event of no GPU, or of a later version
        return []


EVENTS: Language[[ClusterEvent, float]] = Language(
    {
        "kind": word(KINDS, lambda event, now: (event.kind,)),
        "node": place(lambda event, now: event.nodes),
        "gpu": gpu_index(_indexes),
        "user": person(lambda event, now: (event.user,), lambda event, now: event.user == own_name(), cost=2),
        "age": quantity("how long ago", lambda event, now: now - seconds_of(event.at), parse_duration, "age<1h",
                        sign="<"),
    },
    lambda event, now: (event.kind, *event.nodes, event.user, event.words),
    {"event": "kind", "nodes": "node", "index": "gpu", "host": "node", "owner": "user", "who": "user"},
)  # fmt: skip
