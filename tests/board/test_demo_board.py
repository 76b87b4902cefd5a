"""The demo's board: a cluster that lives, people who are in the way as real ones are, and nothing left at the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpuboard.agent.claims import store as claims
from gpuboard.board.core import Core
from gpuboard.board.dialogs.launch_process import LaunchForm
from gpuboard.board.replay.core import ReplayCore
from gpuboard.board.scene import Place, Scene
from gpuboard.board.widgets.grid import Grid
from gpuboard.cli.setup import demo_board
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError
from gpuboard.keeper import processes
from gpuboard.model.replies import Ends
from gpuboard.model.request import Pick, Refusal, Request
from gpuboard.model.units import seconds_of
from gpuboard.recording.file import Recording, RecordingWriter
from gpuboard.recording.frames import Frame
from gpuboard.transport.base import CallFailed
from tests.board import lab, made


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[float], Core]]:
    """A core of the demo's cluster, so many seconds into its story; ended at the test's end."""
    made: list[Core] = []

    def core(t: float) -> Core:
        settings = Settings(claims_dir=str(lab.claims_folder(tmp_path)))
        made.append(demo_board.make(settings, lab.environment(tmp_path), epoch=time.time() - t))
        return made[-1]

    if os.geteuid() != 0:
        pytest.skip("only root can make a folder for claims")
    yield core
    for one in made:
        one.close()
        assert demo_board.end(one) == []


def until(core: Core, condition: Callable[[Scene], object], timeout_s: float = 60.0) -> Scene:
    deadline = time.monotonic() + timeout_s
    while not condition(scene := core.scene()):
        assert time.monotonic() < deadline, [(n.name, n.state, n.error) for n in scene.snapshot.nodes]
        core.fleet.wait_change(0.2)
    return scene


def started(core: Core, but: str = "") -> Scene:
    """Start ``core``; return the first scene in which all nodes, ``but`` one that hangs, are known."""

    def known(scene: Scene) -> bool:
        nodes = [node for node in scene.snapshot.nodes if node.name != but]
        return all(node.gpus and all(gpu.state != "unknown" for gpu in node.gpus) for node in nodes)

    core.start(lambda _: None)
    return until(core, known)


def gpu(scene: Scene, node: str, index: int) -> Place:
    return next(place for place in scene.places.values() if (place.node.name, place.gpu.index) == (node, index))


def test_everything_the_board_can_show_is_there_after_two_minutes(make: Callable[[float], Core]) -> None:
    scene = started(make(120.0))
    states = {place.gpu.state for place in scene.places.values()}
    flags = {flag for place in scene.places.values() for flag in place.gpu.flags}
    assert scene.label == "SIMULATED"
    assert states == {"free", "reserved", "busy", "occupied", "mig", "broken"}
    assert flags >= {"rogue", "sick", "overdue", "mig"}
    assert {lease.owner for lease in scene.leases.leases} >= {"alice", "carol", "erin", "frank"}
    assert all(not lease.mine for lease in scene.leases.leases)
    wide = scene.by_lease["h4t9wd"]
    assert ({g.node for g in wide.gpus}, len(wide.gpus), wide.flags) == ({"sim01", "sim02"}, 8, [])
    lost = gpu(scene, "sim03", 11).gpu
    assert (lost.state, [xid.code for xid in lost.xids or []]) == ("broken", [79])
    hidden = gpu(scene, "sim06", 1).gpu
    assert [(p.user, p.container) for p in hidden.processes or []] == [(None, "6f1d0c9ab27e")]


def test_a_node_hangs_and_comes_back(make: Callable[[float], Core]) -> None:
    for room_s in (5.0, 15.0, 40.0):  # no output until 112: the deadline for the others
        began = time.time()
        core = make(112.0 - room_s)
        scene = started(core, but="sim07")
        if time.time() < began + room_s:
            break
        core.close()
    assert scene.nodes["sim07"].state == "unreachable"
    assert all(node.state == "up" for name, node in scene.nodes.items() if name != "sim07")
    assert until(core, lambda scene: scene.nodes["sim07"].state == "up").nodes["sim07"].gpus


def test_simulated_users_keep_their_gpus(make: Callable[[float], Core]) -> None:
    core = make(120.0)
    scene = started(core)
    carols = gpu(scene, "sim01", 5).gpu.uuid
    args: dict[str, Any] = {"lease": "mm22mm", "uuids": [carols], "for_s": 60.0, "nodes": ["sim01"], "gpus": 1}
    with pytest.raises(CallFailed, match="by carol") as failed:
        core.fleet.call("sim01", "take", args, 60.0, Ends)
    assert failed.value.kind == "conflict"
    with pytest.raises(GpuboardError, match="alice"):
        core.operations.release("h4t9wd")
    until(core, lambda scene: "h4t9wd" in scene.by_lease)


def test_a_mig_device_is_reserved_by_its_uuid_and_its_gpu_not_at_all(make: Callable[[float], Core]) -> None:
    core = make(0.0)
    parent = gpu(started(core), "sim05", 2).gpu
    assert isinstance(core.operations.plan(Request(picks=(Pick("sim05", 2, None),))), Refusal)
    allocation = core.operations.reserve(Request(picks=(Pick(None, None, parent.mig[1].uuid),)), 60.0, "")
    core.operations.published(allocation)
    assert allocation.rank_map.nodes[0].cuda_visible_devices == parent.mig[1].uuid
    held = [["y3k7fb"], [allocation.lease.id]]
    until(core, lambda scene: [device.leases for device in gpu(scene, "sim05", 2).gpu.mig] == held)


def test_a_killed_demos_leases_are_released_by_the_next(make: Callable[[float], Core], tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = str(lab.claims_folder(tmp_path))
    for pid, lease in ((gone.pid, "aa22aa"), (os.getppid(), "bb22bb")):
        uuid = f"SIM-demo-{os.getuid()}-{pid}-sim01-0"
        args = {"lease": lease, "uuids": [uuid], "for_s": 60.0, "nodes": ["sim01"], "gpus": 1}
        claims.handle("take", args, claims.Folder(folder, "SIM-demo-"))
    make(0.0)
    assert [name.partition(":")[0] for name in lab.claims(tmp_path)] == ["bb22bb"]


@pytest.mark.torch
def test_runs_and_leases_of_the_board_end_with_it(make: Callable[[float], Core], tmp_path: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    core = make(0.0)
    started(core)
    allocation = core.operations.reserve(Request(n=2, model="H100"), 600.0, "mine")
    core.operations.published(allocation)
    lease = allocation.lease.id
    command = "-m gpuboard.demo_train --steps 100000 --pause 0.02"
    run = core.starter.start(LaunchForm(command, str(tmp_path), lease=lease, device="cpu"))

    def trains(scene: Scene) -> bool:
        mine = [scene.places[g.uuid].gpu for g in allocation.lease.gpus]
        return all(one.processes and one.utilization for one in mine)

    scene = until(core, trains, 60.0)
    [process] = scene.places[allocation.lease.gpus[0].uuid].gpu.processes or []
    assert (process.lease, "demo_train" in process.command) == (lease, True)
    assert "rogue" not in scene.places[allocation.lease.gpus[0].uuid].gpu.flags
    core.close()
    assert demo_board.end(core) == []
    assert run.over
    assert lab.claims(tmp_path) == []
    assert processes.carriers(lease) == []


async def test_every_screen_and_dialog_shows_that_it_is_simulated(make: Callable[[float], Core]) -> None:
    async with lab.board(make(0.0), (80, 24)) as (app, pilot):
        opened = set()
        for keys in (["t"], ["enter"], ["n"], ["r"], ["x"], ["l"], ["u"], ["w"], ["question_mark"], ["ctrl+p"]):
            before = app.screen
            await pilot.press(*keys)
            await lab.settle(pilot, lambda: app.screen is not before or keys == ["t"])  # noqa: B023  # waited for
            await lab.settle(pilot, lambda: "SIMULATED" in lab.screen(app))
            opened.add(type(app.screen).__name__)
            while len(app.screen_stack) > 2:
                below = len(app.screen_stack)
                await pilot.press("escape")
                await lab.settle(pilot, lambda: len(app.screen_stack) < below)  # noqa: B023
        assert len(opened) == 10, opened


async def test_a_replay_of_a_recording_of_the_demo_looks_as_the_demo(
    make: Callable[[float], Core], tmp_path: Path
) -> None:
    live = started(make(95.0), but="sim07")  # a rogue process, a lost GPU, a hot one, and a node that hangs
    writer = RecordingWriter(tmp_path / "demo.gz", commands=True)
    writer.add(Frame(seconds_of(live.snapshot.at), live.snapshot, live.leases, live.uids))
    writer.close()
    shown: list[list[str]] = []
    replayed = ReplayCore(Recording(tmp_path / "demo.gz"), Settings(), lab.environment(tmp_path))
    for name, scene in (("live", live), ("replay", replayed.scene())):
        (tmp_path / name).mkdir()  # for the preferences of each
        async with made.still(tmp_path / name, scene, (160, 48)) as (app, pilot):
            lists = [lab.screen(app).split("\n", 1)[1]]  # the picture, below the line with the label
            for keys in ("t", "l", "P"):
                await pilot.press("escape", keys)
                await lab.settle(pilot, lambda: len(app.screen.query_one(Grid).tsv().splitlines()) > 3)
                lists.append(app.screen.query_one(Grid).tsv())
            shown.append(lists)
    replayed.close()

    # a recording rounds values, to 64 MiB for example: the last digit shown may differ
    def rounded(text: str) -> str:
        return " ".join(re.sub(r"(?:[\d.]+[a-zA-Z%°]*|[━╸─])+", "#", text).split())

    assert [*map(rounded, shown[1])] == [*map(rounded, shown[0])]
