"""The gate of an attempt: closed until preflight has passed, then the ranks start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gpuboard.launch.attempt.record import AttemptRecord
from gpuboard.launch.failure import FailureWatch
from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.preflight.check import Check, check_text, grouped
from gpuboard.launch.preflight.checks import failed, interfaces, preflight, skipped
from gpuboard.launch.preflight.collect import PreflightCalls
from gpuboard.launch.supervisors import Supervisors
from gpuboard.launch.timing import HeadTiming
from gpuboard.model.replies import Done

Pump = Callable[[Callable[[], bool], float | None], bool]  # handles what comes in until the condition or the time


class StartGate:
    """``calls`` takes the replies to the calls of preflight; ``checks`` are its results."""

    def __init__(
        self,
        plan: LaunchPlan,
        supervisors: Supervisors,
        watch: FailureWatch,
        record: AttemptRecord,
        *,
        script_checks: Sequence[Check],
        timing: HeadTiming,
    ) -> None:
        self.opened = False
        self.checks: list[Check] = []
        self.calls = PreflightCalls(plan, supervisors, timing)
        self._plan = plan
        self._supervisors = supervisors
        self._watch = watch
        self._record = record
        self._script_checks = script_checks
        self._timing = timing
        self._interfaces: dict[str, str] = {}  # node → network interface for its ranks
        self._store = True  # the first node has a torch that can host the ranks' store

    @property
    def refused(self) -> list[Check]:
        """The failed checks that keep the gate closed."""
        return [] if self.opened else failed(self.checks)

    def check(self, pump: Pump, read_gpus: Callable[[], None] | None) -> bool:
        """Run all preflight checks; return whether the gate may open. A call that times out is a failed check.

        ``read_gpus`` starts a reading of the GPUs, which is passed to ``calls``; None: the run needs none.
        """
        calls = self.calls
        if read_gpus is not None:
            read_gpus()
        calls.start()
        if not pump(lambda: self._stopping or calls.started(), time.monotonic() + self._timing.slow_start_s):
            self._record.print(f"waiting for {calls.waiting_for()}: no reply for {self._timing.slow_start_s:.0f} s")
            pump(lambda: self._stopping or calls.started(), None)
        if len(self._plan.nodes) > 1 and not calls.failures and not self._stopping:
            calls.probe_connect()
            pump(lambda: self._stopping or calls.probed(), None)
        pump(lambda: self._stopping or read_gpus is None or calls.snapshot is not None, None)
        if self._stopping:
            return False
        self._evaluate()
        return not failed(self.checks)

    def open(self) -> None:
        """Start the ranks."""
        first = self._plan.nodes[0]
        for config in self._plan.nodes:
            names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} - config.environ.keys()
            environ = {name: self._interfaces[config.node] for name in sorted(names) if config.node in self._interfaces}
            args = {
                "master_addr": first.master_addr,
                "master_port": self.calls.port,
                "environ": environ,
                "store": self._store,
            }
            self._supervisors.call(config.node, "go", args, self._timing.start_s, Done)
        self.opened = True
        self._watch.gate_opened()

    @property
    def _stopping(self) -> bool:
        return self._watch.stop_reason is not None

    def _evaluate(self) -> None:
        first, options, answers = self._plan.nodes[0], self._plan.options, self.calls.collect()
        program = self._plan.target.kind == "program"
        found = preflight(self._plan.rank_map, first.master_addr, options.device, answers, python=not program)
        found += self._script_checks
        self.checks = skipped(found, options.skip)
        self._store = not program or (first.node in answers.facts and answers.facts[first.node].torch is not None)
        self._interfaces = interfaces(first.master_addr, first.node, answers)
        self._record.write("preflight.json", {"schema": 1, "checks": self.checks})
        if options.preflight_only:
            for check in grouped(self.checks):
                self._record.screen.lines("out", check_text(check).splitlines())
        else:
            bad = [check for check, raw in zip(self.checks, found, strict=True) if raw.status in {"fail", "warn"}]
            for check in grouped(bad):
                self._record.print(check_text(check))
