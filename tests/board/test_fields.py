"""Fields of dialogs: they look like fields in every theme, show an example, and whole errors beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Button, Input, Static

from gpuboard.board.app import BoardApp
from gpuboard.board.dialogs.base import Dialog, Field
from gpuboard.board.dialogs.launch import open_launch
from gpuboard.board.dialogs.request_form import gpus_words
from gpuboard.board.dialogs.reserve import open_reserve
from gpuboard.board.dialogs.saved_filters import SaveFilter
from gpuboard.board.screens.leases import RenewDialog
from gpuboard.board.screens.watches import open_watch
from gpuboard.board.screens.welcome import NameNodes
from gpuboard.config import Settings
from gpuboard.model.request import ChosenGpu
from tests.board.lab import board, make_core, screen, settle
from tests.board.made import lease

NARROW = (80, 24)
WRONG = {  # text that is wrong in a field
    "gpus": "1,,", "what": "nothing", "memory": "40 elephants", "nodes": "many", "for": "999d", "grace": "soon",
    "command": "'", "variables": "=1", "name": "x" * 21, "restarts": "some", "least": "0",
}  # fmt: skip
DIALOGS: dict[str, Callable[[BoardApp], object]] = {
    "reserve": lambda app: open_reserve(app, ()),
    "launch": open_launch,
    "watch": open_watch,
    "renew": lambda app: app.push_screen(RenewDialog(lease("k3f9", "me", [("sim01", 0)]), 86400.0)),
    "nodes": lambda app: app.push_screen(NameNodes()),
    "save filter": lambda app: app.push_screen(SaveFilter("GPUs", "user:me", {})),
}


@pytest.mark.parametrize(
    ("glyphs", "looks"),
    [
        ("unicode", [("dark", NARROW), ("plain", NARROW), ("dark", (160, 48))]),
        ("ascii", [("light", (160, 48))]),
    ],
)
async def test_every_dialog_s_fields_are_visible_and_nothing_is_cut(
    tmp_path: Path, glyphs: str, looks: Sequence[tuple[str, tuple[int, int]]]
) -> None:
    """Errors in one theme: neither their text nor their place depends on it."""
    edges = "||" if glyphs == "ascii" else "▏▕"
    core = make_core(tmp_path, settings=Settings(glyphs=glyphs))
    async with board(core, NARROW) as (app, pilot):
        for theme, size in looks:
            app.theme = theme
            await pilot.resize_terminal(*size)
            for name, opened in DIALOGS.items():
                opened(app)
                await settle(pilot, lambda: isinstance(app.screen, Dialog) and app.screen.query("#commit"))
                dialog = app.screen
                assert isinstance(dialog, Dialog)
                await _is_whole(app, pilot, dialog, edges)
                await _shows_errors(app, pilot, dialog, WRONG if theme == "dark" and name != "nodes" else {})
                box = dialog.query_one("#box").region
                assert (box.right <= size[0], box.bottom <= size[1]) == (True, True)
                dialog.dismiss(None)
                await settle(pilot, lambda dialog=dialog: app.screen is not dialog)  # type: ignore[misc]


async def _is_whole(app: BoardApp, pilot: Pilot[int], dialog: Dialog[object], edges: str) -> None:
    """Check every field's edges, example and hint, and that the buttons are on the screen."""
    await settle(pilot, lambda: 0 < dialog.query_one("#commit").region.bottom < app.size.height)
    fields = [field for field in dialog.fields.values() if not field.toggle]
    await settle(pilot, lambda: all(line[:1] == edges[0] for line in _lines(app, dialog, fields)))
    for field, line in zip(fields, _lines(app, dialog, fields), strict=True):
        assert line[-1] == edges[1], field.key
        assert field.value or not field.example or f"e.g. {field.example} " in line, field.key
    text, wrong = screen(app), dialog.wrong()
    for field in dialog.fields.values():
        assert field.key in wrong or field.hint in text, field.key


async def _shows_errors(app: BoardApp, pilot: Pilot[int], dialog: Dialog[object], wrong: Mapping[str, str]) -> None:
    """Check that each error is shown whole beside its field."""
    keys = wrong.keys() & dialog.fields.keys()
    for key in keys:
        dialog.query_one(f"#field-{key}", Input).value = wrong[key]
    await settle(pilot, lambda: all(dialog.wrong().get(key, "-") in _beside(app, dialog) for key in keys))


def _lines(app: BoardApp, dialog: Dialog[object], fields: Sequence[Field]) -> list[str]:
    """Return what is drawn of each of these fields."""
    lines = screen(app).splitlines()
    regions = [dialog.query_one(f"#field-{field.key}", Input).region for field in fields]
    return [lines[region.y].ljust(app.size.width)[region.x : region.right] for region in regions]


def _beside(app: BoardApp, dialog: Dialog[object]) -> str:
    """Return what is drawn beside the fields, unwrapped."""
    lines = screen(app).splitlines()
    notes = [note.region for note in dialog.query(".note")]
    drawn = (lines[y][note.x : note.right].strip() for note in notes for y in range(note.y, note.bottom))
    return " ".join(drawn)


async def test_an_empty_field_is_wrong_only_once_it_is_left_or_submitted(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        for keys in (["down"], ["enter"], ["a", "backspace"]):
            await pilot.press("x")
            await settle(pilot, lambda: isinstance(app.screen, Dialog) and app.screen.query("#commit"))
            note = app.screen.query_one("#note-command", Static)
            assert str(note.render()) == ""
            assert app.screen.query_one("#commit", Button).disabled
            await pilot.press(*keys)
            assert str(note.render()) == "train.py or -m module"
            await pilot.press("escape")


async def test_a_field_keeps_its_width_with_the_focus(tmp_path: Path) -> None:
    async with board(make_core(tmp_path), NARROW) as (app, pilot):
        await pilot.press("x")
        await settle(pilot, lambda: isinstance(app.screen, Dialog) and app.screen.query("#commit"))
        app.screen.query_one("#field-command", Input).value = "-m json.tool"
        await settle(pilot, lambda: not app.screen.query_one("#commit", Button).disabled)
        for key in ("down", "up"):
            widths = [field.region.width for field in app.screen.query(Input)]
            assert len(set(widths[1:])) == 1
            assert widths[0] == app.screen.query_one("#fields").region.width - 14  # the command has the room of a hint
            await pilot.press(key)
            assert [field.region.width for field in app.screen.query(Input)] == widths
            await pilot.resize_terminal(160, 48)


async def test_typing_replaces_a_value_but_goes_on_at_the_end_of_a_command(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        await pilot.press("x")
        await settle(pilot, lambda: isinstance(app.screen, Dialog) and app.screen.query("#commit"))
        command, gpus = (app.screen.query_one(f"#field-{key}", Input) for key in ("command", "gpus"))
        command.value = "a.py"
        await pilot.press("end", "space", "b", "down", "2", "1", "up", "c")
        assert (command.value, gpus.value) == ("a.py bc", "21")


async def test_a_dialog_keeps_its_size_while_the_user_types(tmp_path: Path) -> None:
    async with board(make_core(tmp_path), NARROW) as (app, pilot):
        for key, field, size in (("r", "gpus", NARROW), ("x", "gpus", NARROW), ("w", "what", (160, 48))):
            await pilot.resize_terminal(*size)
            await pilot.press(key)
            await settle(pilot, lambda: isinstance(app.screen, Dialog) and app.screen.query("#commit"))
            box, entry = app.screen.query_one("#box"), app.screen.query_one(f"#field-{field}", Input)
            before = box.region
            for text, answered in ((entry.value, True), ("1:", False), ("2", True)):
                entry.value = text
                await settle(
                    pilot,
                    lambda answered=answered: (  # type: ignore[misc]
                        any(words in screen(app) for words in ("Will reserve", "Available now")) is answered
                    ),
                )
                assert box.region == before, key
            await pilot.press("escape")


async def test_the_label_of_the_field_with_the_focus_is_marked(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        await pilot.press("r")
        await settle(pilot, lambda: isinstance(app.screen, Dialog) and app.screen.query("#commit"))
        for key, marked in (("", "GPUs"), ("down", "Model"), ("up", "GPUs"), ("up", "")):
            await pilot.press(*filter(None, [key]))
            labels = [str(label.render()) for label in app.screen.query(".field.-focused Label")]
            assert labels == [marked] * bool(marked)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ([("sim02", 3)], "sim02 GPU 3"),
        ([("b", 1), ("a", 0), ("a", 2), ("a", 3), ("a", 1), ("a", 6)], "a GPUs 0-3,6 and b GPU 1"),
        ([("a", 0), ("a", 1)], "a GPUs 0-1"),
        ([(f"n{k}", 0) for k in range(9)], "n0 GPU 0, n1 GPU 0, n2 GPU 0 and 6 more nodes: 9 GPUs in all"),
        ([], ""),
    ],
)
def test_gpus_in_words(gpus: list[tuple[str, int]], words: str) -> None:
    assert gpus_words(ChosenGpu(node, index, f"GPU-{node}-{index}") for node, index in gpus) == words


def test_mig_devices_in_words() -> None:
    assert gpus_words([ChosenGpu("a", 2, "MIG-1", mig=1)]) == "a MIG device 2:1"
