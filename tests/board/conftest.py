"""Records which actions the tests of the board run: the session fails if all were run and an action was not.

Also records toasts, and ends the keepers of leases that a test has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import textual.app
import textual.pilot
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.dom import DOMNode
from textual.notifications import Notification, Notifications

import gpuboard.board.app
from gpuboard.board import keys
from gpuboard.board.app import BoardApp
from gpuboard.board.core import Core
from tests.board.lab import EVERY, make_core
from tests.board.launches import Exp
from tests.conftest import UNTRIED
from tests.integration.ranks_driver import carriers
from tests.waiting import until

HERE = Path(__file__).parent
FRAME_S = 0.05  # within it textual draws what has changed: it does so 60 times a second
MOST_FRAMES = 60  # an app that draws without end is as idle as it gets
PARSED: dict[tuple[Any, ...], list[RuleSet]] = {}  # CSS that an app of this process has parsed
TRIED: set[str] = set()  # ids of bindings whose action was run in this process
IN_A_TERMINAL = {"app.interrupt", "app.suspend"}  # in a process of its own on a real terminal: test_robust.py
COMPLETE = pytest.StashKey[bool]()  # all tests of the board were collected


@pytest.fixture(autouse=True)
def take_note(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record every action that is run through its binding: by key, footer or palette."""
    check, run = BoardApp._check_bindings, BoardApp.run_action
    pressed: list[str] = []

    async def check_bindings(app: BoardApp, key: str, priority: bool = False) -> bool:
        pressed.append(key)
        try:
            return await check(app, key, priority)
        finally:
            pressed.pop()

    async def run_action(app: BoardApp, action: Any, default_namespace: DOMNode | None = None, *more: Any) -> bool:
        done = await run(app, action, default_namespace, *more)
        for key, bindings in default_namespace._bindings.key_to_bindings.items() if done and default_namespace else ():
            if not pressed or key == pressed[-1]:
                TRIED.update(binding.id for binding in bindings if binding.id and binding.action == action)
        return done

    monkeypatch.setattr(BoardApp, "_check_bindings", check_bindings)
    monkeypatch.setattr(BoardApp, "run_action", run_action)
    return iter(())


@pytest.fixture(autouse=True)
def whatever_is_done_has_taken_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pilot continue when the app is idle: nothing is ready to run, and no frame is due.

    A key may take several frames: a new layout, what is drawn with its sizes, and the rows of that. textual's own waits
    for one of them, and takes a process that gets no CPU time for an idle one.
    """

    async def idle(*_: float) -> None:
        loop: Any = asyncio.get_running_loop()
        await asyncio.sleep(0)
        for _frame in range(MOST_FRAMES):
            while loop._ready:  # what would run in the next turn
                await asyncio.sleep(0)
            now = loop.time()
            due = [timer.when() for timer in loop._scheduled if not timer.cancelled() and timer.when() - now < FRAME_S]
            if not due:
                break
            await asyncio.sleep(max(due) - now)

    for module in (textual.app, textual.pilot):
        monkeypatch.setattr(module, "wait_for_idle", idle)


@pytest.fixture(autouse=True)
def css_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse each part of the CSS once, for all tests: textual does it for every app, in a fifth of its start."""
    parse = Stylesheet._parse_rules

    def parse_rules(sheet: Stylesheet, *part: Any, **of: Any) -> list[RuleSet]:
        key = (frozenset(sheet._variables.items()), part, *of.items())
        if key not in PARSED:
            PARSED[key] = parse(sheet, *part, **of)
        return PARSED[key]

    monkeypatch.setattr(Stylesheet, "_parse_rules", parse_rules)


@pytest.fixture(autouse=True)
def toasts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record every toast, also one that has gone from the screen before a test checks."""

    added = Notifications.add

    def add(toasts: Notifications, toast: Notification) -> Notifications:
        vars(toasts).setdefault(EVERY, []).append(toast)
        return added(toasts, toast)

    monkeypatch.setattr(Notifications, "add", add)


@pytest.fixture(autouse=True)
def preferences_are_saved_when_a_board_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the last save however long it takes: the board gives up on a home that hangs."""
    monkeypatch.setattr(gpuboard.board.app, "_LAST_SAVE_S", 60.0)


@pytest.fixture(autouse=True)
def no_keeper_is_left(tmp_path: Path) -> Iterator[None]:
    """End the keepers of the test's folder: leases of a board last for hours."""
    yield
    for process in Path("/proc").glob("[0-9]*") if any(tmp_path.glob("**/keeper")) else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = (process / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(f"{tmp_path}/".encode()) and b"/keeper/" in word for word in words):
                os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return make_core(tmp_path)


@pytest.fixture
def exp(tmp_path: Path) -> Iterator[Exp]:
    """Yield a folder to launch in; what still runs in the end is killed."""
    found = Exp(tmp_path)
    yield found
    for entry in found.entries():
        if entry.live:
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry.view.head.pid, signal.SIGKILL)
            until(lambda entry=entry: not carriers(entry.view.id), "the run's processes to end")  # type: ignore[misc]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find out whether all tests of the board are run."""
    ours = {item.path.name for item in items if item.path.parent == HERE}
    config.stash[COMPLETE] = ours == {path.name for path in HERE.glob("test_*.py")} and not config.option.keyword


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell which actions this process, or worker, has not run, for the check in tests/conftest.py."""
    if session.config.stash.get(COMPLETE, False):
        keys.load_screens()
        missing = {action.id for action in keys.actions()} - TRIED - IN_A_TERMINAL
        session.config.stash[UNTRIED] = [missing]
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["untried"] = sorted(missing)
