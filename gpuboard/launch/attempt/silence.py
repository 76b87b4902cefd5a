"""Nodes whose supervisor does not respond: it is stopped, it hangs, or the network delivers nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from gpuboard.launch.runs.folder import RankView, VerdictView
from gpuboard.launch.stalls.evidence import RankEvidence
from gpuboard.launch.stalls.waits import rank_words
from gpuboard.launch.stalls.words import seconds
from gpuboard.launch.supervisors import Supervisors, SupervisorSeen
from gpuboard.launch.timing import HeadTiming
from gpuboard.model.text import clean
from gpuboard.model.units import iso


class SilentNodes:
    """Looks at a silent supervisor over a second connection and names what is wrong with it."""

    def __init__(
        self,
        supervisors: Supervisors,
        ranks: Mapping[int, RankView],
        *,
        lost_head_s: float | None,
        timing: HeadTiming,
        notify: Callable[[str], None],
    ) -> None:
        """``ranks``: all ranks of the run. ``lost_head_s``: after this long a silent node is lost."""
        self.verdicts: dict[str, VerdictView] = {}  # those that stand, by node
        self._supervisors = supervisors
        self._ranks = ranks
        self._lost_head_s = lost_head_s
        self._timing = timing
        self._notify = notify
        self._since: dict[str, float] = {}  # nodes that were looked at, and since when they are silent, monotonic
        self._seen: dict[str, SupervisorSeen] = {}

    def tick(self, now: float) -> bool:
        """Look at nodes that have become silent, print what is new; return whether the verdicts have changed.

        To be called after pings.
        """
        silent = {node: s for node, s in self._supervisors.silent().items() if s >= self._timing.silent_s}
        for node in silent.keys() - self._since.keys():
            self._since[node] = now - silent[node]
            self._supervisors.look(node)
        before = len(self.verdicts)
        for node in self._since.keys() - silent.keys():
            if node in self.verdicts and self._supervisors.reachable(node):
                self._notify(f"{clean(node, 60)} responds again after {seconds(now - self._since[node])}")
            self.forget(node)
        for node, silent_s in silent.items():
            if node in self._seen and node not in self.verdicts:
                self._judge(self._seen[node], silent_s)
        return len(self.verdicts) != before

    def take(self, seen: SupervisorSeen) -> None:
        """Record what a look has found; the next tick evaluates it."""
        if seen.node in self._since:
            self._seen[seen.node] = seen

    def forget(self, node: str) -> None:
        """Withdraw what is known of a node: it responds, or its connection is lost, which is reported as a failure."""
        self._since.pop(node, None)
        self._seen.pop(node, None)
        self.verdicts.pop(node, None)

    def _judge(self, seen: SupervisorSeen, silent_s: float) -> None:
        node = clean(seen.node, 60)
        found = None if isinstance(seen.found, str) else seen.found
        stopped = found is not None and found.state in {"T", "t"}
        if not stopped and silent_s < self._timing.unresponsive_s:
            return  # on a busy node it may respond yet
        name = f"its supervisor (pid {seen.pid})"
        remedy = f"see `ps -o stat,wchan:20,args -p {seen.pid}` on {node}"
        if stopped:
            why = f"{name} is stopped (SIGSTOP, ctrl-Z or a debugger)"
            remedy = f"to continue it: kill -CONT {seen.pid} on {node}"
        elif isinstance(seen.found, str):
            why = f"a new connection fails, too: {clean(seen.found, 300)}"
            remedy = f"check {node} and the network to it"
        else:
            why = f"{name} {_state(found)}"
        ranks = [number for number, rank in self._ranks.items() if rank.node == seen.node]
        text = f"{node} has not responded for {seconds(silent_s)}: {why}; {rank_words(ranks)} may still run there"
        if self._lost_head_s is not None:
            remedy += f"; after {seconds(self._lost_head_s)} without a response the run ends (--lost-head)"
        self.verdicts[seen.node] = VerdictView(iso(time.time()), "node-silent", None, seen.node, text, f"→ {remedy}")
        self._notify(f"{text}\n  → {remedy}")


def _state(found: RankEvidence | None) -> str:
    """Return what a supervisor does that is not stopped."""
    if found is None or found.state is None:
        return "has ended, and its guard has not reported it"
    if found.state == "D":
        return f"is in uninterruptible sleep{f' in {clean(found.wchan, 60)}' if found.wchan else ''}"
    return f"runs, but does not respond (state {clean(found.state, 4)})"
