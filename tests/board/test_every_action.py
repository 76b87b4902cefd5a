"""Every action can be had by key, by a click and by the palette; conftest.py checks that a test has tried each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from textual.widgets import Input

from gpuboard.board.app import BoardApp
from gpuboard.board.command_palette import Palette
from gpuboard.board.core import Core
from gpuboard.board.dialogs.launch import LaunchDialog
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.leases import LeasesScreen
from gpuboard.board.screens.logs import LogScreen
from gpuboard.board.screens.runs import StopConfirm
from gpuboard.board.screens.watches import WatchDialog, WatchesScreen
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.grid import Grid
from gpuboard.board.widgets.log_view import LogView
from gpuboard.launch.runs.folder import RankView, RunFolder, RunView, this_head
from gpuboard.launch.runs.index import RunEntry
from tests.board import lab, made
from tests.board.test_help import choose


def run(folder: str = "/nonexistent") -> RunView:
    return RunView("rabc", None, "t.py", made.AT, "done", 0, [RankView(0, "sim01", 0, 0)], [], this_head(), folder)


def open_log(app: BoardApp) -> None:
    app.push_screen(LogScreen(RunEntry(run(), 0.0, False), 0))


def open_watches(app: BoardApp) -> None:
    app.push_screen(WatchesScreen())


def in_table(app: BoardApp) -> bool:
    return isinstance(app.screen, ClusterScreen) and app.screen.view.view == "table"


def at_cluster(app: BoardApp) -> bool:
    return isinstance(app.screen, ClusterScreen)


class Screen(NamedTuple):
    """A screen, how it is opened from the cluster view, and one of its actions."""

    opened: str | Callable[[BoardApp], None]
    title: str
    done: Callable[[BoardApp], bool]


SCREENS = [
    Screen("n", "Back", at_cluster),
    Screen("enter", "Back", at_cluster),
    Screen("l", "Back", at_cluster),
    Screen("u", "Back", at_cluster),
    Screen("P", "Back", at_cluster),
    Screen("question_mark", "Close", at_cluster),
    Screen(open_watches, "Back", at_cluster),
    Screen(open_log, "Back", at_cluster),
    Screen("", "View", in_table),
]


@pytest.mark.parametrize("how", ["footer", "palette"])
async def test_every_screen_s_actions_can_be_clicked_and_are_in_the_palette(tmp_path: Path, how: str) -> None:
    async with lab.board(lab.make_core(tmp_path), (200, 40)) as (app, pilot):
        for opened, title, done in SCREENS:
            if isinstance(opened, str):
                await pilot.press(*filter(None, [opened]))
            else:
                opened(app)
            await lab.settle(pilot, lambda opened=opened: app.screen.is_mounted and (not opened or not at_cluster(app)))  # type: ignore[misc]
            bindings = [active.binding for active in app.screen.active_bindings.values() if active.binding.id]
            if how == "footer":
                await lab.settle(pilot, lambda: app.screen.query_one(Footer).entries)
                footer = app.screen.query_one(Footer)
                shown = {entry.words for entry in footer.entries}
                itself = getattr(app.screen, "TITLE_WORDS", "")  # it does not offer to open itself
                assert {one.description for one in bindings if one.show} - {itself} <= shown, opened
                x = next(entry.x for entry in footer.entries if entry.words == title)
                await pilot.click(footer, offset=(x, 0))
            else:
                offered = {command.title for command in Palette(app.screen).commands()}
                assert {one.description for one in bindings if one.id != "app.palette"} <= offered, opened
                await choose(app, pilot, title, title)
            await lab.settle(pilot, lambda done=done: done(app))  # type: ignore[misc]


async def test_the_arrows_go_through_a_dialog_and_enter_beside_a_field_commits(tmp_path: Path) -> None:
    async with lab.board(lab.make_core(tmp_path)) as (app, pilot):
        await pilot.press("w")
        await lab.settle(pilot, lambda: isinstance(app.screen, WatchDialog) and app.screen.is_mounted)
        for key, focused in (
            ("down", "field-model"), ("up", "field-what"), ("up", "commit"),
            ("left", "cancel"), ("right", "commit"),
        ):  # fmt: skip
            await pilot.press(key)
            await lab.settle(pilot, lambda focused=focused: app.focused and app.focused.id == focused)  # type: ignore[misc]
        app.set_focus(app.screen.query_one("#field-reserve"))
        await pilot.press("space", "enter")
        await lab.settle(pilot, lambda: app.watches.all)
        assert app.watches.all[0].reserve_s == 8 * 3600.0
        app.watches.remove(1)
        await pilot.press("a")
        await lab.settle(pilot, lambda: isinstance(app.screen, WatchDialog))


async def test_a_lease_s_gpus_are_gone_to_from_the_palette(core: Core) -> None:
    async with lab.board(core) as (app, pilot):
        taken = await lab.reserved(app, core, pilot, 1, "L40S")
        await pilot.press("l")
        await lab.settle(pilot, lambda: taken.lease.id in lab.screen(app))
        grid = app.screen.query_one(Grid)
        await pilot.press("pagedown", "pageup", "s", "down", "enter")
        await lab.settle(pilot, lambda: grid._sort == ("owner", False))
        await pilot.press("x")
        await lab.settle(pilot, lambda: isinstance(app.screen, LaunchDialog) and app.screen.is_mounted)
        assert app.screen.query_one("#field-gpus", Input).value == taken.lease.id
        await pilot.press("escape")
        await lab.settle(pilot, lambda: isinstance(app.screen, LeasesScreen))
        await choose(app, pilot, "Its GPUs", "Its GPUs")
        await lab.settle(pilot, lambda: at_cluster(app))
        assert isinstance(app.screen, ClusterScreen)
        assert app.screen.cursor_uuid == taken.lease.gpus[0].uuid
        await pilot.press("ctrl+l")
        core.operations.release(taken.lease.id)


async def test_a_log_is_gone_through_by_the_arrows(tmp_path: Path) -> None:
    (tmp_path / "rank-0.out").write_text("".join(f"line {number}\n" for number in range(500)))
    async with lab.board(lab.make_core(tmp_path)) as (app, pilot):
        app.push_screen(LogScreen(RunEntry(run(str(tmp_path)), 0.0, False), 0))
        await lab.settle(pilot, lambda: "line 499" in lab.screen(app))
        view = app.screen.query_one("#out", LogView)
        await pilot.press("home", "down", "right")
        await lab.settle(pilot, lambda: view.page and view.page.place.start == len("line 0\n") and view.left == 16)
        await pilot.press("up", "left")
        await lab.settle(pilot, lambda: view.page and view.page.place.start == 0 and view.left == 0)


async def test_tab_goes_between_runs_and_ranks_and_capital_k_kills_when_asked_about_a_stop(core: Core) -> None:
    assert RunFolder(core.env, "rabc").keep("state.json", run()) is None
    async with lab.board(core) as (app, pilot):
        await pilot.press("u")
        await lab.settle(pilot, lambda: "t.py" in lab.screen(app))
        await pilot.press("tab")
        await lab.settle(pilot, lambda: app.focused and app.focused.id == "ranks")
        dialog = StopConfirm(RunEntry(run(), 0.0, False), 5.0)
        answers: list[bool | None] = []
        app.push_screen(dialog, answers.append)
        await lab.settle(pilot, lambda: dialog.is_mounted)
        await pilot.press("j", "k")  # up and down in lists
        await pilot.pause()
        assert not answers
        await pilot.press("K")
        await lab.settle(pilot, lambda: answers)
        assert (answers, dialog.now) == ([True], True)
