"""Which rank the others wait for, step after step: each rank's own time and its waiting time (pure).

The flight recorder has when each rank called a collective. A collective is over when the last rank has called it, so a
rank that calls the next one after that moment may have waited from its own call until then. The rest is its own time:
computing, loading data, transfers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean, median

import msgspec

from gpuboard.model.gpu import Count, Number

_STEPS = 60  # the newest ones are looked at
_ENOUGH = 20  # steps for a judgement: fewer could favour one rank by chance
_MOST_CALLS, _LEAST_CALLS = 200_000, 200  # of all ranks, of one: to look at 1,000 ranks takes 0.2 s
_LONGER, _REGULAR = 1.5, 0.75  # gaps between steps: times the gaps within, share of them at equal distances
_MOSTLY = 0.9  # share of the steps in which no rank calls the next collective before the one is over
_TINY_S = 1e-5  # shorter gaps are equal
_LATE = 0.125  # share of a step that the others wait for a slow rank: it needs a seventh more time
_LEAST_S = 0.002  # shorter waits are of no interest
_USUALLY = 0.75  # share of the steps in which it has to be the slow one
_UNCERTAIN = 2.5  # a wait has to be longer than this many times the uncertainty of a clock: two are compared
# Of the first judgement: if chance alone decides in each step which of R ranks is the last, the same one is the last in
# n steps in a row with a probability of R^(1-n). In all looks of a run together that must stay below _CHANCE.
FIRST_LOOKS = 12
_CHANCE = 1e-4
_FEWEST = 8  # steps, of many ranks too: what a rank does now and then takes some steps
_WARM_UP = 2  # first steps, which compile and fill caches
_LASTS = 0.75  # the lag in the later half of the steps: its share of that in the earlier half, which may be warm-up
_DRIFT = 1e-4  # seconds a second: of a quartz, and of NTP that corrects it


class GroupCalls(msgspec.Struct, frozen=True):
    """When a rank called the newest collectives of a process group: docs/launch-protocol.md, call ``pace``."""

    name: str
    first: Count
    called_us: Count
    gaps_us: list[Count]
    steps: list[Count]


class RankReading(msgspec.Struct, frozen=True):
    """One rank: shares of a core that it and its workers use; ``groups`` None: no flight recorder can be read.

    ``delayed`` is the share of its time in which its threads could run and had no CPU;
    ``transfers``: it sends and receives in its steps, so that its own time contains waits for other ranks.
    """

    rank: Count
    cpu: Number = 0.0
    workers: list[Number] = []
    groups: list[GroupCalls] | None = None
    delayed: Number = 0.0
    transfers: bool = False


class PaceReading(msgspec.Struct, frozen=True):
    """The reply of one node. ``received``, ``replied``: when, in epoch seconds by its clock."""

    ranks: list[RankReading]
    received: Number
    replied: Number
    load: Number | None = None


class ClockOffset(msgspec.Struct, frozen=True):
    """How far a node's clock is ahead of this machine's, and how uncertain that is, in seconds."""

    ahead_s: float
    within_s: float


def clock(sent: float, reading: PaceReading, arrived: float) -> ClockOffset:
    """Return the clock of a node from a call and its reply, as NTP does (RFC 5905, section 8)."""
    ahead_s = (reading.received - sent + reading.replied - arrived) / 2
    return ClockOffset(ahead_s, max(0.0, (arrived - sent - (reading.replied - reading.received)) / 2))


def better(before: ClockOffset, now: ClockOffset, age_s: float) -> ClockOffset:
    """Return the more certain one of two clocks of a node; that of ``age_s`` ago has drifted since then."""
    drifted = ClockOffset(before.ahead_s, before.within_s + _DRIFT * age_s)
    apart = abs(drifted.ahead_s - now.ahead_s) > drifted.within_s + now.within_s  # the clock was set
    return now if apart or now.within_s <= drifted.within_s else drifted


class RankPace(msgspec.Struct, frozen=True):
    """Seconds of a step in which a rank is busy itself and in which it waits for others."""

    rank: int
    own_s: float
    wait_s: float


class GroupPace(msgspec.Struct, frozen=True):
    """The steps of the ranks of one process group. ``slow``: the ranks that the others wait for."""

    group: str
    steps: int
    step_s: float
    ranks: list[RankPace]
    newest: int  # collective
    slow: tuple[int, ...] = ()
    late_s: float = 0.0  # how long the others wait for them in each step


class RankCalls(msgspec.Struct, frozen=True):
    """A rank's calls by the clock of this machine, which is known to within ``within_s`` there; ``transfers`` as in
    :class:`RankReading`."""

    rank: int
    calls: GroupCalls
    ahead_s: float
    within_s: float
    node: str
    transfers: bool = False


def paces(ranks: Sequence[RankCalls], after: Mapping[str, int], *, first: bool = False) -> list[GroupPace]:
    """Return the pace of each process group with two ranks or more that has made steps.

    ``after``: by group, the collective up to which it has been judged before. ``first``: a judgement by few steps,
    which names only a single rank that was the last in every one of them.
    """
    groups: dict[str, list[RankCalls]] = {}
    for one in ranks:
        groups.setdefault(one.calls.name, []).append(one)
    found = [_pace(members, after.get(name, -1), first) for name, members in groups.items() if len(members) > 1]
    seen = [pace for pace in found if pace is not None]
    waits: dict[int, float] = {}  # share of its time that a rank waits, in all its groups
    for pace in seen:
        for rank in pace.ranks:
            waits[rank.rank] = waits.get(rank.rank, 0.0) + rank.wait_s / pace.step_s
    return [_without_echoes(pace, waits) for pace in seen]


def first_paces(ranks: Sequence[RankCalls], readings: Mapping[int, RankReading]) -> list[GroupPace]:
    """Return the pace by the first steps. A rank is not named if it may be late because it lacks a CPU."""
    return [
        msgspec.structs.replace(pace, slow=(), late_s=0.0)
        if any(readings[rank].delayed * pace.step_s > pace.late_s / 2 for rank in pace.slow)
        else pace
        for pace in paces(ranks, {}, first=True)
    ]


def _without_echoes(pace: GroupPace, waits: Mapping[int, float]) -> GroupPace:
    """Leave out ranks that are late because they wait in another group."""
    slow = tuple(rank for rank in pace.slow if waits[rank] <= pace.late_s / pace.step_s / 2)
    return msgspec.structs.replace(pace, slow=slow, late_s=pace.late_s if slow else 0.0)


def first_steps(ranks: int) -> int:
    """Return how many steps a first judgement needs, so that chance does not make it.

    >>> [first_steps(ranks) for ranks in (2, 3, 4, 8, 64)]
    [18, 12, 10, 8, 8]
    """
    return max(_FEWEST, 1 + math.ceil(math.log(FIRST_LOOKS / _CHANCE) / math.log(ranks)))


def _pace(members: Sequence[RankCalls], after: int, by_few: bool) -> GroupPace | None:
    enough = first_steps(len(members)) if by_few else _ENOUGH
    end = min(one.calls.first + len(one.calls.gaps_us) for one in members)
    first = max(after, end - max(_LEAST_CALLS, _MOST_CALLS // len(members)), *(one.calls.first for one in members))
    if end - first < enough:
        return None
    called = {one.rank: _seconds(one, first, end) for one in members}
    last = [max(each) for each in zip(*called.values(), strict=True)]
    starts = [
        at for offset in members[0].calls.steps if 0 <= (at := members[0].calls.first + offset - first) < len(last)
    ]
    starts = _joined(starts, called, last)
    starts = starts[_WARM_UP:][-enough - 1 :] if by_few else starts[-_STEPS - 1 :]
    if len(starts) <= enough:
        return None
    waits = _waits(called, last, starts)
    spans = list(pairwise(starts))
    lengths = [last[stop] - last[start] for start, stop in spans]
    by_step = {rank: [sum(each[start:stop]) for start, stop in spans] for rank, each in waits.items()}
    step_s = median(lengths)
    if step_s <= 0:
        return None  # the clock was set
    found = [RankPace(rank, max(0.0, step_s - median(each)), median(each)) for rank, each in sorted(by_step.items())]
    slow, late_s = _slow(found, by_step, step_s)
    if by_few and not _always(slow, by_step, late_s):
        slow, late_s = (), 0.0
    several = len({one.node for one in members}) > 1
    uncertain_s = _UNCERTAIN * max(one.within_s for one in members) if several else 0.0
    if late_s < max(_LEAST_S, uncertain_s) or any(one.transfers for one in members):
        slow, late_s = (), 0.0
    return GroupPace(members[0].calls.name, len(spans), step_s, found, end, slow, late_s)


def _seconds(one: RankCalls, first: int, end: int) -> list[float]:
    """Return when a rank called the collectives ``first`` to ``end``, in seconds since the epoch of this machine."""
    at, found = one.calls.called_us, []
    for seq, gap in enumerate([0, *one.calls.gaps_us], one.calls.first):
        at += gap
        if first <= seq <= end:
            found.append(at / 1e6 - one.ahead_s)
    return found


def _joined(starts: list[int], called: Mapping[int, Sequence[float]], last: Sequence[float]) -> list[int]:
    """Return where steps start if each call looks like a step of its own: after the longest of the gaps between calls.

    So are the equal buckets of one backward pass. A gap is that of the fastest rank: what only one rank does (a log
    line) does not part steps. The gaps have to be much longer than the others, and regular.
    """
    if len(starts) < 2 or median(later - start for start, later in pairwise(starts)) > 1:
        return starts
    gaps = []
    for k, over in enumerate(last[:-1]):
        gap = min(each[k + 1] for each in called.values()) - over
        gaps.append(gap if gap >= 0 else min(each[k + 1] - each[k] for each in called.values()))
    ordered = sorted(gaps)
    where = range(len(ordered) // 3, len(ordered) - _ENOUGH // 4)
    cut = max(where, key=lambda k: ordered[k + 1] / max(ordered[k], _TINY_S), default=0)
    if ordered[cut + 1] < _LONGER * max(ordered[cut], _TINY_S):
        return starts
    places = [k + 1 for k, gap in enumerate(gaps) if gap > ordered[cut]]
    lengths = Counter(later - start for start, later in pairwise(places))
    return places if max(lengths.values(), default=0) >= _REGULAR * len(places) else starts


def _waits(
    called: Mapping[int, Sequence[float]], last: Sequence[float], starts: Sequence[int]
) -> dict[int, list[float]]:
    """Return for each rank how long it waited in each collective; ``last``: when the last rank called each of them.

    Nobody waits in a collective if a rank calls the next one before it is over: it overlaps with computing. Where
    ranks are never that far apart, the times decide: after a wait, the next call follows the end of the collective more
    regularly than it follows the rank's own call. The one before the longest gap of a step is waited for.
    """
    early = min(called, key=lambda rank: median(at - end for at, end in zip(called[rank], last, strict=True)))
    count = len(last) - 1
    blocking = [min(each[k + 1] for each in called.values()) >= last[k] for k in range(count)]
    own = called[early]
    phases = _phases(starts, count)
    ends = max(
        phases, key=lambda places: median(own[k + 1] - last[k] for k in places)
    )  # a step, which needs its result
    for places in phases:
        blocks = sum(blocking[k] for k in places) >= _MOSTLY * len(places)
        if blocks and places is not ends:
            since_end = _spread([own[k + 1] - last[k] for k in places])
            blocks = since_end <= _spread([own[k + 1] - own[k] for k in places])
        for k in places:
            blocking[k] = blocks
    return {rank: [last[k] - each[k] if blocking[k] else 0.0 for k in range(count)] for rank, each in called.items()}


def _phases(starts: Sequence[int], count: int) -> list[list[int]]:
    """Return the collectives by their place in a step: the same call of the script, as a rule."""
    found: dict[int, list[int]] = {}
    for start, stop in pairwise(starts):
        for k in range(start, min(stop, count)):
            found.setdefault(k - start, []).append(k)
    return list(found.values())


def _spread(values: Sequence[float]) -> float:
    """Return the median absolute deviation, which single long steps do not change."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def _slow(
    found: Sequence[RankPace], by_step: Mapping[int, Sequence[float]], step_s: float
) -> tuple[tuple[int, ...], float]:
    """Return the ranks that the others wait for in most steps, and how long they wait in each; () if there are none."""
    waits = sorted(rank.wait_s for rank in found)
    usual = median(waits[len(waits) // 2 :])
    slow = [rank.rank for rank in found if rank.wait_s <= usual / 3]
    others = [rank.rank for rank in found if rank.wait_s > usual / 3]
    if not slow or len(slow) > len(others):
        return (), 0.0
    late_s = usual - mean(rank.wait_s for rank in found if rank.rank in slow)
    steps = len(by_step[slow[0]])
    usually = sum(
        median(by_step[rank][k] for rank in others) - mean(by_step[rank][k] for rank in slow) > late_s / 2
        for k in range(steps)
    )
    if late_s < _LATE * step_s or usually < _USUALLY * steps:
        return (), 0.0
    return tuple(slow), late_s


def _always(slow: Sequence[int], by_step: Mapping[int, Sequence[float]], late_s: float) -> bool:
    """Whether a single rank was the last in every step, by a good part of ``late_s``, and no less so in the end."""
    if len(slow) != 1:
        return False
    (rank,) = slow
    others = [each for other, each in by_step.items() if other != rank]
    lags = [median(waits) - own for own, *waits in zip(by_step[rank], *others, strict=True)]
    alone = all(min(waits) > own for own, *waits in zip(by_step[rank], *others, strict=True))
    half = len(lags) // 2
    return alone and min(lags) > late_s / 2 and median(lags[half:]) >= _LASTS * median(lags[:half])
