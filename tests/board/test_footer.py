"""The footer: whole entries only, help at the right wherever there is room for anything, remapped keys, clicks."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gpuboard.board.screens.help import HelpScreen
from gpuboard.board.screens.leases import LeasesScreen
from gpuboard.board.screens.overview import OverviewScreen
from gpuboard.board.screens.processes import ProcessesScreen
from gpuboard.board.screens.runs import RunsScreen
from gpuboard.board.screens.watches import WatchesScreen
from gpuboard.board.widgets.footer import Footer
from tests.board import lab

TITLES = {"Leases", "Runs", "Processes", "Overview", "Watches"}


async def test_entries_stand_whole_and_help_at_the_right(tmp_path: Path) -> None:
    async with lab.board(lab.make_core(tmp_path), (200, 24)) as (app, pilot):
        cluster = app.screen
        footer = cluster.query_one(Footer)
        for columns in (200, 120, 80, 40):
            await pilot.resize_terminal(columns, 24)
            await lab.settle(pilot, lambda columns=columns: footer.size.width == columns and footer.entries)  # type: ignore[misc]
            line = "".join(segment.text for segment in footer.render_line(0))
            assert len(line) == columns
            assert line.rstrip().endswith(" ? Help")
            assert [line[e.x : e.x + e.cells] for e in footer.entries] == [f"{e.key} {e.words}" for e in footer.entries]
            assert line.split() == " ".join(f"{e.key} {e.words}" for e in footer.entries).split()
            await pilot.click(footer, offset=(line.index("? Help"), 0))
            await lab.settle(pilot, lambda: isinstance(app.screen, HelpScreen))
            await pilot.press("escape")
            await lab.settle(pilot, lambda: app.screen is cluster)


async def test_a_screen_does_not_offer_to_open_itself(tmp_path: Path) -> None:
    async with lab.board(lab.make_core(tmp_path), (200, 24)) as (app, pilot):
        for kind in (LeasesScreen, RunsScreen, ProcessesScreen, OverviewScreen, WatchesScreen):
            app.push_screen(kind())
            await lab.settle(pilot, lambda kind=kind: isinstance(app.screen, kind) and app.screen.query(Footer))  # type: ignore[misc]
            footer = app.screen.query_one(Footer)
            await lab.settle(pilot, lambda footer=footer: footer.entries)  # type: ignore[misc]
            offered = {entry.words for entry in footer.entries}
            assert offered & TITLES == TITLES - {kind.TITLE_WORDS}
            await pilot.press("escape")


async def test_screens_have_the_same_names_in_the_footer_as_in_their_titles(tmp_path: Path) -> None:
    async with lab.board(lab.make_core(tmp_path), (200, 24)) as (app, pilot):
        footer = app.screen.query_one(Footer)
        await lab.settle(pilot, lambda: {entry.words for entry in footer.entries} >= TITLES)


async def test_remapped_keys_are_shown(tmp_path: Path) -> None:
    core = lab.make_core(tmp_path)
    core.settings = msgspec.structs.replace(core.settings, keys={"cluster": {"view": "b"}, "app": {"help": "f2"}})
    async with lab.board(core) as (app, pilot):
        footer = app.screen.query_one(Footer)
        await lab.settle(pilot, lambda: footer.entries)
        keys = {entry.words: entry.key for entry in footer.entries}
        assert (keys["View"], keys["Help"]) == ("b", "f2")
