"""The overview: below the cluster view where there is room, and as a screen of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len

from gpuboard.board.app import BoardApp
from gpuboard.board.scene import Scene
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.overview import OverviewScreen
from gpuboard.board.terminal.first_frame import draw
from gpuboard.board.widgets.grid import Grid
from gpuboard.board.widgets.overview import OverviewPanel
from gpuboard.model.snapshot import NodeView, Snapshot
from gpuboard.model.units import iso, seconds_of
from tests.board import made
from tests.board.lab import screen, settle
from tests.board.test_first import lines_of

NODES = [made.node(f"gpu{n:02d}", [made.gpu(f"gpu{n:02d}", i) for i in range(4)]) for n in range(1, 25)]


def held(*changed: NodeView, nodes: int = 11) -> Scene:
    """Return a scene of a line a node: bob uses a GPU of each of the first two, alice leaves four idle."""
    views = {node.name: node for node in NODES[:nodes]}
    for name in ("gpu01", "gpu02"):
        views[name] = made.node(name, [made.busy(name, 0), *views[name].gpus[1:]])
    idle = [made.gpu("gpu03", i, "reserved", reason="reserved by alice", flags=["idle"]) for i in range(4)]
    views["gpu03"] = made.node("gpu03", idle)
    views |= {node.name: node for node in changed}
    leases = [made.lease("k3f0", "alice", [("gpu03", i) for i in range(4)]), made.lease("m2c7", "bob", [("gpu01", 0)])]
    leases[1] = msgspec.structs.replace(leases[1], until="2026-01-31T12:05:00.000Z")
    return made.scene(*views.values(), leases=leases)


def happens(app: BoardApp, *scenes: Scene) -> None:
    """Let the core look at scenes, a minute apart, as its thread does."""
    for minute, scene in enumerate(scenes):
        at = iso(seconds_of(made.AT) + 60 * minute)
        snapshot: Snapshot = msgspec.structs.replace(scene.snapshot, at=at)
        app.core.events.add(snapshot, scene.leases, 60.0 * minute)


LOST = made.node("gpu04", [made.gpu("gpu04", 0, "broken", reason="GPU lost: XID 79"), *NODES[3].gpus[1:]])
GONE = made.unread("gpu05", "ssh: connection reset")


def panel(app: BoardApp) -> OverviewPanel:
    return app.screen.query_one(OverviewPanel)


@pytest.mark.parametrize(
    ("size", "nodes", "boxes"), [((80, 24), 11, ("People",)), ((160, 48), 23, ("People", "Cluster", "Ends next"))]
)
async def test_it_takes_the_lines_below_the_rows(
    tmp_path: Path, size: tuple[int, int], nodes: int, boxes: tuple[str, ...]
) -> None:
    bad = held(LOST, GONE, nodes=nodes)
    async with made.still(tmp_path, held(nodes=nodes), size) as (app, pilot):
        happens(app, held(nodes=nodes), bad)
        await made.next_scene(app, pilot, bad)
        await settle(pilot, lambda: "╭─ Events" in screen(app))
        drawn = screen(app)
        assert all(f"╭─ {box}" in drawn for box in boxes)
        assert "lost" in drawn
        assert "unreachable gpu05" in drawn
        assert any(" alice " in line and " 4    -    4 " in line for line in drawn.splitlines())
        assert max(map(cell_len, drawn.splitlines())) <= size[0]
        shown = panel(app)
        assert shown.region.bottom == app.screen.query_one("#left").region.bottom
        # its size does not depend on readings
        lines = shown.lines
        await made.next_scene(app, pilot, made.scene(*NODES[:nodes]))
        assert panel(app).lines == lines


async def test_it_is_hidden_where_rows_need_the_room(tmp_path: Path) -> None:
    async with made.still(tmp_path, made.crowd(40), (120, 34)) as (app, pilot):
        assert not panel(app).display
        await made.next_scene(app, pilot, held(nodes=16))
        await settle(pilot, lambda: panel(app).display)
        await pilot.press("slash", "x", "y", "z")  # a filter changes nothing but the lines of its field
        await settle(pilot, lambda: "No GPU matches" in screen(app))
        assert "╭─ Events" in screen(app)
        await pilot.press("escape")
        await pilot.press("g", "g", "g")  # by user: the number of headings changes with what GPUs do
        await settle(pilot, lambda: not panel(app).display)


async def test_the_first_frame_has_it_too(tmp_path: Path) -> None:
    async with made.still(tmp_path, held(nodes=20), (120, 60)) as (app, _):
        assert panel(app).display
        frame = lines_of(draw(held(nodes=20), app.core, (120, 60)))
        for early, late in zip(frame, screen(app).splitlines(), strict=True):
            assert late.startswith(early)
        assert sum("╭─ Events" in line for line in frame) == 1


async def test_an_empty_list_of_events_names_the_reason(tmp_path: Path) -> None:
    async with made.still(tmp_path, held(), (160, 48)) as (app, pilot):
        happens(app, held(GONE), held(GONE))  # it was so from the start
        await pilot.press("v")
        await settle(pilot, lambda: "They are recorded while a board runs." in screen(app))


async def test_the_screen_lists_sorts_and_filters(tmp_path: Path) -> None:
    async with made.still(tmp_path, held(), (80, 24)) as (app, pilot):
        happens(app, held(), held(LOST), held(LOST, GONE))
        await pilot.press("v")
        await settle(pilot, lambda: isinstance(app.screen, OverviewScreen) and "unreachable" in screen(app))
        drawn = screen(app)
        assert drawn.index("12:02:00 ") < drawn.index("12:01:00 ")  # the newest first; local time is UTC in tests
        assert all(f"╭─ {box}" in drawn for box in ("Cluster", "People", "Ends next"))
        assert "5m  bob" in drawn
        assert drawn.index("alice") < drawn.index("bob ")
        await pilot.press("s")
        await settle(pilot, lambda: "GPUs held ▼" in screen(app))
        await pilot.press("down", "down", "enter")  # GPUs used
        await settle(pilot, lambda: screen(app).index("bob ") < screen(app).index("alice"))
        await pilot.press("t")
        await settle(pilot, lambda: "60 min ago" in screen(app))
        await pilot.press("slash", *"kind:unreach")
        await settle(pilot, lambda: "1 match" in screen(app))
        assert " lost " not in screen(app)
        await pilot.press("escape")
        await settle(pilot, lambda: " lost " in screen(app))
        await pilot.press("down", "enter")
        await settle(pilot, lambda: isinstance(app.screen, ClusterScreen))
        assert isinstance(app.screen, ClusterScreen)
        assert app.screen.cursor_uuid == "GPU-gpu04-0"


async def test_what_ends_later_than_there_are_lines_for_is_counted(tmp_path: Path) -> None:
    leases = [made.lease(f"k3f{index}", "alice", [("gpu03", index)]) for index in range(7)]
    async with made.still(tmp_path, made.scene(*NODES[:4], leases=leases), (80, 24)) as (app, pilot):
        await pilot.press("v")
        await settle(pilot, lambda: "╭─ Ends next" in screen(app))
        listed = sum("k3f" in line for line in screen(app).splitlines())
        assert 0 < listed < 7
        assert f"and {7 - listed} more" in screen(app)


async def test_it_counts_mig_devices_as_the_header_does(tmp_path: Path) -> None:
    sliced = made.node("gpu01", [made.mig("gpu01", 0, "free", "busy", "free"), made.gpu("gpu01", 1)])
    shown = held(sliced)  # of the other ten nodes' 40 GPUs, bob uses one and alice holds four
    async with made.still(tmp_path, shown, (160, 48)) as (app, pilot):
        app.core.history.add(shown.snapshot, seconds_of(shown.snapshot.at))
        await pilot.press("v")
        await settle(pilot, lambda: "% utilized  38 free" in screen(app))
        assert shown.sums.free == 38
        assert [round(free or 0) for free in app.core.history.cluster().free] == [38]


async def test_hostile_names_stay_in_their_cells(tmp_path: Path) -> None:
    users = [*made.HOSTILE, *map(str, range(16))]  # as many as there are a line each
    hostile = [
        made.node(f"n{number}", [made.busy(f"n{number}", 0, name, flags=["rogue"])])
        for number, name in enumerate(users)
    ]
    calm = [made.node(node.name, [made.gpu(node.name, 0)]) for node in hostile]
    async with made.still(tmp_path, made.scene(*hostile), (120, 60)) as (app, pilot):
        happens(app, made.scene(*calm), made.scene(*hostile))
        await made.next_scene(app, pilot, made.scene(*hostile))
        for keys in ((), ("v",)):
            await pilot.press(*keys)
            await settle(pilot, lambda: "rogue" in screen(app))
            lines = [line for line in screen(app).splitlines() if line.startswith(("│", "╭", "╰"))]
            assert len(lines) > 10
            assert {cell_len(line) for line in lines} == {120}
        assert len(app.screen.query_one("#events", Grid)._rows) == len(users)


async def test_in_ascii_its_frames_are_ascii(tmp_path: Path) -> None:
    async with made.still(tmp_path, held(nodes=23), (160, 48), env={"LANG": "C"}) as (app, pilot):
        happens(app, held(), held(LOST))
        await made.next_scene(app, pilot, held(LOST, nodes=23))
        assert "+- People -" in screen(app)
        await pilot.press("v")
        await settle(pilot, lambda: "+- Ends next -" in screen(app))
        assert screen(app).isascii()
