"""The loop, on real pipes and clocks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from gpuboard.agent.event_loop import IN, Loop
from gpuboard.agent.launch.teardown import living
from gpuboard.agent.launch.watch.forked import Looks


def test_timers_fire_in_their_order_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    seen: list[str] = []
    now = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now)  # all of them are set at one moment
        loop.after(0.02, lambda: seen.append("late"))
        loop.after(0.0, lambda: seen.append("first"))
        loop.after(0.0, lambda: seen.append("second"))
        loop.cancel(loop.after(0.0, lambda: seen.append("cancelled")))
    while len(seen) < 3:
        loop.turn()
    assert seen == ["first", "second", "late"]


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
    """The process of a look is no helper that the ranks left running."""
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
    while not results:
        loop.turn()
    assert (results, looks.pids) == ([{"ranks": [1]}], set())
    os.waitpid(pid, 0)
