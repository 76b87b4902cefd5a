"""Every dialog by the mouse: fields, wheel, drags, Cancel and clicks beside it; and the order of tab."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.containers import VerticalScroll
from textual.events import MouseScrollDown, MouseScrollUp
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Button, Input, OptionList

from gpuboard.board.app import BoardApp
from gpuboard.board.dialogs.base import Box, Tick
from tests.board.lab import drag, screen, settle
from tests.board.test_sizes import DIALOGS, PLACES, enter, everywhere, is_visible, standing_clock

__all__ = ["standing_clock"]  # a fixture


@pytest.mark.parametrize(("glyphs", "size"), [("unicode", (80, 24)), ("ascii", (160, 48))])
async def test_every_dialog_by_the_mouse(tmp_path: Path, glyphs: str, size: tuple[int, int]) -> None:
    async with everywhere(tmp_path, glyphs, size) as (app, pilot):
        for name in DIALOGS:
            cluster = app.screen
            await enter(app, pilot, PLACES[name])
            dialog = app.screen
            assert isinstance(dialog, Box), name
            in_order = list(dialog.focus_chain)
            assert in_order == sorted(in_order, key=lambda one: (isinstance(one, Button), one.region.y, one.region.x))
            entries = list(dialog.query("Input, Tick").results(Widget))
            for entry in {*entries[:1], *entries[-1:], *dialog.query(Tick)}:
                await wheel_to(app, pilot, entry)
                await click(app, pilot, entry)
            before, position = app.focused, cluster.scroll_offset
            for part in dialog.query("VerticalScroll, OptionList").results(Widget):
                await wheel(pilot, part, MouseScrollUp)
                await wheel(pilot, part, MouseScrollDown)
            title = dialog.query_one("#title")
            await drag(pilot, title, (1, 0), (-title.region.x, -title.region.y), (0, -title.region.y))  # to beside it
            await pilot.click(offset=(0, size[1] - 1))  # the footer of the screen below
            assert (app.screen, app.focused, cluster.scroll_offset) == (dialog, before, position), name
            await pilot.click("#back" if dialog.query("#back") else "#cancel", times=2)
            await settle(pilot, lambda dialog=dialog: dialog not in app.screen_stack)  # type: ignore[misc]
            await pilot.press(*PLACES[name].closed[1:])
            await settle(pilot, lambda cluster=cluster: app.screen is cluster)  # type: ignore[misc]
        assert "selected" not in screen(app)


async def wheel(pilot: Pilot[int], part: Widget, kind: type[MouseScrollDown | MouseScrollUp]) -> None:
    """Turn the wheel over a part of a dialog, if it is on the screen."""
    if part.region:
        await pilot._post_mouse_events([kind], part, offset=(1, 0))


async def wheel_to(app: BoardApp, pilot: Pilot[int], entry: Widget) -> None:
    """Turn the wheel over the fields until one of them is visible."""
    area = app.screen.query_one("#fields", VerticalScroll)
    while not is_visible(entry):
        before, down = area.scroll_y, entry.region.y > area.region.y
        await wheel(pilot, area, MouseScrollDown if down else MouseScrollUp)
        await settle(pilot, lambda before=before: area.scroll_y != before)  # type: ignore[misc]


async def click(app: BoardApp, pilot: Pilot[int], entry: Widget) -> None:
    """Click into a field, which gives it the focus; a box is ticked and unticked."""
    values = [entry.value] if isinstance(entry, Tick) else []
    for _ in range(1 + len(values)):
        await pilot.click(entry, offset=(2, 0))
        values += [entry.value] if isinstance(entry, Tick) else []
    assert app.focused is entry
    assert isinstance(entry, Input) or values == [values[0], not values[0], values[0]]


async def test_a_line_of_a_list_is_chosen_by_a_click(tmp_path: Path) -> None:
    async with everywhere(tmp_path, "unicode", (80, 24)) as (app, pilot):
        for name in ("copy", "order"):
            await enter(app, pilot, PLACES[name])
            dialog = app.screen
            await pilot.click(OptionList, offset=(2, 1))
            await settle(pilot, lambda dialog=dialog: dialog not in app.screen_stack)  # type: ignore[misc]
            await pilot.press(*PLACES[name].closed[1:])
