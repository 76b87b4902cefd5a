"""The processes of the whole cluster: sorted, filtered, grouped; and signals to several real processes at once."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input, OptionList

from gpuboard.board.app import BoardApp
from gpuboard.board.command_palette import Palette
from gpuboard.board.dialogs.base import Choose, Confirm
from gpuboard.board.scene import Scene
from gpuboard.board.screens.base import BoardScreen
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.gpu import GpuScreen
from gpuboard.board.screens.leases import LeasesScreen
from gpuboard.board.screens.overview import OverviewScreen
from gpuboard.board.screens.processes import ProcessesScreen
from gpuboard.board.widgets.grid import Grid
from gpuboard.board.widgets.overview import OverviewPanel
from gpuboard.launch.runs.folder import RankView, RunFolder, RunView, this_head
from gpuboard.model.snapshot import ProcessView
from tests.board import lab, made, other
from tests.board.made import GIB
from tests.board.test_help import choose as choose_in_palette
from tests.board.test_processes import Sleeper, choose, core_with, notes, sleeper

__all__ = ["sleeper"]


def process(pid: int, user: str, memory: int, **values: Any) -> ProcessView:
    return ProcessView(pid=pid, user=user, command=f"python {user}.py", memory=memory, type="compute", **values)


def some() -> Scene:
    """Return three nodes: alice's and bob's processes, one of which uses two GPUs, and what cannot be read."""
    wide = process(12, "alice", 8 * GIB, started=1.0, uid=7, lease="k3f9", sm_percent=90, cpu_percent=310.0)
    gpus = [
        made.gpu("gpu01", 0, processes=[process(11, "bob", GIB, started=1.0, uid=8, job="17", sm_percent=3)]),
        made.gpu("gpu01", 1, processes=[wide]),
        made.gpu("gpu01", 2, processes=[wide, process(13, "mallory", 2 * GIB, started=2.0, rogue=True)]),
    ]
    old = made.node("gpu02", [made.gpu("gpu02", 0, processes=[process(11, "bob", 3 * GIB, job="17")])], state="stale")
    hidden = made.node("gpu03", [made.gpu("gpu03", 0), made.gpu("gpu03", 1, processes=None)])
    return made.scene(made.node("gpu01", gpus), old, hidden, made.unread("gpu04"), uids={"gpu01": 7})


def rows(app: BoardApp) -> list[tuple[str, ...]]:
    grid = app.screen.query_one(Grid)
    found = []
    for row in grid._rows:
        cells = row.cells() if callable(row.cells) else row.cells
        found.append(tuple(str(cell.text).strip() for cell in cells[:5]))
    return found


def sorted_by(app: BoardApp) -> str:
    """Return what the list of leases, or the people of the overview, are sorted by."""
    if isinstance(app.screen, OverviewScreen):
        return app.screen.query_one(OverviewPanel).gatherer.order
    sort = app.screen.query_one(Grid)._sort
    return sort[0] if sort else ""


def users(app: BoardApp) -> list[str]:
    return [row[0] for row in rows(app)]


async def test_the_palette_offers_every_order_and_the_last_one_is_kept_with_the_grouping(tmp_path: Path) -> None:
    async with made.still(tmp_path, some()) as (app, pilot):
        await pilot.press("P")
        await lab.settle(pilot, lambda: isinstance(app.screen, ProcessesScreen) and users(app))
        assert isinstance(app.screen, ProcessesScreen)
        offered = {command.title for command in Palette(app.screen).commands()}
        assert {f"Sort by {words}" for words in app.screen.orders().values()} <= offered
        await choose_in_palette(app, pilot, "Sort by GPU memory", "Sort by GPU memory")
        await lab.settle(pilot, lambda: users(app) == ["alice", "bob", "mallory", "bob"])
        await pilot.press("t")
        await lab.settle(pilot, lambda: "lease k3f9" in users(app)[0])
        await lab.settle(pilot, lambda: app._save_timer is not None and not app._save_timer.is_alive())
        listed = rows(app)
    async with made.still(tmp_path, some()) as (app, pilot):
        await pilot.press("P")
        await lab.settle(pilot, lambda: isinstance(app.screen, ProcessesScreen) and users(app))
        assert rows(app) == listed
        for key, screen in (("l", LeasesScreen), ("v", OverviewScreen)):
            await pilot.press("escape", key)
            await lab.settle(pilot, lambda screen=screen: isinstance(app.screen, screen))  # type: ignore[misc]
            assert isinstance(app.screen, BoardScreen)
            last, words = list(app.screen.orders().items())[-1]
            await choose_in_palette(app, pilot, f"Sort by {words}", f"Sort by {words}")
            await lab.settle(pilot, lambda last=last: last == sorted_by(app))  # type: ignore[misc]
        await pilot.press("escape")
        await lab.settle(pilot, lambda: isinstance(app.screen, ClusterScreen))
        await choose_in_palette(app, pilot, "Sort by power", "Sort by power")
        await lab.settle(pilot, lambda: app.preferences.view.sort == "power")
        assert app.preferences.view.reverse, "the highest first"


async def test_lists_every_process_once_in_any_order(tmp_path: Path) -> None:
    async with made.still(tmp_path, some(), (80, 24)) as (app, pilot):
        await pilot.press("P")
        await lab.settle(pilot, lambda: isinstance(app.screen, ProcessesScreen) and "python bob.py" in lab.screen(app))
        assert rows(app) == [
            ("bob", "gpu01", "0", "11", "1.0G"),
            ("alice", "gpu01", "1-2", "12", "16G"),
            ("mallory", "gpu01", "2", "13", "2.0G"),
            ("bob", "gpu02", "0", "11", "3.0G"),
        ]
        for size in ((160, 48), (80, 24)):
            await pilot.resize_terminal(*size)
            text = lab.screen(app)
            assert "4 processes on 4 GPUs of 2 nodes, 3 users  22G  SM 46%" in text
            assert "not read: gpu03:1, gpu04" in text
            assert "rogue" in text
            assert ("310" in text) is (size[0] > 80)
            assert all(len(line) <= size[0] for line in text.splitlines())
        grid = app.screen.query_one(Grid)
        x = text.splitlines()[2].index("Memory")
        for expected in (["alice", "bob", "mallory", "bob"], ["bob", "mallory", "bob", "alice"]):
            await pilot.click(grid, offset=(x, 0))
            await lab.settle(pilot, lambda expected=expected: users(app) == expected)  # type: ignore[misc]
        await pilot.press("S")
        await lab.settle(pilot, lambda: users(app) == ["alice", "bob", "mallory", "bob"])
        await pilot.press("s")
        await lab.settle(pilot, lambda: isinstance(app.screen, Choose) and app.screen.is_mounted)
        options = app.screen.query_one(OptionList)
        options.highlighted = options.get_option_index("user")
        await pilot.press("enter")
        await lab.settle(pilot, lambda: isinstance(app.screen, ProcessesScreen) and users(app)[0] == "alice")
        assert "by user" in lab.screen(app)
        await pilot.press("P")
        await lab.settle(pilot, lambda: isinstance(app.screen, ClusterScreen))


async def test_filter_and_way_back(tmp_path: Path) -> None:
    async with made.still(tmp_path, some(), (100, 30)) as (app, pilot):
        await choose_in_palette(app, pilot, "Processes", "Processes")
        await lab.settle(pilot, lambda: isinstance(app.screen, ProcessesScreen) and rows(app))
        await pilot.press("slash")
        await lab.settle(pilot, lambda: isinstance(app.focused, Input))
        assert isinstance(app.focused, Input)
        app.focused.value = "user:bob node:gpu02 mem<1T"
        await lab.settle(pilot, lambda: len(rows(app)) == 1)
        assert "1 matches the filter" in lab.screen(app)
        await pilot.press("down", "space", "escape")
        await lab.settle(pilot, lambda: len(rows(app)) == 4 and "1 selected" in lab.screen(app))
        await pilot.resize_terminal(80, 24)
        await pilot.press("slash", *"alice", "enter")
        await lab.settle(pilot, lambda: "1 selected, 1 hidden   1 matches the filter" in lab.screen(app))
        await pilot.press("escape")
        await pilot.press("escape")
        await lab.settle(pilot, lambda: "selected" not in lab.screen(app))
        await pilot.press("slash", *"nobody")
        await lab.settle(pilot, lambda: "No process matches the filter" in lab.screen(app))
        await pilot.press("escape", "home", "g")
        await lab.settle(pilot, lambda: isinstance(app.screen, GpuScreen))
        assert isinstance(app.screen, GpuScreen)
        assert app.screen.uuid == "GPU-gpu01-0"
        await pilot.press("escape", "escape")
        await lab.settle(pilot, lambda: isinstance(app.screen, ClusterScreen))


async def test_groups_by_run_job_and_lease(tmp_path: Path) -> None:
    async with made.still(tmp_path, some(), (120, 30)) as (app, pilot):
        ranks = [RankView(0, "gpu01", 1, 12)]
        run = RunView("rabc", "k3f9", "train.py", made.AT, "running", None, ranks, [], this_head())
        assert RunFolder(app.core.env, "rabc").keep("state.json", run) is None
        await pilot.press("P", "t")
        await lab.settle(pilot, lambda: any("run rabc" in row[0] for row in rows(app)))
        assert users(app) == [
            "job 17  2 processes on 2 GPUs of 2 nodes  4.0G  SM 3%", "bob", "bob",
            "run rabc  1 process on 2 GPUs of 1 node  16G  SM 90%", "alice",
            "no run, job or lease  1 process on 1 GPU of 1 node  2.0G", "mallory",
        ]  # fmt: skip
        assert lab.screen(app).splitlines()[3].lstrip().startswith("job 17")
        await pilot.press("t")
        await lab.settle(pilot, lambda: len(rows(app)) == 4)


async def test_a_process_of_an_ended_lease_is_overdue_on_every_screen(tmp_path: Path) -> None:
    late = made.gpu("gpu01", 0, "busy", flags=["overdue"], processes=[process(11, "bob", GIB, lease="n6d4")])
    async with made.still(tmp_path, made.scene(made.node("gpu01", [late])), (120, 30)) as (app, pilot):
        line = r"bob +11 .* n6d4 +overdue +python bob.py"
        await lab.settle(pilot, lambda: re.search(line, lab.screen(app)) is not None)
        await pilot.press("enter")
        await lab.settle(pilot, lambda: isinstance(app.screen, GpuScreen) and re.search(line, lab.screen(app)))
        await pilot.press("escape", "P", "t")
        await lab.settle(pilot, lambda: "ended lease n6d4 of bob  1 process" in lab.screen(app))
        assert re.search(r"bob +gpu01 +0 +11 .* n6d4 +overdue +python bob.py", lab.screen(app))


async def test_shows_that_there_is_no_process(tmp_path: Path) -> None:
    async with made.still(tmp_path, made.scene(made.node("gpu01", [made.gpu("gpu01", 0)]))) as (app, pilot):
        await pilot.press("P")
        await lab.settle(pilot, lambda: "No process on any GPU." in lab.screen(app))
        await pilot.press("K")
        await lab.settle(pilot, lambda: notes(app) == ["no process selected"])


@other.needs_root
async def test_one_signal_to_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: Sleeper
) -> None:
    one, two, spared = sleeper(), sleeper(), sleeper()
    foreign = sleeper("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    core = core_with(tmp_path, monkeypatch, (one.pid, two.pid), (foreign.pid, spared.pid))
    async with lab.board(core, (80, 24)) as (app, pilot):
        await pilot.press("P")
        await lab.settle(pilot, lambda: isinstance(app.screen, ProcessesScreen) and len(rows(app)) == 4)
        grid = app.screen.query_one(Grid)
        keys = {key.split(":")[1]: key for key in (row.key for row in grid._rows)}
        grid.marks = {keys[str(foreign.pid)]}
        await pilot.press("K")
        await lab.settle(pilot, lambda: any("belongs to" in words for words in notes(app)))
        grid.marks = {keys[str(process.pid)] for process in (one, two, foreign)}
        await pilot.press("K")
        await choose(app, pilot, "TERM")
        await lab.settle(pilot, lambda: isinstance(app.screen, Confirm) and app.screen.is_mounted)
        text = lab.screen(app)
        assert lab.shown(
            app, "Send SIGTERM to 2 processes?", f"pid {one.pid}", f"pid {two.pid}", "Not to 1 of other users"
        )
        assert str(spared.pid) not in text.partition("Send SIGTERM")[2].partition("Cancel")[0]
        two.kill()  # it ends before the signal
        two.wait()
        await pilot.press("y")
        await lab.settle(pilot, lambda: "signal sent to 1 of 2 processes" in notes(app))
        assert f"gpu01: process {two.pid} has ended" in notes(app)
        assert one.wait(60) == -signal.SIGTERM
        assert (foreign.poll(), spared.poll()) == (None, None)
