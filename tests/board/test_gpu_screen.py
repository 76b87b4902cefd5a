"""One GPU's screen and panel: what is shown, its keys, and what happens when the GPU vanishes while it is open."""

from __future__ import annotations

import os
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuboard.board.app import BoardApp
from gpuboard.board.history import DAY, SPANS, History
from gpuboard.board.history.recorder import Recorder
from gpuboard.board.scene import Scene
from gpuboard.board.screens.gpu import GpuPanel, GpuScreen
from gpuboard.board.screens.node import NodeScreen
from gpuboard.board.widgets.grid import Grid
from gpuboard.board.widgets.pane import Pane
from gpuboard.config import Settings
from gpuboard.model.gpu import Sensors
from gpuboard.model.snapshot import ProcessView, XidView
from tests import nvml
from tests.board.lab import Opened, board, environment, make_core, screen, script_gpus, settle
from tests.board.made import AT, GIB, busy, gpu, lease, next_scene, node, scene, still
from tests.nvml import Gpu, write_script

HOSTILE = "漢字\u0301 [/b] [red]x 🏳️‍🌈 א " * 30


def lab() -> Scene:
    """Return a scene of two nodes; GPU 1 of gpu1 is alice's, and eve is on it too."""
    processes = [
        ProcessView(41, "alice", "python train.py", 50 * GIB, "compute", runtime_s=3700.0, job="123", started=1.5,
                    uid=7, sm_percent=97, cpu_percent=412.4, host_memory=12 * GIB),
        ProcessView(42, "eve", "python steal.py", 9 * GIB, "compute", container="0123456789ab", started=2.5,
                    rogue=True),
        ProcessView(43, None, "Xorg", None, "graphics"),
    ]  # fmt: skip
    health: dict[str, Any] = {
        "ecc_uncorrected": 2,
        "xids": [XidView(48, AT, 65.0)],
        "pcie_width": 8,
        "pcie_width_max": 16,
        "sick": ["PCIe x8 of x16: narrower than before"],
    }
    held = busy("gpu1", 1, processes=processes, leases=["k3f9"], flags=["rogue", "sick"], **health)
    links = {"GPU-gpu1-1": 18}
    return scene(
        node("gpu1", [gpu("gpu1", 0, links=links), held, gpu("gpu1", 2, pci={"GPU-gpu1-1": 10})]),
        node("gpu2", [gpu("gpu2", 0)]),
        leases=[lease("k3f9", "alice", [("gpu1", 1)])],
    )  # fmt: skip


def shows(app: BoardApp, words: str) -> bool:
    return words in screen(app)


@asynccontextmanager
async def opened(folder: Path, first: Scene | None = None, size: tuple[int, int] = (120, 50)) -> Opened:
    async with still(folder, first or lab(), size) as (app, pilot):
        await app.push_screen(GpuScreen("GPU-gpu1-1"))
        await settle(pilot, lambda: isinstance(app.screen, GpuScreen) and "gpu1  GPU" in screen(app))
        yield app, pilot


async def test_the_span_of_graphs_is_changed_and_kept(tmp_path: Path) -> None:
    shown = lab()
    async with opened(tmp_path, shown, (80, 24)) as (app, pilot):
        for second in range(0, 90000, 60):
            app.core.history.add(shown.snapshot, 1e9 + second)
        spans = {"5 min ago": 5, "60 min ago": 61, "24 h ago": 289}
        for (first, count), span in zip(spans.items(), SPANS, strict=True):
            await settle(pilot, partial(shows, app, first))
            assert len(app.core.history.of("GPU-gpu1-1", span).times) == count
            await pilot.press("t")
        await settle(pilot, lambda: "5 min ago" in screen(app))
        await pilot.press("t", "t")
        assert "mean 90  peak 90" in screen(app)
        app.push_screen(NodeScreen("gpu1"))
        await settle(pilot, lambda: isinstance(app.screen, NodeScreen))
        assert isinstance(app.screen, NodeScreen)
        assert app.screen.span.name == "24 h" == app.preferences.span


async def test_activity_and_throughput_have_graphs_on_a_high_screen(tmp_path: Path) -> None:
    read = Sensors(sm_activity=85, tensor_activity=61, pcie_sent=10**9, pcie_received=4 * 10**9)
    shown = scene(node("gpu1", [gpu("gpu1", 0), busy("gpu1", 1, sensors=read, pcie_generation=5, pcie_width=16)]))
    async with opened(tmp_path, shown, (120, 24)) as (app, pilot):
        app.core.history.add(shown.snapshot, 1e9)
        await settle(pilot, lambda: "of 63 GB/s each way" in screen(app))  # a meter
        await pilot.resize_terminal(120, 60)
        await settle(pilot, lambda: "SM activity  85 %" in screen(app))
        lines = screen(app).splitlines()
        assert "each way" not in screen(app)
        [activity] = [" ".join(line.split()) for line in lines if line.startswith(" SM activity")]
        assert activity == "SM activity 85 % mean 85 peak 85 Tensor cores 61 % mean 61 peak 61"
        assert any(line.startswith(" PCIe         in 4.0 GB/s, out 1.0 GB/s of 63 GB/s") for line in lines)
        await pilot.press("t")
        await settle(pilot, lambda: "Over 5 minutes only: SM activity, Tensor cores, PCIe" in screen(app))


async def test_the_last_day_is_shown_after_a_restart(tmp_path: Path) -> None:
    kept, since = History(), (time.time() - 7200) // 300 * 300
    snapshot = lab().snapshot
    for second in range(0, 3600, 60):
        kept.add(snapshot, since + second)
    Recorder(kept, environment(tmp_path), print).write()
    async with opened(tmp_path) as (app, pilot):
        await settle(pilot, lambda: len(app.core.history.of("GPU-gpu1-1", DAY).times) == 12)
        await pilot.press("t", "t")
        await next_scene(app, pilot, lab())
        await settle(pilot, lambda: "mean 90  peak 90" in screen(app))
        app.core.history.add(lab().snapshot, time.time())
        assert len(app.core.history.cluster(DAY).times) == 13


async def test_every_fact_of_a_gpu_is_shown(tmp_path: Path) -> None:
    async with opened(tmp_path) as (app, pilot):
        await settle(pilot, lambda: "PCIe" in screen(app))
        shown = screen(app)
        for words in (
            "gpu1  GPU 1  NVIDIA H100 80GB HBM3",
            "B busy: bob: python (pid 4001)",
            "rogue: a process of a user who does not hold it",
            "Lease        k3f9 of alice, 8h00m left",
            "Utilization  90 %",
            "Memory       60 GiB of 80 GiB",
            "Power        540 of 700 W",
            "Temperature  64 °C",
            "1       NV18     X   SYS",
            "ECC          bad  2 uncorrected since the driver loaded",
            "PCIe         warn generation ?, x8 now; at most ?, x16;",
            "XID          warn 48, 1m ago: double-bit ECC error",
            "Recovery     ?    not readable",
        ):
            assert words in shown, f"{words}\n{shown}"


async def test_processes_stand_in_a_grid_and_the_rogue_one_is_marked(tmp_path: Path) -> None:
    async with opened(tmp_path) as (app, pilot):
        grid = app.screen.query_one("#processes", Grid)
        assert [row.key for row in grid._rows] == ["41:1.5", "42:2.5", "43:None"]
        assert [grid.render_line(y).text.split() for y in range(4)] == [
            ["User", "Pid", "Memory", "SM%", "CPU%", "Host", "Time", "Job", "Container", "Note", "Command"],
            ["alice", "41", "50G", "97", "412", "12G", "1h01m", "123", "-", "python", "train.py"],
            ["eve", "42", "9.0G", "?", "?", "?", "?", "-", "0123456789ab", "rogue", "python", "steal.py"],
            ["hidden", "43", "?", "?", "?", "?", "?", "-", "-", "graphics", "Xorg"],
        ]
        assert (grid.has_focus, grid.cursor) == (True, "41:1.5")
        await pilot.press("down")
        assert grid.cursor == "42:2.5"
        await next_scene(app, pilot, lab())
        assert grid.cursor == "42:2.5"


async def test_no_process_and_unreadable_processes_are_distinguished(tmp_path: Path) -> None:
    async with opened(tmp_path) as (app, pilot):
        await next_scene(app, pilot, scene(node("gpu1", [gpu("gpu1", 1)])))
        await settle(pilot, lambda: "no process\n" in screen(app) + "\n")
        await next_scene(app, pilot, scene(node("gpu1", [gpu("gpu1", 1, processes=None)])))
        await settle(pilot, lambda: "cannot read the processes" in screen(app))


async def test_keys_go_to_the_neighbours_the_node_and_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as (app, pilot):
        shown = app.screen
        assert isinstance(shown, GpuScreen)
        seen = []
        for key in ("right", "right_square_bracket", "right", "left", "left_square_bracket", "left", "left"):
            await pilot.press(key)
            seen.append(shown.uuid.removeprefix("GPU-"))
        assert seen == ["gpu1-2", "gpu2-0", "gpu2-0", "gpu1-2", "gpu1-1", "gpu1-0", "gpu1-0"]
        await pilot.press("n")
        await settle(pilot, lambda: isinstance(app.screen, NodeScreen))
        await pilot.press("escape")
        await settle(pilot, lambda: app.screen is shown)
        await pilot.press("escape")
        await settle(pilot, lambda: app.screen is not shown)


async def test_a_gpu_that_no_node_lists_any_more_stays_with_its_last_values(tmp_path: Path) -> None:
    async with opened(tmp_path) as (app, pilot):
        await next_scene(app, pilot, scene(node("gpu1", [gpu("gpu1", 0)])))
        await settle(pilot, lambda: "No node lists this GPU now. The values shown are " in screen(app))
        assert "Utilization  90 %" in screen(app)
        assert [row.dim for row in app.screen.query_one("#processes", Grid)._rows] == [True] * 3
        await pilot.press("right", "left")  # leads nowhere, and breaks nothing
        await next_scene(app, pilot, lab())
        await settle(pilot, lambda: "No node lists" not in screen(app))


async def test_small_terminals_scroll(tmp_path: Path) -> None:
    async with opened(tmp_path, size=(80, 24)) as (app, pilot):
        assert "gpu1  GPU 1" in screen(app) and "Recovery" not in screen(app)
        await pilot.press("pagedown", "pagedown")
        await settle(pilot, lambda: "Recovery" in screen(app))
        await pilot.press("pageup", "pageup", "pageup")
        await settle(pilot, lambda: "gpu1  GPU 1" in screen(app))


async def test_hostile_text_is_inert_and_every_line_fits(tmp_path: Path) -> None:
    async with opened(tmp_path) as (app, pilot):
        process = ProcessView(1, HOSTILE, HOSTILE, 1, "compute", job=HOSTILE, container=HOSTILE, lease=HOSTILE)
        bad = gpu("gpu1", 1, "broken", name=HOSTILE, reason=HOSTILE, error=HOSTILE, processes=[process])
        held = lease("k3f9", HOSTILE, [("gpu1", 1)])
        await next_scene(app, pilot, scene(node("gpu1", [bad, gpu("gpu1", 2)]), leases=[held], banners=(HOSTILE,)))
        await settle(pilot, lambda: "漢" in screen(app))
        panes = list(app.screen.query(Pane))
        assert len(panes) == 5
        for size in ((80, 24), (120, 50), (200, 60)):
            await pilot.resize_terminal(*size)
            for pane in panes:
                for y in range(pane.size.height):
                    strip = pane.render_line(y)
                    assert strip.cell_length == sum(segment.cell_length for segment in strip) == pane.size.width


async def test_another_theme_changes_its_colours(tmp_path: Path) -> None:
    async with opened(tmp_path) as (app, pilot):
        health = app.screen.query_one("#health", Pane)
        before = [segment.style for segment in health.render_line(1)]
        app.theme = "light"
        await settle(pilot, lambda: [segment.style for segment in health.render_line(1)] != before)
        drawn = list(app.screen._compositor.render_strips()[health.region.y + 1])
        assert {segment.style.color for segment in drawn if segment.style} != {style.color for style in before if style}


async def test_the_panel_follows_the_cursor_also_to_nothing(tmp_path: Path) -> None:
    async with still(tmp_path, lab(), (200, 60)) as (app, pilot):
        panel = app.screen.query_one(GpuPanel)
        assert panel.display
        panel.show_gpu(lab(), None, app.core.history, app.look.glyphs)
        await settle(pilot, lambda: "Move to a GPU to see it here." in screen(app))
        panel.show_gpu(lab(), "GPU-gpu1-1", app.core.history, app.look.glyphs)
        await settle(pilot, lambda: "k3f9 of alice, 8h00m left" in screen(app))
        shown = screen(app)
        for words in ("!eve            42", "ECC          bad  2 uncorrected", "NV18 GPU 0; SYS GPU 2", "Recovery"):
            assert words in shown, f"{words}\n{shown}"
        await pilot.resize_terminal(200, 50)  # room for what is wrong only
        await settle(pilot, lambda: panel.size.height < 50)
        panel.show_gpu(lab(), "GPU-gpu1-1", app.core.history, app.look.glyphs)
        await settle(pilot, lambda: "ECC          2 uncorrected" in screen(app))
        panel.show_gpu(scene(), "GPU-gpu1-1", app.core.history, app.look.glyphs)
        await settle(pilot, lambda: "No node lists this GPU now" in screen(app))


async def test_a_real_gpu_that_is_lost_while_its_screen_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ("compute", os.getpid(), 7 * GIB)
    first = Gpu(gpm={2: 85, 5: 61}, throughput=(5000, 7000))  # GPM without PCIe: from the counters
    second = msgspec.structs.replace(first, used=7 * GIB, utilization=80, processes=(mine,))
    core = make_core(tmp_path, script_gpus(tmp_path, monkeypatch, [first, second]), Settings(interval="0.2s"))
    async with board(core, (120, 60)) as (app, pilot):
        assert app.scene is not None
        lost = app.scene.nodes["gpu01"].gpus[1]
        await app.push_screen(GpuScreen(lost.uuid))
        await settle(
            pilot, lambda: "Utilization  80 %" in screen(app) and "none while gpuboard was connected" in screen(app)
        )
        await settle(pilot, lambda: "SM 85 %   tensor 61 %" in screen(app) and "in 7.0 MB/s" in screen(app))
        assert [gpu.sensors and gpu.sensors.pcie_sent for gpu in core.scene().nodes["gpu01"].gpus] == [None, 5_000_000]
        grid = app.screen.query_one("#processes", Grid)
        assert [row.key.split(":")[0] for row in grid._rows] == [str(os.getpid())]
        lost_too = Gpu(xids=(79,), trouble=(f"fault * {nvml.LOST}",))
        write_script(tmp_path / "nvml", [Gpu(), lost_too], seed=str(tmp_path))
        await settle(pilot, lambda: "GPU is lost" in screen(app) and "X broken" in screen(app))
        await settle(pilot, lambda: "XID          warn 79" in screen(app))
        assert "Utilization  80 %" in screen(app)  # what was last seen
        assert [row.dim for row in grid._rows] == [True]
        await settle(pilot, lambda: core.history.of(lost.uuid).utilization[-1] is None)
