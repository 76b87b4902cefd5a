"""The head's loop: what it concludes from silence when it could not listen, and how soon it can be ended."""

from __future__ import annotations

import io
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.launch.control import ControlRequest, ask
from gpuboard.launch.head import Head
from gpuboard.launch.output import Screen
from gpuboard.launch.run_folder import RunFolder
from gpuboard.launch.supervisors import Heard
from gpuboard.launch.timing import HeadTiming
from gpuboard.transport.connector import Connector
from tests.unit.test_plan import planned
from tests.unit.test_watch import BOOM, RESET
from tests.waiting import until

TIMING = HeadTiming(ping_s=0.1, cause_wait_s=0.2)


class Inbox(queue.SimpleQueue[Any]):
    """That of a process which stands still when it has nothing to do; afterwards its main thread runs first."""

    def __init__(self, meanwhile: Heard) -> None:
        super().__init__()
        self._meanwhile: Heard | None = meanwhile

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self.empty() or self._meanwhile is None:
            return super().get(block, timeout)
        time.sleep(TIMING.cause_wait_s + 0.1)
        self.put(self._meanwhile)
        self._meanwhile = None
        raise queue.Empty


class Seen(RunFolder):
    """A folder whose run is asked to stop, or gets a signal, in the moment in which its state is first seen."""

    end: Callable[[Path], object] | None = None

    def keep(self, name: str, value: object) -> str | None:
        words = super().keep(name, value)
        if name == "state.json" and self.end is not None:
            end, self.end = self.end, None
            end(self.path)
        return words


@pytest.mark.parametrize(
    "end",
    [lambda path: ask(path, ControlRequest("stop", 0.0, "seen")), lambda _: os.kill(os.getpid(), signal.SIGTERM)],
    ids=["stop", "SIGTERM"],
)
def test_a_run_can_be_stopped_as_soon_as_it_is_seen(tmp_path: Path, end: Callable[[Path], object]) -> None:
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    folder = Seen(env, "rabc")
    folder.end = end
    screen = Screen(io.StringIO(), io.StringIO())
    plan = planned()
    nodes = {config.node: Node(config.node, None) for config in plan.nodes}
    head = Head(plan, folder, screen, connector=Connector(Settings()), nodes=nodes, read_gpus=None)

    def unheard(number: int, _frame: object) -> None:
        raise AssertionError(f"the head left signal {number} to others")

    usual = signal.signal(signal.SIGTERM, unheard)
    try:
        head.run()
    finally:
        signal.signal(signal.SIGTERM, usual)
        screen.close()
    assert [verdict.kind for verdict in head.view().verdicts] == ["stopped"]


def test_a_head_that_stood_still_hears_the_cause_before_it_takes_the_echo_for_it(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    screen = Screen(io.StringIO(), io.StringIO())
    folder, connector = RunFolder(env, "rabc"), Connector(Settings())
    head = Head(planned(), folder, screen, connector=connector, nodes={}, read_gpus=None, timing=TIMING)
    head._gone = True
    head._inbox = Inbox(Heard("gpu01", BOOM))
    head._inbox.put(Heard("gpu02", RESET))
    head._pump(lambda: head._watch.cause is not None, None)
    assert [(verdict.rank, verdict.kind) for verdict in head.view().verdicts] == [(1, "raised")]
    screen.close()


@contextmanager
def two_nodes(tmp_path: Path, timing: HeadTiming = TIMING) -> Iterator[tuple[Head, int]]:
    """Yield the head of an open launch whose supervisors both have begun, and the pid of that of gpu01."""
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    screen = Screen(io.StringIO(), io.StringIO())
    plan, connector, folder = planned(), Connector(Settings()), RunFolder(env, "rabc")
    nodes = {config.node: Node(config.node, None) for config in plan.nodes}
    head = Head(plan, folder, screen, connector=connector, nodes=nodes, read_gpus=None, timing=timing)
    head._gone = True
    try:
        head._crew.open()
        links = head._crew._links
        until(lambda: all(link.hello is not None for link in links.values()), "the supervisors begin")
        hello = links["gpu01"].hello
        assert hello is not None
        yield head, hello.pid
    finally:
        head._crew.close()
        connector.close()
        screen.close()


def test_the_cause_is_waited_for_while_its_supervisor_stands_still(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (head, supervisor):
        os.kill(supervisor, signal.SIGSTOP)
        head._inbox.put(Heard("gpu02", RESET))
        assert not head._pump(lambda: head._watch.cause is not None, time.monotonic() + 2 * TIMING.cause_wait_s)
        os.kill(supervisor, signal.SIGCONT)
        head._inbox.put(Heard("gpu01", BOOM))  # what it has not come to say
        head._pump(lambda: head._watch.cause is not None, None)
        assert [(verdict.rank, verdict.kind) for verdict in head.view().verdicts] == [(1, "raised")]


def test_a_supervisor_that_says_nothing_for_long_is_not_waited_for(tmp_path: Path) -> None:
    with two_nodes(tmp_path, msgspec.structs.replace(TIMING, supervisor_wait_s=0.5)) as (head, supervisor):
        os.kill(supervisor, signal.SIGSTOP)
        head._inbox.put(Heard("gpu02", RESET))
        assert head._pump(lambda: head._watch.cause is not None, time.monotonic() + 60)
        assert [verdict.rank for verdict in head.view().verdicts] == [RESET.rank]
        os.kill(supervisor, signal.SIGCONT)
