"""The head's loop: timeouts after a suspension, and stopping a run right after its start."""

from __future__ import annotations

import io
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.launch import head as module
from gpuboard.launch.attempt.record import AttemptRecord
from gpuboard.launch.attempt.requests import Requests
from gpuboard.launch.events import Output
from gpuboard.launch.head import Head
from gpuboard.launch.output import Screen
from gpuboard.launch.runs.control import ControlRequest, ask
from gpuboard.launch.runs.folder import RunFolder, read_state
from gpuboard.launch.supervisors import SupervisorEvent
from gpuboard.launch.timing import HeadTiming
from gpuboard.model.reading import Event
from gpuboard.transport.connector import Connector
from tests.calls import calls_of
from tests.unit.test_plan import planned
from tests.unit.test_watch import BOOM, RESET
from tests.waiting import until

TIMING = HeadTiming(ping_s=0.1, cause_wait_s=0.2)


class Inbox(queue.SimpleQueue[Any]):
    """The inbox of a process that is suspended when idle, by its clock ``now``; ``arrived`` comes in meanwhile."""

    def __init__(self, arrived: SupervisorEvent) -> None:
        super().__init__()
        self._arrived: SupervisorEvent | None = arrived
        self.now = time.monotonic()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self.empty() or self._arrived is None:
            return super().get(block, timeout)
        self.now += TIMING.cause_wait_s + 0.1
        self.put(self._arrived)
        self._arrived = None
        raise queue.Empty


class Seen(RunFolder):
    """A folder whose run is stopped, or gets a signal, as soon as its state can be seen."""

    end: Callable[[Path], object] | None = None

    def keep(self, name: str, value: object) -> str | None:
        error = super().keep(name, value)
        if name == "state.json" and self.end is not None:
            end, self.end = self.end, None
            end(self.path)
        return error


@pytest.mark.parametrize(
    "end",
    [lambda path: ask(path, ControlRequest("stop", 0.0, "seen")), lambda _: os.kill(os.getpid(), signal.SIGTERM)],
    ids=["stop", "SIGTERM"],
)
def test_a_run_can_be_stopped_as_soon_as_it_is_seen(tmp_path: Path, end: Callable[[Path], object]) -> None:
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    folder = Seen(env, "rabc")
    folder.end = end
    err = io.StringIO()
    screen = Screen(io.StringIO(), err)
    plan = planned()
    nodes = {config.node: Node(config.node, None) for config in plan.nodes}
    head = Head(plan, folder, screen, connector=Connector(Settings()), nodes=nodes, read_gpus=None)

    def not_ours(number: int, _frame: object) -> None:
        raise AssertionError(f"the head did not handle signal {number}")

    usual = signal.signal(signal.SIGTERM, not_ours)
    try:
        head.run()
    finally:
        signal.signal(signal.SIGTERM, usual)
        screen.close()
    assert [verdict.kind for verdict in head.view().verdicts] == ["stopped"]
    assert ": stopped before the ranks were started" in err.getvalue()


def test_a_resumed_head_reads_its_inbox_before_it_names_the_root_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    screen = Screen(io.StringIO(), io.StringIO())
    folder, connector = RunFolder(env, "rabc"), Connector(Settings())
    head = Head(planned(), folder, screen, connector=connector, nodes={}, read_gpus=None, timing=TIMING)
    head._gate.opened = True
    head._inbox = inbox = Inbox(SupervisorEvent("gpu01", BOOM))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: inbox.now, time=time.time))
    head._inbox.put(SupervisorEvent("gpu02", RESET))
    head._pump(lambda: head._watch.cause is not None, None)
    assert [(verdict.rank, verdict.kind) for verdict in head.view().verdicts] == [(1, "raised")]
    screen.close()


@contextmanager
def unopened(tmp_path: Path) -> Iterator[Head]:
    """Yield the head of a launch whose supervisors are not started."""
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    with closing(Screen(io.StringIO(), io.StringIO())) as screen, closing(Connector(Settings())) as connector:
        yield Head(
            planned(), RunFolder(env, "rabc"), screen, connector=connector, nodes={}, read_gpus=None, timing=TIMING
        )


def test_a_state_that_could_not_be_written_is_written_once_there_is_room(tmp_path: Path) -> None:
    """A run that waits or trains without output changes nothing else for hours."""
    with unopened(tmp_path) as head:
        outcome, path = head._outcome, head._record.folder.path
        outcome.save()
        full = path.with_name("full")
        path.rename(full)
        outcome.state = "running"
        outcome.save()
        full.rename(path)
        outcome.save()
        state = read_state(path)
        assert state is not None
        assert state.state == "running"


def test_a_request_is_handled_before_output_that_is_queued(tmp_path: Path) -> None:
    with unopened(tmp_path) as head, calls_of(Head._take) as taken:
        head._inbox.put(SupervisorEvent("gpu01", Output(0, "out", "line\n")))
        head.stop("asked")
        assert head._pump(lambda: bool(taken), None)
    assert taken[0]["item"] == ControlRequest("stop", None, "asked")


def test_a_deadline_passes_only_after_all_that_arrived_before_it(tmp_path: Path) -> None:
    with unopened(tmp_path) as head:
        for _ in range(1500):
            head._inbox.put(SupervisorEvent("gpu02", RESET))
        assert not head._pump(lambda: False, time.monotonic())
        assert head._inbox.empty()


def test_a_deadline_passes_while_output_arrives_without_pause(tmp_path: Path) -> None:
    class Endless(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            self.put(SupervisorEvent("gpu01", Output(0, "out", "line\n")))
            return super().get(block, timeout)

        def get_nowait(self) -> Any:
            return self.get(block=False)

    with unopened(tmp_path) as head:
        head._inbox = Endless()
        assert not head._pump(lambda: False, time.monotonic() + 0.2)


def test_ranks_that_were_not_started_are_not_counted_down(tmp_path: Path) -> None:
    with unopened(tmp_path) as head:
        head._record.print("preflight failed")
        ended_at = head._ending.finish(opened=False, refused=True)
        head._ending.tick(ended_at, ended_at - head._timing.empty_s)
        assert (head._record.folder.path / "head.log").read_text().endswith(" gpuboard: preflight failed\n")


@contextmanager
def two_nodes(tmp_path: Path, timing: HeadTiming = TIMING) -> Iterator[tuple[Head, int]]:
    """Yield the head of a launch with an open gate and two running supervisors, and the pid of that of gpu01."""
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    screen = Screen(io.StringIO(), io.StringIO())
    plan, connector, folder = planned(), Connector(Settings()), RunFolder(env, "rabc")
    nodes = {config.node: Node(config.node, None) for config in plan.nodes}
    head = Head(plan, folder, screen, connector=connector, nodes=nodes, read_gpus=None, timing=timing)
    head._gate.opened = True
    try:
        head._supervisors.open()
        links = head._supervisors._links
        until(lambda: all(link.hello is not None for link in links.values()), "the supervisors start")
        hello = links["gpu01"].hello
        assert hello is not None
        yield head, hello.pid
    finally:
        head._supervisors.close()
        connector.close()
        screen.close()


def test_the_head_waits_for_events_of_a_suspended_supervisor(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (head, supervisor):
        os.kill(supervisor, signal.SIGSTOP)
        head._inbox.put(SupervisorEvent("gpu02", RESET))
        assert not head._pump(lambda: head._watch.cause is not None, time.monotonic() + 2 * TIMING.cause_wait_s)
        os.kill(supervisor, signal.SIGCONT)
        head._inbox.put(SupervisorEvent("gpu01", BOOM))  # sent late
        head._pump(lambda: head._watch.cause is not None, None)
        assert [(verdict.rank, verdict.kind) for verdict in head.view().verdicts] == [(1, "raised")]


def test_a_stopped_supervisor_is_named_until_it_continues(tmp_path: Path) -> None:
    with two_nodes(tmp_path, msgspec.structs.replace(TIMING, silent_s=0.5)) as (head, supervisor):
        os.kill(supervisor, signal.SIGSTOP)
        assert head._pump(lambda: bool(head.view().verdicts), time.monotonic() + 60)
        (verdict,) = head.view().verdicts
        assert (verdict.kind, verdict.node) == ("node-silent", "gpu01")
        assert f"its supervisor (pid {supervisor}) is stopped" in verdict.text
        assert f"kill -CONT {supervisor} on gpu01; after 60 s" in verdict.evidence
        os.kill(supervisor, signal.SIGCONT)
        assert head._pump(lambda: not head.view().verdicts, time.monotonic() + 60)
    assert "gpu01 responds again after " in (head._record.folder.path / "head.log").read_text()


def test_the_head_pings_while_its_main_thread_writes_a_file(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (head, _):
        now = time.monotonic()
        until(lambda: head._supervisors.complete_until() > now, "both nodes answer a later ping")


def test_ranks_are_paused_while_their_output_waits_to_be_handled(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (head, _):
        link = head._supervisors._links["gpu01"]
        while not head._supervisors._holding:
            link._listener(Event("output", msgspec.Raw(msgspec.json.encode(Output(0, "out", "x" * 60_000 + "\n")))))
            assert head._inbox.qsize() < 200
        assert head._pump(lambda: not head._supervisors._holding, time.monotonic() + 60)


def test_the_wait_for_a_suspended_supervisor_is_limited(tmp_path: Path) -> None:
    with two_nodes(tmp_path, msgspec.structs.replace(TIMING, supervisor_wait_s=0.5)) as (head, supervisor):
        os.kill(supervisor, signal.SIGSTOP)
        head._inbox.put(SupervisorEvent("gpu02", RESET))
        assert head._pump(lambda: head._watch.cause is not None, time.monotonic() + 60)
        assert [verdict.rank for verdict in head.view().verdicts] == [RESET.rank]
        os.kill(supervisor, signal.SIGCONT)


def test_a_request_between_two_attempts_reaches_the_next_one(tmp_path: Path) -> None:
    """The control socket's thread has taken the inbox of the attempt that ends, and has not put the request into it."""
    putting, moved = threading.Event(), threading.Event()

    class Slow(queue.SimpleQueue[Any]):
        def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
            putting.set()
            moved.wait(0.2)  # the next attempt begins now, unless it waits for this request
            super().put(item)

    folder = RunFolder({"XDG_STATE_HOME": str(tmp_path)}, "r0000000")
    with closing(Screen(io.StringIO(), io.StringIO())) as screen:
        requests, record = Requests("r0000000"), AttemptRecord(folder, screen)
        last, following = Slow(), queue.SimpleQueue[Any]()
        requests.receive(last, record, view=lambda: None, explained=lambda explanation: explanation)
        asking = threading.Thread(target=ask, args=(folder.path, ControlRequest("stop")))
        asking.start()
        putting.wait()
        requests.receive(following, record, view=lambda: None, explained=lambda explanation: explanation)
        moved.set()
        asking.join()
        requests.close()
    assert following.get_nowait() == ControlRequest("stop")
