"""What each rank of a run is doing, and which ranks it waits for (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from gpuboard.launch.stalls.evidence import (
    ChildProcess,
    Collective,
    ProcessGroup,
    RankEvidence,
    StackFrame,
    own_frame,
    transfers,
    waiting_children,
    waits_for_data,
    waits_for_work,
    waits_in_collective,
    waits_in_init,
)
from gpuboard.model.units import ranges

HANDLE_WAIT = "wait()"  # of a handle: what it waits for is not known
DEFAULT_GROUP = "0"  # torch's name of the group that init_process_group makes, of which every rank is a member


class RankStatus(msgspec.Struct, frozen=True):
    """What the head knows of a rank without an inspection. ``exit_code`` None: it has not ended with a code."""

    rank: int
    node: str
    index: int
    importing: bool = False
    joined: bool = False
    ended: bool = False
    exit_code: int | None = None
    exit_place: str = ""  # where it called sys.exit()
    quiet_s: float | None = None  # None: active
    last_error: str = ""

    @property
    def label(self) -> str:
        """``rank 1 (gpu02:1)``."""
        return f"rank {self.rank} ({self.node}:{self.index})"


Doing = Literal["ended", "stopped", "blocked", "importing", "init", "collective", "data", "code", "unknown"]


class Activity(msgspec.Struct, frozen=True):
    """What one rank is doing. ``group``, ``seq``: the collective in which it waits, if the flight recorder has it.

    ``process``: the one below the rank that waits for others, in the rank's place.
    """

    status: RankStatus
    evidence: RankEvidence | None
    doing: Doing
    frame: StackFrame | None = None
    call: str = ""  # of torch.distributed
    group: ProcessGroup | None = None
    peer: int | None = None  # the rank that it receives from or sends to, if that is known
    process: ChildProcess | None = None

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self.doing in {"init", "collective"}

    @property
    def current(self) -> Collective | None:
        """The collective in which it waits."""
        return self.group.at(self.group.enqueued) if self.group else None

    @property
    def place(self) -> str:
        """Its place in the user's code, "" if unknown."""
        return self.frame.place if self.frame else ""


class RankGroup(msgspec.Struct, frozen=True):
    """Ranks that do the same, at the same place, and wait for the same ranks.

    ``doing``: one of ``Doing``; ``words``: what they do, and where; ``suspect``: the verdict names them.
    """

    ranks: list[int]
    doing: str
    words: str
    waits_for: list[int] = []
    suspect: bool = False


def activity(status: RankStatus, evidence: RankEvidence | None) -> Activity:
    """Return what a rank is doing."""
    if status.ended:
        return Activity(status, evidence, "ended")
    if evidence is None or (evidence.state is None and not evidence.stack):
        return Activity(status, evidence, "unknown")
    frame = own_frame(evidence.stack)
    if evidence.state in {"T", "t"}:
        return Activity(status, evidence, "stopped", frame)
    if evidence.state == "D":
        return Activity(status, evidence, "blocked", frame)
    if status.importing:
        return Activity(status, evidence, "importing", frame)
    call = waits_in_collective(evidence.stack) or ""
    if waits_in_init(evidence.stack, evidence.source):
        return Activity(status, evidence, "init", frame, call or "TCPStore")
    if transfers(evidence.stack):
        return Activity(status, evidence, "collective", frame, evidence.stack[0].function, peer=evidence.peer)
    open_groups = [g for g in evidence.collectives or [] if g.enqueued > g.completed]
    if open_groups and not waits_for_data(evidence.stack):
        inside = next((one for one in evidence.threads if waits_in_collective(one.stack)), None)
        if not call and inside is not None:
            frame, call = own_frame(inside.stack), waits_in_collective(inside.stack) or ""
        return Activity(status, evidence, "collective", frame, call, open_groups[-1])
    if call and call != "backward" and not evidence.collectives:  # no flight recorder
        return Activity(status, evidence, "collective", frame, call)
    if status.joined and status.quiet_s is not None and waits_for_work(evidence):
        return Activity(status, evidence, "collective", frame, call or HANDLE_WAIT)
    if call == "backward" and evidence.collectives is None and status.quiet_s is not None:
        return Activity(status, evidence, "collective", frame, call)
    if waits_for_data(evidence.stack):
        return Activity(status, evidence, "data", frame, call)
    waiting, others = waiting_children(evidence)
    if status.quiet_s is not None and waiting and not others:
        child = waiting[0]
        doing: Doing = "init" if waits_in_init(child.stack, child.source) else "collective"
        call = child_call(child)
        return Activity(status, evidence, doing, own_frame(child.stack), call, process=child)
    return Activity(status, evidence, "code", frame, call)


def child_call(child: ChildProcess) -> str:
    """Return the function of torch.distributed in which a process below a rank waits for others."""
    return waits_in_collective(child.stack) or "TCPStore"


def waits_for(activities: Mapping[int, Activity]) -> dict[int, frozenset[int]]:
    """Return, for each waiting rank, the ranks that it waits for; empty if every one of them is there too."""
    return {rank: frozenset(_blockers(one, activities)) for rank, one in activities.items() if one.waits}


def _blockers(one: Activity, activities: Mapping[int, Activity]) -> set[int]:
    others = {rank: other for rank, other in activities.items() if rank != one.status.rank}
    if one.doing == "init":
        later = one.call == "new_group"  # which every rank must call, after init_process_group
        return {rank for rank, other in others.items() if other.doing != "init" and (later or not _past_init(other))}
    if one.peer in others:
        other = others[one.peer]
        served = other.peer == one.status.rank and {one.call, other.call} == {"send", "recv"}
        return set() if served else {one.peer}
    if one.group is None:
        return {rank for rank, other in others.items() if not other.waits or other.call == "new_group"}
    found = set()
    for rank, other in others.items():
        group = group_of(other, one.group.name)
        if group is not None:
            if group.enqueued < one.group.enqueued:
                found.add(rank)
        elif one.group.name == DEFAULT_GROUP or other.doing == "ended":
            found.add(rank)
    return found


def _past_init(other: Activity) -> bool:
    return bool(other.evidence and other.evidence.collectives) or other.doing == "collective"


def group_of(one: Activity, name: str) -> ProcessGroup | None:
    """Return a process group as a rank sees it, None if its flight recorder does not list it."""
    found = (one.evidence.collectives if one.evidence else None) or []
    return next((group for group in found if group.name == name), None)


def roots(waits: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """Return the ranks that others wait for, directly or through others, and that wait for no other rank."""
    return frozenset(blocker for blockers in waits.values() for blocker in blockers if blocker not in waits)


def in_cycles(waits: Mapping[int, frozenset[int]]) -> list[int]:
    """Return the ranks that wait for themselves through others, in order."""
    found = []
    for rank, blockers in sorted(waits.items()):
        reached: set[int] = set()
        following = set(blockers)
        while following:
            reached |= following
            following = {one for other in following for one in waits.get(other, ())} - reached
        if rank in reached:
            found.append(rank)
    return found


def rank_words(numbers: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2,5``."""
    return f"rank{'s' if len(numbers) != 1 else ''} {ranges(numbers)}"


def ranks_label(ones: Iterable[Activity]) -> str:
    """Return the label of the only rank, or the numbers of several."""
    ones = list(ones)
    return ones[0].status.label if len(ones) == 1 else f"ranks {ranges([one.status.rank for one in ones])}"
