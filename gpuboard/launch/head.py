"""The head of a run: opens the supervisors, runs preflight, opens the gate, watches, tears down.

One loop in the main thread over one inbox; it never waits for a node, the person's terminal or a disk elsewhere.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.launch import events
from gpuboard.launch.control import ControlRequest, ControlServer
from gpuboard.launch.failure import FailureWatch, rank_words, signal_name
from gpuboard.launch.output import Logs, Relay, Screen
from gpuboard.launch.plan import LaunchPlan, shown
from gpuboard.launch.preflight.check import Check, check_text, grouped
from gpuboard.launch.preflight.checks import failed, interfaces, preflight
from gpuboard.launch.preflight.collect import PreflightQuestions
from gpuboard.launch.run_folder import FINAL, RunFolder, RunState, RunView, VerdictView, this_head
from gpuboard.launch.supervisors import CallAnswer, Crew, Heard, Lost
from gpuboard.launch.timing import DEFAULT_TIMING, HeadTiming
from gpuboard.model.replies import Done
from gpuboard.model.snapshot import Snapshot
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration, iso
from gpuboard.transport.base import CallFailed, LinkLost
from gpuboard.transport.connector import Connector

_HOLD_ABOVE, _HOLD_BELOW = 8 * 2**20, 2**20  # characters the person's side has not read

GpuReader = Callable[[Callable[[Snapshot], None]], None]


class SignalReceived(msgspec.Struct, frozen=True):
    """A signal has reached this process."""

    number: int


class Head:
    """One run, from its plan to its exit code."""

    def __init__(
        self,
        plan: LaunchPlan,
        folder: RunFolder,
        screen: Screen,
        *,
        connector: Connector,
        nodes: Mapping[str, Node],
        read_gpus: GpuReader | None,
        timing: HeadTiming = DEFAULT_TIMING,
    ) -> None:
        """``nodes``: how to reach each node of the plan. ``read_gpus`` starts a reading that it hands to its argument;
        None: no GPUs are needed."""
        self._plan = plan
        self._folder = folder
        self._screen = screen
        self._read_gpus = read_gpus
        self._timing = timing
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._crew = Crew(plan, nodes, connector, self._inbox, timing)
        self._watch = FailureWatch(plan, timing)
        self._logs = Logs(folder.path, self._say)
        labels = {rank: f"{view.node}:{view.index}" for rank, view in self._watch.ranks.items()}
        self._relay = Relay(labels, self._logs, screen, mark=self._watch.mark)
        self._names = [config.node for config in plan.nodes]
        self._questions = PreflightQuestions(plan, self._crew, timing)
        self._owners: dict[str, str] = {}  # node → the interface that the ranks there are to use
        self.checks: list[Check] = []
        self._state: RunState = "preflight"
        self._started = time.time()
        self._gone = False  # the gate is open
        self._over = False  # all ranks ended well
        self._code: int | None = None  # what a person's stop makes the run exit with
        self._stop_at: float | None = None
        self._grace_s = plan.options.grace_s
        self._countdown = -1
        self._sweeping: set[str] = set()  # lost nodes that another supervisor is emptying
        self._spared: list[int] = []  # ranks that may end by themselves for a moment before they are told to
        self._pinged = self._saved = float("-inf")
        self._heard_to = time.monotonic()  # what came until then has been taken in
        self._told_to = 0.0  # and what any supervisor had to say until then
        self._holding = False
        self._view: RunView | None = None
        self._caused_at = 0.0  # epoch seconds of the verdict

    # the run

    def run(self) -> int:
        """Run it all; return the exit code. To be called in the main thread."""
        restore = self._catch_signals()
        control = self._listen()  # both before anybody can know of the run: it can be ended as soon as it is seen
        try:
            self._keep("plan.json", shown(self._plan))
            self._keep("rank_map.json", self._plan.rank_map)
            self._save()
            self._crew.open()
            if self._preflight():
                self._go()
                self._pump(lambda: self._watch.emptied, None)
            code = self._finish()
        finally:
            if control is not None:
                control.close()
            self._crew.close()
            self._logs.close()
            for number, handler in restore.items():
                signal.signal(number, handler)
        return code

    def stop(self, reason: str) -> None:
        """End the run, from any thread and at any time, as a person would."""
        self._inbox.put(ControlRequest("stop", None, reason))

    def _listen(self) -> ControlServer | None:
        try:
            return ControlServer(self._folder.path, self._control)
        except OSError as error:  # some file systems hold no sockets
            self._say(
                f"{self._folder.path}: no control socket: {error.strerror}; `gpuboard stop` will not reach this run"
            )
            return None

    def view(self) -> RunView:
        """Return the run as ``runs --json`` shows it."""
        watch = self._watch
        for rank, line in self._relay.last_line.items():
            watch.last_words(rank, line, self._relay.last_error.get(rank, ""))
        return RunView(
            id=self._plan.run,
            lease=self._plan.rank_map.lease,
            target=" ".join([self._plan.target.words(), *self._plan.target.args]),
            started=iso(self._started),
            state=self._state,
            exit_code=self._exit_code() if self._state in FINAL else None,
            ranks=list(watch.ranks.values()),
            verdicts=self._verdicts(),
            head=this_head(),
            folder=str(self._folder.path),
        )

    # preflight

    def _preflight(self) -> bool:
        """Ask every node all there is to ask; return whether the gate may open. No answer in its time is a failure."""
        asked = self._questions
        first = self._plan.nodes[0]
        if self._read_gpus is not None:
            self._read_gpus(self._inbox.put)
        asked.start()
        self._pump(lambda: self._stopping() or asked.started(), None)
        if len(self._plan.nodes) > 1 and not asked.failures and not self._stopping():
            asked.probe_listen()
            self._pump(lambda: self._stopping() or asked.listening(), None)
            asked.probe_connect()
            self._pump(lambda: self._stopping() or asked.probed(), None)
        read = self._read_gpus is None
        self._pump(lambda: self._stopping() or read or asked.snapshot is not None, None)
        if self._stopping():
            return False
        answers = asked.collect()
        self.checks = preflight(self._plan.rank_map, first.master_addr, self._plan.options.device, answers)
        self._keep("preflight.json", {"schema": 1, "checks": self.checks})
        self._caused_at = time.time() if failed(self.checks) else 0.0
        for check in grouped([check for check in self.checks if check.status in {"fail", "warn"}]):
            self._say(check_text(check))
        self._owners = interfaces(first.master_addr, first.node, answers)
        return not failed(self.checks)

    def _go(self) -> None:
        """Open the gate."""
        first = self._plan.nodes[0]
        for config in self._plan.nodes:
            names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} - config.environ.keys()
            environ = {name: self._owners[config.node] for name in sorted(names) if config.node in self._owners}
            args = {"master_addr": first.master_addr, "master_port": self._questions.port, "environ": environ}
            self._crew.ask(config.node, "go", args, self._timing.start_s, Done)
        self._gone = True
        self._watch.opened()
        self._state = "starting"
        self._save()

    # the loop

    def _stopping(self) -> bool:
        return self._watch.stop_reason is not None

    def _pump(self, done: Callable[[], bool], until: float | None) -> bool:
        """Handle what comes in until ``done()`` or the time ``until``; return whether it is done.

        Time in which we stood still is no silence of others: what they said meanwhile is heard first.
        """
        while not done():
            if until is not None and self._heard_to >= until:
                return False
            now = time.monotonic()
            self._periodic(now)
            told_to = self._crew.heard_to()
            with contextlib.suppress(queue.Empty):
                self._take(self._inbox.get(timeout=self._timing.poll_s))
                for _ in range(1000):  # a burst of output is one round; the rest of the loop must not starve
                    self._take(self._inbox.get_nowait())
            self._heard_to, self._told_to = now, told_to
        return True

    def _take(self, item: object) -> None:
        now = time.monotonic()
        if isinstance(item, Heard):
            self._hear(item, now)
        elif isinstance(item, CallAnswer):
            self._answered(item)
        elif isinstance(item, Lost):
            self._lose(item.node, item.words, now)
        elif isinstance(item, SignalReceived):
            self._signalled(item.number, now)
        elif isinstance(item, ControlRequest):
            words = clean(item.reason, 200) or f"stopped by `gpuboard stop {self._plan.run}`"
            self._stop(words, 128 + signal.SIGTERM, item.grace_s)
        elif isinstance(item, Snapshot):
            self._questions.snapshot = item

    def _hear(self, item: Heard, now: float) -> None:
        event = item.event
        if item.node in self._sweeping or not self._watch.accepts(item.node, event):
            return  # from a second supervisor, which runs no ranks, or about another node's ranks
        if isinstance(event, events.Output):
            self._relay.output(event.rank, "err" if event.stream == "err" else "out", event.text)
            return
        if isinstance(event, events.Exited):
            self._relay.ended(event.rank)
            error = self._relay.last_error.get(event.rank, "")
            self._watch.last_words(event.rank, self._relay.last_line.get(event.rank, ""), error)
        self._watch.event(item.node, event, now)
        if self._gone:
            self._watch.opened()
            self._judge()  # at once: the cause is said before the traceback, which follows in the same burst
            self._stop_if_asked(now)

    def _answered(self, item: CallAnswer) -> None:
        if item.op != "go":
            self._questions.take(item)
        elif isinstance(item.value, (CallFailed, LinkLost)):
            self._watch.node_lost(item.node, str(item.value), time.monotonic())

    def _lose(self, node: str, words: str, now: float) -> None:
        if node in self._sweeping:
            self._sweeping.remove(node)
        elif self._gone or self._stopping():
            if self._gone and node not in self._watch.ended_nodes:
                self._sweeping.add(node)
                self._crew.sweep(node)
            self._watch.node_lost(node, words, now)
        else:
            self._questions.lost(node, words)
            self._watch.ended_nodes.add(node)

    def _judge(self) -> None:
        if self._gone:
            # A supervisor may stand still for a while: the cause may be with it, and the echo come from another node.
            told_to = max(self._told_to, self._heard_to - self._timing.supervisor_wait_s)
            self._watch.tick(min(self._heard_to, told_to + self._timing.cause_wait_s))
        for line in self._watch.said:
            self._say(line)
        self._watch.said.clear()

    def _periodic(self, now: float) -> None:
        self._judge()
        if self._state == "starting" and all(
            v.state not in {"waiting", "importing"} for v in self._watch.ranks.values()
        ):
            self._state = "running"
            self._saved = float("-inf")
        if self._watch.cause is not None and not self._caused_at:
            self._caused_at = time.time()
        self._stop_if_asked(now)
        if self._gone and self._watch.finished and self._watch.cause is None and not self._over:
            self._over = True  # the store on the first node is not needed any more; helpers of the ranks get their time
            options = self._plan.options
            self._crew.tell("stop", {"grace_s": options.helper_grace_s, "reason": "all ranks ended"})
        if self._stop_at is not None:
            self._count_down(self._heard_to)
        if now - self._pinged >= self._timing.ping_s:
            self._pinged = now
            for node in self._crew.ping():
                self._lose(node, f"nothing heard for {self._plan.options.lost_head_s:.0f} s", now)
        if now - self._saved >= self._timing.save_s:
            self._save()
        backlog = self._screen.backlog
        if backlog > _HOLD_ABOVE if not self._holding else backlog < _HOLD_BELOW:
            self._holding = not self._holding
            self._crew.tell("hold", {"on": self._holding})

    # ending

    def _stop(self, reason: str, code: int, grace_s: float | None) -> None:
        """A person wants the run to end; asked again, at once."""
        if self._stop_at is not None:  # asked again, or while a failure is being cleared up; never later than was said
            left = max(0.0, self._stop_at + self._grace_s - time.monotonic())
            grace_s = min(grace_s or 0.0, left)
        if grace_s is not None:
            self._grace_s = grace_s
        if self._code is None and self._watch.cause is None:
            self._code = code
        self._watch.stop(reason, time.monotonic())
        if self._stop_at is not None:
            self._begin_stop(time.monotonic())

    def _stop_if_asked(self, now: float) -> None:
        if self._stopping() and self._stop_at is None:
            self._begin_stop(now)

    def _begin_stop(self, now: float) -> None:
        if self._watch.cause is not None and self._watch.cause.kind == "node-lost":
            self._grace_s = min(self._grace_s, self._timing.lost_node_grace_s)
        self._stop_at = now
        self._countdown = -1
        reason = self._watch.stop_reason or ""
        self._spared = self._watch.ending if self._grace_s > 0 else []
        self._crew.tell("stop", {"grace_s": self._grace_s, "reason": reason, "spare": self._spared})
        how = f"SIGTERM now, SIGKILL in {self._grace_s:.0f} s" if self._grace_s > 0 else "SIGKILL now"
        told = [rank for rank in self._watch.running if rank not in self._spared]
        if told:
            self._say(f"{reason}; stopping {rank_words(told)}: {how}")

    def _count_down(self, now: float) -> None:
        assert self._stop_at is not None
        if self._spared and now - self._stop_at >= self._timing.exit_wait_s:
            self._crew.tell("signal", {"signal": int(signal.SIGTERM), "ranks": self._spared})
            self._spared = []
        left = self._stop_at + self._grace_s - now
        if left < -self._timing.empty_s:
            for name in self._names:
                if name not in self._watch.ended_nodes:
                    self._watch.node_lost(name, "its supervisor did not say that all has ended", now)
            return
        seconds = max(0, round(left))
        if seconds == self._countdown or not self._watch.running:
            return
        self._countdown = seconds
        words = f"{rank_words(self._watch.running)} still running: SIGKILL in {seconds} s"
        if self._screen.terminal("err"):
            self._screen.pin(f"gpuboard: {words} (ctrl-C: now)")
        elif left < self._grace_s - 1 and (seconds % 10 == 0 or seconds == 5):
            self._say(words)

    def _finish(self) -> int:
        """Empty every node, say how it went; return the exit code."""
        refused = bool(failed(self.checks)) and not self._gone
        if not self._watch.emptied:
            if refused:
                self._grace_s = self._timing.closed_gate_grace_s
            elif not self._gone:
                self._grace_s = min(self._grace_s, self._timing.closed_gate_grace_s)
            if self._stop_at is None:
                self._watch.stop("preflight refused" if refused else "not started", time.monotonic())
                self._stop_at = time.monotonic()
                self._crew.tell("stop", {"grace_s": self._grace_s, "reason": self._watch.stop_reason or ""})
            self._pump(lambda: self._watch.emptied, time.monotonic() + self._grace_s + self._timing.empty_s)
        self._pump(lambda: not self._sweeping, time.monotonic() + self._timing.sweep_s)
        self._periodic(time.monotonic())
        for rank in self._watch.ranks:  # what helpers, and ranks of a lost node, left without a line end
            self._relay.ended(rank)
        code = self._exit_code()
        self._state = "done" if code == 0 else "stopped" if self._code is not None else "failed"
        self._save()
        if refused:
            count = len(failed(self.checks))
            words = f"{count} check{'' if count == 1 else 's'} failed"
            self._say(f"preflight refused: {words}, no rank has passed its gate")
        for line in self._watch.summary() if self._gone else []:
            self._say(line)
        if code != 0:
            ran = format_duration(round((self._caused_at or time.time()) - self._started))
            at = time.strftime("%H:%M:%S", time.localtime(self._caused_at or None))
            self._say(f"exit code {code}, at {at} after {ran}; logs: {self._folder.path}")
        return code

    def _exit_code(self) -> int:
        if self._code is not None:
            return self._code if self._gone else 128 + signal.SIGINT
        if failed(self.checks) and not self._gone:
            return 7
        return self._watch.exit_code()

    # signals, control, words

    def _catch_signals(self) -> dict[int, Any]:
        def caught(number: int, _frame: FrameType | None) -> None:
            self._inbox.put(SignalReceived(number))

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup; `&` in sh
        return {number: signal.signal(number, caught) for number in heeded}

    def _signalled(self, number: int, now: float) -> None:
        if number == signal.SIGINT:
            self._stop("ctrl-C", 128 + number, None)
        elif number == signal.SIGHUP:
            if not self._stopping():  # the shell and the kernel both send it: that is no second request
                self._stop("the terminal is gone", 128 + number, None)
        elif not self._gone or not self._watch.running:
            if number == signal.SIGTERM:
                self._stop("SIGTERM", 128 + number, None)
        else:
            self._say(f"{signal_name(number)} is passed on to {rank_words(self._watch.running)}")
            self._watch.forwarded(number)
            self._crew.tell("signal", {"signal": number, "ranks": None})

    def _control(self, request: ControlRequest) -> object:
        """Answer a client of the control socket; called in its thread."""
        if request.op == "stop":
            self._inbox.put(request)
            return {"run": self._plan.run}
        return self._view if request.op == "state" else {"error": f"no op {request.op!r}"}

    def _verdicts(self) -> list[VerdictView]:
        cause = self._watch.cause
        if failed(self.checks) and not self._gone:
            return [
                VerdictView(iso(self._caused_at), "preflight", None, c.node, check_text(c).splitlines()[0], c.remedy)
                for c in grouped(failed(self.checks))
            ]
        if cause is None:
            return []
        return [VerdictView(iso(self._caused_at), cause.kind, cause.rank, cause.node, cause.text, cause.evidence)]

    def _save(self) -> None:
        self._saved = time.monotonic()
        view = self.view()
        if view != self._view:  # an idle run must not write to somebody's network home for days
            self._view = view
            self._keep("state.json", view)

    def _keep(self, name: str, value: object) -> None:
        words = self._folder.keep(name, value)
        if words:
            self._say(words)

    def _say(self, text: str) -> None:
        lines = [f"gpuboard: {line}" if not line.startswith(" ") else line for line in text.splitlines()]
        self._screen.lines("err", lines)
        self._folder.log(f"{iso(time.time())} {line}\n" for line in lines)
