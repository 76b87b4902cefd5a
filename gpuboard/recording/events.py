"""What happened to nodes and GPUs, as it is kept in files: recordings, and the event file of the board."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from gpuboard.model.text import clean
from gpuboard.model.units import iso, seconds_of

Kind = Literal[
    "lost", "broken", "recovered", "error", "xid", "sick", "rogue", "unreachable", "stale", "back", "expired", "ended"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
EVENTS_MOST = 200  # the newest ones up to a frame of a recording
NODES_MAX = 1024  # names kept of an event


class ClusterEvent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Something that happened, to one or more nodes or GPUs at once. As it is written to files, JSON."""

    at: str  # ISO 8601, by this host's clock
    kind: str  # of KINDS, or another one of a later version
    nodes: tuple[str, ...] = ()
    gpus: str = ""  # indexes, "0-3,7", "0:5" of a MIG device; only of a single node
    user: str = ""
    words: str = ""
    by: str = ""  # the board that has seen it


def checked(event: ClusterEvent) -> ClusterEvent:
    """Return an event of a file, which may come from anybody, as it can be shown. Raises ValueError for its time."""
    return msgspec.structs.replace(
        event,
        at=iso(seconds_of(event.at)),
        kind=clean(event.kind, 32),
        nodes=tuple(clean(name, 253) for name in event.nodes[:NODES_MAX]),
        gpus=clean(event.gpus, 64),
        user=clean(event.user, 64),
        words=clean(event.words),
    )
