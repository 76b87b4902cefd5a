"""The view of a single node: meters that fill the screen, processes, and the keys of the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from gpuboard.board.scene import Scene
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.text.single_node import host_lines
from gpuboard.board.theme.styles import UNICODE
from gpuboard.board.widgets.single_node import MeterGrid, ProcessGrid, SingleNode
from gpuboard.board.widgets.table import GpuTable
from gpuboard.model.gpu import GpuState, Sensors
from gpuboard.model.snapshot import ProcessView
from tests.board.lab import screen, settle
from tests.board.made import GIB, at_cluster, busy, gpu, lease, mig, next_scene, node, scene, unread


def eight(**changes: object) -> Scene:
    """Return a node of eight GPUs, two of them busy."""
    gpus = [busy("dgx", 0, "alice"), busy("dgx", 1, "bob", flags=["rogue"], power=665.0)]
    made = node("dgx", [*gpus, *(gpu("dgx", index) for index in range(2, 8))], load1=3.5)
    return scene(msgspec.structs.replace(made, **changes), leases=[lease("k3f9", "alice", [("dgx", 0)])])


def divided(*users: str, beside: Sequence[ProcessView] = ()) -> Scene:
    """Return a node with a GPU in MIG mode: a free device and one for each user; ``beside``: processes of no device."""
    taken: GpuState = "busy"
    split = mig("dgx", 0, "free", *[taken] * len(users))
    found = [ProcessView(7 + k, user, "train", GIB, "compute") for k, user in enumerate(users)]
    devices = [
        split.mig[0],
        *(msgspec.structs.replace(split.mig[k + 1], processes=[one]) for k, one in enumerate(found)),
    ]
    held = msgspec.structs.replace(split, mig=devices, processes=[*found, *beside])
    return eight(gpus=[held, gpu("dgx", 1)])


opened = partial(at_cluster, size=(120, 34))


def rows(shown: ClusterScreen) -> list[str]:
    grid = shown.grid
    return [grid.render_line(y).text.rstrip() for y in range(1, grid.size.height)]


async def test_host_gpus_and_processes_are_on_one_screen(tmp_path: Path) -> None:
    async with opened(tmp_path, eight()) as (app, shown, _):
        lines = screen(app).splitlines()
        assert lines[2].split()[:2] == ["dgx", "CPU"]
        assert {"12%", "3.50", "580.159.04"} <= set(lines[2].split())
        first, reason, second = rows(shown)[:3]
        assert first.split()[:3] == ["0", "B", "busy"]
        assert first.split()[-1] == "alice"
        for value in ("90%", "60/80G", "540/700W", "64°C"):
            assert value in first
        assert reason.split(None, 2)[2] == "python (pid 4000)"
        assert "B! busy" in second
        processes = [line.split() for line in lines if line.endswith("python train.py")]
        assert [words[:4] for words in processes] == [["0", "alice", "4000", "60G"], ["1", "bob", "4001", "60G"]]
        assert "rogue" in processes[1]


async def test_processes_of_mig_devices_that_a_filter_hides_are_not_listed(tmp_path: Path) -> None:
    async with opened(tmp_path, divided("alice", "bob")) as (_, shown, pilot):
        processes = shown.query_one(ProcessGrid)
        for text, users in (("", {"alice", "bob"}), ("user:alice", {"alice"}), ("state:free", set())):
            shown.use_filter(text)
            await pilot.pause()
            drawn = "\n".join(processes.render_line(y).text for y in range(processes.size.height))
            assert {user for user in ("alice", "bob") if user in drawn} == users
        assert "no process on these GPUs" in drawn


async def test_processes_of_a_gpu_that_is_in_several_groups_are_listed_once(tmp_path: Path) -> None:
    of_no_device = ProcessView(9, "carol", "serve", GIB, "compute")
    async with opened(tmp_path, divided("alice", "bob", beside=[of_no_device])) as (_, shown, pilot):
        await pilot.press("g", "g", "g")
        assert shown.view.group == "user"
        await settle(pilot, lambda: sum(line.startswith("0:") for line in map(str.strip, rows(shown))) == 3)
        processes = shown.query_one(ProcessGrid)
        drawn = [processes.render_line(y).text.split()[:2] for y in range(1, processes.size.height)]
        assert [words for words in drawn if words] == [["0", "carol"], ["0:1", "alice"], ["0:2", "bob"]]


async def test_the_pane_is_whole(tmp_path: Path) -> None:
    async with opened(tmp_path, eight(), size=(100, 44)) as (app, _, pilot):
        for size in ((100, 44), (120, 50), (160, 48)):  # the pane is below, below, at the right
            await pilot.resize_terminal(*size)
            await settle(pilot, lambda: "Not readable ECC" in screen(app))
            assert all(words in screen(app) for words in ("Utilization", " Processes", "Links  ", "python train.py"))


@pytest.mark.parametrize("cells", [100, 120, 96])
def test_the_host_line_does_not_move_with_its_values(cells: int) -> None:
    values = [
        {"cpu_percent": 2.0, "load1": 0.5, "memory_used": 5 * GIB, "memory_total": 1024 * GIB},
        {"cpu_percent": 100.0, "load1": 88.25, "memory_used": 1000 * GIB, "memory_total": 1024 * GIB},
    ]
    shown = []
    for some in values:
        [line] = host_lines(node("dgx", [gpu("dgx", 0)], **some), UNICODE, cells)
        words = "".join(text for text, _ in line)
        assert len(words) <= cells - 2
        shown.append([words.find(word) for word in ("CPU ", "load", "memory", " of 1024 GiB", "driver", "CUDA")])
    assert shown[0] == shown[1]


def test_the_host_line_leaves_out_only_what_does_not_fit() -> None:
    full = {"cpu_percent": 58.0, "load1": 72.87, "memory_used": 447 * GIB, "memory_total": 1024 * GIB, "cuda": "13.0"}
    [line] = host_lines(node("dgx-a1", [gpu("dgx-a1", 0)], **full), UNICODE, 80)
    words = "".join(text for text, _ in line)
    assert len(words) <= 80
    assert re.sub("[━─ ]+", " ", words) == " dgx-a1 CPU 58% load 72.87 driver 580.159.04 CUDA 13.0"


async def test_the_last_line_of_a_row_has_what_the_driver_reports_besides(tmp_path: Path) -> None:
    reports = [Sensors(performance_state=0, sm_clock=1980, fan=34), Sensors(performance_state=12, sm_clock=345), None]
    gpus = [busy("dgx", at, "chrysanthemum", sensors=read) for at, read in enumerate(reports)]
    gpus += [gpu("dgx", at) for at in range(3, 8)]
    reason = "chrysanthemum: python (pid 400{})"  # its column cuts the name
    expected = [reason.format(0) + " P0 1980 MHz fan 34%", reason.format(1) + " P12 345 MHz", reason.format(2)]
    async with opened(tmp_path, eight(gpus=gpus), size=(120, 34)) as (_, shown, pilot):
        for size in ((120, 34), (160, 48)):  # rows of two lines, with a curve beside them, and of four
            await pilot.resize_terminal(*size)
            lines = [" ".join(re.sub("[⠀-⣿]", "", line).split()[2:]) for line in rows(shown)]  # no model, no curve
            assert [line for line in lines if line.startswith("chrysanthemum:")] == expected


async def test_rows_are_as_tall_as_the_screen_allows(tmp_path: Path) -> None:
    sizes = {(80, 24): 1, (120, 34): 2, (120, 38): 3, (160, 48): 4, (220, 70): 7}
    indexes = [str(index) for index in range(8)]
    async with opened(tmp_path, eight(), size=(80, 24)) as (app, shown, pilot):
        for size, tall in sizes.items():
            await pilot.resize_terminal(*size)
            assert [line.split()[0] for line in rows(shown)[::tall]] == indexes
            drawn = screen(app).splitlines()
            assert max(map(len, drawn)) <= size[0]
            assert sum("python train.py" in line for line in drawn) >= 2
        # What the GPUs read and how many processes there are moves nothing.
        await next_scene(app, pilot, eight(gpus=[gpu("dgx", index) for index in range(8)]))
        for size, tall in sizes.items():
            await pilot.resize_terminal(*size)
            assert [line.split()[0] for line in rows(shown)[::tall]] == indexes


async def test_rows_of_two_lines_have_a_curve_of_two_lines_beside_the_reason(tmp_path: Path) -> None:
    long = busy("dgx", 0, "alice", reason="alice: python " + "x" * 200)
    shot = eight(gpus=[long, *(gpu("dgx", index) for index in range(1, 8))])
    async with opened(tmp_path, shot) as (app, shown, pilot):
        for second in range(300):
            idle = eight(gpus=[gpu("dgx", index) for index in range(8)])
            app.core.history.add((shot if second > 150 else idle).snapshot, 1e9 + second)
        await next_scene(app, pilot, shot)
        grid = shown.grid
        start = next(x for x in range(grid.size.width) if grid.column_at(x) == "trace")
        first, second_line = (grid.render_line(y).text for y in (1, 2))
        assert re.fullmatch(r" +[⠀-⣿]+ alice *", first[start:])
        assert re.fullmatch(r"[⠀-⣿]+ *", second_line[start:])
        assert second_line[:start].endswith("xxx… ")


async def test_a_long_reason_has_the_room_that_curves_leave_and_moves_no_row(tmp_path: Path) -> None:
    sick = ["2 uncorrected ECC errors since the driver was loaded", "XID 94: contained ECC error"]
    gpus = [busy("dgx", 0, "bob", sick=sick, sensors=Sensors(0, 1980)), *(gpu("dgx", at) for at in range(1, 8))]
    async with opened(tmp_path, eight(gpus=gpus)) as (_, shown, pilot):
        found = {}
        for size, tall in (((120, 34), 2), ((160, 48), 4)):
            await pilot.resize_terminal(*size)
            lines = rows(shown)
            assert [line.split()[0] for line in lines[: 8 * tall : tall]] == [str(at) for at in range(8)]
            found[tall] = lines[:tall]
        model, reason = "     H100 80GB   ", f"sick ({'; '.join(sick)}); bob: python (pid 4000)"
        assert found[2][1].startswith(f"{model}{reason[:85]}"), "no curve yet: its cell is free"
        assert found[4][1].split()[:2] == ["5", "min"]
        first, second = (line.removeprefix(model) for line in found[4][2:])
        assert re.sub(" +", " ", f"{first} {second}") == f"{reason} P0 1980 MHz"


async def test_rows_without_reasons_have_that_of_the_cursor_below(tmp_path: Path) -> None:
    held = gpu("dgx", 1, "reserved", reason="carol, 4h55m left: debug the loader", flags=["idle"])
    shot = eight(gpus=[busy("dgx", 0, "bob", sick=["XID 94"]), held, *(gpu("dgx", at) for at in range(2, 8))])
    async with opened(tmp_path, shot, size=(80, 24)) as (app, _, pilot):

        def below() -> list[str]:
            lines = screen(app).splitlines()
            at = next(number for number, line in enumerate(lines) if line.split()[:2] == ["GPU", "User"])
            return [lines[at - 2].split()[0], lines[at - 1].strip()]

        assert below() == ["7", "GPU 0  sick (XID 94); bob: python (pid 4000)"]
        await pilot.press("down")
        await settle(pilot, lambda: below() == ["7", "GPU 1  carol, 4h55m left: debug the loader"])
        await next_scene(app, pilot, eight(gpus=[gpu("dgx", at) for at in range(8)]))
        assert below() == ["7", "GPU 1  no process, no reservation"]
        await pilot.resize_terminal(80, 40)
        await pilot.press("p")
        await settle(pilot, lambda: " dgx  GPU 1  NVIDIA" in screen(app))
        assert screen(app).count("no process, no reservation") == 1, "in the pane"
        await pilot.press("p")
        for size in ((80, 14), (140, 24), (120, 34)):  # too few lines; a column has reasons; each row has its own
            await pilot.resize_terminal(*size)
            await settle(pilot, lambda: "GPU 1  no" not in screen(app))


async def test_a_meter_is_as_long_as_its_value(tmp_path: Path) -> None:
    halves = [gpu("dgx", 0, utilization=50, memory_used=40 * GIB, power=350.0, power_limit=700.0)]
    async with opened(tmp_path, scene(node("dgx", halves)), size=(200, 30)) as (_, shown, _):
        line = rows(shown)[0]
        assert line.count("━") == pytest.approx(line.count("─"), abs=2)
        assert line.count("━") > 20


async def test_unknown_is_a_question_mark_and_no_meter(tmp_path: Path) -> None:
    nothing = gpu(
        "dgx", 0, "unknown", reason="not readable", memory_used=None, memory_total=None, utilization=None,
        temperature=None, power=None, power_limit=None, processes=None,
    )  # fmt: skip
    bare = node("dgx", [nothing], age_s=None, cpu_percent=None, memory_used=None, memory_total=None)
    async with opened(tmp_path, scene(bare), size=(80, 12)) as (_, shown, _):
        assert rows(shown)[0].split() == ["0", "?", "unknown", "?", "?/?G", "?W", "?", "?"]


async def test_keys_and_mouse_act_on_whole_rows(tmp_path: Path) -> None:
    async with opened(tmp_path, eight()) as (app, shown, pilot):
        await pilot.press("down", "space")
        assert shown.targets() == ["GPU-dgx-1"]
        assert shown.cursor_uuid == "GPU-dgx-2"
        await pilot.click(MeterGrid, offset=(30, 1 + 2 * 5 + 1))  # the second line of GPU 5
        await settle(pilot, lambda: shown.cursor_uuid == "GPU-dgx-5")
        await pilot.click(ProcessGrid, offset=(40, 0))  # the titles of the processes
        await pilot.pause()
        assert shown.view.sort == ""
        await pilot.press("end", "enter")
        await settle(pilot, lambda: "GPU 7" in screen(app))


async def test_small_terminals_scroll_to_the_cursor(tmp_path: Path) -> None:
    many = scene(node("dgx", [gpu("dgx", index) for index in range(16)]))
    async with opened(tmp_path, many, size=(80, 12)) as (_, shown, pilot):
        await pilot.press("end")
        await settle(pilot, lambda: any(line.split()[:1] == ["15"] for line in rows(shown)))
        await pilot.press("home")
        await settle(pilot, lambda: rows(shown)[0].split()[0] == "0")


async def test_mig_devices_filter_and_groups(tmp_path: Path) -> None:
    parts = scene(node("dgx", [mig("dgx", 0, "free", "busy"), busy("dgx", 1, "bob")]))
    async with opened(tmp_path, parts) as (app, shown, pilot):
        await pilot.press("down")
        assert shown.cursor_uuid == "MIG-dgx-0-0"
        await pilot.press("slash", *"user:bob", "enter")
        await settle(pilot, lambda: shown.cursor_uuid == "GPU-dgx-1")
        await pilot.press("escape", "g", "g", "g")
        await settle(pilot, lambda: any(line.strip().startswith("bob  1 GPU") for line in rows(shown)))
        await pilot.press("g", "g", "t")
        assert isinstance(shown.grid, GpuTable)
        assert shown.cursor_uuid == "MIG-dgx-0-0"  # where the user put it before the filter
        assert not app.screen.query_one(SingleNode).display


async def test_mig_devices_have_their_numbers_and_columns_stay_aligned(tmp_path: Path) -> None:
    parts = scene(node("dgx", [mig("dgx", 10, "free", "busy"), busy("dgx", 11, "bob")]))
    async with opened(tmp_path, parts, size=(80, 24)) as (_, shown, pilot):
        for size in ((80, 24), (80, 24), (160, 48), (160, 48)):  # the picture, then the table
            await pilot.resize_terminal(*size)
            lines = [line for line in rows(shown) if re.search(r"\b1[01](:[01])? ", line)]
            numbers = [re.search(r"\b1[01](?::[01])?(?= )", line) for line in lines]
            assert [found and found[0] for found in numbers] == ["10", "10:0", "10:1", "11"]
            assert len({found.end() for found in numbers if found}) == 1
            await pilot.press("t")


async def test_what_is_wrong_with_the_node_is_said(tmp_path: Path) -> None:
    async with opened(tmp_path, scene(unread("dgx", "ssh: no route to host"))) as (app, shown, pilot):
        assert screen(app).count("ssh: no route to host") == 1
        assert rows(shown)[0].split() == ["-", "unreachable"]
        assert shown.cursor_node == "dgx"
        stale = eight(state="stale", age_s=42.0, error="no reading for 42 s")
        await next_scene(app, pilot, stale)
        lines = screen(app).splitlines()
        assert "stale, read 42s ago" in lines[2]
        assert lines[3].strip() == "no reading for 42 s"


async def test_a_second_node_brings_the_letters(tmp_path: Path) -> None:
    async with opened(tmp_path, eight()) as (app, shown, pilot):
        await pilot.press("down")
        two = scene(*eight().snapshot.nodes, node("other", [gpu("other", 0)]))
        await next_scene(app, pilot, two)
        assert rows(shown)[0].split()[:3] == ["dgx", "up", "B"]
        await pilot.press("down")
        await settle(pilot, lambda: shown.cursor_uuid == "GPU-other-0")
        await next_scene(app, pilot, eight())
        assert isinstance(shown.grid, MeterGrid)
        assert shown.grid.has_focus
