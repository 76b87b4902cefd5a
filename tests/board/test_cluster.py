"""The cluster view: picture and table, by keys and mouse; one cursor and one selection, by UUID."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len
from textual.geometry import Region
from textual.widgets import Input

from gpuboard.board.app import BoardApp
from gpuboard.board.arrange import NodeRow, ViewState, arrange_nodes
from gpuboard.board.filter.conditions import KEYS
from gpuboard.board.scene import Scene
from gpuboard.board.screens.gpu import GpuPanel, GpuScreen
from gpuboard.board.screens.node import NodeScreen
from gpuboard.board.widgets.grid import Grid
from gpuboard.board.widgets.picture import Picture
from gpuboard.board.widgets.table import GpuTable
from gpuboard.model.snapshot import JobView
from tests.board.lab import drag, screen, settle
from tests.board.made import (
    GIB,
    HOSTILE,
    at_cluster,
    awaited,
    busy,
    crowd,
    gpu,
    lease,
    mig,
    next_scene,
    node,
    scene,
    unread,
)


def lab(**changes: Any) -> Scene:
    """Return a small cluster with everything in it; ``changes`` are those of its first GPU."""
    gpus = [
        busy("gpu1", 0, **changes),
        busy("gpu1", 1, "carol", flags=["rogue"], leases=["k3f9"]),
        gpu("gpu1", 2, "reserved", leases=["k3f9"], flags=["idle"], reason="alice, 3h10m left"),
        gpu("gpu1", 3),
        gpu("gpu1", 4, "broken", reason="GPU lost"),
    ]
    old = [gpu("gpu4", index, "unknown", reason="last reading is 12 s old") for index in range(16)]
    return scene(
        node("gpu1", gpus),
        node("gpu2", [gpu("gpu2", index, name="NVIDIA L40S", memory_total=48 * GIB) for index in range(2)]),
        node("gpu3", [mig("gpu3", 0, "free", "busy"), gpu("gpu3", 1)]),
        node("gpu4", old, state="stale", age_s=12.3, error="no reading for 12 s"),
        unread("gpu5", "ssh: no route to host"),
        node("gpu10", [gpu("gpu10", 0, flags=["sick"])]),
        leases=[lease("k3f9", "alice", [("gpu1", 1), ("gpu1", 2)])],
    )


LETTERS = (120, 16)  # too few lines for wide cells


def lines(grid: Grid) -> list[str]:
    drawn = (grid.render_line(y).text.rstrip() for y in range(1, grid.size.height))
    return [line for line in drawn if line]


def status(app: BoardApp) -> str:
    return screen(app).splitlines()[-2].strip()


async def test_the_error_of_a_node_takes_the_lines_of_its_row(tmp_path: Path) -> None:
    error = "ssh: connection refused; is sshd running there, and is the port right?"
    nodes = [node(f"gpu{k}", [gpu(f"gpu{k}", index) for index in range(4)]) for k in range(1, 4)]
    async with at_cluster(tmp_path, scene(*nodes, unread("gpu4", error)), (80, 24)) as (app, _, _):
        rows = screen(app).splitlines()
        [first] = [number for number, line in enumerate(rows) if line.startswith(" gpu4 ")]
        words = " ".join(" ".join(rows[first : first + 3]).split())
        assert words == f"gpu4 unreachable {error}"


async def test_the_picture_shows_every_node_and_gpu(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), LETTERS) as (_, shown, _):
        assert [line[:61].rstrip() for line in lines(shown.grid)] == [
            "gpu1   up          B B!RzF  X                            1/5",
            "gpu2   up          F F                                   2/2",
            "gpu3   up          M1F                                   2/3",
            "gpu4   stale 12s   ? ? ? ?  ? ? ? ?  ? ? ? ?  ? ? ? ?   ?/16",
            "gpu5   unreachable ssh: no route to host",
            "gpu10  up          F+                                    1/1",
        ]
        assert lines(shown.grid)[0].split()[-8:] == [
            "36%", "H100", "80GB", "12%", "97/512G", "alice", "2,", "bob",
        ]  # fmt: skip
        assert lines(shown.grid)[3].endswith("no reading for 12 s")


@pytest.mark.parametrize(
    ("size", "below"), [((120, 40), ["GPU lost:", "fallen off", "the bus"]), ((120, 20), ["GPU lost:…"])]
)
async def test_a_wide_cell_without_readings_has_the_reason_for_that(
    tmp_path: Path, size: tuple[int, int], below: list[str]
) -> None:
    nothing = {"memory_used": None, "utilization": None, "processes": None, "temperature": None, "power": None}
    lost = gpu("gpu1", 0, "broken", reason="GPU lost: fallen off the bus", **nothing)
    nodes = node("gpu1", [lost, *(busy("gpu1", k) for k in range(1, 8))]), *crowd(5).snapshot.nodes
    async with at_cluster(tmp_path, scene(*nodes), size) as (_, shown, _):
        cells = [line[20:30].rstrip() for line in lines(shown.grid)]
        assert cells[: 1 + len(below)] == ["X", *below]


async def test_a_narrow_terminal_names_the_users_and_signs_that_matter(tmp_path: Path) -> None:
    users = node("gpu7", [*(busy("gpu7", k, "alexandra") for k in range(4)), busy("gpu7", 4, "bob")])
    async with at_cluster(tmp_path, scene(*lab().snapshot.nodes, users), (80, 24)) as (app, shown, pilot):
        drawn = lines(shown.grid)
        assert [line.split(" up ")[1].split()[-2:] for line in (drawn[0], drawn[5])] == [
            ["bob", "+1"],
            ["alex…", "+1"],
        ]
        assert status(app) == "R reserved  B busy  M mig  ? unknown  X broken  ! rogue  + sick  z idle"
        await pilot.resize_terminal(*LETTERS)
        await settle(pilot, lambda: lines(shown.grid)[5].endswith("alexandra +1"))


async def test_the_column_of_users_names_as_many_as_fit(tmp_path: Path) -> None:
    users = [f"user{k}" for k in range(8)]
    full = node("gpu7", [busy("gpu7", k, user) for k, user in enumerate(users)])
    async with at_cluster(tmp_path, scene(*crowd(40).snapshot.nodes, full), (200, 60)) as (_, shown, _):
        [row] = [line for line in lines(shown.grid) if line.startswith("gpu7 ")]
        assert ", ".join(users[:3]) in row


async def test_a_node_without_an_answer_yet_is_connecting_not_unreachable(tmp_path: Path) -> None:
    nodes = awaited("gpu1"), unread("gpu2", "ssh: no route to host")
    async with at_cluster(tmp_path, scene(*nodes)) as (app, shown, pilot):
        assert lines(shown.grid) == ["gpu1   connecting  no answer yet", "gpu2   unreachable ssh: no route to host"]
        assert "1 unreachable · 1 connecting" in screen(app)
        await pilot.press("t")
        assert [line.split(None, 2)[2] for line in lines(shown.grid)] == [
            "connecting: no answer yet", "ssh: no route to host",
        ]  # fmt: skip
        await pilot.press("t", "n")
        assert "Connection   connecting: no answer yet" in screen(app)
        assert "no GPUs known yet" in screen(app)


async def test_the_table_shows_every_gpu_and_mig_device(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (_, shown, pilot):
        await pilot.press("t")
        drawn = lines(shown.grid)
        assert len(drawn) == 5 + 2 + 4 + 16 + 1 + 1
        assert drawn[0].split() == [
            "gpu1", "0", "H100", "80GB", "━━━─", "60/80G", "90%", "540W", "64°C", "bob", "B", "busy",
            "python", "(pid", "4000)",
        ]  # fmt: skip
        assert "B! busy" in drawn[1]
        assert "Rz reserved" in drawn[2]
        assert drawn[7].split()[-5:-3] == ["1/2", "free"]
        assert " ".join(drawn[8].split()) == "0:0 3g.40gb ──── 0/40G - - - - F free made free"
        assert drawn[-2].split() == ["gpu5", "?", "ssh:", "no", "route", "to", "host"]


async def test_what_is_unknown_is_never_blank_nor_zero(tmp_path: Path) -> None:
    nothing = gpu(
        "gpu1", 0, "unknown", reason="not readable", memory_used=None, memory_total=None, utilization=None,
        temperature=None, power=None, power_limit=None, processes=None,
    )  # fmt: skip
    bare = node("gpu1", [nothing], age_s=None, cpu_percent=None, memory_used=None, memory_total=None)
    async with at_cluster(tmp_path, scene(bare, unread("gpu2"))) as (_, shown, pilot):
        drawn = [line.split() for line in lines(shown.grid)]
        assert drawn == [
            ["gpu1", "up", "?", "0/1", "H100", "80GB"],
            ["gpu2", "unreachable", "ssh:", "no", "answer", "in", "5", "s"],
        ]
        await pilot.press("t")
        line, _ = lines(shown.grid)
        assert line.split() == [
            "gpu1", "0", "?/?G", "?", "?", "?", "?", "?", "unknown", "not", "readable",
        ]  # fmt: skip


async def test_few_nodes_have_cells_with_meters_and_users(tmp_path: Path) -> None:
    one = node("gpu1", [busy("gpu1", 0, "alice", flags=["rogue"]), gpu("gpu1", 1), mig("gpu1", 2, "free", "busy")])
    few = scene(one, node("gpu2", [busy("gpu2", 0, None)], state="stale", age_s=12.0, error="no reading for 12 s"),
                unread("gpu3", "ssh: no route to host"))  # fmt: skip
    async with at_cluster(tmp_path, few, (100, 24)) as (_, shown, pilot):
        drawn = lines(shown.grid)
        assert [line.split()[:2] for line in drawn[:3]] == [["gpu1", "up"], ["H100", "80GB"], ["CPU", "╸────"]]
        assert drawn[0].split("B!")[1].split()[:-3] == ["━" * 13 + "╸─", "90%", "F", "─" * 15, "0%", "M"]
        assert drawn[1].split()[2:] == ["alice", "-", "-"]
        assert drawn[2].split()[3:] == ["│━━━━━━━━━━━━────", "60/80G", "─" * 17, "0/80G", "─" * 17, "0/80G"]
        assert drawn[3].split() == ["Mem", "━────", "97/512G", "│"]
        assert "cell: utilization, user, memory" in screen(shown.app)
        assert drawn[-1].split(None, 2)[2] == "ssh: no route to host"
        assert drawn[-2].strip() == "no reading for 12 s"
        left = len(" gpu1   up          ")
        await pilot.click(Picture, offset=(left + 24 + 3, 2))  # the second line of GPU 1
        assert shown.cursor_uuid == "GPU-gpu1-1"
        await drag(pilot, shown.grid, (left, 1), (left + 24, 2), (left + 26, 3))
        assert shown.targets() == ["GPU-gpu1-0", "GPU-gpu1-1"]
        await pilot.press("escape", "down")
        assert shown.cursor_node == "gpu2"
        await pilot.press("slash", *"state:free", "enter")
        assert len(lines(shown.grid)) > 1, "a filter changes no sizes"
        await pilot.resize_terminal(100, 8)
        await settle(pilot, lambda: len(lines(shown.grid)) == 1)


async def test_a_large_node_takes_several_rows_of_wide_cells(tmp_path: Path) -> None:
    large = node("gpu1", [busy("gpu1", index) if index in {3, 12} else gpu("gpu1", index) for index in range(16)])
    async with at_cluster(tmp_path, scene(large, node("gpu2", [gpu("gpu2", 0)])), (120, 34)) as (_, shown, pilot):
        starts = [line.split()[:3] for line in lines(shown.grid) if "━" in line or "──" in line]
        assert [start for start in starts if start[0] in {"gpu1", "GPU", "gpu2"}] == [
            ["gpu1", "up", "F"], ["GPU", "8-15", "F"], ["gpu2", "up", "F"],
        ]  # fmt: skip
        visited = []
        for key in ("right", "down", "right", "down", "up", "up"):
            await pilot.press(key)
            visited.append(shown.cursor_uuid)
        assert visited == [f"GPU-gpu{place}" for place in ("1-1", "1-9", "1-10", "2-0", "1-10", "1-2")]
        await pilot.press("slash", *"state:busy", "enter")
        assert [shown.cursor_uuid, shown.grid.index_of("node:gpu1+8")] == ["GPU-gpu1-3", 1]
        await pilot.press("slash", *" mem>90G", "enter")
        assert lines(shown.grid)[0].strip() == "No GPU matches the filter."


async def test_cells_without_readings_have_a_letter_and_a_user(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"memory_used": None, "utilization": None, "power": None, "processes": None}
    job = JobView(id="7", user="bob", partition="gpu", until=None)
    bare = node("gpu2", [gpu("gpu2", 0, "allocated", jobs=[job], **nothing), gpu("gpu2", 1, **nothing)],
                cpu_percent=None, memory_total=None)  # fmt: skip
    async with at_cluster(tmp_path, scene(bare, node("gpu1", [gpu("gpu1", 0)])), (100, 24)) as (app, shown, pilot):
        drawn = [line.split() for line in lines(shown.grid) if "gpu1" not in line][-3:]
        assert drawn == [["gpu2", "up", "A", "F", "1/2"], ["H100", "80GB", "bob"], ["no", "readings"]]
        await next_scene(app, pilot, scene(bare, msgspec.structs.replace(bare, name="gpu3")))
        assert [line.split()[:4] for line in lines(shown.grid)] == [[name, "up", "A", "F"] for name in ("gpu2", "gpu3")]


async def test_arrows_walk_over_gpus_and_keep_their_column(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), LETTERS) as (_, shown, pilot):
        visited = [shown.cursor_uuid]
        for key in (*["right"] * 3, *["down"] * 5, "up", "up", "left", "home", "left"):
            await pilot.press(key)
            visited.append(shown.cursor_uuid)
        assert visited == [
            "GPU-gpu1-0", "GPU-gpu1-1", "GPU-gpu1-2", "GPU-gpu1-3", "GPU-gpu2-1", "GPU-gpu3-1", "GPU-gpu4-3", None,
            "GPU-gpu10-0", None, "GPU-gpu4-3", "GPU-gpu4-2", "GPU-gpu1-2", "GPU-gpu1-1",
        ]  # fmt: skip
        await pilot.press("end", "up")
        assert (shown.cursor_uuid, shown.cursor_node, shown.targets()) == (None, "gpu5", [])


async def test_keys_select_in_the_picture(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (app, shown, pilot):
        assert shown.targets() == ["GPU-gpu1-0"]
        await pilot.press("space", "right", "shift+right", "shift+down")
        assert shown.targets() == ["GPU-gpu1-0", "GPU-gpu1-2", "GPU-gpu1-3", "GPU-gpu2-1"]
        await pilot.press("space")  # takes the mark away; the last of its row goes on in the next
        assert (shown.cursor_uuid, "GPU-gpu2-1" in shown.targets()) == ("GPU-gpu3-0", False)
        await pilot.press("shift+up", "shift+left")
        await pilot.pause()
        assert status(app).startswith("5 selected")
        await pilot.press("escape")
        assert shown.targets() == ["GPU-gpu2-0"]


async def test_enter_opens_the_gpu_and_n_its_node(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (app, shown, pilot):
        await pilot.press("right", "enter")
        await settle(pilot, lambda: isinstance(app.screen, GpuScreen) and app.screen.uuid == "GPU-gpu1-1")
        await pilot.press("escape", "n")
        await settle(pilot, lambda: isinstance(app.screen, NodeScreen))
        await pilot.press("escape", "end", "up", "enter")  # a node that was never read
        await settle(pilot, lambda: isinstance(app.screen, NodeScreen))
        await pilot.press("escape", "t", "home", *["down"] * 8)
        assert shown.cursor_uuid == "MIG-gpu3-0-0"
        await pilot.press("enter")
        await settle(pilot, lambda: isinstance(app.screen, GpuScreen) and app.screen.uuid == "GPU-gpu3-0")


async def test_picture_and_table_share_cursor_and_selection(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (_, shown, pilot):
        await pilot.press("space", "down", "t")
        assert shown.view.view == "table"
        assert (shown.cursor_uuid, shown.targets()) == ("GPU-gpu2-1", ["GPU-gpu1-0"])
        assert lines(shown.grid)[0].startswith("●")
        await pilot.press("space", "down", "space")  # and a MIG device, after its parent
        assert shown.targets() == ["GPU-gpu1-0", "GPU-gpu2-1", "MIG-gpu3-0-0"]
        assert shown.cursor_uuid == "MIG-gpu3-0-1"
        await pilot.press("t")
        assert shown.view.view == "picture"
        assert shown.cursor_uuid == "GPU-gpu3-0"
        assert shown.targets() == ["GPU-gpu1-0", "GPU-gpu2-1", "MIG-gpu3-0-0"]


async def test_the_selection_survives_sort_filter_group_and_what_vanishes(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (app, shown, pilot):
        await pilot.press("t", "down", "down", "space", "space")
        selected = ["GPU-gpu1-2", "GPU-gpu1-3"]
        assert shown.cursor_uuid == "GPU-gpu1-4"
        for key in ("s", "j", "enter", "S", "g", "g", "g", "g", "g", "t", "t"):
            await pilot.press(key)
            assert (shown.cursor_uuid, shown.targets()) == ("GPU-gpu1-4", selected)
        await pilot.press("slash", *"state:busy node:gpu1")
        await pilot.pause()
        assert len(lines(shown.grid)) == 2
        assert shown.targets() == selected
        await pilot.press("escape")
        assert (shown.cursor_uuid, shown.targets()) == ("GPU-gpu1-4", selected)
        await next_scene(app, pilot, scene(unread("gpu1"), node("gpu2", [gpu("gpu2", 0)])))
        assert status(app).startswith("2 selected, 2 gone")
        assert (shown.cursor_uuid, shown.targets()) == ("GPU-gpu2-0", [])  # not the cursor's instead
        await next_scene(app, pilot, lab())
        assert (shown.cursor_uuid, shown.targets()) == ("GPU-gpu1-4", selected)


async def test_the_filter_looks_through_what_is_typed(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), LETTERS) as (app, shown, pilot):
        await pilot.press("slash", *"user:carol")
        await pilot.pause()
        assert [line[:29] for line in lines(shown.grid)] == ["gpu1   up          b B!rzf  x"]
        assert status(app).startswith("1 GPU matches ")
        await pilot.press(*' "')
        await pilot.pause()
        assert "the quote is not closed" in screen(app)
        assert len(lines(shown.grid)) == 1  # the last filter that could be understood,
        assert status(app).startswith("1 GPU matches user:carol ")  # which is another than the one above the rows
        await pilot.press("backspace", "enter", "down")
        await pilot.pause()
        assert "the quote" not in screen(app)
        assert shown.grid.has_focus
        assert shown.cursor_uuid == "GPU-gpu1-1"  # the only one that matches
        await pilot.press("slash", *" nobody")
        await pilot.pause()
        assert lines(shown.grid) == ["  No GPU matches the filter.", "  Escape clears it."]
        await pilot.press("escape")
        await pilot.pause()
        assert len(lines(shown.grid)) == 6
        assert not shown.field.display


async def test_the_hint_for_filters_is_complete_and_slash_is_part_of_it(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), (80, 24)) as (app, shown, pilot):
        assert " / Filter " in screen(app)
        await pilot.press("slash", *"what:x")
        await pilot.pause()
        assert "Filter" not in screen(app).splitlines()[-1]
        for size in ((80, 24), (60, 24), (120, 40)):
            await pilot.resize_terminal(*size)
            await settle(pilot, lambda: all(f" {key}" in screen(app) for key in KEYS))
        await pilot.press("slash", "enter")
        await pilot.pause()
        assert shown.query_one("#filter", Input).value == "what:x/"
        assert " / Filter " in screen(app)


async def test_down_leads_from_the_filter_to_the_rows(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (_, shown, pilot):
        await pilot.press("slash", *"l40s", "down", "right")
        assert (shown.grid.has_focus, shown.cursor_uuid) == (True, "GPU-gpu2-1")


async def test_the_header_of_a_column_that_does_not_sort(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), (140, 40)) as (_, shown, pilot):
        await pilot.press("t")
        column = next(x for x in range(shown.grid.size.width) if shown.grid.column_at(x) == "spark")
        await pilot.click(GpuTable, offset=(column, 0))
        assert shown.view.sort == ""


@pytest.mark.parametrize("view", ["picture", "table"])
async def test_headers_and_keys_sort(tmp_path: Path, view: str) -> None:
    async with at_cluster(tmp_path, lab()) as (app, shown, pilot):
        if view == "table":
            await pilot.press("t")
        grid = shown.grid
        await pilot.click(type(grid), offset=(3, 0))
        assert (shown.view.sort, shown.view.reverse) == ("node", False)
        await pilot.click(type(grid), offset=(3, 0))
        await pilot.pause()
        assert (shown.view.sort, shown.view.reverse) == ("node", True)
        assert lines(grid)[0].strip().startswith("gpu10")
        assert "Node▼" in grid.render_line(0).text
        assert status(app).startswith("by node ▼")
        await pilot.press("S")
        assert (shown.view.sort, shown.view.reverse) == ("node", False)
        below = list(shown.orders()).index("utilization")  # the menu opens at its first order
        await pilot.press("s", *"jk", *["down"] * below, "enter")
        assert (shown.view.sort, shown.view.reverse) == ("utilization", True)
        assert lines(grid)[0].strip().startswith("gpu1 ")
        for measured in ("sm", "tensor"):
            shown.order_by(measured)
            assert (shown.view.sort, shown.view.reverse) == (measured, True)


async def test_groups_have_headings_and_count(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), LETTERS) as (_, shown, pilot):
        await pilot.press("g", "g", "g", "home")
        assert shown.view.group == "user"
        assert [line[:61].rstrip() for line in lines(shown.grid)][:11] == [
            "alice  2 GPUs  1 reserved  1 busy",
            "gpu1   up          b B!Rzf  x                            0/2",
            "bob  1 GPU  1 busy",
            "gpu1   up          B b!rzf  x                            0/1",
            "no one  6 GPUs  5 free  1 broken  1 MIG device  1 free",
            "gpu1   up          b b!rzF  X                            1/2",
            "gpu2   up          F F                                   2/2",
            "gpu3   up          M1F                                   2/2",
            "gpu10  up          F+                                    1/1",
            "unknown  16 GPUs  16 unknown  1 MIG device  1 busy",
            "gpu3   up          M0f                                   0/1",
        ]
        await pilot.press("down")
        assert shown.cursor_uuid == "GPU-gpu1-0"
        await pilot.press("t")
        device = next(line for line in shown.grid.tsv().splitlines() if "\t0:1\t" in line)
        assert device.startswith("gpu3\t")  # its GPU is in the group above
        await pilot.press("t", "g", "g")
        assert shown.view.group == "none"
        assert shown.cursor_uuid == "GPU-gpu1-0"


async def test_cursor_and_marks_are_in_one_group(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), LETTERS) as (app, shown, pilot):
        await pilot.press("space", "g", "g", "g")  # the cursor goes on
        assert (shown.targets(), shown.cursor_uuid) == (["GPU-gpu1-0"], "GPU-gpu1-1")
        ground = app.look.style("cursor").bgcolor
        assert ground is not None
        rows = shown.grid.render_lines(Region(0, 0, *shown.grid.size))
        found = [[run.text for run in row if run.style and run.style.bgcolor == ground] for row in rows]
        assert [texts for texts in found if texts] == [["B", "!"]]


async def test_a_process_on_a_mig_device_counts_once_for_its_user(tmp_path: Path) -> None:
    parts = mig("gpu1", 0, "busy", "free")
    process = busy("gpu1", 0, "dave").processes
    parts = msgspec.structs.replace(
        parts, processes=process, mig=[msgspec.structs.replace(parts.mig[0], processes=process), parts.mig[1]]
    )
    nodes = node("mig1", [parts]), *lab().snapshot.nodes, *crowd(40).snapshot.nodes
    async with at_cluster(tmp_path, scene(*nodes), (200, 60)) as (_, shown, _):
        [row] = [line for line in lines(shown.grid) if line.startswith("mig1 ")]
        assert row.rstrip().endswith(" dave")


async def test_a_node_without_gpus_is_itself_in_every_group(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (app, shown, pilot):
        app.go_to("node:gpu5")
        found = []
        for key in ("g", "g", "t", "g", "t", "g", "t", "g"):
            await pilot.press(key)
            found.append((shown.cursor_node, shown.cursor_uuid))
        assert found == [("gpu5", None)] * 8


async def test_the_view_is_kept_between_starts(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (app, shown, pilot):
        await pilot.press("t", "s", "j", "j", "enter", "S", "g", "slash", *"state:free", "enter", "q")
    async with at_cluster(tmp_path, lab()) as (app, shown, pilot):
        assert shown.view == ViewState(view="table", sort="model", reverse=True, group="node", filter="state:free")
        assert shown.field.display
        assert status(app).startswith("6 GPUs match  by model ▼  grouped by node")
        assert len(lines(shown.grid)) == 4 + 6 + 1  # headings, GPUs, and the free device of the one in MIG mode


async def test_the_status_line_counts_what_matches_as_the_header_does(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), LETTERS) as (app, shown, pilot):
        for text, words, drawn in (
            ("state:free", "6 GPUs match", "gpu3 up M1F 2/2"),
            ("state:busy", "3 GPUs match", "gpu3 up M0f 0/1"),
            ("model:3g", "2 GPUs match", "gpu3 up M1f 1/2"),
            ("state:unreachable", "1 node matches", "gpu5 unreachable"),
            ("node:gpu[3,5]", "3 GPUs and 1 node match", "gpu5 unreachable"),
            ("nothing", "0 GPUs match", "No GPU matches the filter."),
        ):
            shown.use_filter(text)
            for _ in range(2):  # as a picture and as a table
                await settle(pilot, lambda words=words: status(app).startswith(words))  # type: ignore[misc]
                if isinstance(shown.grid, Picture):
                    assert any({*drawn.split()} <= {*line.split()} for line in lines(shown.grid)), text
                await pilot.press("t")


async def test_banners_and_simulation_are_shown(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (app, _, pilot):
        assert "SIMULATED" not in screen(app)
        invented = node("sim01", [gpu("sim01", 0)], source="simulated")
        await next_scene(app, pilot, scene(invented, banners=("The ledger [x] does not answer",)))
        assert "SIMULATED" in screen(app).splitlines()[0]
        assert "The ledger [x] does not answer" in screen(app)
        cure = "set claims_dir to another folder; no GPU there counts as free"
        long = f"no reservations on 7 of 7 nodes: /scratch/claims cannot hold reservations: no such file; {cure}"
        await next_scene(app, pilot, scene(invented, banners=(long,)))
        assert cure in " ".join(screen(app).split())  # on a second line
        await next_scene(app, pilot, lab())
        assert "The ledger" not in screen(app)


async def test_a_wide_terminal_shows_the_cursors_gpu_beside(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (app, shown, pilot):
        assert not shown.query_one(GpuPanel).display
        await pilot.resize_terminal(200, 60)
        await settle(pilot, lambda: "GPU-gpu1-0" in screen(app))
        await pilot.press("right")
        await settle(pilot, lambda: "GPU-gpu1-1" in screen(app))
        await pilot.resize_terminal(80, 24)
        await settle(pilot, lambda: "GPU-gpu1" not in screen(app))
        assert len(screen(app).splitlines()[0]) <= 80
        assert "free" in screen(app).splitlines()[0] or "/" in screen(app).splitlines()[0]


async def test_a_key_moves_hides_and_shows_the_detail_pane_for_the_next_start_too(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), (200, 60)) as (app, shown, pilot):
        pane = shown.query_one(GpuPanel)
        assert (pane.region.x, pane.size.height) == (200 - 64, shown.grid.size.height)
        await pilot.press("p")
        await settle(pilot, lambda: pane.region.y > shown.grid.region.bottom - 1 and "GPU-gpu1-0" in screen(app))
        assert (shown.grid.size.width, shown.grid.cursor) == (199, "GPU-gpu1-0")
        await pilot.press("p")
        await settle(pilot, lambda: not pane.display)
        await pilot.press("q")
    async with at_cluster(tmp_path, lab(), (200, 60)) as (app, shown, pilot):
        pane = shown.query_one(GpuPanel)
        assert not pane.display
        await pilot.press("p")
        await settle(pilot, lambda: pane.display and pane.region.x > 100)
        await pilot.resize_terminal(149, 40)  # no room beside the rows
        await settle(pilot, lambda: pane.region.y > shown.grid.region.bottom - 1)
        await pilot.press("p")
        await settle(pilot, lambda: not pane.display)
        await pilot.press("p")
        await settle(pilot, lambda: pane.display and shown.view.pane == "below")


async def test_an_empty_inventory_shows_what_to_do(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, scene()) as (app, _, _):
        assert "No nodes." in screen(app)


async def test_going_to_a_gpu_takes_a_filter_away_that_hides_it(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (app, shown, pilot):
        await pilot.press("slash", *"l40s", "enter")
        app.go_to("GPU-gpu2-1")
        assert (shown.cursor_uuid, shown.view.filter) == ("GPU-gpu2-1", "l40s")
        app.go_to("node:gpu3")
        assert (shown.cursor_uuid, shown.view.filter) == ("GPU-gpu3-0", "")
        app.go_to("node:gpu5")
        assert shown.cursor_node == "gpu5"


@pytest.mark.parametrize("view", ["picture", "table"])
async def test_going_to_a_mig_device_leads_to_it_or_to_the_cell_of_its_gpu(tmp_path: Path, view: str) -> None:
    async with at_cluster(tmp_path, lab()) as (app, shown, pilot):
        if view == "table":
            await pilot.press("t")
        await pilot.press("slash", *"gpu3", "enter")
        app.go_to("MIG-gpu3-0-1")
        assert shown.cursor_uuid == ("GPU-gpu3-0" if view == "picture" else "MIG-gpu3-0-1")
        assert shown.view.filter == "gpu3"
        await pilot.press("slash", "ctrl+u", *"gpu1", "enter")
        app.go_to("MIG-gpu3-0-1")
        assert (shown.cursor_node, shown.view.filter) == ("gpu3", "")


def test_rows_by_age_keep_their_places_while_all_values_are_current() -> None:
    def names(*ages: float) -> list[str]:
        nodes = [node(f"gpu{k}", [gpu(f"gpu{k}", 0)], age_s=age) for k, age in enumerate(ages)]
        nodes.append(node("gpu9", [gpu("gpu9", 0)], state="stale", age_s=80.0))
        rows = arrange_nodes(scene(*nodes), ViewState(sort="age", reverse=True))
        return [row.node.name for row in rows if isinstance(row, NodeRow)]

    assert names(0.4, 1.6, 0.9) == names(1.7, 0.2, 1.2) == ["gpu9", "gpu0", "gpu1", "gpu2"]


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_hostile_text_leaves_columns_aligned(tmp_path: Path, size: tuple[int, int]) -> None:
    rows = [node(f"gpu{n}", [busy(f"gpu{n}", 0, text, reason=text, name=text)]) for n, text in enumerate(HOSTILE)]
    rows += [node(text, [gpu(f"n{n}", 0)], error=text) for n, text in enumerate(HOSTILE[:4])]
    rows += [unread(f"{text}-u", text) for text in HOSTILE]
    async with at_cluster(tmp_path, scene(*rows), size) as (_, shown, pilot):
        for keys in ((), ("t",), ("g", "g", "g"), ("t",)):  # the picture, the table, and both in groups
            await pilot.press(*keys)
            await pilot.pause()
            grid = shown.grid
            strips = [grid.render_line(y) for y in range(grid.size.height)]
            assert {cell_len(strip.text) for strip in strips} == {grid.scrollable_content_region.width}
            if not keys:  # columns below each other: the state of a node stands where its title does
                at = cell_len(strips[0].text.partition("State")[0])
                found = {cell_len(strip.text.partition(" up ")[0]) + 1 for strip in strips if " up " in strip.text}
                assert found == {at}


async def test_the_first_gpus_values_change_and_nothing_moves(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (app, _, pilot):
        await pilot.press("t")
        before = screen(app).splitlines()
        changes = {"utilization": 7, "memory_used": 5 * GIB, "power": 88.0, "temperature": 9}
        await next_scene(app, pilot, lab(**changes))
        after = screen(app).splitlines()
        changed = [number for number, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        assert len(changed) == 1
        line = after[changed[0]]
        assert [line.index(words) for words in (" 5/80G", "  7%", " 88W", " 9°C", "B  busy")] == [
            before[changed[0]].index(words) for words in ("60/80G", " 90%", "540W", "64°C", "B  busy")
        ]
