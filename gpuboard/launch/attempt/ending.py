"""How an attempt ends: who asked for it, SIGTERM, the grace, SIGKILL, and nodes that do not report their end."""

from __future__ import annotations

import signal
import time

from gpuboard.launch.attempt.record import AttemptRecord
from gpuboard.launch.failure import FailureWatch
from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.stalls.waits import rank_words
from gpuboard.launch.supervisors import Supervisors
from gpuboard.launch.timing import HeadTiming


class Ending:
    """``code``: exit code of a run that the user stops. ``asked``: the user's first request, its reason and code."""

    def __init__(
        self, plan: LaunchPlan, supervisors: Supervisors, watch: FailureWatch, record: AttemptRecord, timing: HeadTiming
    ) -> None:
        self.code: int | None = None
        self.asked: tuple[str, int] | None = None
        self._supervisors = supervisors
        self._watch = watch
        self._record = record
        self._timing = timing
        self._names = [config.node for config in plan.nodes]
        self._grace_s = plan.options.grace_s
        self._stop_at: float | None = None  # when the ranks were sent SIGTERM, monotonic
        self._terminated_at: float | None = None  # when the first SIGTERM was forwarded, monotonic
        self._countdown = -1  # seconds shown last
        self._spared: list[int] = []  # ranks that get SIGTERM ``exit_wait_s`` later than the others

    @property
    def stopping(self) -> bool:
        """Whether the ranks are to be stopped, or are being stopped."""
        return self._watch.stop_reason is not None

    def ask(self, reason: str, code: int, grace_s: float | None) -> None:
        """Stop the run for the user; a second request ends it at once."""
        self.asked = self.asked or (reason, code)
        if self._stop_at is not None:  # second request, or the run has failed: never later than announced
            left = max(0.0, self._stop_at + self._grace_s - time.monotonic())
            grace_s = min(grace_s or 0.0, left)
        if grace_s is not None:
            self._grace_s = grace_s
        if self.code is None and self._watch.cause is None:
            self.code = code
        self._watch.stop(reason, time.monotonic())
        if self._stop_at is not None:
            self._begin(time.monotonic())

    def hung_up(self) -> None:
        """Stop the run because its terminal was closed: both the shell and the kernel report it, as one request."""
        if not self.stopping:
            self.ask("the terminal was closed", 128 + signal.SIGHUP, None)
        self.asked = self.asked or ("the terminal was closed", 128 + signal.SIGHUP)

    def forwarding(self, number: int, now: float) -> str:
        """Record that a signal is forwarded to the ranks; return what follows, for the message about it."""
        if number != signal.SIGTERM:
            return ""
        self._terminated_at = self._terminated_at or now
        self.asked = self.asked or ("SIGTERM", 128 + number)
        return "" if self.stopping else f"; SIGKILL in {self._left_s(now):.0f} s"

    def begin_if_due(self, now: float) -> None:
        """Stop the ranks if that has been decided."""
        if self.stopping and self._stop_at is None:
            self._begin(now)

    def tick(self, now: float, read_until: float) -> None:
        """Do what is due; ``read_until``: all items that arrived before have been processed."""
        unheeded = self._terminated_at is not None and not self.stopping and not self._watch.finished
        if unheeded and self._left_s(now) == 0.0:
            self.ask("the ranks have not ended after SIGTERM", 128 + signal.SIGTERM, 0.0)
            self.begin_if_due(now)
        if self._stop_at is not None:
            self._count_down(self._stop_at, read_until)

    def finish(self, *, opened: bool, refused: bool) -> float:
        """Stop what is still running, at the end; return when every node should be empty (monotonic)."""
        if refused:
            self._grace_s = self._timing.closed_gate_grace_s
        elif not opened:
            self._grace_s = min(self._grace_s, self._timing.closed_gate_grace_s)
        if self._stop_at is None:
            self._watch.stop("preflight failed" if refused else "not started", time.monotonic())
            self._stop_at = time.monotonic()
            self._supervisors.call_all("stop", {"grace_s": self._grace_s, "reason": self._watch.stop_reason or ""})
        return time.monotonic() + self._grace_s + self._timing.empty_s

    def _begin(self, now: float) -> None:
        if self._watch.cause is not None and self._watch.cause.kind == "node-lost":
            self._grace_s = min(self._grace_s, self._timing.lost_node_grace_s)
        self._grace_s = self._left_s(now)
        self._stop_at = now
        self._countdown = -1
        reason = self._watch.stop_reason or ""
        self._spared = self._watch.exiting if self._grace_s > 0 else []
        self._supervisors.call_all("stop", {"grace_s": self._grace_s, "reason": reason, "spare": self._spared})
        how = f"SIGTERM now, SIGKILL in {self._grace_s:.0f} s" if self._grace_s > 0 else "SIGKILL now"
        stopped = [rank for rank in self._running() if rank not in self._spared]
        if stopped:
            self._record.print(f"{reason}; stopping {rank_words(stopped)}: {how}")

    def _running(self) -> list[int]:
        """Return the ranks that have a process."""
        return [rank for rank in self._watch.running if self._watch.ranks[rank].pid is not None]

    def _left_s(self, now: float) -> float:
        """Return the time until SIGKILL; it counts from the first SIGTERM that was forwarded."""
        if self._terminated_at is None:
            return self._grace_s
        return max(0.0, self._terminated_at + self._grace_s - now)

    def _count_down(self, stop_at: float, now: float) -> None:
        if self._spared and now - stop_at >= self._timing.exit_wait_s:
            self._supervisors.call_all("signal", {"signal": int(signal.SIGTERM), "ranks": self._spared})
            self._spared = []
        left = stop_at + self._grace_s - now
        if left < -self._timing.empty_s:
            for name in self._names:
                if name not in self._watch.ended_nodes:
                    self._watch.node_lost(name, "no report that all processes of the run have ended", now)
            return
        seconds = max(0, round(left))
        running = self._running()
        if seconds == self._countdown or not running:
            return
        self._countdown = seconds
        text = f"{rank_words(running)} still running: SIGKILL in {seconds} s"
        if self._record.screen.terminal("err"):
            self._record.screen.pin(f"gpuboard: {text} (ctrl-C: now)")
        elif left < self._grace_s - 1 and (seconds % 10 == 0 or seconds == 5):
            self._record.print(text)
