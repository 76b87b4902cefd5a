"""The verdict on a run in which nothing moves: rules in the order of docs/launch-protocol.md (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from gpuboard.launch.stalls.differences import difference_at
from gpuboard.launch.stalls.evidence import RankEvidence, StoreProcess, connects_to_store, waiting_children
from gpuboard.launch.stalls.pace import GroupPace
from gpuboard.launch.stalls.waits import (
    DEFAULT_GROUP,
    HANDLE_WAIT,
    Activity,
    RankGroup,
    RankStatus,
    activity,
    child_call,
    in_cycles,
    rank_words,
    ranks_label,
    roots,
    waits_for,
)
from gpuboard.launch.stalls.words import (
    NAMED,
    at_place,
    collective,
    cpu,
    describe,
    exit_place,
    is_at,
    lock,
    of_several,
    other_program,
    process_place,
    seconds,
    waiting,
)
from gpuboard.model.text import clean
from gpuboard.model.units import ranges

StallKind = Literal[
    "stall-absent", "stall-stopped", "stall-ended", "stall-behind", "stall-mismatch", "stall-network", "stall-idle"
]

UNEVEN_INPUTS = (
    "the ranks run different numbers of steps (uneven inputs?): use drop_last=True, "
    "torch.distributed.algorithms.Join, or the same number of steps on every rank"
)
INIT_ONCE = "call init_process_group once in each process; new_group() makes further groups"
_SAME_CALLS = "every rank must call the same collectives in the same order, with the same shapes and dtypes"
_CHECK_NETWORK = (
    "check the network: `gpuboard launch --preflight-only`, firewall, interface (GLOO_SOCKET_IFNAME, "
    "NCCL_SOCKET_IFNAME)"
)
_ONE_STORE = "leave MASTER_ADDR and MASTER_PORT as they are, and call init_process_group without init_method"
_MATCHING = "every recv needs a send by the other rank, which must not wait itself: change the order on one of them"


class Stall(msgspec.Struct, frozen=True):
    """A verdict. ``sure``: no further progress is possible. ``cpu``: share of
    a core that the suspects use, 0 if they are quiet."""

    kind: StallKind
    ranks: tuple[int, ...]  # the suspects
    node: str | None  # of the only suspect
    words: str  # follows "waiting 12 s "
    remedy: str = ""
    sure: bool = False
    cpu: float = 0.0
    importing: bool = False

    def text(self, waited_s: float) -> str:
        """Return the verdict as one sentence."""
        return f"waiting {seconds(waited_s)} {self.words}"


def diagnose(activities: Mapping[int, Activity], store: StoreProcess | None = None) -> Stall | None:
    """Return why nothing moves; None while no rank waits for another. ``store``: None if it is not known."""
    stopped = [one for one in activities.values() if one.doing == "stopped"]
    stopped += [one for one in activities.values() if one.doing == "blocked"]
    waits = waits_for(activities)
    if store is not None and store.state in {"T", "t"} and any(one.doing == "init" for one in activities.values()):
        return _store_stopped(store, activities)
    if stopped and (waits or len(stopped) == len(activities)):
        return _stopped(stopped, waits, activities)
    if (inside := _processes(activities)) is not None:
        return inside
    if not waits:
        return None
    if (wrong := _wrong_numbers(activities)) is not None:
        return wrong
    last = roots(waits)
    if last:
        return _behind([activities[rank] for rank in sorted(last)], waits, activities)
    if any(not blockers for blockers in waits.values()):
        at_same = [activities[rank] for rank, blockers in sorted(waits.items()) if not blockers]
        return (
            _mismatch(at_same, activities)
            or _other_roots(at_same)
            or _unmatched(at_same, waits, activities)
            or _other_calls(activities)
            or _network(at_same)
        )
    return _cycle(waits, activities)


class Explanation(msgspec.Struct, frozen=True):
    """What the ranks of a job are doing at one moment. ``missing``: what could not be seen, and why.

    ``picture``: ``groups`` as lines of text. ``paces``: the steps of each process group at the newest look, ``pace``:
    the same as text.
    """

    picture: list[str]
    verdict: str | None
    remedy: str
    ranks: list[RankEvidence]
    missing: list[str] = []
    groups: list[RankGroup] = []
    paces: list[GroupPace] = []
    pace: list[str] = []


def explain(
    statuses: Sequence[RankStatus], evidence: Mapping[int, RankEvidence], store: StoreProcess | None = None
) -> Explanation:
    """Return what every rank is doing and what blocks."""
    activities = {status.rank: activity(status, evidence.get(status.rank)) for status in statuses}
    stall = diagnose(activities, store)
    failed = {
        f"{one.status.node}: {clean(one.evidence.stack_error, 300)}"
        for one in activities.values()
        if one.evidence and one.evidence.stack_error
    }
    groups = grouped(activities, stall)
    return Explanation(
        picture(groups, activities),
        f"waiting {stall.words}" if stall else None,
        stall.remedy if stall else "",
        list(evidence.values()),
        sorted(failed),
        groups,
    )


def grouped(activities: Mapping[int, Activity], stall: Stall | None) -> list[RankGroup]:
    """Return what every rank is doing and for which ranks it waits, folded."""
    waits = waits_for(activities)
    named = stall.ranks if stall and len(stall.ranks) < len(activities) else ()
    found: dict[tuple[str, str, tuple[int, ...], bool], list[int]] = {}
    for rank, one in activities.items():
        blockers = sorted(waits.get(rank, ()))
        key = one.doing, describe(one), tuple(blockers), rank in named
        found.setdefault(key, []).append(rank)
    return [
        RankGroup(ranks, doing, of_several(words) if len(ranks) > 1 else words, list(blockers), suspect)
        for (doing, words, blockers, suspect), ranks in found.items()
    ]


def picture(groups: Iterable[RankGroup], activities: Mapping[int, Activity]) -> list[str]:
    """Return groups of ranks as lines of text."""
    lines = []
    for group in groups:
        others = f", for {rank_words(group.waits_for)}" if group.waits_for else ""
        lines.append(f"{ranks_label(activities[rank] for rank in group.ranks)}: {group.words}{others}")
    return lines


def _suspect(ones: list[Activity]) -> str | None:
    return ones[0].status.node if len(ones) == 1 else None


def _wrong_numbers(activities: Mapping[int, Activity]) -> Stall | None:
    """Return the verdict if ranks passed numbers to init_process_group with which the group cannot be complete."""
    joins = {
        rank: one.evidence.joins_as
        for rank, one in activities.items()
        if one.doing == "init" and one.evidence is not None and one.evidence.joins_as is not None
    }
    sizes = {size for _, size in joins.values()}
    twice = len({number for number, _ in joins.values()}) < len(joins)
    if len(sizes) < 2 and not twice and max(sizes, default=0) <= len(activities):
        return None
    ones = [activities[rank] for rank in joins]
    parts = [
        f"{activities[rank].status.label} passed rank={number} and world_size={size}"
        for rank, (number, size) in list(joins.items())[:NAMED]
    ]
    parts += [f"{len(joins) - NAMED} more"] if len(joins) > NAMED else []
    return _differ(
        ones,
        f"in init_process_group{at_place(ones[0])}: the run has {len(activities)} ranks; {'; '.join(parts)}",
        "call init_process_group without rank and world_size, or with RANK (not LOCAL_RANK) and WORLD_SIZE",
        node=_suspect(ones),
    )


def _processes(activities: Mapping[int, Activity]) -> Stall | None:
    """Return the verdict if processes that ranks have started wait for others of the same rank."""
    found = []
    for one in activities.values():
        if one.doing == "code" and one.evidence is not None and one.status.quiet_s is not None:
            waiting, others = waiting_children(one.evidence)
            if waiting and others:
                found.append((one, waiting[0], others[0]))
    if not found:
        return None
    parts = [
        f"process {other.pid} of {one.status.label}, which is{process_place(other)}; its process {child.pid} waits "
        f"in {child_call(child)}{process_place(child)}"
        for one, child, other in found[:NAMED]
    ]
    parts += [f"{len(found) - NAMED} more ranks"] if len(found) > NAMED else []
    ones = [one for one, _, _ in found]
    ranks = tuple(one.status.rank for one in ones)
    return Stall("stall-behind", ranks, _suspect(ones), f"for {'; '.join(parts)}")


def _stopped(ones: list[Activity], waits: Mapping[int, frozenset[int]], activities: Mapping[int, Activity]) -> Stall:
    parts = []
    for one in ones[:NAMED]:
        evidence = one.evidence
        if one.doing == "stopped":
            state = "is stopped (SIGSTOP, ctrl-Z or a debugger)"
        else:
            where = f" in {clean(evidence.wchan, 60)}" if evidence and evidence.wchan else ""
            state = f"is in uninterruptible sleep{where} (driver or file system)"
        parts.append(f"{one.status.label}, which {state}{at_place(one)}")
    if len(ones) > NAMED:
        parts.append(f"{len(ones) - NAMED} more")
    pids = [f"kill -CONT {one.evidence.pid} on {one.status.node}" for one in ones[:1] if one.evidence]
    return Stall(
        "stall-stopped",
        tuple(one.status.rank for one in ones),
        _suspect(ones),
        f"for {'; '.join(parts)}{waiting(waits, activities)}",
        f"to continue it: {pids[0]}" if pids and ones[0].doing == "stopped" else "",
        sure=ones[0].doing == "stopped",
    )


def _store_stopped(store: StoreProcess, activities: Mapping[int, Activity]) -> Stall:
    waits = {rank: frozenset[int]() for rank, one in activities.items() if one.doing == "init"}
    return Stall(
        "stall-stopped",
        tuple(waits),
        clean(store.node, 60),
        f"for the store of this run, process {store.pid} on {clean(store.node, 60)}, which is stopped (SIGSTOP)"
        f"{waiting(waits, activities)}",
        f"to continue it: kill -CONT {store.pid} on {clean(store.node, 60)}",
        sure=True,
    )


def _behind(ones: list[Activity], waits: Mapping[int, frozenset[int]], activities: Mapping[int, Activity]) -> Stall:
    ended = [one for one in ones if one.doing == "ended"]
    if ended:
        codes = sorted({one.status.exit_code for one in ended if one.status.exit_code is not None})
        how = f"ended with exit code {codes[0]}" if len(codes) == 1 else "ended"
        verb = "takes" if len(ended) == 1 else "take"
        return Stall(
            "stall-ended",
            tuple(one.status.rank for one in ended),
            _suspect(ended),
            f"for {ranks_label(ended)}, which {how} and {verb} part in no further collective"
            f"{waiting(waits, activities)}{exit_place([one.status.exit_place for one in ended])}",
            UNEVEN_INPUTS,
            sure=True,
        )
    initializing = any(activities[rank].doing == "init" and activities[rank].call != "new_group" for rank in waits)
    absent = [one for one in ones if initializing and not one.status.joined]
    named = absent or ones
    parts = [f"{one.status.label}, which {is_at(one, bool(absent))}{lock(one, activities)[0]}" for one in named[:NAMED]]
    if len(named) > NAMED:
        parts.append(f"and ranks {ranges([one.status.rank for one in named[NAMED:]])}")
    return Stall(
        "stall-absent" if absent else "stall-behind",
        tuple(one.status.rank for one in named),
        _suspect(named),
        f"for {'; '.join(parts)}{waiting(waits, activities)}",
        _behind_remedy(named[0], activities),
        cpu=max(cpu(one) for one in named),
        importing=any(one.doing == "importing" for one in named),
    )


def _behind_remedy(one: Activity, activities: Mapping[int, Activity]) -> str:
    if (remedy := lock(one, activities)[1]) != "":
        return remedy
    if one.doing == "importing":
        return "the command of --wrap has not come to its own command line" if other_program(one) else ""
    if one.evidence is not None and not one.evidence.stack and one.evidence.stack_error:
        return f"its stack cannot be read: {clean(one.evidence.stack_error, 200)}"
    return ""


def _mismatch(ones: list[Activity], activities: Mapping[int, Activity]) -> Stall | None:
    """Return the verdict if ranks called different collectives with the same number, None if they agree."""
    newest = dict.fromkeys((one.group.name, one.group.enqueued) for one in ones if one.group is not None)
    found = next((found for name, seq in newest if (found := difference_at(name, seq, activities))), None)
    if found is None:
        return None
    words, suspects, others = found
    return _differ(suspects or others, f"because {words}", _SAME_CALLS, node=_suspect(suspects))


def elsewhere(statuses: Sequence[RankStatus], evidence: Mapping[int, RankEvidence]) -> dict[int, str]:
    """Return what each rank does that takes part in no collective, as it follows "which"."""
    activities = [activity(status, evidence.get(status.rank)) for status in statuses]
    return {one.status.rank: is_at(one, absent=False) for one in activities if one.doing in {"code", "data"}}


def _cycle(waits: Mapping[int, frozenset[int]], activities: Mapping[int, Activity]) -> Stall:
    """Return the verdict if ranks wait for each other; the others, which wait for one of these, are not named."""
    ones = [activities[rank] for rank in in_cycles(waits)]
    parts = [
        f"{one.status.label} waits in {collective(one)}{at_place(one)}"
        + (f" for {rank_words(waits[one.status.rank])}" if one.peer is None else "")
        for one in ones[:NAMED]
    ]
    transfers = any(one.peer is not None for one in ones)
    return _differ(
        ones,
        f"because the ranks wait for each other: {'; '.join(parts)}",
        _MATCHING
        if transfers
        else "every rank must call new_group with the same ranks, also one that is no member of the group"
        if any(one.call == "new_group" for one in ones)
        else "every rank must use its process groups in the same order",
    )


def _other_roots(ones: list[Activity]) -> Stall | None:
    """Return the verdict if the ranks in one collective call gave it different roots, None if they agree."""
    roots: dict[int, list[Activity]] = {}
    for one in ones:
        same_call = one.current is not None and collective(one) == collective(ones[0])
        if same_call and one.evidence is not None and one.evidence.peer is not None:
            roots.setdefault(one.evidence.peer, []).append(one)
    if len(roots) < 2:
        return None
    of = "" if ones[0].group is None or ones[0].group.name == DEFAULT_GROUP else " of the group"
    parts = [f"{ranks_label(same)} named rank {root}{of}{at_place(same[0])}" for root, same in roots.items()]
    words = f"because the ranks differ in src or dst of {collective(ones[0])}: {'; '.join(parts)}"
    return _differ(ones, words, "every rank must pass the same src or dst")


def _unmatched(
    ones: list[Activity], waits: Mapping[int, frozenset[int]], activities: Mapping[int, Activity]
) -> Stall | None:
    """Return the verdict if every rank waits and some of them for a send or receive of an unknown rank."""
    if not any(one.peer is None and one.call in {"send", "recv", HANDLE_WAIT} for one in ones):
        return None
    parts = [f"{one.status.label} waits in {collective(one)}{at_place(one)}" for one in ones[:NAMED]]
    others = waiting({rank: blockers for rank, blockers in waits.items() if blockers}, activities)
    return _differ(
        ones,
        f"because every rank waits for another one: {'; '.join(parts)}{others}",
        "no rank sends or sets what these wait for: compare the order of the calls on all ranks",
        sure=False,
    )


def _other_calls(activities: Mapping[int, Activity]) -> Stall | None:
    """Return the verdict if ranks wait in different calls, or at different places, and what some of them called cannot
    be read. It is uncertain: a rank may be one collective ahead of another."""
    ones = [one for one in activities.values() if one.doing == "collective" and one.peer is None and not one.process]
    if len({(one.call, one.place) for one in ones}) < 2 or all(one.current for one in ones):
        return None
    where = waiting({one.status.rank: frozenset() for one in ones}, activities)
    return Stall(
        "stall-mismatch",
        tuple(one.status.rank for one in ones),
        None,
        f"because the ranks wait in different calls, as far as their stacks show{where}",
        f"{_SAME_CALLS}; if they do, {_CHECK_NETWORK}",
        cpu=max(map(cpu, ones)),
    )


def _differ(ones: list[Activity], words: str, remedy: str, *, node: str | None = None, sure: bool = True) -> Stall:
    return Stall("stall-mismatch", tuple(one.status.rank for one in ones), node, words, remedy, sure=sure)


def _network(ones: list[Activity]) -> Stall:
    if any(one.process is not None for one in ones):
        children = [child for one in ones if one.evidence for child in waiting_children(one.evidence)[0]]
        places = list(dict.fromkeys(f"{child_call(child)}{process_place(child)}" for child in children))
        return Stall(
            "stall-network",
            tuple(one.status.rank for one in ones),
            _suspect(ones),
            f"in {'; '.join(places[:NAMED])}: processes that {ranks_label(ones)} started wait for others, and none of "
            "theirs is elsewhere",
            "give every process of a group its own rank, and their number as world_size; or call the training function "
            "once in each rank, with RANK and WORLD_SIZE from the environment",
        )
    joined = any(one.status.joined for one in ones)
    if not joined and all(one.evidence and connects_to_store(one.evidence.stack, one.evidence.source) for one in ones):
        return Stall(
            "stall-network",
            tuple(one.status.rank for one in ones),
            None,
            f"in {ones[0].call}{at_place(ones[0])}: {ranks_label(ones)} have not connected to the store of this run",
            _ONE_STORE,
        )
    initializing = [one for one in ones if one.doing == "init" and one.call != "new_group"]
    if again := [one for one in initializing if one.evidence is not None and one.evidence.collectives]:
        return _differ(
            again,
            f"in {again[0].call}{at_place(again[0])}: {ranks_label(again)} had a process group before, whose addresses "
            "are still in the store of this run",
            INIT_ONCE,
            node=_suspect(again),
        )
    nodes = list(dict.fromkeys(one.status.node for one in ones))
    between = f"the network between {', '.join(clean(node, 60) for node in nodes[:4])}"
    if len(nodes) > 4:
        between += f" and {len(nodes) - 4} more"
    if len(nodes) == 1:
        between = f"the connections between the ranks on {clean(nodes[0], 60)}"
    inside = collective(ones[0]) if ones[0].doing == "collective" else ones[0].call or "init_process_group"
    cause, remedy = f", so {between} may not deliver", _CHECK_NETWORK
    if all(one.current for one in ones):
        cause = f" with equal arguments{cause}"
    elif ones[0].doing == "collective" and ones[0].peer is None and "barrier" not in ones[0].call:  # it has no tensor
        cause = f"; without a flight recorder shapes and dtypes are unknown: they differ, or {between} may not deliver"
        remedy = f"{_SAME_CALLS}; if they do, {_CHECK_NETWORK}"
    elif initializing and not joined:
        cause, remedy = f"; they use different stores, or {between} may not deliver", f"{_ONE_STORE}; {_CHECK_NETWORK}"
    return Stall(
        "stall-network",
        tuple(one.status.rank for one in ones),
        None,
        f"in {inside}{at_place(ones[0])}: {ranks_label(ones)} take part{cause}",
        remedy,
        cpu=max(cpu(one) for one in ones),  # of ranks that wait for GPUs, which may still compute
    )
