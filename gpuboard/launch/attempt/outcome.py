"""An attempt as `runs --json` shows it: its state, its verdicts and its exit code."""

from __future__ import annotations

import signal
import time

import msgspec

from gpuboard.launch.attempt.ending import Ending
from gpuboard.launch.attempt.gate import StartGate
from gpuboard.launch.attempt.record import AttemptRecord
from gpuboard.launch.attempt.silence import SilentNodes
from gpuboard.launch.failure import FailureWatch
from gpuboard.launch.output import Relay
from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.preflight.check import check_text, grouped
from gpuboard.launch.restarts import attempt_text, same_failure_text
from gpuboard.launch.runs.folder import FINAL, RunState, RunView, VerdictView, this_head
from gpuboard.launch.runs.places import moved
from gpuboard.launch.stalls.follower import StallFollower
from gpuboard.launch.stalls.straggler import Straggler
from gpuboard.model.units import format_duration, iso


class AttemptOutcome:
    """``saved``: the newest view that was to be written to state.json. ``failed_at``: epoch seconds, 0 before."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        gate: StartGate,
        ending: Ending,
        watch: FailureWatch,
        stalls: StallFollower,
        straggler: Straggler,
        silent: SilentNodes,
        relay: Relay,
        record: AttemptRecord,
        before: RunView | None,
    ) -> None:
        """``before``: the run at the end of the attempt before."""
        self.state: RunState = "preflight"
        self._started = time.time()
        self.failed_at = 0.0
        self.saved: RunView | None = None
        self._saved_at = float("-inf")  # monotonic
        self._unwritten = False  # state.json lacks ``saved``: the disk was full
        self._plan = plan
        self._gate = gate
        self._ending = ending
        self._watch = watch
        self._stalls = stalls
        self._straggler = straggler
        self._silent = silent
        self._relay = relay
        self._record = record
        self._before = before
        self._former = moved(before, watch.ranks) if before else []
        self._stopped: VerdictView | None = None  # the run, between two attempts

    def view(self) -> RunView:
        """Return the run with this attempt."""
        watch, before = self._watch, self._before
        for rank, line in self._relay.last_line.items():
            tail = self._relay.errors.get(rank)
            watch.note_output(rank, line, tail[-1] if tail else "")
        found = [*self._verdicts(), *([self._stopped] if self._stopped else [])]
        found = [msgspec.structs.replace(verdict, attempt=self._plan.attempt) for verdict in found]
        return RunView(
            id=self._plan.run,
            lease=self._plan.rank_map.lease,
            target=" ".join([self._plan.target.words(), *self._plan.target.args]),
            started=before.started if before else iso(self._started),
            state=self.state,
            exit_code=self.exit_code() if self.state in FINAL else None,
            ranks=list(watch.ranks.values()),
            verdicts=[*(before.verdicts if before else ()), *found],
            head=this_head(),
            folder=str(self._record.folder.path),
            attempt=self._plan.attempt,
            former=self._former,
        )

    @property
    def failure(self) -> str:
        """What this attempt failed of: the same text for the same failure."""
        place = self._watch.cause.place if self._watch.cause else ""
        return place or next((verdict.text for verdict in self._verdicts()), "")

    def exit_code(self) -> int:
        """Return the exit code of the run if it ends with this attempt."""
        if self._ending.code is not None:
            return self._ending.code if self._gate.opened else 128 + signal.SIGINT
        if self._gate.refused:
            return 7
        return 0 if self._passed else self._watch.exit_code()

    def closing(self, failure_before: str) -> list[str]:
        """Return the last messages of the attempt; ``failure_before``: what the one before failed of."""
        code, options, lines = self.exit_code(), self._plan.options, []
        if refused := self._gate.refused:
            lines.append(
                f"preflight failed: {len(refused)} check{'' if len(refused) == 1 else 's'}; no rank was started"
            )
        elif options.preflight_only and code == 0:
            lines.append("preflight passed; no rank was started (--preflight-only)")
        elif not self._gate.opened and self._ending.asked is not None:
            lines.append(f"{self._ending.asked[0]}: stopped before the ranks were started")
        lines += self._watch.summary() if self._gate.opened else []
        if code != 0 and failure_before and failure_before == self.failure:
            lines.append(same_failure_text(self._plan, self.failure))
        if code != 0:
            ran = format_duration(round((self.failed_at or time.time()) - self._started))
            at = time.strftime("%H:%M:%S", time.localtime(self.failed_at or None))
            which = f"{attempt_text(self._plan)}: " if options.max_restarts else ""
            lines.append(f"{which}exit code {code} at {at} after {ran}; logs: {self._record.folder.path}")
        return lines

    def stopped(self, reason: str) -> None:
        """Record that the user ends the run after this attempt, before the next one."""
        self._stopped = VerdictView(iso(time.time()), "stopped", None, None, reason)
        self.state = "stopped"

    def save(self, after_s: float = 0.0) -> None:
        """Write state.json unless that was tried less than ``after_s`` ago, or it has the newest view already."""
        if time.monotonic() - self._saved_at < after_s:
            return
        self._saved_at = time.monotonic()
        view = self.view()
        if view != self.saved or self._unwritten:  # an idle run writes nothing: the folder may be on a network home
            self.saved = view
            self._unwritten = not self._record.write("state.json", view)

    def changed(self) -> None:
        """Write state.json at the next occasion, however recently that was done."""
        self._saved_at = float("-inf")

    @property
    def _passed(self) -> bool:
        """Whether this was --preflight-only, without a failed check or a request to stop."""
        return self._plan.options.preflight_only and self._ending.code is None and not self._gate.refused

    def _verdicts(self) -> list[VerdictView]:
        cause, refused = self._watch.cause, self._gate.refused
        if refused:
            return [
                VerdictView(iso(self.failed_at), "preflight", None, c.node, check_text(c).splitlines()[0], c.remedy)
                for c in grouped(refused)
            ]
        stalled = [self._stalls.verdict] if self._stalls.verdict else []
        slow = [*([self._straggler.verdict] if self._straggler.verdict else []), *self._silent.verdicts.values()]
        if cause is None or cause.kind == "stalled" or self._passed:
            return stalled + slow
        return [
            *stalled,
            VerdictView(iso(self.failed_at), cause.kind, cause.rank, cause.node, cause.text, cause.evidence),
            *slow,
        ]
