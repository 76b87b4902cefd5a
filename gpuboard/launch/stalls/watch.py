"""When to inspect a run, and when a verdict is due (pure: times are passed in, monotonic seconds).

Ranks report when they have been quiet for some seconds (agent/launch/watch/signs.py). While all are active nothing is
inspected. A verdict needs two inspections with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gpuboard.agent.launch.rank.traceback_text import is_library
from gpuboard.launch.stalls.evidence import (
    Inspection,
    RankEvidence,
    StackFrame,
    connects,
    store_of,
    waits_for_data,
)
from gpuboard.launch.stalls.verdict import Stall, diagnose, grouped, picture
from gpuboard.launch.stalls.waits import Activity, RankGroup, RankStatus, activity
from gpuboard.launch.stalls.words import seconds


class StallTiming(msgspec.Struct, frozen=True):
    """All fields are seconds. Waits for an active rank are longer where CPUs are scarce, up to four times."""

    # from one inspection to the next: long enough that a rank that moves shows other stacks or numbers
    again_s: float = 1.5
    # longest interval between inspections while nothing changes
    longest_s: float = 60.0
    # wait for a verdict that no progress can contradict: a stopped rank, ranks that differ
    sure_s: float = 2.0
    # wait for a rank that uses no CPU and moves no data, also before the others began to wait for it
    idle_s: float = 7.0
    # wait for a rank in uninterruptible sleep: a write to a slow file system, or a driver that hangs
    blocked_s: float = 15.0
    # wait for a rank that computes at one place with the GIL held: torch releases it in its own computations
    busy_s: float = 7.0
    # wait for a rank that computes in one function of the script with the GIL held, without a call of another one: what
    # takes that long in Python has calls, as a rule
    loop_s: float = 10.0
    # wait for a rank that computes or writes and whose stack changes: a slow step, a checkpoint; also for one that
    # computes before the first collective is complete: rank 0 often prepares the data for all
    slow_s: float = 40.0
    # wait for such a rank from which on this is called a stall: a long evaluation is none
    long_s: float = 300.0
    # wait for a rank that still imports torch
    importing_s: float = 60.0
    # wait for ranks that are all quiet and not in a collective: a download, an input prompt, a save at the end
    all_quiet_s: float = 90.0
    # wait for ranks that are all quiet, one of them while it opens a connection: that takes a second, with packet loss
    connect_s: float = 10.0
    # first interval between two messages about the same stall; doubles each time
    repeat_s: float = 30.0
    # interval of inspections of ranks on GPUs, which may use a whole CPU while they wait
    gpu_s: float = 10.0


DEFAULT_STALL_TIMING = StallTiming()

# In a second, of a rank whose main thread sleeps: its other threads show a progress bar or write a log
_ASIDE_BYTES = 4096
_ASIDE_CPU = 0.2  # of a core


class StallReport(msgspec.Struct, frozen=True):
    """A verdict that stands. ``since`` is when the ranks began to wait. ``computes``: so do the suspects, so that the
    run is slow and not stalled."""

    stall: Stall
    since: float
    place: str  # of the suspects in the user's code
    picture: list[str]
    evidence: list[RankEvidence]
    groups: list[RankGroup]
    computes: bool = False

    @property
    def identity(self) -> object:
        """Equal for reports of the same stall."""
        return self.stall.kind, self.stall.ranks, self.place if not self.computes else None

    def text(self, now: float) -> str:
        """Return the message about it."""
        return f"{'' if self.computes else 'stalled: '}{self.stall.text(now - self.since)}"


class StallWatch:
    """Follows one run; the head acts on ``messages`` and ``report``."""

    def __init__(self, *, on_gpus: bool, timing: StallTiming = DEFAULT_STALL_TIMING) -> None:
        self.report: StallReport | None = None
        self.messages: list[str] = []
        self.ending = False  # the ranks were sent SIGTERM: what changes then is no progress
        self._gpu_s = timing.gpu_s if on_gpus else float("inf")
        self._timing = timing
        self._quiet: dict[int, float] = {}  # rank → since when it has been quiet
        self._load = 0.0  # tasks per CPU of the busiest node
        self._look_at = float("inf")
        self._interval = timing.again_s
        self._key: object = None  # of the newest diagnosis
        self._since = 0.0  # when the ranks began to wait
        self._confirmed = False  # by a second inspection
        self._suspects: object = None  # stacks of the suspects at the newest inspection
        self._still_since = 0.0  # since when these have been the same
        self._script: object = None  # of the suspects at the newest inspection
        self._script_since = 0.0  # since when it has been the same
        self._loops: object = None  # functions in which these compute without a call
        self._loop_since = 0.0  # since when these have been the same
        self._polls = False  # the suspects sleep in their own code
        self._asleep = False  # the main threads of the suspects
        self._preparing = False  # no collective is complete yet
        self._repeat_at = 0.0
        self._repeat_s = timing.repeat_s
        self._next_on_gpus = 0.0  # when to inspect ranks of which none is quiet
        self._patience: dict[str, float] = {}  # place of a suspect → longest wait for it that ended by itself

    def quiet(self, rank: int, quiet_s: float | None, load: float | None, now: float) -> None:
        """Record that a rank has been quiet for ``quiet_s``, or is active again (None)."""
        self._load = load or 0.0
        if quiet_s is None:
            self._quiet.pop(rank, None)
            if self.report is not None:
                self._look_at = now  # the run may have resumed
        else:
            self._quiet.setdefault(rank, now - quiet_s)
            self._interval = self._timing.again_s
            self._look_at = min(self._look_at, now)

    def ended(self, rank: int, now: float) -> None:
        """Record the end of a rank, for which others may now wait."""
        self._quiet.pop(rank, None)
        if self._quiet:
            self._interval = self._timing.again_s
            self._look_at = min(self._look_at, now)

    def quiet_s(self, rank: int, now: float) -> float | None:
        """Return how long a rank has been quiet, None if it is active."""
        since = self._quiet.get(rank)
        return None if since is None else now - since

    def due(self, now: float) -> bool:
        """Return whether an inspection is due."""
        if not self._next_on_gpus:
            self._next_on_gpus = now + self._gpu_s
        return now >= (self._look_at if self._quiet or self.report else self._next_on_gpus)

    def inspected(
        self, statuses: Sequence[RankStatus], found: Sequence[Inspection], now: float, begun: float | None = None
    ) -> None:
        """Evaluate an inspection of all nodes; ``begun``: when it was started, None: just now."""
        took_s = 0.0 if begun is None else max(0.0, now - begun)
        evidence = {one.rank: one for inspection in found for one in inspection.ranks}
        unseen = any(not status.ended and status.rank not in evidence for status in statuses)
        if unseen and (self.report is not None or not evidence):  # a node was too slow: neither progress nor its end
            self._look_at, self._next_on_gpus = now + self._interval, now + self._gpu_s
            return
        self._load = max([inspection.load or 0.0 for inspection in found], default=self._load)
        completed = [group.completed for one in evidence.values() for group in one.collectives or ()]
        self._preparing = bool(completed) and max(completed) < 1  # torch writes -1 for none
        activities = {status.rank: activity(status, evidence.get(status.rank)) for status in statuses}
        stall = diagnose(activities, store_of(found))
        self._next_on_gpus = now + self._gpu_s
        self._look_at = now + self._interval
        self._interval = min(self._interval * 1.3, self._timing.longest_s)
        if stall is None:
            if not self._all_quiet(activities, now):
                self._moves(now)
            return
        key = (stall.kind, stall.ranks, *(_progress(one) for one in activities.values()))
        if key != self._key:
            self._moves(now)
            self._key, self._confirmed = key, False
            waiting = [self._quiet[r] for r, one in activities.items() if one.waits and r in self._quiet]
            self._since = min(max(waiting, default=now), now)
            self._still_since = self._loop_since = self._script_since = self._since
            self._script = None
            self._look_at = max(now, now - took_s + self._timing.again_s)
        else:
            self._confirmed = True
            self._next_on_gpus = now + min(self._gpu_s, self._timing.again_s)
        stacks = [_stack(activities[rank]) for rank in stall.ranks if rank in activities]
        suspects = [one for rank, one in evidence.items() if rank in stall.ranks]
        self._asleep = all(map(_sleeps, suspects))
        self._polls = all("sleep(" in one.source for one in suspects)
        if stacks != self._suspects or any(map(_works, suspects)):
            self._suspects, self._still_since = stacks, now
        script = [one.script for one in suspects]
        if script != self._script:
            self._script_since = self._since if self._script is None else now
            self._script = script
        loops = [_loop(one) for one in suspects]
        if loops != self._loops or None in loops:
            self._loops, self._loop_since = loops, now
        place = _place(stall, activities)
        waited = now - self._since
        left = self._wanted(stall, place, now) - waited
        if not self._confirmed or left > 0:
            self._interval = self._timing.again_s
            if self._confirmed:  # the result of the last inspection is to arrive when the verdict is due
                self._look_at = now + min(max(left - took_s, 0.0), self._timing.again_s)
            return
        groups = grouped(activities, stall)
        lines = picture(groups, activities)
        computes = self._computes(stall, waited, now)
        self._say(StallReport(stall, self._since, place, lines, list(evidence.values()), groups, computes), now)

    def _wanted(self, stall: Stall, place: str, now: float) -> float:
        """Return how long ranks must have waited before the verdict is given."""
        timing = self._timing
        if stall.sure:
            return timing.sure_s
        if not stall.cpu:  # it sleeps: it would use a CPU that is scarce, too
            idle_s = timing.blocked_s if stall.kind == "stall-stopped" else timing.idle_s
            earlier = self._since - max((self._quiet.get(rank, now) for rank in stall.ranks), default=now)
            # Longer if the user's code goes on between the inspections: it waits for a GPU or a service in each step.
            # One that sleeps in each step tries something again and again.
            script_s = self._script_since - self._since + timing.idle_s - 2 * timing.again_s
            longest_s = timing.loop_s if self._polls else timing.slow_s
            wanted = max(timing.sure_s, idle_s - max(0.0, earlier), min(longest_s, script_s))
            return max(wanted, 2.0 * self._patience.get(place, 0.0))
        # Where CPUs are scarce, the same work takes longer by the share that the rank does not get.
        slowdown = 1.0 if self._asleep else max(1.0, min(max(1.0, self._load), 1.0 / stall.cpu, 4.0))
        wanted = (timing.importing_s if stall.importing else timing.slow_s) * slowdown
        if not stall.importing and not self._preparing:  # sooner if its stack stays the same
            still_s = self._still_since - self._since + timing.busy_s - 2 * timing.again_s
            loop_s = self._loop_since - self._since + timing.loop_s - 2 * timing.again_s
            wanted = min(wanted, max(timing.busy_s * slowdown, still_s), max(timing.loop_s * slowdown, loop_s))
        return max(wanted, 2.0 * self._patience.get(place, 0.0))

    def _computes(self, stall: Stall, waited: float, now: float) -> bool:
        """Whether the suspects seem to make progress."""
        timing = self._timing
        still_s = (
            timing.slow_s if self.report is not None and self.report.computes else timing.busy_s - 2 * timing.again_s
        )
        if stall.cpu:
            moves = stall.importing or self._preparing or now - self._still_since < still_s
        else:
            moves = self._script_since > self._since and now - self._script_since < still_s
        return moves and waited < timing.long_s and not stall.sure

    def _say(self, report: StallReport, now: float) -> None:
        first = self.report is None or self.report.identity != report.identity
        if first:
            self._repeat_s = self._timing.repeat_s
        elif now < self._repeat_at:
            self.report = report
            return
        else:
            self._repeat_s *= 2
        self._repeat_at = now + self._repeat_s
        self.report = report
        self.messages.append(report.text(now))
        if first and report.stall.remedy:
            self.messages.append(f"  → {report.stall.remedy}")
        if first and len(report.picture) > 2:  # otherwise the sentence contains it
            self.messages += [f"  {line}" for line in report.picture[:20]]

    def _moves(self, now: float) -> None:
        """Record that the run makes progress."""
        if self.report is not None:
            waited = now - self.report.since
            place = self.report.place
            self._patience[place] = max(waited, self._patience.get(place, 0.0))
            if not self.ending:
                self.messages.append(f"the run continues after {seconds(waited)}")
            self.report = None
        self._key = None

    def _all_quiet(self, activities: Mapping[int, Activity], now: float) -> bool:
        """Report a run whose ranks are all quiet although none waits for another; return whether it is one."""
        running = [rank for rank, one in activities.items() if one.doing != "ended"]
        if not running or any(rank not in self._quiet for rank in running):
            return False
        since = max(self._quiet[rank] for rank in running)
        wanted = self._timing.connect_s if any(map(_connects, activities.values())) else self._timing.all_quiet_s
        if now - since < wanted:
            self._look_at = min(self._look_at, since + wanted)
            return False
        groups = grouped(activities, None)
        lines = picture(groups, activities)
        words = "while no rank computes, reads or writes: " + "; ".join(lines[:3])
        stall = Stall("stall-idle", tuple(running), None, words)
        self._key = ("idle",)
        self._say(StallReport(stall, since, "", lines, [], groups), now)
        return True


def _progress(one: Activity) -> object:
    groups = (one.evidence.collectives if one.evidence else None) or []
    return one.status.rank, one.doing, tuple((g.name, g.enqueued, g.completed) for g in groups)


def _connects(one: Activity) -> bool:
    """Whether a rank, or a process below it, opens a connection."""
    found = one.evidence
    if found is None:
        return False
    return connects(found.stack, found.source) or any(connects(c.stack, c.source) for c in found.children)


def _sleeps(one: RankEvidence) -> bool:
    """Whether the main thread of a rank sleeps, and its other threads and processes do not work for it either."""
    return one.active is False and (one.cpu or 0.0) < _ASIDE_CPU and one.moved_bytes < _ASIDE_BYTES


def _loop(one: RankEvidence) -> object:
    """Return the innermost function and where it was called if a rank computes there, in the user's own code, or a
    DataLoader worker for which it waits."""
    if one.moved_bytes:
        return None
    if waits_for_data(one.stack):
        return [(child.pid, called) for child in one.children if (called := _computing(child.gil, child.stack))] or None
    return None if one.children else _computing(one.gil, one.stack)


def _computing(gil: bool | None, stack: Sequence[StackFrame]) -> object:
    if not gil or not stack or is_library(stack[0].file):
        return None
    return stack[0].function, stack[0].file, stack[1:]


def _works(one: RankEvidence) -> bool:
    """Whether a rank may make progress although its stack stays the same: it moves data, or runs native code."""
    return not _sleeps(one) and (one.moved_bytes > 0 or one.gil is False)


def _stack(one: Activity) -> object:
    evidence = one.evidence
    if evidence is None:
        return None
    return evidence.stack, evidence.variables, [(child.pid, child.stack) for child in evidence.children]


def _place(stall: Stall, activities: Mapping[int, Activity]) -> str:
    return ";".join(activities[rank].place for rank in stall.ranks if rank in activities)
