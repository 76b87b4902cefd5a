"""Every screen and dialog at every size, in ASCII, and under keys pressed faster than screens are drawn."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from textual.events import Key
from textual.keys import _character_to_key

from gpuboard.board.app import BoardApp
from gpuboard.board.scene import Scene
from gpuboard.config import Settings
from gpuboard.model.snapshot import Snapshot
from tests.board.lab import board, make_core, screen, settle

# what is opened from the cluster view, by the keys that open it
PLACES = {
    "picture": (), "table": ("t",), "GPU": ("enter",), "node": ("n",), "leases": ("l",), "runs": ("u",),
    "watches": ("w",), "reserve": ("r",), "launch": ("x",), "copy": ("y",), "filter": ("slash", "a"),
    "overview": ("v",), "help": ("question_mark",), "palette": ("ctrl+p",), "themes": ("ctrl+t",),
}  # fmt: skip
VIEWS = {"picture", "table", "filter"}  # of the cluster view itself
# One place goes through them forwards and the next one backwards: each opens at the size of the place before it.
SIZES = [(200, 60), (80, 24)]
ODD_SIZES = [(300, 90), (200, 2), (1, 1), (20, 5)]
HOSTILE = "[/x]\u202e\u0301äß漢字💥é" * 3


async def test_no_screen_at_no_size_draws_beyond_ascii_where_characters_are_ascii(tmp_path: Path) -> None:
    async with board(make_core(tmp_path, settings=Settings(glyphs="ascii"))) as (app, pilot):
        _make_hostile(app)
        for number, (place, keys) in enumerate(PLACES.items()):
            await pilot.press(*keys)
            await settle(pilot, lambda: "?????" in screen(app) or len(app.screen_stack) > 2)
            opened = app.screen
            for size in SIZES[:: -1 if number % 2 else 1]:
                await pilot.resize_terminal(*size)
                await settle(pilot, lambda size=size: app.screen.size == size)  # type: ignore[misc]
                assert app.screen is opened, place
                drawn = screen(app)
                assert [character for character in drawn if not character.isascii()] == [], place
                assert max(len(line) for line in drawn.splitlines() or [""]) <= size[0], place
            while len(app.screen_stack) > 2:
                app.pop_screen()
            await pilot.press(*{"table": "t", "filter": ("escape", "escape")}.get(place, ()))


async def test_every_screen_at_every_size_with_all_characters(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        for place, keys in PLACES.items():
            await pilot.press(*keys)
            await settle(pilot, lambda place=place: len(app.screen_stack) > 2 or place in VIEWS)  # type: ignore[misc]
            opened = app.screen
            for size in ODD_SIZES:
                await pilot.resize_terminal(*size)
                await settle(pilot, lambda size=size: app.screen.size == size)  # type: ignore[misc]
                assert app.screen is opened, place
                assert max(cell_len(line) for line in screen(app).splitlines() or [""]) <= size[0], place
            while len(app.screen_stack) > 2:
                app.pop_screen()
            await pilot.press(*{"table": "t", "filter": ("escape", "escape")}.get(place, ()))


async def test_node_data_that_is_not_ascii_is_shown_as_question_marks(tmp_path: Path) -> None:
    async with board(make_core(tmp_path, settings=Settings(glyphs="ascii")), size=(200, 60)) as (app, pilot):
        _make_hostile(app)
        await pilot.press("t")
        await settle(pilot, lambda: "[/x]????" in screen(app))


@pytest.mark.parametrize("seed", range(2))
async def test_keys_faster_than_screens_are_drawn_end_nothing(tmp_path: Path, seed: int) -> None:
    keys = [
        "up", "down", "left", "right", "enter", "escape", "space", "tab", "pagedown", "home", "end", "slash",
        "question_mark", "f1", "ctrl+p", "ctrl+t", *"abdefghijlmnorstuvwxyzGNS[]1", "backspace", "shift+down", "ctrl+l",
    ]  # fmt: skip
    dice = random.Random(seed)
    pressed = [dice.choice(keys) for _ in range(120)]
    async with board(make_core(tmp_path), size=(100, 30)) as (app, pilot):
        for start in range(0, len(pressed), 10):
            for key in pressed[start : start + 10]:
                named = _character_to_key(key) if len(key) == 1 else key
                app.post_message(Key(named, key if len(key) == 1 else None))
            await pilot.pause()
            assert app.is_running, pressed[: start + 10]


def _make_hostile(app: BoardApp) -> None:
    """Show hostile texts from now on."""
    made = app.core.scene
    app.core.scene = lambda: _hostile(made())  # type: ignore[method-assign]


def _hostile(scene: Scene) -> Scene:
    """Return a scene whose texts are of every kind."""
    nodes = [
        msgspec.structs.replace(
            node,
            hostname=HOSTILE,
            gpus=[
                msgspec.structs.replace(
                    gpu,
                    name=HOSTILE,
                    reason=HOSTILE,
                    processes=[msgspec.structs.replace(p, user=HOSTILE, command=HOSTILE) for p in gpu.processes or []],
                )
                for gpu in node.gpus
            ],
        )
        for node in scene.snapshot.nodes
    ]
    snapshot: Snapshot = msgspec.structs.replace(scene.snapshot, nodes=nodes, cluster=HOSTILE)
    return Scene(snapshot, scene.leases, uids=scene.uids, banners=(HOSTILE,))
