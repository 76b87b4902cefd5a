"""Keys that arrive together, as over a slow connection: each takes effect before the next."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from textual.events import Key, Paste
from textual.widgets import Input

from gpuboard.board.app import BoardApp
from gpuboard.board.dialogs.reserve import ReserveDialog
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.leases import LeasesScreen
from tests.board.lab import board, make_core, settle


def burst(app: BoardApp, *keys: str) -> None:
    """Press keys (words: names of keys, else each character) all at once."""
    for word in keys:
        named = word.startswith("<")
        for key in [word[1:-1]] if named else word:
            app.post_message(Key(key, None if named else key))


async def test_a_filter_typed_in_one_go_is_a_filter_and_no_commands(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        app.post_message(Key("slash", "/"))
        burst(app, "user:quinn")
        await settle(pilot, lambda: app.screen.query_one("#filter", Input).value == "user:quinn")
        assert isinstance(app.screen, ClusterScreen)
        assert app._exit is False


def test_a_dialog_and_its_fields_in_one_go(tmp_path: Path) -> None:
    async def main() -> None:
        async with board(make_core(tmp_path)) as (app, pilot):
            burst(app, "r", "<ctrl+u>", "2", "<tab>", "H100", "<down>", "40GiB", "<down>", "1", "<tab>", "<ctrl+u>")
            burst(app, "3h", "<tab>")
            app.post_message(Paste("two lines\nnot three"))

            def typed() -> dict[str, str] | None:
                return app.screen.values if isinstance(app.screen, ReserveDialog) and app.screen.is_mounted else None

            await settle(pilot, lambda: (typed() or {}).get("purpose"))
            expected = {"gpus": "2", "model": "H100", "memory": "40GiB", "nodes": "1", "for": "3h"}
            assert typed() == {**expected, "purpose": "two lines"}

    asyncio.run(main())


async def test_screens_that_open_and_close_in_one_go(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        burst(app, "l", "r", "<escape>", "<escape>", "<down>", "<enter>", "<escape>", "l", "d", "t")
        await settle(pilot, lambda: isinstance(app.screen, LeasesScreen) and app.screen._line)
        assert [type(screen) for screen in app.screen_stack[1:]] == [ClusterScreen, LeasesScreen]


async def test_page_keys_before_a_list_is_drawn(tmp_path: Path) -> None:
    async with board(make_core(tmp_path), size=(60, 15)) as (app, pilot):
        burst(app, "<ctrl+p>", "<pagedown>", "<pageup>", "<escape>", "<ctrl+t>", "<pagedown>", "<escape>")
        burst(app, "y", "<pagedown>", "<pageup>", "<escape>", "l")
        await settle(pilot, lambda: isinstance(app.screen, LeasesScreen))


async def test_keys_keep_their_order_after_the_machine_was_suspended(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        typed, widget = app._keys, app.screen.query_one("#filter")
        typed._now, typed._at = Key("a", "a"), widget  # that has not come so far
        burst(app, "l")
        await settle(pilot, lambda: typed._waiting)
        before = typed._checks
        time.sleep(3.0)  # nothing here goes on meanwhile
        await settle(pilot, lambda: typed._checks > before)
        assert isinstance(app.screen, ClusterScreen)
        await widget.remove()  # now it never will
        await settle(pilot, lambda: isinstance(app.screen, LeasesScreen))
