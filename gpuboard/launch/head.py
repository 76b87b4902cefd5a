"""The head of a run: opens the supervisors, runs preflight, opens the gate, watches, tears down.

One loop in the main thread reads one inbox and writes the run's files. It never blocks on a node or on the user's
terminal; while a file system hangs, another thread pings the nodes (``supervisors``).
"""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.launch import events
from gpuboard.launch.attempt.ending import Ending
from gpuboard.launch.attempt.gate import StartGate
from gpuboard.launch.attempt.outcome import AttemptOutcome
from gpuboard.launch.attempt.record import AttemptRecord
from gpuboard.launch.attempt.requests import Requests, SignalReceived, suspend
from gpuboard.launch.attempt.silence import SilentNodes
from gpuboard.launch.causes import gpus, stderr
from gpuboard.launch.causes.exits import signal_name
from gpuboard.launch.failure import FailureWatch
from gpuboard.launch.output import Logs, Relay, Screen
from gpuboard.launch.plan import LaunchPlan, shown
from gpuboard.launch.preflight.check import Check
from gpuboard.launch.restarts import attempt_text, pause_s, restarts
from gpuboard.launch.runs.control import ControlRequest
from gpuboard.launch.runs.folder import RunFolder, RunView
from gpuboard.launch.stalls.follower import ExplainRequest, StallFollower
from gpuboard.launch.stalls.straggler import Straggler
from gpuboard.launch.stalls.waits import rank_words
from gpuboard.launch.stdin import StdinReader
from gpuboard.launch.supervisors import CallReply, SupervisorEvent, SupervisorLost, Supervisors, SupervisorSeen
from gpuboard.launch.timing import DEFAULT_TIMING, HeadTiming
from gpuboard.model.snapshot import Snapshot
from gpuboard.model.text import clean
from gpuboard.model.units import iso
from gpuboard.transport.base import CallFailed, LinkLost
from gpuboard.transport.connector import Connector

_GPUS_S = 5.0  # at the end of a run, for a reading of its GPUs: a new connection per node and one reading

GpuReader = Callable[[Callable[[Snapshot], None]], None]


class LeaseReading(msgspec.Struct, frozen=True):
    """All GPUs of the lease, also those that the run does not use."""

    snapshot: Snapshot


class Mark(msgspec.Struct, frozen=True):
    """A place in the inbox: all items that arrived before ``read_until`` precede it (see ``Head._read_until``)."""

    read_until: float
    complete_until: float


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
        self._screen = screen
        self._started_hook = started
        self._timing = timing
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()  # requests of the user, which output must not delay
        self._record = record = AttemptRecord(folder, screen)
        self._supervisors = Supervisors(plan, nodes, connector, self._inbox, timing, backlog=lambda: screen.backlog)
        self._watch = FailureWatch(plan, timing)
        self._gate = StartGate(plan, self._supervisors, self._watch, record, script_checks=script_checks, timing=timing)
        self._ending = Ending(plan, self._supervisors, self._watch, record, timing)
        on_gpus = plan.options.device == "cuda"
        kept = len(list(folder.path.glob("stall-*.json"))) if before else 0
        self._stalls = StallFollower(
            self._supervisors, nodes, self._watch, on_gpus=on_gpus, keep=record.write, notify=record.print, kept=kept
        )
        self._read_gpus = None if read_gpus is None else partial(read_gpus, self._inbox.put)
        self._straggler = Straggler(
            self._supervisors, self._watch.ranks, read_gpus=self._read_gpus, notify=record.print
        )
        heading = f"--- {attempt_text(plan)} at {iso(time.time())} ---" if before else ""
        self._silent = SilentNodes(
            self._supervisors,
            self._watch.ranks,
            lost_head_s=plan.options.lost_head_s,
            timing=timing,
            notify=record.print,
        )
        self._logs = Logs(folder.path, record.report_incomplete, heading)
        labels = {rank: f"{view.node}:{view.index}" for rank, view in self._watch.ranks.items()}
        self._relay = Relay(labels, self._logs, screen, mark=self._watch.mark)
        self._outcome = AttemptOutcome(
            plan,
            gate=self._gate,
            ending=self._ending,
            watch=self._watch,
            stalls=self._stalls,
            straggler=self._straggler,
            silent=self._silent,
            relay=self._relay,
            record=record,
            before=before.view() if before else None,
        )
        self._requests: Requests = before._requests if before else Requests(plan.run)
        self._succeeded = False  # all ranks exited with 0
        self._running_since: float | None = None  # when the last rank began to run, monotonic
        self._sweeping: set[str] = set()  # lost nodes on which a second supervisor ends what is left
        self._looked = float("-inf")  # for silent nodes, monotonic
        self._read_until = time.monotonic()  # all items that arrived before have been processed
        self._marked = False  # a Mark is in the inbox
        self._complete_until = 0.0  # so have all events that any reachable supervisor sent before
        self._stdin: StdinReader | None = None
        self._read_lease = read_lease
        self._restarted = before is not None
        self._failure_before = before.failure if before else ""
        self._change = change
        self.lease_reading: Snapshot | None = None  # all GPUs of the lease, read in the pause after this attempt
        self.continues = False  # another attempt follows, which gets the user's requests
        self._reading_gpus = False  # a GPU may be the reason of a failure or stall

    # the run

    def run(self) -> int:
        """Lead the run to its end; return the exit code. To be called in the main thread."""
        record = self._record
        self._requests.receive(  # before state.json exists: a run that can be seen can be stopped
            self._asked, record, view=lambda: self._outcome.saved, explained=self._straggler.explain
        )
        try:
            if self._restarted:
                self._screen.unpin()
                record.print(attempt_text(self._plan) + (f": {self._change}" if self._change else ""))
            record.write("plan.json", shown(self._plan))
            record.write("rank_map.json", self._plan.rank_map)
            self._outcome.save()
            self._supervisors.open()
            if self._preflight() and not self._plan.options.preflight_only:
                self._go()
                self._pump(lambda: self._watch.emptied, None)
            code = self._finish()
            if self._restarts(code):
                code = self._pause(code)
        finally:
            if not self.continues:
                self._requests.close()
            if self._stdin is not None:
                self._stdin.stop()
            self._supervisors.close()
            self._logs.close()
        return code

    def stop(self, reason: str) -> None:
        """Stop the run as `gpuboard stop` does; from any thread and at any time."""
        self._asked.put(ControlRequest("stop", None, reason))

    def abandon(self) -> None:
        """End the run between two attempts: the next one cannot be started."""
        self.continues = False
        self._outcome.state = "failed"
        self._outcome.save()
        self._requests.close()

    @property
    def logs_complete(self) -> bool:
        """Whether all output of the ranks is in the run's folder."""
        return not self._logs.failed

    @property
    def checks(self) -> list[Check]:
        """The results of preflight."""
        return self._gate.checks

    @property
    def failure(self) -> str:
        """What this attempt failed of: the same text for the same failure."""
        return self._outcome.failure

    def view(self) -> RunView:
        """Return the run as ``runs --json`` shows it."""
        return self._outcome.view()

    def _preflight(self) -> bool:
        passed = self._gate.check(self._pump, self._read_gpus)
        self._outcome.failed_at = time.time() if self._gate.refused else 0.0
        return passed

    def _go(self) -> None:
        self._gate.open()
        rank = self._plan.options.stdin_rank
        if rank is not None:
            write = partial(self._supervisors.write_stdin, self._watch.ranks[rank].node)
            self._stdin = StdinReader(sys.stdin.fileno(), write)
        self._outcome.state = "starting"
        self._outcome.save()

    # the loop

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
            try:
                self._take(self._next(wait=True))
                while time.monotonic() - now < self._timing.poll_s:  # output must not starve the rest of the loop
                    self._take(self._next(wait=False))
            except queue.Empty:
                self._read_until, self._complete_until = now, complete_until
            else:
                if not self._marked:
                    self._marked = True
                    self._inbox.put(Mark(now, complete_until))
        return True

    def _next(self, *, wait: bool) -> object:
        """Return the next item, requests of the user first. Raises queue.Empty."""
        if not self._asked.empty():
            return self._asked.get_nowait()
        return self._inbox.get(timeout=self._timing.poll_s) if wait else self._inbox.get_nowait()

    def _take(self, item: object) -> None:
        now = time.monotonic()
        if isinstance(item, SupervisorEvent):
            self._on_event(item, now)
            self._supervisors.handled(item.event)
        elif isinstance(item, Mark):
            self._marked = False
            self._read_until, self._complete_until = item.read_until, item.complete_until
        elif isinstance(item, CallReply):
            self._on_reply(item)
        elif isinstance(item, SupervisorLost):
            self._on_lost(item.node, item.error, now)
        elif isinstance(item, SupervisorSeen):
            self._silent.take(item)
        elif isinstance(item, SignalReceived):
            self._on_signal(item.number, now)
        elif isinstance(item, ControlRequest):
            reason = clean(item.reason, 200) or f"stopped by `gpuboard stop {self._plan.run}`"
            self._ending.ask(reason, 128 + signal.SIGTERM, item.grace_s)
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
            tail = self._relay.errors.get(event.rank, ())
            last = self._relay.last_line.get(event.rank, "")
            self._watch.note_output(event.rank, last, stderr.evidence(tail))
            self._watch.note_end_of_output(event.rank, stderr.root_error(tail), "" if last in tail else last)
        if isinstance(event, events.Quiet):
            self._stalls.quiet(event, now)
            return
        if isinstance(event, events.Leaving):
            self._stalls.left(event)
        if isinstance(event, events.Measured):
            self._record.write("measured.json", event)
        self._watch.event(item.node, event, now)
        if isinstance(event, events.Exited):
            self._stalls.ended(event.rank, now)
        if self._watch.unexplained and not self._ending.stopping:
            self._stalls.compare()
        if self._gate.opened:
            self._watch.gate_opened()
            self._evaluate()  # at once: the cause is printed before the traceback that follows in the same burst
            self._ending.begin_if_due(now)

    def _on_reply(self, item: CallReply) -> None:
        if item.op in {"inspect", "py-spy"}:
            self._stalls.take(item, time.monotonic(), judge=self._gate.opened and not self._ending.stopping)
        elif item.op == "pace":
            self._straggler.take(item, time.monotonic())
        elif item.op != "go":
            self._gate.calls.take(item)
        elif isinstance(item.value, (CallFailed, LinkLost)):
            self._watch.node_lost(item.node, f"cannot start its ranks: {item.value}", time.monotonic())

    def _on_lost(self, node: str, error: str, now: float) -> None:
        self._silent.forget(node)
        if node in self._sweeping:
            self._sweeping.remove(node)
        elif self._gate.opened or self._ending.stopping:
            if self._gate.opened and node not in self._watch.ended_nodes:
                self._sweeping.add(node)
                self._supervisors.sweep(node)
            self._watch.node_lost(node, f"connection lost: {error.removeprefix('the connection was lost: ')}", now)
        else:
            self._gate.calls.lost(node, error)
            self._watch.ended_nodes.add(node)

    def _check_gpus(self) -> None:
        """Read the GPUs again: one of them may be the reason."""
        if self._read_gpus is not None and not self._reading_gpus:
            self._reading_gpus = True
            self._read_gpus()

    def _on_gpus(self, snapshot: Snapshot) -> None:
        self._gate.calls.snapshot = snapshot
        self._watch.gpu_processes = {
            node.name: {p.pid: f"{p.user}, {p.command}" for gpu in node.gpus for p in gpu.processes or ()}
            for node in snapshot.nodes
        }
        self._straggler.take_gpus(snapshot)
        if self._reading_gpus:
            self._reading_gpus = False
            for line in gpus.damaged(self._plan.rank_map, snapshot):
                self._record.print(line)
                self._watch.note_evidence(line)

    def _evaluate(self) -> None:
        if self._gate.opened:
            # A supervisor may be suspended: it may hold the root cause while another node reports a secondary failure.
            complete_until = max(self._complete_until, self._read_until - self._timing.supervisor_wait_s)
            self._watch.tick(min(self._read_until, complete_until + self._timing.cause_wait_s))
        for line in self._watch.messages:
            self._record.print(line)
        self._watch.messages.clear()

    def _periodic(self, now: float) -> None:
        self._evaluate()
        if self._watch.places_wanted and not self._ending.stopping:
            self._watch.places_wanted = False
            self._stalls.compare()
        if self._outcome.state == "starting" and all(
            v.state not in {"waiting", "importing"} for v in self._watch.ranks.values()
        ):
            self._outcome.state = "running"
            self._outcome.changed()
        if self._watch.cause is not None and not self._outcome.failed_at:
            self._outcome.failed_at = time.time()
            if gpus.names_gpu(f"{self._watch.cause.text} {self._watch.cause.evidence}"):
                self._check_gpus()
        self._watch_stalls(now)
        self._ending.begin_if_due(now)
        self._notify_started(now)
        if self._gate.opened and self._watch.finished and self._watch.all_well and not self._succeeded:
            self._stalls.succeeded()
            self._succeeded = True  # the store on node rank 0 may end; the ranks' helpers have their grace
            options = self._plan.options
            self._supervisors.call_all("stop", {"grace_s": options.helper_grace_s, "reason": "all ranks ended"})
        self._ending.tick(now, self._read_until)
        if now - self._looked >= self._timing.ping_s:
            self._looked = now
            if self._gate.opened and self._silent.tick(now):
                self._outcome.changed()
        self._outcome.save(self._timing.save_s)
        self._supervisors.regulate()

    def _notify_started(self, now: float) -> None:
        if (
            self._started_hook is None
            or not self._gate.opened
            or self._ending.stopping
            or self._watch.cause is not None
        ):
            return
        if self._outcome.state != "starting":
            self._running_since = self._running_since or now
        long_enough = self._running_since is not None and now - self._running_since >= self._timing.started_s
        if long_enough or self._stalls.verdict is not None:
            self._outcome.save()
            hook, self._started_hook = self._started_hook, None
            hook()

    def _watch_stalls(self, now: float) -> None:
        if not self._gate.opened or self._ending.stopping or self._watch.finished:
            return
        if self._stalls.tick(now):
            self._outcome.changed()
            verdict = self._stalls.verdict
            if verdict is not None:
                self._check_gpus()
            if self._stalls.stalled and verdict is not None and self._plan.options.on_stall == "kill":
                self._watch.stalled(verdict, now)
        if self._stalls.verdict is None and self._straggler.tick(now, self._watch.running_nodes):
            self._outcome.changed()
        if self._outcome.state in {"running", "stalled"}:
            self._outcome.state = "stalled" if self._stalls.stalled else "running"

    def _on_signal(self, number: int, now: float) -> None:
        if number == signal.SIGINT:
            self._ending.ask("ctrl-C", 128 + number, None)
        elif number == signal.SIGHUP:
            self._ending.hung_up()
        elif number == signal.SIGTSTP:
            suspend(self._record, None if self._watch.emptied else self._plan.options.lost_head_s)
        elif self._gate.opened and self._watch.running:
            kill = self._ending.forwarding(number, now)
            self._record.print(f"forwarding {signal_name(number)} to {rank_words(self._watch.running)}{kill}")
            self._watch.note_forwarded(number)
            if number == signal.SIGTERM:
                self._stalls.terminated()
            self._supervisors.call_all("signal", {"signal": number, "ranks": None})
        elif number == signal.SIGTERM:
            self._ending.ask("SIGTERM", 128 + number, None)

    # ending

    def _finish(self) -> int:
        if not self._watch.emptied:
            empty_at = self._ending.finish(opened=self._gate.opened, refused=bool(self._gate.refused))
            self._pump(lambda: self._watch.emptied, empty_at)
        self._pump(lambda: not self._sweeping, time.monotonic() + self._timing.sweep_s)
        self._pump(lambda: self._ending.asked is not None or not self._reading_gpus, time.monotonic() + _GPUS_S)
        self._periodic(time.monotonic())
        for rank in self._watch.ranks:  # unfinished lines of helpers and of ranks on lost nodes
            self._relay.ended(rank)
        code = self._outcome.exit_code()
        self._outcome.state = "done" if code == 0 else "stopped" if self._ending.code is not None else "failed"
        if self._restarts(code):
            self._outcome.state = "preflight"  # of the next attempt: the run is not over
        for line in self._outcome.closing(self._failure_before):
            self._record.print(line)
        self._outcome.save()  # last: who reads that the run has ended finds all messages
        return code

    def _restarts(self, code: int) -> bool:
        return restarts(self._plan, code, opened=self._gate.opened, asked=self._ending.asked is not None)

    def _pause(self, code: int) -> int:
        """Wait before the next attempt, and read the lease's GPUs. Return ``code``, or that of a stop meanwhile."""
        wait_s = pause_s(self._plan.attempt, self._timing)
        self._record.print(f"attempt {self._plan.attempt + 1} in {wait_s:.0f} s (ctrl-C: end the run)")
        self._pump(lambda: self._ending.asked is not None, time.monotonic() + wait_s)
        if self._read_lease is not None:  # after the pause: memory of ended processes is free then
            self._read_lease(lambda snapshot: self._inbox.put(LeaseReading(snapshot)))
        read = self._read_lease is None
        self._pump(lambda: self._ending.asked is not None or read or self.lease_reading is not None, None)
        if self._ending.asked is None:
            self.continues = True
            return code
        reason, self._ending.code = self._ending.asked
        self._outcome.stopped(reason)
        self._record.print(
            f"{reason}: stopped before attempt {self._plan.attempt + 1}; logs: {self._record.folder.path}"
        )
        self._outcome.save()
        return self._outcome.exit_code()
