"""The filter of events (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from gpuboard.board.filter.conditions import own_name
from gpuboard.board.filter.language import Key, Language
from gpuboard.board.filter.matchers import ME, nodes, number, one_of, text
from gpuboard.board.overview.events import KINDS, ClusterEvent
from gpuboard.model.units import parse_duration, seconds_of


def _kinds(event: ClusterEvent, now: float) -> tuple[str, ...]:
    return (event.kind,)


def _nodes(event: ClusterEvent, now: float) -> tuple[str, ...]:
    return event.nodes


def _users(event: ClusterEvent, now: float) -> tuple[str, ...]:
    return (event.user,)


def _texts(event: ClusterEvent, now: float) -> Iterable[str]:
    return (event.kind, *event.nodes, event.user, event.words)


EVENTS = Language(
    {
        "kind": Key(f"one of {', '.join(KINDS)}", 1, one_of(KINDS, _kinds), words=KINDS),
        "node": Key("a node or nodeset, node:gpu[01-04]", 2, nodes(_nodes), offers=_nodes),
        "user": Key("a person, user:alice; user:me is you", 2,
                    text(_users, begins=True, mine=lambda event, now: event.user == own_name()), words=(ME,),
                    offers=_users),
        "age": Key("how long ago, age<1h", 1,
                   number(lambda event, now: now - seconds_of(event.at), parse_duration, "age<1h"), sign="<"),
    },
    _texts,
    {"event": "kind", "nodes": "node", "host": "node", "owner": "user", "who": "user"},
)  # fmt: skip
