"""Watches over real agents: notifications, and reservations made at once."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from gpuboard.board.core import Core
from gpuboard.board.dialogs.base import Tick
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.leases import LeasesScreen
from gpuboard.board.screens.watches import Watch, WatchDialog, WatchesScreen, holds, open_watch
from gpuboard.cluster.simulated import demo_nodes
from gpuboard.keeper.client import Handover
from gpuboard.launch.runs.folder import RunFolder, RunView, this_head
from gpuboard.model.request import Choice, Request
from tests.board import lab, made, other
from tests.board.pty_lab import Terminal
from tests.nvml import Gpu, library, write_script
from tests.waiting import until


async def fill(pilot: Pilot[int], **texts: str) -> None:
    """Wait for the dialog and put texts into its fields."""
    await lab.settle(pilot, lambda: isinstance(pilot.app.screen, WatchDialog) and pilot.app.screen.is_mounted)
    for key, text in texts.items():
        pilot.app.screen.query_one(f"#field-{key}", Input).value = text
    await pilot.pause()


async def test_a_watch_notifies_when_enough_are_free(tmp_path: Path, core: Core) -> None:
    async with lab.board(core, (80, 24)) as (app, pilot):
        taken = await lab.reserved(app, core, pilot, 2, "L40S")
        await pilot.press("w")
        await fill(pilot, what="2", model="l40s", nodes="1")
        await lab.settle(pilot, lambda: "Will wait: requested 2 GPUs on one node of model l40s" in lab.screen(app))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: "2 free l40s on one node" in lab.screen(app))
        await pilot.press("escape")
        await lab.settle(pilot, lambda: "watching for 2 free l40s on one node" in lab.screen(app))
        assert len(app.watches.active) == 1
        core.operations.release(taken.lease.id)
        await lab.settle(pilot, lambda: not app.watches.active)
        assert lab.toasts(app)[-1] == "Available: 2 free l40s on one node: sim02:0-1"
        await lab.settle(pilot, lambda: "watching" not in lab.screen(app))
        assert lab.claims(tmp_path) == []


async def test_reserves_at_once(tmp_path: Path, core: Core) -> None:
    async with lab.board(core) as (app, pilot):
        taken = await lab.reserved(app, core, pilot, 3, "H100")
        await pilot.press("w")
        await fill(pilot, **{"what": "2", "model": "H100", "for": "20m", "purpose": "waited"})
        tick = app.screen.query_one(Tick)
        tick.focus()
        await pilot.press("space", "enter")
        await lab.settle(pilot, lambda: "2 free H100, then reserve for 20m" in lab.screen(app))
        core.operations.release(taken.lease.id)
        await lab.settle(pilot, lambda: not app.watches.active)
        claims = lab.claims(tmp_path)
        assert len(claims) == 2
        [lease] = {claim.split(":")[0] for claim in claims}
        await lab.settle(pilot, lambda: lab.told(app, f"Reserved: {lease}: sim01:"))
        await lab.settle(pilot, lambda: lease in core.scene().by_lease)
        found = core.scene().by_lease[lease]
        assert (found.purpose, 1100 < found.remaining_s <= 1200) == ("waited", True)
        core.operations.release(lease)


@other.needs_root
async def test_continues_when_another_user_was_faster(tmp_path: Path) -> None:
    nodes = demo_nodes(claims_dir=str(tmp_path / "claims"))
    core = lab.make_core(tmp_path, nodes, lab.SELDOM)  # readings come when the test wants them
    async with lab.board(core, twice=True) as (app, pilot):
        assert app.scene is not None
        with other.somebody(tmp_path, nodes[0]) as agent:
            other.take(agent, "abcdef", [app.scene.nodes["sim01"].gpus[0].uuid])
            app.watches.add(Watch(0, time.time(), Request(n=3, model="H100"), reserve_s=600.0))
            await lab.settle(pilot, lambda: app.watches.all[0].words.startswith("another user was faster at "))
            assert lab.claims(tmp_path) == ["abcdef: sim01-0"]
            assert len(app.watches.active) == 1
            agent.call("release", lease="abcdef")
            core.fleet.refresh(["sim01"], 60)
            core.fleet.refresh(["sim01"], 60)
            await lab.settle(pilot, lambda: not app.watches.active)
            assert len(lab.claims(tmp_path)) == 3
            core.operations.release(lab.claims(tmp_path)[0].split(":")[0])


async def test_a_keeper_that_fails_at_the_end_is_reported(
    tmp_path: Path, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handover, "confirm", lab.keeper_ended)
    async with lab.board(core) as (app, pilot):
        app.watches.add(Watch(0, time.time(), Request(n=1), reserve_s=600.0))
        await lab.settle(pilot, lambda: lab.told(app, "1 free GPU, then", "the keeper has ended"))
        assert [watch.words for watch in app.watches.all] == ["could not reserve: the keeper has ended"]
        await lab.settle(pilot, lambda: lab.claims(tmp_path) == [])


async def test_a_hung_reservation_blocks_no_watch_and_is_released_with_its_own(tmp_path: Path, core: Core) -> None:
    async with lab.board(core) as (app, pilot):
        with lab.hung(core, "sim02"):
            app.watches.add(Watch(0, time.time(), Request(n=5), reserve_s=600.0))
            await lab.settle(pilot, lambda: len(lab.claims(tmp_path)) == 3)
            app.watches.add(Watch(0, time.time(), Request(n=1, model="L40S")))
            await lab.settle(pilot, lambda: [watch.number for watch in app.watches.active] == [1])
            app.watches.remove(1)
            await lab.settle(pilot, lambda: lab.claims(tmp_path) == [])
        await lab.settle(pilot, lambda: core.operations._reserving == set() and lab.claims(tmp_path) == [])
        assert len(lab.toasts(app)) == 1


async def test_a_watch_notifies_when_a_lease_that_is_typed_or_under_the_cursor_ends(core: Core) -> None:
    async with lab.board(core, (80, 24)) as (app, pilot):
        taken = await lab.reserved(app, core, pilot, 1, "L40S")
        promise = f"Will notify you when lease {taken.lease.id} ends"
        await pilot.press("w")
        await fill(pilot, what=taken.lease.id)
        await lab.settle(pilot, lambda: promise in lab.screen(app))
        await pilot.press("escape", "l")
        await lab.settle(pilot, lambda: isinstance(app.screen, LeasesScreen) and taken.lease.id in lab.screen(app))
        await pilot.press("e")
        await lab.settle(pilot, lambda: promise in lab.screen(app))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: len(app.watches.active) == 1)
        core.operations.release(taken.lease.id)
        await lab.settle(pilot, lambda: not app.watches.active)
        assert lab.toasts(app)[-1].startswith(f"Ended: lease {taken.lease.id} ends (")


async def test_a_watch_notifies_when_a_run_ends(core: Core) -> None:
    folder = RunFolder(core.env, "r7k2m")
    view = RunView("r7k2m", None, "train.py", made.AT, "running", None, [], [], this_head(), str(folder.path))
    assert folder.keep("state.json", view) is None
    async with lab.board(core, (80, 24)) as (app, pilot):
        await pilot.press("w")
        await fill(pilot, what="r7k2m")
        await lab.settle(pilot, lambda: "Will notify you when run r7k2m ends" in lab.screen(app))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: len(app.watches.active) == 1)
        folder.keep("state.json", msgspec.structs.replace(view, state="failed", exit_code=1))
        await lab.settle(pilot, lambda: not app.watches.active)
        assert lab.toasts(app)[-1].startswith("Ended: run r7k2m ends: failed: train.py")


def test_a_real_terminal_shows_the_notification(tmp_path: Path) -> None:
    write_script(tmp_path / "nvml", [Gpu()], seed=str(tmp_path))
    env = lab.environment(tmp_path) | {
        "FAKE_NVML": str(tmp_path / "nvml"),
        "LD_LIBRARY_PATH": str(library()),
        "GPUBOARD_CLAIMS_DIR": str(lab.claims_folder(tmp_path)),
        "TMUX": "",
    }
    with contextlib.closing(Terminal([sys.executable, "-m", "gpuboard", "board"], env)) as terminal:
        terminal.shows("1 free of 1")
        terminal.press(b"w")
        terminal.shows("Available now")
        terminal.press(b"\r")
        sequence = b"\x1b]9;gpuboard: Available: 1 free GPU: "
        until(lambda: sequence in terminal.written, "a notification")
        until(lambda: b"\x1b]777;notify;gpuboard: Available;1 free GPU: " in terminal.written, "the other one")
        terminal.press(b"q")
        terminal.ends(5)
        assert terminal.text.count("\x07") == 1  # the bell, without the ends of sequences


async def test_watches_are_listed_and_removed(core: Core) -> None:
    async with lab.board(core, (80, 24)) as (app, pilot):
        await pilot.press("w")
        await lab.settle(pilot, lambda: isinstance(app.screen, WatchDialog) and app.screen.is_mounted)
        await pilot.press("escape")
        await lab.settle(pilot, lambda: "No watches." in lab.screen(app))
        for what in ("6", "5"):
            await pilot.press("a")
            await fill(pilot, what=what)
            await pilot.click("#commit")
            await lab.settle(pilot, lambda: isinstance(app.screen, WatchesScreen))
        await lab.settle(pilot, lambda: [watch.condition for watch in app.watches.active] == ["6 free GPUs"])
        await lab.settle(pilot, lambda: "6 free GPUs" in lab.screen(app) and "sim01:0,2-3@sim02:0-1" in lab.screen(app))
        await pilot.press("home", "d")
        await lab.settle(pilot, lambda: [watch.condition for watch in app.watches.all] == ["5 free GPUs"])
        await pilot.press("w")
        await lab.settle(pilot, lambda: isinstance(app.screen, ClusterScreen))


async def test_what_a_job_would_wait_for_is_not_available(tmp_path: Path) -> None:
    gpus = [made.gpu("gpu01", 0, "allocated", reason="job 12 of bob"), made.gpu("gpu01", 1)]
    async with made.still(tmp_path, made.scene(made.node("gpu01", gpus, source="slurm"))) as (app, pilot):
        app.core.operations.plan = lambda request, snapshot=None: Choice((), "the job waits")  # type: ignore[method-assign]
        open_watch(app)
        await lab.settle(pilot, lambda: lab.shown(app, "Available now: gpu01 GPU 1"))
        await fill(pilot, what="2")
        await lab.settle(pilot, lambda: lab.shown(app, "Will wait: "))


async def test_what_can_never_be_is_not_watched_for(core: Core) -> None:
    async with lab.board(core, (80, 24)) as (app, pilot):
        open_watch(app)
        await fill(pilot, what="3000")
        await pilot.press("enter")  # maybe before the answer
        await lab.settle(pilot, lambda: lab.shown(app, "Impossible here: "))
        assert app.screen.query_one("#commit").disabled
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, WatchDialog)
        assert app.watches.all == []
        await fill(pilot, what="6")
        await pilot.press("enter")
        await lab.settle(pilot, lambda: [watch.condition for watch in app.watches.all] == ["6 free GPUs"])


def test_what_was_not_read_has_not_ended() -> None:
    lease = msgspec.structs.replace(made.lease("abcdef", "bob", [("gpu01", 0)]), nodes=["gpu01"])
    watch = Watch(1, 0.0, lease=lease)
    held = made.scene(made.node("gpu01", [made.gpu("gpu01", 0, "reserved")]), leases=[lease])
    assert holds(watch, held) == ""
    unread = made.scene(made.unread("gpu01"))
    unread.leases.unread.append("gpu01")
    assert holds(watch, unread) == ""
    assert holds(watch, made.scene(made.node("gpu01", [made.gpu("gpu01", 0)]))) == "gpu01:0 of bob"
    again = made.scene(made.node("gpu01", [made.gpu("gpu01", 0)]), leases=[made.lease("abcdef", "eve", [("gpu01", 0)])])
    assert holds(watch, again) == "gpu01:0 of bob"


def test_unknown_is_not_free() -> None:
    watch = Watch(1, 0.0, Request(n=1))
    assert holds(watch, made.scene(made.node("gpu01", [made.gpu("gpu01", 0, "unknown")]))) == ""
    stale = made.node("gpu01", [made.gpu("gpu01", 0)], state="stale", error="no reading for 9 s")
    assert holds(watch, made.scene(stale)) == ""
    assert holds(watch, made.scene(made.node("gpu01", [made.gpu("gpu01", 0)]))) == "gpu01:0"
