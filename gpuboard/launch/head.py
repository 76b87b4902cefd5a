"""The head of a run: opens the supervisors, runs preflight, opens the gate, watches, tears down.

One loop in the main thread reads one inbox. It never blocks on a node, on the user's terminal or on a remote disk.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.launch import events
from gpuboard.launch.causes import gpus, stderr
from gpuboard.launch.causes.exits import signal_name
from gpuboard.launch.failure import FailureWatch, rank_words
from gpuboard.launch.output import Logs, Relay, Screen
from gpuboard.launch.plan import LaunchPlan, shown
from gpuboard.launch.preflight.check import Check, check_text, grouped
from gpuboard.launch.preflight.checks import failed, interfaces, preflight, skipped
from gpuboard.launch.preflight.collect import PreflightCalls
from gpuboard.launch.restarts.rules import attempt_text, pause_s, restarts, same_failure_text
from gpuboard.launch.runs.control import ControlRequest, ControlServer
from gpuboard.launch.runs.folder import FINAL, RunFolder, RunState, RunView, VerdictView, this_head
from gpuboard.launch.stalls.follower import ExplainRequest, StallFollower
from gpuboard.launch.stalls.straggler import Straggler
from gpuboard.launch.stdin import StdinReader
from gpuboard.launch.supervisors import CallReply, SupervisorEvent, SupervisorLost, Supervisors
from gpuboard.launch.timing import DEFAULT_TIMING, HeadTiming
from gpuboard.model.replies import Done
from gpuboard.model.snapshot import Snapshot
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration, iso
from gpuboard.transport.base import CallFailed, LinkLost
from gpuboard.transport.connector import Connector

# characters of output not yet written to the user's streams, above and below which the ranks are paused and resumed
_HOLD_ABOVE, _HOLD_BELOW = 8 * 2**20, 2**20

_FORWARDED = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM})  # to the ranks, when a client asks for it

_EXPLAIN_S = 12.0  # for the inspections of all nodes
_GPUS_S = 5.0  # at the end of a run, for a reading of its GPUs: a new connection per node and one reading

GpuReader = Callable[[Callable[[Snapshot], None]], None]


class SignalReceived(msgspec.Struct, frozen=True):
    """This process received a signal."""

    number: int


class LeaseReading(msgspec.Struct, frozen=True):
    """All GPUs of the lease, also those that the run does not use."""

    snapshot: Snapshot


class Head:
    """One attempt of a run, from its plan to its exit code."""

    def __init__(
        self,
        plan: LaunchPlan,
        folder: RunFolder,
        screen: Screen,
        *,
        connector: Connector,
        nodes: Mapping[str, Node],
        read_gpus: GpuReader | None,
        script_checks: Sequence[Check] = (),
        started: Callable[[], None] | None = None,
        read_lease: GpuReader | None = None,
        before: Head | None = None,
        change: str = "",
        timing: HeadTiming = DEFAULT_TIMING,
    ) -> None:
        """``nodes``: how to reach each node of the plan. ``read_gpus`` starts a reading and passes it to its argument;
        None: the run needs no GPUs. ``script_checks`` belong to the results of preflight. ``started`` is called once
        all ranks have run for ``started_s``, or stall before; not if one fails before. ``read_lease`` reads the GPUs
        of the whole lease before a restart; None: the run uses all of them. ``before``: the attempt that this one
        follows; ``change``: what differs from it."""
        self._plan = plan
        self._folder = folder
        self._screen = screen
        self._read_gpus = read_gpus
        self._script_checks = script_checks
        self._started_hook = started
        self._timing = timing
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._supervisors = Supervisors(plan, nodes, connector, self._inbox, timing)
        self._watch = FailureWatch(plan, timing)
        on_gpus = plan.options.device == "cuda"
        kept = len(list(folder.path.glob("stall-*.json"))) if before else 0
        self._stalls = StallFollower(
            self._supervisors, nodes, self._watch, on_gpus=on_gpus, keep=self._write, notify=self._print, kept=kept
        )
        again = None if read_gpus is None else partial(read_gpus, self._inbox.put)
        self._straggler = Straggler(self._supervisors, self._watch.ranks, read_gpus=again, notify=self._print)
        heading = f"--- {attempt_text(plan)} at {iso(time.time())} ---" if before else ""
        self._logs = Logs(folder.path, self._report_incomplete, heading)
        self._incomplete = False  # the run's folder cannot be written
        labels = {rank: f"{view.node}:{view.index}" for rank, view in self._watch.ranks.items()}
        self._relay = Relay(labels, self._logs, screen, mark=self._watch.mark)
        self._names = [config.node for config in plan.nodes]
        self._preflight_calls = PreflightCalls(plan, self._supervisors, timing)
        self._interfaces: dict[str, str] = {}  # node → network interface for its ranks
        self.checks: list[Check] = []
        self._store = True  # the first node has a torch that can host the ranks' store
        self._state: RunState = "preflight"
        self._started = time.time()
        self._gate_open = False
        self._succeeded = False  # all ranks exited with 0
        self._stop_code: int | None = None  # exit code of a run that the user stops
        self._stop_at: float | None = None  # when the ranks were sent SIGTERM, monotonic
        self._grace_s = plan.options.grace_s
        self._terminated_at: float | None = None  # when the first SIGTERM was forwarded, monotonic
        self._running_since: float | None = None  # when the last rank began to run, monotonic
        self._countdown = -1  # seconds shown last
        self._sweeping: set[str] = set()  # lost nodes on which a second supervisor ends what is left
        self._spared: list[int] = []  # ranks that get SIGTERM ``exit_wait_s`` later than the others
        self._pinged = self._saved = float("-inf")
        self._read_until = time.monotonic()  # all items that arrived before have been processed
        self._complete_until = 0.0  # so have all events that any reachable supervisor sent before
        self._holding = False
        self._stdin: StdinReader | None = None
        self._view: RunView | None = None
        self._failed_at = 0.0  # epoch seconds; 0: no failure yet
        self._read_lease = read_lease
        self._before = before
        self._view_before = before.view() if before else None
        self._failure_before = before.failure if before else ""
        self._change = change
        self._stopped: VerdictView | None = None  # the run, between two attempts
        self._stop_asked: tuple[str, int] | None = None  # by the user: the reason and the exit code
        self._control_server: ControlServer | None = None
        self._handlers: dict[int, Any] = {}  # of signals, to be restored
        self.lease_reading: Snapshot | None = None  # all GPUs of the lease, read in the pause after this attempt
        self.continues = False  # another attempt follows, which takes over control socket and signals
        self._reading_gpus = False  # a GPU may be the reason of a failure or stall

    # the run

    def run(self) -> int:
        """Lead the run to its end; return the exit code. To be called in the main thread."""
        self._catch_signals()
        self._listen()  # both before state.json exists: a run that can be seen can be stopped
        try:
            self._begin()
            self._write("plan.json", shown(self._plan))
            self._write("rank_map.json", self._plan.rank_map)
            self._save()
            self._supervisors.open()
            if self._preflight() and not self._plan.options.preflight_only:
                self._go()
                self._pump(lambda: self._watch.emptied, None)
            code = self._finish()
            if self._restarts(code):
                code = self._pause(code)
        finally:
            if self._control_server is not None and not self.continues:
                self._control_server.close()
            if self._stdin is not None:
                self._stdin.stop()
            self._supervisors.close()
            self._logs.close()
            for number, handler in self._handlers.items() if not self.continues else ():
                signal.signal(number, handler)
        return code

    def stop(self, reason: str) -> None:
        """Stop the run as `gpuboard stop` does; from any thread and at any time."""
        self._inbox.put(ControlRequest("stop", None, reason))

    def abandon(self) -> None:
        """End the run between two attempts: the next one cannot be started."""
        self.continues = False
        self._state = "failed"
        self._save()
        if self._control_server is not None:
            self._control_server.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _listen(self) -> None:
        if self._before is not None:
            self._control_server = self._before._control_server
            if self._control_server is not None:
                self._control_server.handle = self._control
            return
        try:
            self._control_server = ControlServer(self._folder.path, self._control)
        except OSError as error:  # a file system without sockets
            why = f"{self._folder.path}: cannot create the control socket: {error.strerror}"
            self._print(f"{why}; `gpuboard stop` will not work for this run, ctrl-C does")

    def _begin(self) -> None:
        """Take over from the attempt before, with the requests that it has not handled."""
        if self._before is None:
            return
        before, self._before = self._before, None
        self._screen.unpin()
        self._print(attempt_text(self._plan) + (f": {self._change}" if self._change else ""))
        with contextlib.suppress(queue.Empty):
            while True:
                item = before._inbox.get_nowait()
                if isinstance(item, (SignalReceived, ControlRequest, ExplainRequest)):
                    self._inbox.put(item)

    @property
    def logs_complete(self) -> bool:
        """Whether all output of the ranks is in the run's folder."""
        return not self._logs.failed

    def view(self) -> RunView:
        """Return the run as ``runs --json`` shows it."""
        watch, before = self._watch, self._view_before
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
            state=self._state,
            exit_code=self._exit_code() if self._state in FINAL else None,
            ranks=list(watch.ranks.values()),
            verdicts=[*(before.verdicts if before else ()), *found],
            head=this_head(),
            folder=str(self._folder.path),
            attempt=self._plan.attempt,
        )

    @property
    def failure(self) -> str:
        """What this attempt failed of: the same text for the same failure."""
        place = self._watch.cause.place if self._watch.cause else ""
        return place or next((verdict.text for verdict in self._verdicts()), "")

    # preflight

    def _preflight(self) -> bool:
        """Run all preflight checks; return whether the gate may open. A call that times out is a failed check."""
        calls = self._preflight_calls
        first = self._plan.nodes[0]
        if self._read_gpus is not None:
            self._read_gpus(self._inbox.put)
        calls.start()
        if not self._pump(lambda: self._stopping() or calls.started(), time.monotonic() + self._timing.slow_start_s):
            self._print(f"waiting for {calls.waiting_for()}: no reply for {self._timing.slow_start_s:.0f} s")
            self._pump(lambda: self._stopping() or calls.started(), None)
        if len(self._plan.nodes) > 1 and not calls.failures and not self._stopping():
            calls.probe_connect()
            self._pump(lambda: self._stopping() or calls.probed(), None)
        read = self._read_gpus is None
        self._pump(lambda: self._stopping() or read or calls.snapshot is not None, None)
        if self._stopping():
            return False
        answers = calls.collect()
        program = self._plan.target.kind == "program"
        options = self._plan.options
        found = preflight(self._plan.rank_map, first.master_addr, options.device, answers, python=not program)
        found += self._script_checks
        self.checks = skipped(found, options.skip)
        self._store = not program or (first.node in answers.facts and answers.facts[first.node].torch is not None)
        self._write("preflight.json", {"schema": 1, "checks": self.checks})
        self._failed_at = time.time() if failed(self.checks) else 0.0
        if options.preflight_only:
            for check in grouped(self.checks):
                self._screen.lines("out", check_text(check).splitlines())
        else:
            bad = [check for check, raw in zip(self.checks, found, strict=True) if raw.status in {"fail", "warn"}]
            for check in grouped(bad):
                self._print(check_text(check))
        self._interfaces = interfaces(first.master_addr, first.node, answers)
        return not failed(self.checks)

    def _go(self) -> None:
        """Open the gate."""
        first = self._plan.nodes[0]
        for config in self._plan.nodes:
            names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} - config.environ.keys()
            environ = {name: self._interfaces[config.node] for name in sorted(names) if config.node in self._interfaces}
            args = {
                "master_addr": first.master_addr,
                "master_port": self._preflight_calls.port,
                "environ": environ,
                "store": self._store,
            }
            self._supervisors.call(config.node, "go", args, self._timing.start_s, Done)
        self._gate_open = True
        self._read_stdin()
        self._watch.gate_opened()
        self._state = "starting"
        self._save()

    def _read_stdin(self) -> None:
        rank = self._plan.options.stdin_rank
        if rank is not None:
            write = partial(self._supervisors.write_stdin, self._watch.ranks[rank].node)
            self._stdin = StdinReader(sys.stdin.fileno(), write)

    # the loop

    def _stopping(self) -> bool:
        return self._watch.stop_reason is not None

    def _pump(self, done: Callable[[], bool], until: float | None) -> bool:
        """Handle what comes in until ``done()`` or the time ``until``; return whether it is done.

        The clock of timeouts is ``_read_until``: after a suspension the inbox is drained before they are evaluated.
        """
        while not done():
            if until is not None and self._read_until >= until:
                return False
            now = time.monotonic()
            self._periodic(now)
            complete_until = self._supervisors.complete_until()
            with contextlib.suppress(queue.Empty):
                self._take(self._inbox.get(timeout=self._timing.poll_s))
                for _ in range(1000):  # bounded: a burst of output must not starve the rest of the loop
                    self._take(self._inbox.get_nowait())
            self._read_until, self._complete_until = now, complete_until
        return True

    def _take(self, item: object) -> None:
        now = time.monotonic()
        if isinstance(item, SupervisorEvent):
            self._on_event(item, now)
        elif isinstance(item, CallReply):
            self._on_reply(item)
        elif isinstance(item, SupervisorLost):
            self._on_lost(item.node, item.error, now)
        elif isinstance(item, SignalReceived):
            self._on_signal(item.number, now)
        elif isinstance(item, ControlRequest):
            reason = clean(item.reason, 200) or f"stopped by `gpuboard stop {self._plan.run}`"
            self._stop(reason, 128 + signal.SIGTERM, item.grace_s)
        elif isinstance(item, ExplainRequest):
            self._stalls.explain(item)
        elif isinstance(item, LeaseReading):
            self.lease_reading = item.snapshot
        elif isinstance(item, Snapshot):
            self._on_gpus(item)

    def _on_event(self, item: SupervisorEvent, now: float) -> None:
        event = item.event
        if item.node in self._sweeping or not self._watch.accepts(item.node, event):
            return  # from a second supervisor, which runs no ranks, or about another node's ranks
        if isinstance(event, events.Output):
            data = event.data or event.text.encode("utf-8", "replace")
            self._relay.output(event.rank, "err" if event.stream == "err" else "out", data)
            return
        if isinstance(event, events.Exited):
            self._relay.ended(event.rank)
            error = stderr.evidence(self._relay.errors.get(event.rank, ()))
            self._watch.note_output(event.rank, self._relay.last_line.get(event.rank, ""), error)
        if isinstance(event, events.Quiet):
            self._stalls.quiet(event, now)
            return
        if isinstance(event, events.Leaving):
            self._stalls.left(event)
        if isinstance(event, events.Measured):
            self._write("measured.json", event)
        self._watch.event(item.node, event, now)
        if isinstance(event, events.Exited):
            self._stalls.ended(event.rank, now)
        if self._watch.unexplained and not self._stopping():
            self._stalls.compare()
        if self._gate_open:
            self._watch.gate_opened()
            self._evaluate()  # at once: the cause is printed before the traceback that follows in the same burst
            self._stop_if_needed(now)

    def _on_reply(self, item: CallReply) -> None:
        if item.op in {"inspect", "py-spy"}:
            self._stalls.take(item, time.monotonic(), judge=self._gate_open and not self._stopping())
        elif item.op == "pace":
            self._straggler.take(item, time.monotonic())
        elif item.op != "go":
            self._preflight_calls.take(item)
        elif isinstance(item.value, (CallFailed, LinkLost)):
            self._watch.node_lost(item.node, f"cannot start its ranks: {item.value}", time.monotonic())

    def _on_lost(self, node: str, error: str, now: float) -> None:
        if node in self._sweeping:
            self._sweeping.remove(node)
        elif self._gate_open or self._stopping():
            if self._gate_open and node not in self._watch.ended_nodes:
                self._sweeping.add(node)
                self._supervisors.sweep(node)
            self._watch.node_lost(node, f"connection lost: {error}", now)
        else:
            self._preflight_calls.lost(node, error)
            self._watch.ended_nodes.add(node)

    def _check_gpus(self) -> None:
        """Read the GPUs again: one of them may be the reason."""
        if self._read_gpus is not None and not self._reading_gpus:
            self._reading_gpus = True
            self._read_gpus(self._inbox.put)

    def _on_gpus(self, snapshot: Snapshot) -> None:
        self._preflight_calls.snapshot = snapshot
        self._watch.gpu_processes = {
            node.name: {p.pid: f"{p.user}, {p.command}" for gpu in node.gpus for p in gpu.processes or ()}
            for node in snapshot.nodes
        }
        self._straggler.take_gpus(snapshot)
        if self._reading_gpus:
            self._reading_gpus = False
            for line in gpus.damaged(self._plan.rank_map, snapshot):
                self._print(line)
                self._watch.note_evidence(line)

    def _evaluate(self) -> None:
        if self._gate_open:
            # A supervisor may be suspended: it may hold the root cause while another node reports a secondary failure.
            complete_until = max(self._complete_until, self._read_until - self._timing.supervisor_wait_s)
            self._watch.tick(min(self._read_until, complete_until + self._timing.cause_wait_s))
        for line in self._watch.messages:
            self._print(line)
        self._watch.messages.clear()

    def _periodic(self, now: float) -> None:
        self._evaluate()
        if self._state == "starting" and all(
            v.state not in {"waiting", "importing"} for v in self._watch.ranks.values()
        ):
            self._state = "running"
            self._saved = float("-inf")
        if self._watch.cause is not None and not self._failed_at:
            self._failed_at = time.time()
            if gpus.names_gpu(f"{self._watch.cause.text} {self._watch.cause.evidence}"):
                self._check_gpus()
        self._watch_stalls(now)
        self._stop_if_needed(now)
        self._notify_started(now)
        if self._gate_open and self._watch.finished and self._watch.all_well and not self._succeeded:
            self._stalls.succeeded()
            self._succeeded = True  # the store on node rank 0 may end; the ranks' helpers have their grace
            options = self._plan.options
            self._supervisors.call_all("stop", {"grace_s": options.helper_grace_s, "reason": "all ranks ended"})
        unheeded = self._terminated_at is not None and not self._stopping() and not self._watch.finished
        if unheeded and self._grace_left(now) == 0.0:
            self._stop("the ranks have not ended after SIGTERM", 128 + signal.SIGTERM, 0.0)
            self._stop_if_needed(now)
        if self._stop_at is not None:
            self._count_down(self._read_until)
        if now - self._pinged >= self._timing.ping_s:
            self._pinged = now
            for node in self._supervisors.ping():
                self._on_lost(node, f"no response for {self._plan.options.lost_head_s:.0f} s", now)
        if now - self._saved >= self._timing.save_s:
            self._save()
        backlog = self._screen.backlog
        if backlog > _HOLD_ABOVE if not self._holding else backlog < _HOLD_BELOW:
            self._holding = not self._holding
            self._supervisors.call_all("hold", {"on": self._holding})

    def _notify_started(self, now: float) -> None:
        if self._started_hook is None or not self._gate_open or self._stopping() or self._watch.cause is not None:
            return
        if self._state != "starting":
            self._running_since = self._running_since or now
        long_enough = self._running_since is not None and now - self._running_since >= self._timing.started_s
        if long_enough or self._stalls.verdict is not None:
            self._save()
            hook, self._started_hook = self._started_hook, None
            hook()

    def _watch_stalls(self, now: float) -> None:
        if not self._gate_open or self._stopping() or self._watch.finished:
            return
        if self._stalls.tick(now):
            self._saved = float("-inf")
            verdict = self._stalls.verdict
            if verdict is not None:
                self._check_gpus()
            if verdict is not None and self._plan.options.on_stall == "kill":
                self._watch.stalled(verdict, now)
        if self._stalls.verdict is None and self._straggler.tick(now, self._watch.running_nodes):
            self._saved = float("-inf")
        if self._state in {"running", "stalled"}:
            self._state = "running" if self._stalls.verdict is None else "stalled"

    # ending

    def _stop(self, reason: str, code: int, grace_s: float | None) -> None:
        """Stop the run for the user; a second request ends it at once."""
        self._stop_asked = self._stop_asked or (reason, code)
        if self._stop_at is not None:  # second request, or the run has failed: never later than announced
            left = max(0.0, self._stop_at + self._grace_s - time.monotonic())
            grace_s = min(grace_s or 0.0, left)
        if grace_s is not None:
            self._grace_s = grace_s
        if self._stop_code is None and self._watch.cause is None:
            self._stop_code = code
        self._watch.stop(reason, time.monotonic())
        if self._stop_at is not None:
            self._begin_stop(time.monotonic())

    def _stop_if_needed(self, now: float) -> None:
        if self._stopping() and self._stop_at is None:
            self._begin_stop(now)

    def _begin_stop(self, now: float) -> None:
        if self._watch.cause is not None and self._watch.cause.kind == "node-lost":
            self._grace_s = min(self._grace_s, self._timing.lost_node_grace_s)
        self._grace_s = self._grace_left(now)
        self._stop_at = now
        self._countdown = -1
        reason = self._watch.stop_reason or ""
        self._spared = self._watch.exiting if self._grace_s > 0 else []
        self._supervisors.call_all("stop", {"grace_s": self._grace_s, "reason": reason, "spare": self._spared})
        how = f"SIGTERM now, SIGKILL in {self._grace_s:.0f} s" if self._grace_s > 0 else "SIGKILL now"
        stopped = [rank for rank in self._watch.running if rank not in self._spared]
        if stopped:
            self._print(f"{reason}; stopping {rank_words(stopped)}: {how}")

    def _grace_left(self, now: float) -> float:
        """Return the time until SIGKILL; it counts from the first SIGTERM that was forwarded."""
        if self._terminated_at is None:
            return self._grace_s
        return max(0.0, self._terminated_at + self._grace_s - now)

    def _count_down(self, now: float) -> None:
        assert self._stop_at is not None
        if self._spared and now - self._stop_at >= self._timing.exit_wait_s:
            self._supervisors.call_all("signal", {"signal": int(signal.SIGTERM), "ranks": self._spared})
            self._spared = []
        left = self._stop_at + self._grace_s - now
        if left < -self._timing.empty_s:
            for name in self._names:
                if name not in self._watch.ended_nodes:
                    self._watch.node_lost(name, "no report that all processes of the run have ended", now)
            return
        seconds = max(0, round(left))
        if seconds == self._countdown or not self._watch.running:
            return
        self._countdown = seconds
        text = f"{rank_words(self._watch.running)} still running: SIGKILL in {seconds} s"
        if self._screen.terminal("err"):
            self._screen.pin(f"gpuboard: {text} (ctrl-C: now)")
        elif left < self._grace_s - 1 and (seconds % 10 == 0 or seconds == 5):
            self._print(text)

    def _finish(self) -> int:
        """End all processes of the run, print the summary, return the exit code."""
        refused = bool(failed(self.checks)) and not self._gate_open
        if not self._watch.emptied:
            if refused:
                self._grace_s = self._timing.closed_gate_grace_s
            elif not self._gate_open:
                self._grace_s = min(self._grace_s, self._timing.closed_gate_grace_s)
            if self._stop_at is None:
                self._watch.stop("preflight failed" if refused else "not started", time.monotonic())
                self._stop_at = time.monotonic()
                self._supervisors.call_all("stop", {"grace_s": self._grace_s, "reason": self._watch.stop_reason or ""})
            self._pump(lambda: self._watch.emptied, time.monotonic() + self._grace_s + self._timing.empty_s)
        self._pump(lambda: not self._sweeping, time.monotonic() + self._timing.sweep_s)
        self._pump(lambda: self._stop_asked is not None or not self._reading_gpus, time.monotonic() + _GPUS_S)
        self._periodic(time.monotonic())
        for rank in self._watch.ranks:  # unfinished lines of helpers and of ranks on lost nodes
            self._relay.ended(rank)
        code = self._exit_code()
        self._state = "done" if code == 0 else "stopped" if self._stop_code is not None else "failed"
        if self._restarts(code):
            self._state = "preflight"  # of the next attempt: the run is not over
        if refused:
            count = len(failed(self.checks))
            self._print(f"preflight failed: {count} check{'' if count == 1 else 's'}; no rank was started")
        elif self._plan.options.preflight_only and code == 0:
            self._print("preflight passed; no rank was started (--preflight-only)")
        for line in self._watch.summary() if self._gate_open else []:
            self._print(line)
        if code != 0 and self._failure_before and self._failure_before == self.failure:
            self._print(same_failure_text(self._plan, self.failure))
        if code != 0:
            ran = format_duration(round((self._failed_at or time.time()) - self._started))
            at = time.strftime("%H:%M:%S", time.localtime(self._failed_at or None))
            which = f"{attempt_text(self._plan)}: " if self._plan.options.max_restarts else ""
            self._print(f"{which}exit code {code} at {at} after {ran}; logs: {self._folder.path}")
        self._save()  # last: who reads that the run has ended finds all messages
        return code

    def _restarts(self, code: int) -> bool:
        return restarts(self._plan, code, opened=self._gate_open, asked=self._stop_asked is not None)

    def _pause(self, code: int) -> int:
        """Wait before the next attempt, and read the lease's GPUs. Return ``code``, or that of a stop meanwhile."""
        wait_s = pause_s(self._plan.attempt, self._timing)
        self._print(f"attempt {self._plan.attempt + 1} in {wait_s:.0f} s (ctrl-C: end the run)")
        self._pump(lambda: self._stop_asked is not None, time.monotonic() + wait_s)
        if self._read_lease is not None:  # after the pause: memory of ended processes is free then
            self._read_lease(lambda snapshot: self._inbox.put(LeaseReading(snapshot)))
        read = self._read_lease is None
        self._pump(lambda: self._stop_asked is not None or read or self.lease_reading is not None, None)
        if self._stop_asked is None:
            self.continues = True
            return code
        reason, self._stop_code = self._stop_asked
        self._stopped = VerdictView(iso(time.time()), "stopped", None, None, reason)
        self._state = "stopped"
        self._print(f"{reason}: stopped before attempt {self._plan.attempt + 1}; logs: {self._folder.path}")
        self._save()
        return self._exit_code()

    def _exit_code(self) -> int:
        if self._stop_code is not None:
            return self._stop_code if self._gate_open else 128 + signal.SIGINT
        if failed(self.checks) and not self._gate_open:
            return 7
        return 0 if self._passed() else self._watch.exit_code()

    def _passed(self) -> bool:
        """Whether this was --preflight-only, without a failed check or a request to stop."""
        return self._plan.options.preflight_only and self._stop_code is None and not failed(self.checks)

    # signals, control, messages

    def _catch_signals(self) -> None:
        def caught(number: int, _frame: FrameType | None) -> None:
            self._inbox.put(SignalReceived(number))

        if self._before is not None:
            self._handlers = self._before._handlers
            for number in self._handlers:
                if signal.getsignal(number) is not signal.SIG_IGN:  # SIGHUP, of a detached run
                    signal.signal(number, caught)
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)
        ours = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup; `&` in sh
        self._handlers = {number: signal.signal(number, caught) for number in ours}

    def _on_signal(self, number: int, now: float) -> None:
        if number == signal.SIGINT:
            self._stop("ctrl-C", 128 + number, None)
        elif number == signal.SIGHUP:
            if not self._stopping():  # both the shell and the kernel send it, which is one request
                self._stop("the terminal was closed", 128 + number, None)
            self._stop_asked = self._stop_asked or ("the terminal was closed", 128 + number)
        elif number == signal.SIGTSTP:
            self._suspend()
        elif not self._gate_open or not self._watch.running:
            if number == signal.SIGTERM:
                self._stop("SIGTERM", 128 + number, None)
        else:
            kill = ""
            if number == signal.SIGTERM:
                self._terminated_at = self._terminated_at or now
                self._stop_asked = self._stop_asked or ("SIGTERM", 128 + number)
                kill = "" if self._stopping() else f"; SIGKILL in {self._grace_left(now):.0f} s"
            self._print(f"forwarding {signal_name(number)} to {rank_words(self._watch.running)}{kill}")
            self._watch.note_forwarded(number)
            self._supervisors.call_all("signal", {"signal": number, "ranks": None})

    def _suspend(self) -> None:
        """Suspend this process as ctrl-Z does, after telling what that means for the run."""
        limit_s = self._plan.options.lost_head_s
        if limit_s is not None and not self._watch.emptied:
            self._print(
                f"suspended: the ranks will be stopped unless `fg` or `bg` continues gpuboard within {limit_s:.0f} s; "
                "launch with --lost-head never to let them run on"
            )
            self._screen.settle(1.0)
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # to this thread: it acts before this returns
        signal.signal(signal.SIGTSTP, handler)

    def _control(self, request: ControlRequest) -> object:
        """Return the reply to a client of the control socket; called in the socket's thread."""
        if request.op == "stop":
            self._inbox.put(request)
            return {"run": self._plan.run}
        if request.op == "signal" and request.signal in _FORWARDED:
            self._inbox.put(SignalReceived(request.signal))
            return {"run": self._plan.run}
        if request.op == "explain":
            asked = ExplainRequest(queue.SimpleQueue())
            self._inbox.put(asked)
            try:
                return self._straggler.explain(asked.reply.get(timeout=_EXPLAIN_S))
            except queue.Empty:
                return {"error": f"the nodes did not respond within {_EXPLAIN_S:.0f} s"}
        return self._view if request.op == "state" else {"error": f"unknown op {request.op!r}"}

    def _verdicts(self) -> list[VerdictView]:
        cause = self._watch.cause
        if failed(self.checks) and not self._gate_open:
            return [
                VerdictView(iso(self._failed_at), "preflight", None, c.node, check_text(c).splitlines()[0], c.remedy)
                for c in grouped(failed(self.checks))
            ]
        stalled = [self._stalls.verdict] if self._stalls.verdict else []
        slow = [self._straggler.verdict] if self._straggler.verdict else []
        if cause is None or cause.kind == "stalled" or self._passed():
            return stalled + slow
        return [
            *stalled,
            VerdictView(iso(self._failed_at), cause.kind, cause.rank, cause.node, cause.text, cause.evidence),
            *slow,
        ]

    def _save(self) -> None:
        self._saved = time.monotonic()
        view = self.view()
        if view != self._view:  # an idle run writes nothing: the folder may be on a network home
            self._view = view
            self._write("state.json", view)

    def _write(self, name: str, value: object) -> None:
        error = self._folder.keep(name, value)
        if error:
            self._report_incomplete(error)

    def _report_incomplete(self, message: str) -> None:
        """Print the first of the messages about files that cannot be written: they have one reason, a full disk."""
        if not self._incomplete:
            self._incomplete = True
            self._print(message)

    def _print(self, text: str) -> None:
        lines = [f"gpuboard: {line}" if not line.startswith(" ") else line for line in text.splitlines()]
        self._screen.lines("err", lines)
        self._folder.log(f"{iso(time.time())} {line}\n" for line in lines)
