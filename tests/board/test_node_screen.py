"""One node's screen: its host, its connection with the error and its cure, its GPUs; a node that stops answering."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from gpuboard.board.scene import Scene
from gpuboard.board.screens.gpu import GpuScreen
from gpuboard.board.screens.node import NodeScreen
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.grid import Grid
from gpuboard.board.widgets.pane import Pane
from gpuboard.config import Settings, StateSettings
from gpuboard.model.gpu import Sensors
from tests.board.lab import Opened, agent_pid, board, hung, make_core, screen, settle
from tests.board.made import busy, gpu, lease, mig, next_scene, node, scene, still, unread

CURE = "ssh: the host key of gpu10 is unknown; compare it and add it to ~/.ssh/known_hosts"
HOSTILE = "漢字\u0301 [/b] [red]x 🏳️‍🌈 א " * 30


ADDRESSES = ["10.0.0.2", "2001:0db8:0000:0000:0000:0000:0000:0002"]


def lab() -> Scene:
    """Return a scene of a node with GPUs and MIG devices, one without reservations, and one that never answered."""
    gpus = [
        busy("gpu2", 0, flags=["rogue"]),
        gpu("gpu2", 1, "reserved", leases=["k3f9"]),
        mig("gpu2", 2, "free", "busy"),
    ]
    return scene(
        node("gpu2", gpus, load1=3.5, cuda="13.0", hostname="gpu2.lab", addresses=ADDRESSES),
        node("gpu3", [gpu("gpu3", 0, "unknown")], claims_error="/var/tmp is on NFS"),
        unread("gpu10", CURE),
        leases=[lease("k3f9", "alice", [("gpu2", 1)])],
    )


@asynccontextmanager
async def opened(folder: Path, name: str, size: tuple[int, int] = (120, 40)) -> Opened:
    async with still(folder, lab(), size) as (app, pilot):
        await app.push_screen(NodeScreen(name))
        await settle(pilot, lambda: isinstance(app.screen, NodeScreen) and "Connection" in screen(app))
        yield app, pilot


async def test_activity_is_beside_utilization_where_there_is_room_and_a_gpu_reports_it(tmp_path: Path) -> None:
    gpus = [busy("gpu2", 0, sensors=Sensors(sm_activity=85, tensor_activity=61)), mig("gpu2", 1, "free")]
    async with opened(tmp_path, "gpu2", (160, 48)) as (app, pilot):
        assert "Tensor" not in screen(app)
        await next_scene(app, pilot, scene(node("gpu2", gpus)))
        await settle(pilot, lambda: "Tensor" in screen(app))
        grid = app.screen.query_one("#gpus", Grid)
        rows = [" ".join(grid.render_line(y).text.split()) for y in range(4)]
        assert "Util SM Tensor 5 min Temp" in rows[0]
        assert " 60.0/80 90% 85% 61% " in rows[1]
        assert " 0.0/80 ? ? ? " in rows[2]
        assert rows[3] == "1:0 F free - ────────── 0.0/40 - - - - - - 3g.40gb made free"


async def test_its_processes_are_below_the_gpus_where_there_is_room(tmp_path: Path) -> None:
    async with opened(tmp_path, "gpu2", (120, 20)) as (app, pilot):
        assert "python train.py" not in screen(app)
        await pilot.resize_terminal(120, 60)
        await settle(pilot, lambda: "python train.py" in screen(app))
        lines = screen(app).splitlines()
        [titles] = [number for number, line in enumerate(lines) if line.startswith(" GPU User")]
        assert lines[titles + 1].split()[:4] == ["0", "bob", "4000", "60G"]
        idle = [gpu("gpu2", 0), gpu("gpu2", 1), mig("gpu2", 2, "free", "busy")]
        await next_scene(app, pilot, scene(msgspec.structs.replace(lab().snapshot.nodes[0], gpus=idle)))
        assert "no process on these GPUs" in screen(app)
        assert screen(app).splitlines()[titles].startswith(" GPU User")  # nothing moves
        await pilot.resize_terminal(80, 20)
        await settle(pilot, lambda: "Memory" in screen(app) and "GPU User" not in screen(app))


async def test_processes_and_graphs_share_the_lines_below_the_gpus_of_a_large_node(tmp_path: Path) -> None:
    gpus = [busy("gpu2", number, "bob") for number in range(16)]
    shown = scene(msgspec.structs.replace(lab().snapshot.nodes[0], gpus=gpus))
    async with opened(tmp_path, "gpu2", (120, 34)) as (app, pilot):
        await next_scene(app, pilot, shown)
        assert screen(app).splitlines()[-3].split()[1] == "bob"  # no empty lines
        await pilot.resize_terminal(160, 48)
        await settle(pilot, lambda: "5 min ago" in screen(app) and screen(app).splitlines()[-3].split()[1:2] == ["bob"])


async def test_the_key_of_the_time_span_is_dim_where_no_graph_has_room(tmp_path: Path) -> None:
    async with opened(tmp_path, "gpu2", (80, 24)) as (app, pilot):

        def enabled() -> bool:
            (entry,) = [entry for entry in app.screen.query_one(Footer).entries if entry.words == "Time"]
            return entry.enabled

        assert not enabled()
        span = app.preferences.graphs
        await pilot.press("t")
        assert app.preferences.graphs == span
        await pilot.resize_terminal(80, 60)
        await settle(pilot, enabled)
        await pilot.press("t")
        await settle(pilot, lambda: app.preferences.graphs != span)
        await pilot.resize_terminal(80, 24)
        await settle(pilot, lambda: not enabled())


async def test_every_fact_of_a_gpu_is_shown(tmp_path: Path) -> None:
    async with opened(tmp_path, "gpu2") as (app, _):
        lines = [line.strip() for line in screen(app).splitlines()]
        assert lines[:5] == [
            "gpu2  driver 580.159.04   CUDA 13.0   read through nvml",
            "Connection   up",
            "Last reading 1s ago",
            "Host name    gpu2.lab",
            "Addresses    10.0.0.2, 2001:db8::2",
        ]
        for words in (
            "CPU          12 %",
            "Memory       97 GiB of 512 GiB",
            "Load         3.50",
            "Not reported: Network",
        ):
            assert words in screen(app)
        grid = app.screen.query_one("#gpus", Grid)
        assert [" ".join(grid.render_line(y).text.split()) for y in range(6)] == [
            "GPU State User Memory GiB Util Temp Power Model Reason",
            "0 B! busy bob ━━━━━━━╸── 60.0/80 90% 64°C 540W H100 80GB [rogue] python (pid 4000)",
            "1 R reserved alice ────────── 0.0/80 0% 31°C 70W H100 80GB no process, no reservation",
            "2 M 1/2 free - ────────── 0.0/80 ? 31°C 70W H100 80GB in MIG mode",
            "2:0 F free - ────────── 0.0/40 - - - 3g.40gb made free",
            "2:1 B busy ? ────────── 0.0/40 - - - 3g.40gb made busy",
        ]


async def test_a_node_that_never_answered_shows_reason_and_remedy(tmp_path: Path) -> None:
    async with opened(tmp_path, "gpu10") as (app, _):
        shown = screen(app)
        for words in (
            f"Error        {CURE}",
            "Connection   unreachable: never connected",
            "Last reading never",
            "load ?",
            "Host name    ?",
        ):
            assert words in shown, f"{words}\n{shown}"
        assert "no GPUs known: no reading from this node" in shown
        assert "read through" not in shown


async def test_a_node_that_cannot_hold_reservations_is_reported(tmp_path: Path) -> None:
    async with opened(tmp_path, "gpu3") as (app, _):
        assert "Reservations not possible here: /var/tmp is on NFS" in screen(app)


async def test_keys_go_to_the_neighbours_to_a_gpu_and_back(tmp_path: Path) -> None:
    async with opened(tmp_path, "gpu2") as (app, pilot):
        shown = app.screen
        assert isinstance(shown, NodeScreen)
        seen = []
        for key in ("left", "right", "right_square_bracket", "right", "left", "left_square_bracket"):
            await pilot.press(key)
            seen.append(shown.node_name)
        assert seen == ["gpu2", "gpu3", "gpu10", "gpu10", "gpu3", "gpu2"]
        await pilot.press("down", "down", "down", "enter")  # a MIG device: its GPU
        await settle(pilot, lambda: isinstance(app.screen, GpuScreen))
        assert isinstance(app.screen, GpuScreen)
        assert app.screen.uuid == "GPU-gpu2-2"
        await pilot.press("escape")
        await settle(pilot, lambda: app.screen is shown)
        await pilot.press("escape")
        await settle(pilot, lambda: app.screen is not shown)


async def test_a_double_click_opens_a_gpu(tmp_path: Path) -> None:
    async with opened(tmp_path, "gpu2") as (app, pilot):
        await pilot.click("#gpus", offset=(10, 2), times=2)
        await settle(pilot, lambda: isinstance(app.screen, GpuScreen))
        assert isinstance(app.screen, GpuScreen)
        assert app.screen.uuid == "GPU-gpu2-1"


async def test_hostile_text_is_inert_and_every_line_fits(tmp_path: Path) -> None:
    async with opened(tmp_path, "gpu2", (80, 24)) as (app, pilot):
        bad = gpu("gpu2", 0, name=HOSTILE, reason=HOSTILE)
        bad_node = node("gpu2", [bad], driver=HOSTILE, error=HOSTILE, claims_error=HOSTILE, addresses=[HOSTILE] * 3)
        await next_scene(app, pilot, scene(bad_node, banners=(HOSTILE,)))
        await settle(pilot, lambda: "漢" in screen(app))
        widgets: list[Pane | Grid] = [app.screen.query_one("#node", Pane), app.screen.query_one("#gpus", Grid)]
        for size in ((80, 24), (200, 60)):
            await pilot.resize_terminal(*size)
            for widget in widgets:
                for y in range(widget.size.height):
                    strip = widget.render_line(y)
                    assert strip.cell_length == sum(segment.cell_length for segment in strip)
                    assert strip.cell_length in {widget.size.width, widget.scrollable_content_region.width}
            assert "Connection" in screen(app) or size[1] == 24
            assert "GPU State" in screen(app)  # the GPUs keep their place below however long an error is


async def test_the_load_of_a_node_is_beside_its_gpus(tmp_path: Path) -> None:
    async with opened(tmp_path, "gpu2", (80, 24)) as (app, pilot):
        gpus = [busy("gpu2", index) for index in range(8)]
        shown = node("gpu2", gpus, load1=3.5, net_received=120e6, net_sent=4.25e6)
        for second in range(300):
            app.core.history.add(scene(shown).snapshot, 1e9 + second)
        await next_scene(app, pilot, scene(shown))
        for size in ((80, 24), (160, 48)):
            await pilot.resize_terminal(*size)
            await settle(pilot, lambda: "in 120, out 4.2 MB/s" in screen(app))
            assert "GPU State" in screen(app) and "7 B  busy" in screen(app)
            graphs = all(words in screen(app) for words in ("mean 128 MB/s  peak 128 MB/s", "mean 3.6  peak 3.6"))
            assert graphs == (size == (160, 48))
            assert ("load 3.50" in screen(app)) == (size == (80, 24))
            assert (" 5 min " in screen(app)) == (size == (160, 48))
        await next_scene(app, pilot, scene(node("gpu2", [busy("gpu2", 0)], cpu_percent=None, state="stale")))
        await settle(pilot, lambda: "stale: connected" in screen(app))
        assert "?" in screen(app)


async def test_a_node_that_a_scene_lacks_shows_no_old_values(tmp_path: Path) -> None:
    async with opened(tmp_path, "gpu2", (120, 60)) as (app, pilot):
        await next_scene(app, pilot, scene(banners=("this is a bug: KeyError",)))
        await settle(pilot, lambda: "this board has no reading of gpu2 now" in screen(app))
        assert "this is a bug: KeyError" in screen(app)
        assert not any(words in screen(app) for words in ("Connection", "reserved", "python train.py"))
        await next_scene(app, pilot, lab())
        await settle(pilot, lambda: "Connection   up" in screen(app) and "python train.py" in screen(app))


async def test_a_real_node_that_stops_answering_while_its_screen_is_open(tmp_path: Path) -> None:
    core = make_core(tmp_path, settings=Settings(interval="0.2s", state=StateSettings(stale_min="1s")))
    async with board(core) as (app, pilot):
        await app.push_screen(NodeScreen("sim01"))
        await settle(pilot, lambda: "Connection   up" in screen(app))
        with hung(core, "sim01"):
            await settle(pilot, lambda: "stale: connected, but no new reading" in screen(app))
            grid = app.screen.query_one("#gpus", Grid)
            await settle(pilot, lambda: {row.dim for row in grid._rows} == {True})
            assert "?  unknown" in screen(app) and "F  free" not in screen(app)
        await settle(pilot, lambda: "Connection   up" in screen(app) and "F  free" in screen(app))
        feed = core.fleet._feeds["sim01"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(feed, "check", lambda now: None)  # it connects again once the error was seen
            os.kill(agent_pid(core, "sim01"), signal.SIGKILL)
            await settle(pilot, lambda: "Error" in screen(app))
        await settle(pilot, lambda: "Connection   up" in screen(app) and "Error" not in screen(app))
