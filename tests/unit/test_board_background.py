"""Background work of the board: one piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from gpuboard.board.background import Background
from gpuboard.errors import GpuboardError


class FakeApp:
    """An app whose threads end in ``finish``."""

    def __init__(self) -> None:
        self.app = self
        self.running: list[tuple[Callable[[], Any], Callable[[Any], object], Callable[[GpuboardError], object]]] = []
        self.toasts: list[str] = []

    def ask(self, work: Any, then: Any, failed: Any) -> None:
        self.running.append((work, then, failed))

    def show_error_once(self, error: GpuboardError) -> None:
        self.toasts.append(str(error))

    def finish(self) -> None:
        work, then, failed = self.running.pop(0)
        try:
            value = work()
        except GpuboardError as error:
            failed(error)
        else:
            then(value)


@pytest.fixture
def app() -> FakeApp:
    return FakeApp()


@pytest.fixture
def work(app: FakeApp) -> Background[int]:
    return Background(cast("Any", app))


def test_one_piece_of_work_runs_at_a_time(app: FakeApp, work: Background[int]) -> None:
    found: list[int] = []
    work.ask(lambda: 1, found.append)
    work.ask(lambda: 2, found.append)
    assert (work.busy, len(app.running)) == (True, 1)
    app.finish()
    assert (found, work.busy, app.running) == ([1], False, [])


def test_again_runs_once_after_the_callback(app: FakeApp, work: Background[int]) -> None:
    steps: list[object] = []
    work.ask(lambda: 1, steps.append)
    for _ in range(3):
        work.ask(lambda: 2, steps.append, again=lambda: steps.append("again"))
    app.finish()
    assert steps == [1, "again"]


def test_work_started_by_the_callback_replaces_again(app: FakeApp, work: Background[int]) -> None:
    steps: list[object] = []
    work.ask(lambda: 1, lambda _: work.ask(lambda: 3, steps.append))
    work.ask(lambda: 2, steps.append, again=lambda: steps.append("again"))
    app.finish()
    app.finish()
    assert (steps, work.busy) == ([3], False)


def test_an_error_ends_the_work_and_is_shown(app: FakeApp, work: Background[int]) -> None:
    def fail() -> int:
        raise GpuboardError("no such folder")

    values: list[int] = []
    work.ask(fail, values.append)
    app.finish()
    assert (app.toasts, work.busy) == (["no such folder"], False)
    failures: list[str] = []
    work.ask(fail, values.append, lambda error: failures.append(str(error)))
    app.finish()
    assert (failures, values, len(app.toasts)) == (["no such folder"], [], 1)


def test_a_pause_in_proportion_to_the_work(app: FakeApp) -> None:
    clock = iter([100.0, 100.0, 102.0, 119.9, 120.0])
    work: Background[int] = Background(cast("Any", app), rest=9, clock=lambda: next(clock))
    seen = [work.rested]
    work.ask(lambda: 1, lambda _: None)  # for two seconds
    seen.append(work.rested)
    app.finish()
    assert [*seen, work.rested, work.rested] == [True, False, False, True]
