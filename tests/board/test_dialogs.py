"""Dialogs and screens close once, also after a double press; background errors reach the caller."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.events import Key
from textual.pilot import Pilot

from gpuboard.board.app import BoardApp
from gpuboard.board.dialogs.base import Box, Confirm
from gpuboard.board.screens.watches import WatchDialog
from gpuboard.errors import GpuboardError
from tests.board.lab import board, make_core, settle, toasts


def stack(app: BoardApp) -> list[str]:
    return [type(shown).__name__ for shown in app.screen_stack[1:]]


async def at_once(pilot: Pilot[int], *keys: str) -> None:
    """Press keys so quickly that they have all come before anything was done."""
    for key in keys:
        pilot.app.post_message(Key(key, None))
    await settle(pilot, lambda: True)


async def test_enter_twice_closes_the_dialog_alone_and_answers_once(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        await pilot.press("w")
        await settle(pilot, lambda: isinstance(app.screen, WatchDialog))
        await at_once(pilot, "enter", "enter", "enter")
        await settle(pilot, lambda: stack(app) == ["ClusterScreen", "WatchesScreen"])
        assert len(app.watches.all) == 1


async def test_ctrl_c_closes_a_dialog(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        for key in ("x", "y"):  # with a field, with a list
            await pilot.press(key)
            await settle(pilot, lambda: isinstance(app.screen, Box) and app.focused)
            await pilot.press("ctrl+c")
            await settle(pilot, lambda: stack(app) == ["ClusterScreen"])


async def test_a_button_pressed_twice_answers_once(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        await pilot.press("l")
        answers: list[bool | None] = []
        dialog = Confirm("Release it?", "", verb="Release")
        app.push_screen(dialog, answers.append)
        await settle(pilot, lambda: dialog.is_current and dialog.query("#yes"))
        button = dialog.query_one("#yes")
        button.press()  # type: ignore[attr-defined]  # what two clicks do
        button.press()  # type: ignore[attr-defined]
        await settle(pilot, lambda: answers)
        assert (answers, stack(app)) == ([True], ["ClusterScreen", "LeasesScreen"])


async def test_a_dialog_that_ends_below_the_palette_goes_with_it(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        answers: list[bool | None] = []
        dialog = Confirm("Is it?", "", verb="Do")
        app.push_screen(dialog, answers.append)
        await settle(pilot, lambda: dialog.is_current)
        await pilot.press("ctrl+p")
        await settle(pilot, lambda: isinstance(app.screen, CommandPalette))
        dialog.dismiss(True)
        await settle(pilot, lambda: answers)
        assert (answers, stack(app)) == ([True], ["ClusterScreen"])
        assert app.is_running


async def test_going_back_ends_at_the_cluster_and_screens_do_not_pile_up(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        await pilot.press("l")
        app.pop_screen()  # a footer that is clicked twice
        app.pop_screen()
        await settle(pilot, lambda: stack(app) == ["ClusterScreen"])
        await pilot.press("l", "u", "l")
        await settle(pilot, lambda: stack(app) == ["ClusterScreen", "LeasesScreen"])


async def test_a_bug_in_background_work_reaches_the_caller(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        failures: list[GpuboardError] = []
        nothing: dict[str, str] = {}
        app.ask(lambda: nothing["key"], pytest.fail, failures.append)
        await settle(pilot, lambda: failures)
        assert "this is a bug: KeyError" in str(failures[0])
        app.show_error_once(failures[0])
        app.show_error_once(failures[0])
        await settle(pilot, lambda: toasts(app))
        assert toasts(app) == [f": {failures[0]}"]
