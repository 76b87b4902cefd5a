"""The filter's field: completion by keys, the filter in force, filters of lists, and filters saved by name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ClusterShell.NodeSet import set_std_group_resolver
from ClusterShell.NodeUtils import GroupResolverConfig
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from gpuboard.board import preferences
from gpuboard.board.app import BoardApp
from gpuboard.board.dialogs.saved_filters import SavedFilters, SaveFilter
from gpuboard.board.screens.base import FilteredScreen
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.leases import LeasesScreen
from gpuboard.board.screens.runs import RunsScreen
from gpuboard.board.screens.watches import Watch, WatchesScreen
from gpuboard.board.widgets.grid import Grid
from gpuboard.launch.runs.folder import RankView, RunFolder, RunView, this_head
from gpuboard.model.request import Request
from tests.board.lab import screen, settle, told
from tests.board.made import AT, busy, gpu, lease, node, scene, still
from tests.board.test_help import choose

NARROW = (80, 24)
LAB = scene(
    node("gpu01", [gpu("gpu01", 0), busy("gpu01", 1, "alice"), busy("gpu01", 2, "albert")]),
    node("gpu02", [gpu("gpu02", 0, "reserved", leases=["k3f9"])]),
    leases=[lease("k3f9", "alice", [("gpu02", 0)]), lease("m7p2", "carol", [("gpu01", 0)])],
)


def top(app: BoardApp) -> FilteredScreen:
    assert isinstance(app.screen, FilteredScreen)
    return app.screen


def text(app: BoardApp) -> str:
    return top(app).field.input.value


async def test_keys_and_values_are_completed_while_a_filter_is_typed(tmp_path: Path) -> None:
    async with still(tmp_path, LAB, NARROW) as (app, pilot):
        await pilot.press("slash")
        await settle(pilot, lambda: "state:  user:  node:" in screen(app))
        await pilot.press("u", "s")
        await settle(pilot, lambda: "tab: user:" in screen(app))
        await settle(pilot, lambda: " user:" in screen(app).split("tab:")[0])  # dim behind the cursor
        await pilot.press("tab", "a", "l")
        await settle(pilot, lambda: "tab: albert  alice" in screen(app))
        await pilot.press("right")  # as tab
        assert text(app) == "user:albert"
        await pilot.press("left", "right", *" stat", "tab", "b", "tab")  # from within the text right only moves
        assert text(app) == "user:albert state:broken"
        assert "tab:" not in screen(app)
        await pilot.press("tab")  # nothing to complete: to the rows
        assert top(app).grid.has_focus


async def test_a_word_that_may_become_a_key_waits_until_it_is_finished(tmp_path: Path) -> None:
    async with still(tmp_path, LAB, NARROW) as (app, pilot):
        await pilot.press("slash", *"user")
        await settle(pilot, lambda: 'enter or a space looks for "user"; no filter is in force' in screen(app))
        assert not top(app).query_in_force
        await pilot.press(*":alice", "space", "minus", *"no")
        await settle(pilot, lambda: 'enter or a space leaves out "no"; in force: user:alice' in screen(app))
        await pilot.press("space")
        await settle(pilot, lambda: "in force" not in screen(app))
        assert top(app).query_in_force.text == "user:alice -no "
        await pilot.press("ctrl+u", *"user:alice free", "ctrl+o")  # it is valid, whatever may become of the word
        await settle(pilot, lambda: isinstance(app.screen, SaveFilter))
        await pilot.press("escape", "ctrl+u", *"alb")  # no key begins so
        await settle(pilot, lambda: "1 GPU matches" in screen(app))
        await pilot.press("ctrl+u", *"gpu", "enter")
        await settle(pilot, lambda: top(app).grid.has_focus and top(app).query_in_force.text == "gpu")
        assert "in force" not in screen(app)


async def test_an_invalid_filter_shows_which_one_is_in_force(tmp_path: Path) -> None:
    async with still(tmp_path, LAB, NARROW) as (app, pilot):
        await pilot.press("slash", *"mem>")
        await settle(pilot, lambda: "mem> needs a value" in screen(app) and "no filter is in force" in screen(app))
        await pilot.press("ctrl+u", *"user:alice mem>4")
        await settle(
            pilot, lambda: "in force: user:alice" in screen(app) and top(app).query_in_force.text == "user:alice"
        )
        await settle(pilot, lambda: "2 GPUs match user:alice" in screen(app))
        await pilot.press("ctrl+o")
        await settle(pilot, lambda: told(app, "no valid filter to save"))
        await pilot.press("0", "G")
        await settle(pilot, lambda: "in force" not in screen(app))
        assert top(app).query_in_force.text == "user:alice mem>40G"


async def test_the_board_goes_on_while_a_group_is_looked_up(tmp_path: Path) -> None:
    there = tmp_path / "there"
    (tmp_path / "groups.conf").write_text(
        f"[Main]\ndefault: slow\n[slow]\nmap: while [ ! -e {there} ]; do sleep 0.02; done; echo gpu01\n"
    )
    set_std_group_resolver(GroupResolverConfig(str(tmp_path / "groups.conf")))
    try:
        async with still(tmp_path, LAB) as (app, pilot):
            await pilot.press("slash", *"alice node:@lab")
            await settle(pilot, lambda: "looking up groups" in screen(app) and "in force: alice" in screen(app))
            assert top(app).query_in_force.text == "alice"
            there.touch()
            await settle(pilot, lambda: top(app).query_in_force.text == "alice node:@lab" and "1 GPU m" in screen(app))
            there.unlink()
            await pilot.press(*"2", "ctrl+u", *"gpu02")
            assert top(app).query_in_force.text == "gpu02"
            there.touch()
            await settle(pilot, lambda: not top(app).field._lookups.busy)
            assert top(app).query_in_force.text == "gpu02"
    finally:
        there.touch()
        set_std_group_resolver(None)


LISTS = {  # what is typed, what it is completed to, and which of two rows is left
    "leases": ("user:c", "user:carol", "m7p2", "k3f9"),
    "runs": ("state:f", "state:failed", "rbbb", "raaa"),
    "watches": ("lease:k", "lease:k3f9", "lease k3f9 ends", "99 free"),
}


def watch(**changes: object) -> Watch:
    return Watch(0, time.time(), **changes)  # type: ignore[arg-type]


async def opened_list(app: BoardApp, pilot: Pilot[int], kind: str) -> None:
    if kind == "runs":
        for name, state in (("raaa", "done"), ("rbbb", "failed")):
            view = RunView(name, None, f"{state}.py", AT, state, 0, [RankView(0, "gpu01", 0, 0)], [], this_head())  # type: ignore[arg-type]
            assert RunFolder(app.core.env, name).keep("state.json", view) is None
        await pilot.press("u")
        await settle(pilot, lambda: "rbbb" in screen(app))
    elif kind == "watches":
        app.watches.add(watch(lease=LAB.leases.leases[0]))
        app.watches.add(watch(request=Request(n=99)))
        await pilot.press("w")
        await settle(pilot, lambda: isinstance(app.screen, WatchesScreen) and "k3f9" in screen(app))
    else:
        await pilot.press("l")
        await settle(pilot, lambda: isinstance(app.screen, LeasesScreen) and "k3f9" in screen(app))


@pytest.mark.parametrize(("kind", "size"), [("leases", NARROW), ("runs", (160, 48)), ("watches", NARROW)])
async def test_lists_are_filtered(tmp_path: Path, kind: str, size: tuple[int, int]) -> None:
    typed, completed, kept, gone = LISTS[kind]
    async with still(tmp_path, LAB, size) as (app, pilot):
        await opened_list(app, pilot, kind)
        await settle(pilot, lambda: kept in screen(app) and gone in screen(app))
        assert " / Filter " in screen(app)
        await pilot.press("slash", *typed, "tab")
        await settle(pilot, lambda: text(app) == completed and kept in screen(app) and gone not in screen(app))
        await pilot.press(*" nothing", "enter")
        await settle(pilot, lambda: "matches the filter." in screen(app) and kept not in screen(app))
        shown = app.screen
        await pilot.press("escape")  # clears the filter first
        await settle(pilot, lambda: kept in screen(app) and gone in screen(app))
        assert app.screen is shown
        await pilot.press("escape")
        await settle(pilot, lambda: isinstance(app.screen, ClusterScreen))


async def test_the_cursor_goes_to_a_new_run_that_a_filter_would_hide(tmp_path: Path) -> None:
    async with still(tmp_path, LAB) as (app, pilot):
        await opened_list(app, pilot, "runs")
        await pilot.press("slash", *"state:failed", "enter")
        await settle(pilot, lambda: "raaa" not in screen(app))
        assert isinstance(app.screen, RunsScreen)
        app.screen.jump("raaa")
        await settle(pilot, lambda: isinstance(app.screen, RunsScreen) and app.screen.grid.cursor == "raaa")


async def test_a_filter_is_saved_chosen_and_deleted_by_keys_and_by_the_mouse(tmp_path: Path) -> None:
    async with still(tmp_path, LAB, (160, 48)) as (app, pilot):
        await pilot.press("F")
        await settle(pilot, lambda: told(app, "no saved filters for GPUs"))
        for typed, name in (("user:alice", "alice's"), ("state:free", "free")):
            await pilot.press("slash", "ctrl+u", *typed, "ctrl+o")
            await settle(pilot, lambda: isinstance(app.screen, SaveFilter) and "Will save" in screen(app))
            await pilot.press("enter")
            assert isinstance(app.screen, SaveFilter)  # a name is needed
            await pilot.press(*name, "enter")
            await settle(pilot, lambda: isinstance(app.screen, ClusterScreen) and app.screen.grid.has_focus)
        await pilot.press("F")
        await settle(pilot, lambda: isinstance(app.screen, SavedFilters) and "user:alice" in screen(app))
        await pilot.press("enter")
        await settle(pilot, lambda: isinstance(app.screen, ClusterScreen) and text(app) == "user:alice")
        await choose(app, pilot, "filter free", "Filter: free")
        await settle(pilot, lambda: text(app) == "state:free" and top(app).query_in_force.text == "state:free")
        await pilot.press("F")
        await settle(pilot, lambda: isinstance(app.screen, SavedFilters) and app.screen.query(OptionList))
        await pilot.click("#delete")
        await settle(pilot, lambda: "user:alice" not in screen(app))
        await pilot.press("d")  # the last one: the dialog closes
        await settle(pilot, lambda: isinstance(app.screen, ClusterScreen))
        assert app.preferences.filters == ()
        await pilot.press("l")  # filters of GPUs are not those of leases
        await settle(pilot, lambda: isinstance(app.screen, LeasesScreen))


async def test_saving_under_a_name_in_use_shows_what_is_replaced_and_is_kept(tmp_path: Path) -> None:
    async with still(tmp_path, LAB) as (app, pilot):
        for typed in ("user:alice", "user:albert"):
            await pilot.press("slash", "ctrl+u", *typed, "ctrl+o")
            await settle(pilot, lambda: isinstance(app.screen, SaveFilter) and app.screen.is_mounted)
            await pilot.press(*"mine")
            if typed == "user:albert":
                await settle(pilot, lambda: "Will replace mine: user:alice" in screen(app))
            await pilot.press("enter")
            await settle(pilot, lambda: isinstance(app.screen, ClusterScreen))
        await settle(pilot, lambda: preferences.load(app.core.env)[0].filters == app.preferences.filters)
    kept, wrong = preferences.load(app.core.env)
    assert wrong is None
    assert kept.filters == (preferences.SavedFilter("mine", "user:albert", "GPUs"),)


async def test_the_field_of_a_list_is_clicked_and_left_for_the_rows(tmp_path: Path) -> None:
    async with still(tmp_path, LAB, NARROW) as (app, pilot):
        await opened_list(app, pilot, "leases")
        await pilot.press("slash", *"alice", "down")
        assert isinstance(top(app).grid, Grid)
        assert top(app).grid.has_focus
        await pilot.click("#filter")
        await settle(pilot, lambda: isinstance(app.focused, Input))
        await pilot.press("end", "ctrl+u", "enter")  # an empty filter closes
        await settle(pilot, lambda: not top(app).field.is_open and top(app).grid.has_focus)
