"""The loop, on real pipes and clocks."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuboard.agent.event_loop import IN, Loop
from gpuboard.agent.launch import teardown
from gpuboard.agent.launch.teardown import living
from gpuboard.agent.launch.watch.forked import Looks
from gpuboard.agent.nvml import process as nvml_process
from gpuboard.keeper.daemon.loop import KeeperLoop
from tests.calls import calls_of


def test_timers_fire_in_their_order_and_once() -> None:
    now = 1000.0
    loop = Loop(lambda: now)
    seen: list[str] = []
    loop.after(0.02, lambda: seen.append("late"))
    loop.after(0.0, lambda: seen.append("first"))
    loop.after(0.0, lambda: seen.append("second"))
    loop.cancel(loop.after(0.0, lambda: seen.append("cancelled")))
    loop.turn()
    assert seen == ["first", "second"]
    now += 0.02
    loop.turn()
    assert seen == ["first", "second", "late"]


def test_a_timer_of_a_signal_handler_is_never_lost() -> None:
    """The supervisor's handler of SIGTERM adds one, whatever the loop is doing meanwhile."""
    loop = Loop()
    received: list[int] = []

    def handler(number: int, _frame: object) -> None:
        received.append(number)
        loop.after(0.0, lambda: None)

    usual = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0001)
        while len(received) < 1000:
            loop.cancel(loop.after(60.0, lambda: None))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, usual)
    assert len(loop._timers) == len(received)


def test_a_callback_may_forget_what_is_ready_too() -> None:
    loop = Loop()
    pipes = [os.pipe() for _ in range(2)]
    seen: list[int] = []

    def taken(fd: int) -> None:
        seen.append(fd)
        for read_end, _ in pipes:
            loop.unwatch(read_end)

    for read_end, write_end in pipes:
        os.write(write_end, b"x")
        loop.watch(read_end, IN, lambda fd=read_end: taken(fd))  # type: ignore[misc]
    loop.turn()
    assert len(seen) == 1
    for pair in pipes:
        for fd in pair:
            os.close(fd)


@pytest.mark.parametrize("kind", [Loop, KeeperLoop])
def test_a_new_file_with_the_number_of_a_ready_one_is_not_taken_for_it(kind: type[Loop | KeeperLoop]) -> None:
    loop = kind()
    pipes = [os.pipe() for _ in range(2)]
    seen: list[str] = []

    def watch(fd: int, callback: Callable[[], None]) -> None:
        if isinstance(loop, Loop):
            loop.watch(fd, IN, callback)
        else:
            loop.watch(fd, callback)

    def replace() -> None:
        """Close the other pipe, and open another one in its place."""
        loop.unwatch(pipes[0][0])
        loop.unwatch(pipes[1][0])
        os.dup2(quiet[0], pipes[1][0])
        watch(pipes[1][0], lambda: seen.append("the new one"))
        seen.append("the first one")

    quiet = os.pipe()
    watch(pipes[0][0], replace)
    watch(pipes[1][0], lambda: seen.append("the old one"))
    for _, write_end in pipes:
        os.write(write_end, b"x")
    if isinstance(loop, Loop):
        loop.turn()
    else:
        loop.wait(0.0)
    assert seen == ["the first one"]
    for fd in (*pipes[0], *pipes[1], *quiet):
        os.close(fd)


def test_a_timer_may_cancel_another_of_the_same_moment() -> None:
    loop = Loop()
    seen: list[str] = []
    handles: list[int] = []
    loop.after(0.0, lambda: loop.cancel(handles[0]))
    handles.append(loop.after(0.0, lambda: seen.append("cancelled")))
    loop.after(0.0, lambda: seen.append("after"))
    while not seen:
        loop.turn()
    assert seen == ["after"]


def test_a_look_is_known_until_its_result_is_there(tmp_path: Path) -> None:
    """The process of a look is no helper that the ranks left running, and gets no signal once it has ended."""
    loop = Loop()
    looks = Looks(loop)
    results: list[dict[str, Any]] = []
    config = {"run": "r0", "attempt": 1}
    told = tmp_path / "told"

    def look() -> dict[str, Any]:
        while not told.exists():
            time.sleep(0.001)
        return {"ranks": [1]}

    looks.start(look, results.append)
    (pid,) = looks.pids
    assert pid in {process.pid for process in living(config, os.getpid(), [])}
    assert pid not in {process.pid for process in living(config, os.getpid(), looks.pids)}
    told.touch()
    with calls_of(teardown.send_signal) as signalled:
        while not results:
            loop.turn()
    assert (results, looks.pids, signalled) == ([{"ranks": [1]}], set(), [])
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    "start",
    [lambda: nvml_process.spawn(0.0, [], set(), None), lambda: Looks(Loop()).start(dict, lambda _: None)],
    ids=["NVML process", "inspection"],
)
def test_a_process_that_cannot_be_started_leaves_no_pipe(
    start: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a user has too many processes, they are started again and again."""

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    gc.collect()  # files that other tests left open are closed now, not meanwhile
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", fork)
        with pytest.raises(BlockingIOError):
            start()
    assert os.listdir("/proc/self/fd") == before
