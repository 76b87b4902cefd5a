"""A rank that the others wait for, step after step: when to look, and the verdict `slow` with what is beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from gpuboard.launch.runs.folder import RankView, VerdictView
from gpuboard.launch.stalls.pace import (
    FIRST_LOOKS,
    ClockOffset,
    GroupPace,
    PaceReading,
    RankCalls,
    RankReading,
    better,
    clock,
    first_paces,
    paces,
)
from gpuboard.launch.stalls.slow import evidence, pace_lines, remedy, slow_text
from gpuboard.launch.stalls.verdict import Explanation
from gpuboard.launch.supervisors import CallReply, Supervisors
from gpuboard.model.snapshot import Snapshot
from gpuboard.model.units import iso

_REPLY_S = 10.0  # the nodes' own deadline is 5 s


class PaceTiming(msgspec.Struct, frozen=True):
    """All fields but ``looks`` are seconds."""

    # from the start to the first look, and from one look at the first steps to the next; it grows by half a quarter
    sooner_s: float = 2.0
    # from the start to the first look that counts for `looks`: the steps have to be those of training
    first_s: float = 10.0
    # from one look to the next while a rank is suspected
    again_s: float = 5.0
    # longest interval between looks: each costs a rank about 20 ms of CPU
    longest_s: float = 60.0
    # looks in a row, each at other steps, that have to name the same ranks
    looks: int = 3
    # longest wait for the readings of the GPUs that belong to a verdict
    gpus_s: float = 15.0


DEFAULT_PACE_TIMING = PaceTiming()


class PaceWatch:
    """Decides when to look, and which slow ranks are established (pure: times are passed in, monotonic seconds).

    A few looks at the first steps come before and between those that count: they name a rank if it was the last in
    every step, which the others then confirm or not.
    """

    def __init__(self, timing: PaceTiming = DEFAULT_PACE_TIMING) -> None:
        self.slow: GroupPace | None = None  # established, as last seen
        self.confirmed = False  # by the looks that count
        self.newest: list[GroupPace] = []  # of all process groups, as last seen
        self.judged: dict[str, int] = {}  # group → the newest collective that has been looked at
        self._timing = timing
        self._next = 0.0  # look that counts
        self._interval = timing.again_s
        self._sooner = 0.0  # next look at the first steps
        self._sooner_s = timing.sooner_s
        self._left = FIRST_LOOKS
        self._calls = 0  # that the newest of them has seen
        self._seen: tuple[int, ...] = ()  # slow ranks of the newest look
        self._count = 0  # of looks that have shown the same

    def due(self, now: float) -> bool:
        """Return whether to look now."""
        if not self._next:
            self._next, self._sooner = now + self._timing.first_s, now + self._timing.sooner_s
        return self.counts(now) or (self.first and now >= self._sooner)

    @property
    def first(self) -> bool:
        """Whether looks still look at the first steps."""
        return self._left > 0

    def counts(self, now: float) -> bool:
        """Return whether a look now is one of those that count."""
        return now >= self._next

    def looked(self, found: Sequence[GroupPace], now: float) -> None:
        """Evaluate a look that counts; ``found`` is empty if the ranks have made too few steps since the one before."""
        slowest = _slowest(found)
        if slowest is not None:
            self.newest = list(found)
            self.judged |= {pace.group: pace.newest for pace in found}
            self._count = self._count + 1 if slowest.slow == self._seen else 1
            self._seen = slowest.slow
            enough = self._count >= self._timing.looks
            if enough or self._seen == self._established:
                self.slow = slowest if slowest.slow else None
                self.confirmed = bool(slowest.slow) and (self.confirmed or enough)
        if slowest is not None and (self._seen != self._established or (self._seen and not self.confirmed)):
            self._interval = self._timing.again_s
        else:  # the ranks are soon to make their first steps, or slow ones: look a little later each time
            self._interval = min(self._interval * (1.2 if slowest is None else 2.0), self._timing.longest_s)
        self._next = now + self._interval

    def looked_sooner(self, found: Sequence[GroupPace], calls: int, now: float) -> None:
        """Evaluate a look at the first steps: ``found`` is empty before there are enough; ``calls`` there are."""
        slowest = _slowest(found)
        if slowest is not None:
            self._left -= 1
            self._sooner_s *= 1.25
            if self.slow is None and slowest.slow:
                self.newest = list(found)
                self.slow, self._left = slowest, 0
        elif calls != self._calls:
            self._sooner_s = self._timing.sooner_s
        else:
            self._sooner_s = min(self._sooner_s * 1.2, self._timing.longest_s)
        self._calls = calls
        self._sooner = now + self._sooner_s

    @property
    def _established(self) -> tuple[int, ...]:
        return () if self.slow is None else self.slow.slow


def _slowest(found: Sequence[GroupPace]) -> GroupPace | None:
    return max(found, key=lambda pace: pace.late_s / pace.step_s, default=None)


class Straggler:
    """The head's part: asks the nodes, keeps the verdict. ``notify`` prints a message."""

    def __init__(
        self,
        supervisors: Supervisors,
        ranks: Mapping[int, RankView],
        *,
        read_gpus: Callable[[], None] | None,
        notify: Callable[[str], None],
        timing: PaceTiming = DEFAULT_PACE_TIMING,
    ) -> None:
        """``read_gpus`` starts a reading of the GPUs, which is passed to :meth:`take_gpus`; None: there are none."""
        self.verdict: VerdictView | None = None  # the one that stands
        self.watch = PaceWatch(timing)
        self._supervisors = supervisors
        self._timing = timing
        self._ranks = ranks
        self._read_gpus = read_gpus
        self._notify = notify
        self._sent: dict[str, float] = {}  # node whose reply is awaited → when it was asked, epoch seconds
        self._clocks: dict[str, tuple[ClockOffset, float]] = {}  # node → its clock, as known at that time
        self._calls: list[RankCalls] = []
        self._readings: dict[int, RankReading] = {}
        self._loads: dict[str, float | None] = {}
        self._named: tuple[tuple[int, ...], bool] = (), False  # slow ranks of the verdict, and whether it is confirmed
        self._shown: tuple[int, ...] = ()  # slow ranks whose evidence has been printed
        self._gpus_until: float | None = None  # a verdict waits for readings of the GPUs

    def explain(self, explanation: Explanation) -> Explanation:
        """Return ``explanation`` with the pace of the ranks at the newest look; called in any thread."""
        found = self.watch.newest
        lines = [line for pace in found for line in pace_lines(pace, self._ranks)]
        return msgspec.structs.replace(explanation, paces=found, pace=lines)

    def tick(self, now: float, nodes: Collection[str]) -> bool:
        """Look if that is due; return whether the verdict has changed. ``nodes``: those whose ranks run."""
        if self.watch.due(now) and not self._sent and nodes:
            self._calls, self._readings, self._loads = [], {}, {}
            for node in nodes:
                self._sent[node] = time.time()
                self._supervisors.call(node, "pace", {}, _REPLY_S, PaceReading)
        if self._gpus_until is not None and now >= self._gpus_until:
            self._gpus_until = None
            return self._establish(None)
        slow = () if self.watch.slow is None else self.watch.slow.slow
        if (slow, self.watch.confirmed) == self._named:
            return False
        self._named = slow, self.watch.confirmed
        if slow and self._read_gpus is not None:
            self._gpus_until = now + self._timing.gpus_s
            self._read_gpus()
            return False
        return self._establish(None)

    def take(self, reply: CallReply, now: float) -> None:
        """Process a node's reply. A node without one is left out: the ranks of a group then lack some of its members,
        which changes who waits, so that nothing is concluded."""
        sent = self._sent.pop(reply.node, None)
        reading = reply.value
        if sent is not None and isinstance(reading, PaceReading):
            there = clock(sent, reading, time.time())
            if before := self._clocks.get(reply.node):
                there = better(before[0], there, now - before[1])
            self._clocks[reply.node] = there, now
            self._loads[reply.node] = reading.load
            for rank in reading.ranks:
                self._readings[rank.rank] = rank
                self._calls += [
                    RankCalls(rank.rank, group, there.ahead_s, there.within_s, reply.node, rank.transfers)
                    for group in rank.groups or ()
                    if rank.rank in self._ranks
                ]
        if not self._sent:
            calls = self._calls if self._readings.keys() >= self._ranks.keys() else []
            if self.watch.counts(now):
                self.watch.looked(paces(calls, self.watch.judged), now)
            if self.watch.first:
                count = sum(one.calls.first + len(one.calls.gaps_us) for one in calls)
                self.watch.looked_sooner(first_paces(calls, self._readings), count, now)
            self._calls = []

    def take_gpus(self, snapshot: Snapshot) -> None:
        """Process a reading of the GPUs, if a verdict waits for it."""
        if self._gpus_until is not None:
            self._gpus_until = None
            self._establish(snapshot)

    def _establish(self, snapshot: Snapshot | None) -> bool:
        pace = self.watch.slow
        if pace is None:
            if self.verdict is not None:
                self._notify("no rank is slower than the others any more")
            changed, self.verdict, self._shown = self.verdict is not None, None, ()
            return changed
        lines = evidence(pace, self._ranks, self._readings, self._loads, snapshot)
        hint = remedy(pace, self._ranks, self._readings, self._loads, snapshot)
        lines.append(f"→ {hint}")
        text = slow_text(pace, self._ranks, so_far=not self.watch.confirmed)
        nodes = {self._ranks[rank].node for rank in pace.slow}
        self.verdict = VerdictView(
            iso(time.time()),
            "slow",
            pace.slow[0] if len(pace.slow) == 1 else None,
            nodes.pop() if len(nodes) == 1 else None,
            text,
            "\n".join(lines),
        )
        new, self._shown = self._shown != pace.slow, pace.slow
        self._notify("\n".join([text, *(f"  {line}" for line in lines if new)]))
        return True
