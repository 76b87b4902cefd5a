"""Ranks that called different collectives: while they run, and at their end without an error of torch (pure).

gloo may accept data of another size or type, and go on with wrong values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from gpuboard.agent.launch.rank.recorder import EQUAL
from gpuboard.agent.launch.rank.traceback_text import remoteness
from gpuboard.launch.events import Leaving, Raised
from gpuboard.launch.stalls.evidence import Collective, ProcessGroup, RankEvidence, StackFrame
from gpuboard.launch.stalls.waits import DEFAULT_GROUP, Activity, RankStatus, activity, group_of, ranks_label
from gpuboard.launch.stalls.words import clause
from gpuboard.model.text import clean
from gpuboard.model.units import ranges


def silent_difference(leaving: Sequence[Leaving], labels: Mapping[int, str]) -> str | None:
    """Return at which collective ranks that have ended well differed first; None if they agree as far as known.

    ``labels``: how each rank is named.
    """
    ranks: dict[int, dict[str, list[int]]] = {}  # number of a collective → call → ranks
    for one in leaving:
        calls = [clean(call, 200) for call in one.calls]
        for number, at in one.called:
            if 0 <= at < len(calls):
                ranks.setdefault(number, {}).setdefault(calls[at], []).append(one.rank)
    first = min((number for number, by_call in ranks.items() if len(by_call) > 1), default=None)
    if first is None:
        return None
    ones = sorted(ranks[first].items(), key=lambda item: (len(item[1]), min(item[1])))
    parts = "; ".join(f"{_named(sorted(who), labels)} called {call}" for call, who in ones)
    return f"the ranks differ at collective {first}: {parts}; torch reported no error: results may be wrong"


def _named(ranks: Sequence[int], labels: Mapping[int, str]) -> str:
    return labels[ranks[0]] if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def evidence_of(raised: Raised) -> RankEvidence | None:
    """Return what the exception that ends a rank shows of its collectives; None if nothing."""
    known = [(number, clean(raised.calls[at], 200)) for number, at in raised.called if 0 <= at < len(raised.calls)]
    if not known:
        return None
    newest = known[-1][0]
    group = ProcessGroup(DEFAULT_GROUP, newest, newest - 1, [Collective(number, call) for number, call in known])
    frames = [StackFrame(raised.function or "", raised.file, raised.line or 0)] if raised.file else []
    return RankEvidence(raised.rank, 0, stack=frames, collectives=[group])


def merged(old: RankEvidence | None, new: RankEvidence) -> RankEvidence:
    """Return ``new`` with the process groups that only ``old`` has, and with its stack if that is of the same call.

    A rank that was seen as its interpreter ended has no frame of the user's code on its stack.
    """
    newest = {group.name: group.enqueued for group in new.collectives or ()}
    before = [] if old is None else old.collectives or []
    same = all(newest.get(group.name, group.enqueued) == group.enqueued for group in before)
    ended = all(remoteness(frame.file) > 1 for frame in new.stack)
    stack = old.stack if old is not None and old.stack and ended and same else new.stack
    groups = [*(new.collectives or ()), *(group for group in before if group.name not in newest)]
    return msgspec.structs.replace(new, stack=stack, collectives=groups)


def difference(statuses: Sequence[RankStatus], evidence: Mapping[int, RankEvidence]) -> tuple[str, list[int]] | None:
    """Return the first recent collective that the ranks called differently, as text, and the suspected ranks.

    None if the flight recorders of those that can be read show none.
    """
    activities = _activities(statuses, evidence)
    groups = [group for one in evidence.values() for group in one.collectives or []]
    for name, seq in sorted({(group.name, entry.seq) for group in groups for entry in group.recent}):
        found = difference_at(name, seq, activities)
        if found is not None:
            return found[0], [one.status.rank for one in found[1]]
    return None


class LastCall(NamedTuple):
    """The newest collective of a rank. ``comparable``: its ranks must pass tensors of equal shape and type."""

    words: str
    place: str
    comparable: bool

    @property
    def text(self) -> str:
        """``all_reduce of float 4 (collective 12) at train.py:41``."""
        return f"{self.words} at {self.place}" if self.place else self.words


def last_calls(statuses: Sequence[RankStatus], evidence: Mapping[int, RankEvidence]) -> dict[int, LastCall]:
    """Return the newest collective of each rank that is known."""
    found = {}
    for rank, one in _activities(statuses, evidence).items():
        group = group_of(one, DEFAULT_GROUP)
        entry = group.at(group.enqueued) if group else None
        if entry is not None:
            comparable = entry.words().partition(" of ")[0].strip("_") in EQUAL
            found[rank] = LastCall(f"{entry.words()} (collective {entry.seq})", one.place, comparable)
    return found


def _activities(statuses: Sequence[RankStatus], evidence: Mapping[int, RankEvidence]) -> dict[int, Activity]:
    """Return what the ranks did when they were last seen."""
    alive = (msgspec.structs.replace(status, ended=False) for status in statuses)
    return {status.rank: activity(status, evidence.get(status.rank)) for status in alive}


def difference_at(
    name: str, seq: int, activities: Mapping[int, Activity]
) -> tuple[str, list[Activity], list[Activity]] | None:
    """Return how ranks differ at a collective of a group, the suspects (a minority), and all ranks that called it."""
    calls: dict[str, list[tuple[Activity, Collective]]] = {}
    for one in activities.values():
        group = group_of(one, name)
        entry = group.at(seq) if group else None
        if entry is not None:
            calls.setdefault(_signature(entry), []).append((one, entry))
    if len(calls) < 2:
        return None
    parts = []
    for same in calls.values():
        one, entry = same[0]
        group = group_of(one, name)
        newest = group is not None and group.enqueued == seq
        place = f" at {one.place}{clause(one)}" if newest and one.place else ""
        parts.append(f"{ranks_label([one for one, _ in same])} called {entry.words()}{place}")
    sizes = sorted((len(same) for same in calls.values()), reverse=True)
    minority = [same for same in calls.values() if len(same) < sizes[0]] if sizes[0] > sizes[1] else []
    suspects = [one for same in minority for one, _ in same]
    blame = f"; most likely wrong: {ranks_label(suspects)}" if suspects else ""
    words = f"the ranks differ at collective {seq}: {'; '.join(parts)}{blame}"
    return words, suspects, [one for same in calls.values() for one, _ in same]


def _signature(entry: Collective) -> str:
    op = entry.op.strip("_")
    return entry.words() if entry.op in EQUAL or op in EQUAL else op
