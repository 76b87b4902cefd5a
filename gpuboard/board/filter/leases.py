"""The keys of the filter of leases (pure)."""

from __future__ import annotations

from gpuboard.board.dialogs.request_form import places_words
from gpuboard.board.filter.language import Language
from gpuboard.board.filter.matchers import named, person, place, quantity, word
from gpuboard.board.tables.held import HeldLease
from gpuboard.model.lease import Lease
from gpuboard.model.units import parse_duration, parse_number


def holder_words(lease: Lease) -> str:
    """Return the process or job that a lease ends with."""
    if lease.holder is None:
        return "detached" if lease.job is None else f"job {lease.job}"
    return f"pid {lease.holder.pid}{' ended' if lease.holder.alive is False else ''}"


_FLAGS = ("rogue", "idle", "disputed", "overdue")
LEASES: Language[[HeldLease]] = Language(
    {
        "user": person(lambda one: (one.lease.owner,), lambda one: one.mine),
        "lease": named("a lease's id, lease:k3f9", lambda one: (one.lease.id,)),
        "node": place(lambda one: one.lease.nodes or one.node_names),
        "flag": word(_FLAGS, lambda one: one.flags, cost=2),
        "left": quantity("how long it still lasts", lambda one: one.lease.remaining_s, parse_duration, "left<1h",
                         sign="<"),
        "gpus": quantity("how many GPUs it holds", lambda one: len(one.lease.gpus), parse_number, "gpus>4", sign=">"),
        "job": named("a job's id, job:123", lambda one: (one.lease.job,)),
        "host": named("where it was made, host:login1", lambda one: (one.lease.host,), cost=2, begins=False),
        "purpose": named("a part of it, purpose:nightly", lambda one: (one.lease.purpose,), cost=2, begins=False,
                         offered=False),
    },
    lambda one: (one.lease.id, one.lease.owner, places_words(one.lease.gpus), holder_words(one.lease), one.lease.host,
                 one.lease.purpose, *one.flags),
    {"owner": "user", "who": "user", "id": "lease", "nodes": "node", "flags": "flag", "from": "host"},
)  # fmt: skip
