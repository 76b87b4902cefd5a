"""The keys of the filter of leases (pure)."""

from __future__ import annotations

import time

from gpuboard.board.dialogs.request_form import places_words
from gpuboard.board.filter.language import Key, Language
from gpuboard.board.filter.matchers import ME, nodes, number, one_of, text
from gpuboard.board.tables.held import HeldLease
from gpuboard.model.lease import Lease
from gpuboard.model.units import parse_duration, parse_number


def holder_words(lease: Lease) -> str:
    """Return the process or job that a lease ends with."""
    if lease.holder is None:
        return "detached" if lease.job is None else f"job {lease.job}"
    return f"pid {lease.holder.pid}{' ended' if lease.holder.alive is False else ''}"


def _left(one: HeldLease) -> float:
    return max(0.0, one.until - time.time())


_FLAGS = ("rogue", "idle", "disputed", "overdue")
LEASES: Language[[HeldLease]] = Language(
    {
        "user": Key("a person, user:alice; user:me is you", 1,
                    text(lambda one: (one.lease.owner,), begins=True, mine=lambda one: one.mine), words=(ME,),
                    offers=lambda one: (one.lease.owner,)),
        "lease": Key("a lease's id, lease:k3f9", 1, text(lambda one: (one.lease.id,), begins=True),
                     offers=lambda one: (one.lease.id,)),
        "node": Key("a node or nodeset, node:gpu[01-04]", 2, nodes(lambda one: one.lease.nodes or one.node_names),
                    offers=lambda one: one.lease.nodes or one.node_names),
        "flag": Key(f"one of {', '.join(_FLAGS)}", 2, one_of(_FLAGS, lambda one: one.flags), words=_FLAGS),
        "left": Key("how long it still lasts, left<1h", 1, number(_left, parse_duration, "left<1h"), sign="<"),
        "gpus": Key("how many GPUs it holds, gpus>4", 1,
                    number(lambda one: len(one.lease.gpus), parse_number, "gpus>4"), sign=">"),
        "job": Key("a job's id, job:123", 1, text(lambda one: (one.lease.job,), begins=True),
                   offers=lambda one: (one.lease.job,)),
        "host": Key("where it was made, host:login1", 2, text(lambda one: (one.lease.host,)),
                    offers=lambda one: (one.lease.host,)),
        "purpose": Key("a part of it, purpose:nightly", 2, text(lambda one: (one.lease.purpose,))),
    },
    lambda one: (one.lease.id, one.lease.owner, places_words(one.lease.gpus), holder_words(one.lease), one.lease.host,
                 one.lease.purpose, *one.flags),
    {"owner": "user", "who": "user", "id": "lease", "nodes": "node", "flags": "flag", "from": "host"},
)  # fmt: skip
