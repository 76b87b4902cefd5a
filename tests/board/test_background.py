"""Background work of the board: one piece at a time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from textual.screen import Screen

from gpuboard.board.background import Background
from gpuboard.errors import GpuboardError
from tests.board import lab, made

EMPTY = made.scene(made.node("gpu01"))


async def test_one_piece_of_work_runs_at_a_time(tmp_path: Path) -> None:
    async with made.still(tmp_path, EMPTY) as (app, pilot):
        work: Background[int] = Background(app)
        answers = threading.Event()
        steps: list[object] = []
        work.ask(lambda: int(answers.wait(60)), steps.append)
        for _ in range(3):
            work.ask(lambda: 2, steps.append, again=lambda: steps.append("again"))
        assert work.busy
        answers.set()
        await lab.settle(pilot, lambda: not work.busy)
        assert steps == [1, "again"]

        steps.clear()
        answers.clear()
        work.ask(lambda: int(answers.wait(60)), lambda _: work.ask(lambda: 3, steps.append))
        work.ask(lambda: 2, steps.append, again=lambda: steps.append("again"))
        answers.set()
        await lab.settle(pilot, lambda: steps and not work.busy)
        assert steps == [3]  # work started by the callback replaces ``again``


async def test_an_error_ends_the_work_and_is_shown_once(tmp_path: Path) -> None:
    def fail() -> int:
        raise GpuboardError("no such folder")

    async with made.still(tmp_path, EMPTY) as (app, pilot):
        work: Background[int] = Background(app)
        values: list[int] = []
        failures: list[str] = []
        for failed in (None, None, lambda error: failures.append(str(error))):
            work.ask(fail, values.append, failed)
            await lab.settle(pilot, lambda: not work.busy)
        assert (lab.toasts(app), failures, values) == ([": no such folder"], ["no such folder"], [])


class Answered(Screen[None]):
    """Is answered while it is removed: its widgets have gone, and it is still attached."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Background[bool] = Background(self)
        self.removed = threading.Event()
        self.answers: list[bool] = []

    async def on_unmount(self) -> None:
        self.removed.set()
        while self.work.busy:
            await asyncio.sleep(0)


async def test_a_screen_that_is_being_removed_is_not_called_back(tmp_path: Path) -> None:
    screen = Answered()
    async with made.still(tmp_path, EMPTY) as (app, _):
        await app.push_screen(screen)
        screen.work.ask(lambda: screen.removed.wait(60), screen.answers.append)
    assert (screen.work.busy, screen.answers) == (False, [])


async def test_a_pause_in_proportion_to_the_work(tmp_path: Path) -> None:
    clock = iter([100.0, 100.0, 102.0, 119.9, 120.0])
    async with made.still(tmp_path, EMPTY) as (app, pilot):
        work: Background[int] = Background(app, rest=9, clock=lambda: next(clock))
        seen = [work.rested]
        work.ask(lambda: 1, lambda _: None)  # for two seconds
        seen.append(work.rested)
        await lab.settle(pilot, lambda: not work.busy)
        assert [*seen, work.rested, work.rested] == [True, False, False, True]
