"""Signals and what can be copied, from the cluster view, against a real agent and real processes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList

from gpuboard.board.app import BoardApp
from gpuboard.board.core import Core
from gpuboard.board.dialogs.base import Choose, Confirm
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.gpu import GpuScreen
from gpuboard.model.snapshot import ProcessView
from tests.board import lab, made, other
from tests.nvml import GIB, Gpu

Sleeper = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    found: list[subprocess.Popen[bytes]] = []

    def start(*before: str) -> subprocess.Popen[bytes]:
        found.append(subprocess.Popen([*before, "sleep", "600"]))
        return found[-1]

    yield start
    for process in found:
        process.kill()
        process.wait()


def core_with(folder: Path, patch: pytest.MonkeyPatch, *gpus: tuple[int, ...]) -> Core:
    """Return a core over this machine with a scripted GPU for each of ``gpus``, on which those processes run."""
    made = [Gpu(used=2 * GIB, processes=tuple(("compute", pid, GIB) for pid in pids)) for pids in gpus]
    return lab.make_core(folder, lab.script_gpus(folder, patch, made))


def notes(app: BoardApp) -> list[str]:
    return [note.message for note in lab.notifications(app)]


async def choose(app: BoardApp, pilot: Pilot[int], key: str) -> None:
    await lab.settle(pilot, lambda: isinstance(app.screen, Choose) and app.screen.is_mounted)
    options = app.screen.query_one(OptionList)
    options.highlighted = options.get_option_index(key)
    await pilot.press("enter")
    await pilot.pause()


async def test_sends_a_signal_that_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: Sleeper) -> None:
    process = sleeper()
    async with lab.board(core_with(tmp_path, monkeypatch, (process.pid,))) as (app, pilot):
        await pilot.press("K")
        await lab.settle(pilot, lambda: isinstance(app.screen, Choose))
        assert f"process {process.pid} on gpu01: sleep 600" in lab.screen(app)
        await choose(app, pilot, "USR1")
        await lab.settle(pilot, lambda: isinstance(app.screen, Confirm))
        text = lab.screen(app)
        assert all(words in text for words in (f"pid {process.pid}", "gpu01", "sleep 600", "SIGUSR1"))
        await pilot.press("enter")  # the harmless button
        await lab.settle(pilot, lambda: not isinstance(app.screen, Confirm))
        assert process.poll() is None
        await pilot.press("K")
        await choose(app, pilot, "TERM")
        await lab.settle(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await lab.settle(pilot, lambda: f"signal sent to process {process.pid} on gpu01" in notes(app))
        assert process.wait(60) == -signal.SIGTERM


async def test_chooses_among_the_processes_with_the_mouse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: Sleeper
) -> None:
    one, two = sorted((sleeper(), sleeper()), key=lambda process: process.pid)
    core = core_with(tmp_path, monkeypatch, (one.pid, two.pid))
    async with lab.board(core, (80, 24)) as (app, pilot):
        await pilot.press("K")
        await lab.settle(pilot, lambda: isinstance(app.screen, Choose) and app.screen.is_mounted)
        await pilot.click(OptionList, offset=(5, 1))
        await lab.settle(pilot, lambda: f"process {two.pid} on gpu01" in lab.screen(app))
        await choose(app, pilot, "KILL")
        await lab.settle(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.click("#yes")
        await lab.settle(pilot, lambda: two.poll() is not None)
        assert (one.poll(), two.poll()) == (None, -signal.SIGKILL)


async def test_the_process_under_the_cursor_of_a_gpus_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: Sleeper
) -> None:
    process = sleeper()
    async with lab.board(core_with(tmp_path, monkeypatch, (process.pid,))) as (app, pilot):
        await pilot.press("enter")
        await lab.settle(pilot, lambda: isinstance(app.screen, GpuScreen) and str(process.pid) in lab.screen(app))
        await pilot.press("K")
        await choose(app, pilot, "INT")
        await lab.settle(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("tab", "enter")
        await lab.settle(pilot, lambda: process.poll() is not None)
        assert process.poll() == -signal.SIGINT


async def test_a_process_of_a_mig_device_is_named_by_it(tmp_path: Path) -> None:
    split = made.mig("gpu01", 2, "free", "busy")
    process = ProcessView(4711, "alice", "python train.py", GIB, "compute", started=5.0, uid=1001)
    device = msgspec.structs.replace(split.mig[1], processes=[process])
    split = msgspec.structs.replace(split, mig=[split.mig[0], device], processes=[process])
    shown = made.scene(made.node("gpu01", [split]), uids={"gpu01": 1001})
    async with made.still(tmp_path, shown) as (app, pilot):
        await pilot.press("K")
        await choose(app, pilot, "TERM")
        await lab.settle(pilot, lambda: isinstance(app.screen, Confirm))
        assert lab.shown(app, "gpu01:2:1 pid 4711")


@other.needs_root
async def test_other_peoples_are_named_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: Sleeper
) -> None:
    process = sleeper("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    async with lab.board(core_with(tmp_path, monkeypatch, (process.pid,))) as (app, pilot):
        await lab.settle(pilot, lambda: "nobody" in lab.screen(app))
        await pilot.press("K")
        await lab.settle(pilot, lambda: notes(app))
        assert notes(app) == [f"process {process.pid} on gpu01 belongs to nobody; nothing was sent"]
        assert len(app.screen_stack) == 2
        assert process.poll() is None


async def test_one_that_has_ended_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: Sleeper) -> None:
    process = sleeper()
    async with lab.board(core_with(tmp_path, monkeypatch, (process.pid,))) as (app, pilot):
        await pilot.press("K")
        await choose(app, pilot, "TERM")
        await lab.settle(pilot, lambda: isinstance(app.screen, Confirm))
        process.kill()
        process.wait()
        await pilot.press("y")
        await lab.settle(pilot, lambda: f"process {process.pid} has ended" in notes(app))


async def test_without_processes_it_shows_that(tmp_path: Path) -> None:
    async with lab.board(lab.make_core(tmp_path)) as (app, pilot):
        await pilot.press("K")
        await lab.settle(pilot, lambda: notes(app))
        assert notes(app) == ["no process on this GPU"]


async def test_copies_with_keys_and_shows_what(tmp_path: Path) -> None:
    core = lab.make_core(tmp_path)
    async with lab.board(core) as (app, pilot):
        assert app.scene is not None
        first = [gpu.uuid for gpu in app.scene.nodes["sim01"].gpus]
        assert isinstance(app.screen, ClusterScreen)
        app.screen.grid.marks = {first[0], first[2]}
        await pilot.press("right", "right", "right", "space")
        await lab.settle(pilot, lambda: "3 selected" in lab.screen(app))
        expected = {
            "uuids": f"{first[0]},{first[2]},{first[3]}",
            "export": "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,2,3  # SIMULATED",
            "export-uuid": f"export CUDA_VISIBLE_DEVICES={first[0]},{first[2]},{first[3]}  # SIMULATED",
        }
        for key, text in expected.items():
            await pilot.press("y")
            await choose(app, pilot, key)
            await lab.settle(pilot, lambda text=text: notes(app)[-1:] == [text])  # type: ignore[misc]
            assert app.clipboard == text
        await pilot.press("y")
        await choose(app, pilot, "ssh sim01")
        await lab.settle(pilot, lambda: notes(app)[-1] == "sim01 is this machine; no ssh is needed")
