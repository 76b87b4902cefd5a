"""The help screen and the palette: made from the bindings, so that nothing can be lacking in them."""

from __future__ import annotations

import re
from pathlib import Path

from textual.command import CommandPalette
from textual.events import MouseScrollDown
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from gpuboard.board import keys
from gpuboard.board.app import BoardApp
from gpuboard.board.command_palette import Palette
from gpuboard.board.filter.conditions import GPUS
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.help import FILTER_WORDS, FLAG_WORDS, MOUSE_WORDS, RANK_WORDS, STATE_WORDS, HelpScreen
from gpuboard.board.text.detail.ranks import RANK_LETTERS
from gpuboard.board.text.format import FLAG_MARKS, UNKNOWN
from gpuboard.board.theme.styles import LETTERS
from gpuboard.model.state import STATES
from tests.board.lab import board, make_core, screen, settle


def test_states_and_flags_are_all_explained_and_the_filters_are_valid() -> None:
    assert set(STATE_WORDS) == set(STATES) == set(LETTERS)
    assert set(RANK_WORDS) == set(RANK_LETTERS) - {UNKNOWN}
    assert set(FLAG_WORDS) == {"rogue", "idle", "overdue", "disputed", "sick"}
    assert [GPUS.parse(example).text for example, _ in FILTER_WORDS] == [example for example, _ in FILTER_WORDS]


async def test_help_has_every_action_and_starts_with_the_screen_it_was_opened_from(tmp_path: Path) -> None:
    async with board(make_core(tmp_path), size=(80, 24)) as (app, pilot):
        await pilot.press("question_mark")
        await settle(pilot, lambda: isinstance(app.screen, HelpScreen))
        words = await _read(app, pilot)
        plain = [line.rstrip(" ▁▂▃▄▅▆▇█").strip() for line in words]  # without the scroll bar
        titles = [line for line in plain if line in {"Cluster", "Everywhere", "Lists"}]
        assert list(dict.fromkeys(titles)) == ["Cluster", "Everywhere", "Lists"]  # pages overlap
        keys.load_screens()
        lacking = [a.id for a in keys.actions() if not any(a.description in line for line in words)]
        assert lacking == []
        shown = {" ".join(line.split()) for line in words}
        assert [pair for pair in MOUSE_WORDS if " ".join(pair) not in shown] == []
        for state, letter in LETTERS.items():
            assert any(line.split()[:2] == [letter, state] for line in words), state
        for flag, mark in FLAG_MARKS.items():
            assert any(line.split()[:2] == [mark, flag] for line in words), flag
        await pilot.press("question_mark")
        await settle(pilot, lambda: isinstance(app.screen, ClusterScreen))


async def test_help_scrolls_by_keys_and_wheel_and_uses_the_width(tmp_path: Path) -> None:
    async with board(make_core(tmp_path), size=(80, 24)) as (app, pilot):
        await pilot.press("f1")
        await settle(pilot, lambda: isinstance(app.screen, HelpScreen) and "Reserve" in screen(app))
        box = app.screen.query_one("#scroll")
        for there, back, lines in (("down", "up", 1), ("pagedown", "pageup", 20), ("end", "home", box.max_scroll_y)):
            await pilot.press(there)
            await settle(pilot, lambda lines=lines: box.scroll_y == lines)  # type: ignore[misc]
            await pilot.press(back)
            await settle(pilot, lambda: box.scroll_y == 0)
        assert box.max_scroll_y > 40
        await pilot._post_mouse_events([MouseScrollDown], offset=(10, 10))
        await settle(pilot, lambda: box.scroll_y > 0)
        await pilot.resize_terminal(200, 60)
        await pilot.press("home")
        # titles side by side
        await settle(pilot, lambda: any(re.match(r" Cluster {9,}\S", line) for line in screen(app).splitlines()))
        assert "picture.mark-right " in screen(app)  # whole
        await pilot.resize_terminal(120, 40)
        await settle(pilot, lambda: "picture.mark-right " in screen(app))
        for width in (120, 160):
            await pilot.resize_terminal(width, 40)
            await pilot.press("home")
            await settle(pilot, lambda: box.scroll_y == 0)
            assert [line for line in await _read(app, pilot) if "…" in line] == []
        await pilot.press("q")
        await settle(pilot, lambda: isinstance(app.screen, ClusterScreen))
        assert app.is_running


async def test_the_palette_has_every_action_of_screen_and_app(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, _):
        active = {b.binding.description for b in app.screen.active_bindings.values() if b.binding.id and b.enabled}
        assert {"Quit", "Help", "Sort", "Reserve", "Select", "Up"} <= active
        active -= {"Palette"}
        palette = Palette(app.screen)
        for description in active:
            found = [hit.text async for hit in palette.search(description)]
            assert description in found
        shown = [hit.text async for hit in palette.discover()]
        assert {"Quit", "Help", "Sort", "Theme: Dark"} <= set(shown)
        assert "Up" not in shown  # found when asked for, else in the way


async def test_the_palette_runs_an_action_and_goes_to_a_node_and_a_gpu_by_name(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        await choose(app, pilot, "help", "Help")
        await settle(pilot, lambda: isinstance(app.screen, HelpScreen))
        await choose(app, pilot, "sim02:1", "Go to sim02:1")
        cluster = app.screen_stack[1]
        assert isinstance(cluster, ClusterScreen)
        assert app.scene is not None
        uuid = app.scene.nodes["sim02"].gpus[1].uuid
        await settle(pilot, lambda: len(app.screen_stack) == 2 and cluster.cursor_uuid == uuid)
        await choose(app, pilot, "sim01", "Go to sim01")
        await settle(pilot, lambda: cluster.cursor_node == "sim01")


async def choose(app: BoardApp, pilot: Pilot[int], words: str, option: str) -> None:
    """Type into the palette until ``option`` comes first, and take it."""
    await pilot.press("ctrl+p")
    await settle(pilot, lambda: _is_open(app))
    app.screen.query_one(Input).value = words[:-1]
    await pilot.press("end", words[-1])
    await settle(pilot, lambda: _options(app)[:1] and _options(app)[0].startswith(option))
    await pilot.press("enter")
    await settle(pilot, lambda: not _is_open(app))


def _is_open(app: BoardApp) -> bool:
    return isinstance(app.screen, CommandPalette)


def _options(app: BoardApp) -> list[str]:
    if not _is_open(app):
        return []
    found = app.screen.query_one(OptionList)
    return [str(found.get_option_at_index(index).prompt) for index in range(found.option_count)]


async def _read(app: BoardApp, pilot: Pilot[int]) -> list[str]:
    lines: list[str] = []
    box = app.screen.query_one("#scroll")
    while True:
        lines += screen(app).splitlines()[: box.size.height]
        if box.scroll_y >= box.max_scroll_y:
            return lines
        at = box.scroll_y
        await pilot.press("pagedown")
        await settle(pilot, lambda at=at: at < box.scroll_y == box.scroll_target_y)  # type: ignore[misc]
