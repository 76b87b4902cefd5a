"""The columns of the table: the usual ones, and those that a user has chosen, ordered and sized."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.style import Style

from gpuboard.board import preferences
from gpuboard.board.app import BoardApp
from gpuboard.board.dialogs.columns import ColumnList, ColumnsDialog
from gpuboard.board.screens.node import NodeScreen
from gpuboard.board.tables.columns import ABOUT, COLUMNS, USUAL, ColumnChoice, choices, layout
from gpuboard.board.text.rows import header_runs, share
from gpuboard.board.theme.styles import UNICODE, Look
from gpuboard.board.widgets.table import GpuTable
from gpuboard.model.lease import LeaseGpu
from gpuboard.model.snapshot import JobView
from tests.board import lab, made
from tests.board.made import busy, gpu, lease, mig, next_scene, node, scene, still, unread

CLUSTER = scene(
    node(
        "gpu1",
        [
            busy("gpu1", 0, "bob"),
            gpu("gpu1", 1, "reserved", reason="alice, 3h10m left: ablation", leases=["k3f9"]),
            gpu("gpu1", 2),
        ],
    ),
    node(
        "gpu2",
        [busy("gpu2", 0, "carol"), gpu("gpu2", 1, "unknown", reason="last reading is 42 s old")],
        state="stale", age_s=42.0, error="no new reading",
    ),
    unread("gpu3"),
    leases=[lease("k3f9", "alice", [("gpu1", 1)])],
)  # fmt: skip


def drawn(app: BoardApp) -> list[str]:
    table = app.screen_stack[1].query_one(GpuTable)
    return [table.render_line(y).text.strip() for y in range(1 + len(table._rows))]


def titles(app: BoardApp) -> list[str]:
    return drawn(app)[0].split()


async def test_nothing_is_said_twice_and_reasons_have_room(tmp_path: Path) -> None:
    async with still(tmp_path, CLUSTER, (80, 24)) as (app, pilot):
        await pilot.press("t")
        for size in ((80, 24), (120, 34), (160, 48)):
            await pilot.resize_terminal(*size)
            shown = drawn(app)
            assert {"Age", "Model"}.isdisjoint(titles(app))
            assert [line.partition(" busy ")[2].strip() for line in shown if " busy " in line] == [
                "python (pid 4000)", "42s old: python (pid 4000)" if size[0] > 80 else "42s old: python (pid 40…",
            ]  # fmt: skip
            assert "3h10m left: ablation" in shown[2]
            assert shown[5].endswith("last reading is 42 s old")
            room = cell_len(shown[0]) - shown[0].index("Reason")
            assert shown[6].split() == ["gpu3", "?", "ssh:", "no", "answer", "in", "5", "s"]
            assert room > 0


async def test_the_model_is_a_column_where_gpus_have_several_or_mig_devices(tmp_path: Path) -> None:
    async with still(tmp_path, CLUSTER, (120, 34)) as (app, pilot):
        await pilot.press("t")
        assert "Model" not in titles(app)
        await next_scene(app, pilot, scene(node("gpu1", [gpu("gpu1", 0), gpu("gpu1", 1, name="NVIDIA L40S")])))
        assert "Model" in titles(app)
        await next_scene(app, pilot, scene(node("gpu1", [gpu("gpu1", 0), mig("gpu1", 1, "free")])))
        assert "Model" in titles(app)


async def test_columns_are_hidden_moved_and_sized_and_kept(tmp_path: Path) -> None:
    async with still(tmp_path, CLUSTER, (80, 24)) as (app, pilot):
        await pilot.press("C")
        await pilot.pause()
        assert isinstance(app.screen, ColumnsDialog)
        for words in ("Columns of the table", "space: show, hide", "Cancel", "Keep"):
            assert words in lab.screen(app)
        assert drawn(app)[0].startswith("Node")  # the table is behind the dialog, in place of the picture
        await pilot.press("down", "space")  # no index
        await pilot.pause()
        assert titles(app)[:2] == ["Node", "Memory"]  # the model has no room beside the reason
        columns = app.screen.query_one(ColumnList)
        columns.cursor = "user"
        await pilot.press(*["left"] * 8)
        columns.cursor = "user"
        await pilot.press("minus", "minus")
        await pilot.pause()
        assert titles(app)[:2] == ["User", "Node"]
        assert drawn(app)[1].index("gpu1") == 9  # 8 cells and a gap
        columns.cursor = "uuid"
        await pilot.press("space")
        assert columns.cursor == "uuid"
        await pilot.pause()
        assert "no room" in lab.screen(app)
        assert "UUID" not in titles(app)
        await pilot.press("enter")
        await pilot.pause()
        assert app.preferences.columns[:3] == ("user:8", "node", "model")
        app.leave(0)
    kept, wrong = preferences.load(app.core.env)
    assert (wrong, kept.columns) == (None, app.preferences.columns)


async def test_escape_undoes_and_backspace_resets(tmp_path: Path) -> None:
    async with still(tmp_path, CLUSTER, (120, 34)) as (app, pilot):
        await pilot.press("t")
        before = drawn(app)
        await pilot.press("C", "space", "down", "space", "right", "plus", "escape")
        await pilot.pause()
        assert (drawn(app), app.preferences.columns) == (before, ())
        await pilot.press("C", "space", "enter")
        await pilot.pause()
        assert titles(app)[0] == "GPU"
        assert drawn(app)[6].startswith("gpu3  ssh: no answer")  # without its column the node is still named
        await pilot.press("C", "backspace", "enter")
        await pilot.pause()
        assert (drawn(app), app.preferences.columns) == (before, ())


async def test_going_elsewhere_undoes(tmp_path: Path) -> None:
    async with still(tmp_path, CLUSTER, (120, 34)) as (app, pilot):
        await pilot.press("t")
        before = titles(app)
        await pilot.press("C", "space")
        app.go_to("node:gpu1")  # as the palette does
        await pilot.pause()
        assert (len(app.screen_stack), titles(app)) == (2, before)


async def test_one_column_stays_and_the_mouse_works(tmp_path: Path) -> None:
    async with still(tmp_path, CLUSTER, (120, 40)) as (app, pilot):
        await pilot.press("C")
        await pilot.pause()
        columns = app.screen.query_one(ColumnList)
        await pilot.click(ColumnList, offset=(0, 2))  # the mark of the second row
        await pilot.pause()
        assert "index" not in columns.marks
        for key in USUAL:
            if key in columns.marks:
                columns.cursor = key
                await pilot.press("space")
        await pilot.pause()
        assert columns.marks == {"reason"}
        assert lab.told(app, "a table has at least one column")
        assert titles(app) == ["Reason"]
        assert drawn(app)[1] == "bob: python (pid 4000)"  # named here where no column does
        await pilot.click("#keep")
        await pilot.pause()
        assert app.preferences.columns == ("reason",)


async def test_columns_by_the_palette_and_with_thousands_of_rows(tmp_path: Path) -> None:
    async with still(tmp_path, made.crowd(1000), (160, 48)) as (app, pilot):
        await pilot.press("ctrl+p", *"columns")
        await pilot.pause()
        await lab.settle(pilot, lambda: "Columns" in lab.screen(app))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: isinstance(app.screen, ColumnsDialog))


def test_what_was_kept_is_read_leniently() -> None:
    assert choices(["node", "user:14", "gone", "node:3", "index:x", "uuid:9999", "power:1", "age:٣"]) == [
        ColumnChoice("node", 3),
        ColumnChoice("user", 14),
        ColumnChoice("index"),
        ColumnChoice("uuid"),
        ColumnChoice("power", 3),
        ColumnChoice("age"),
    ]
    assert [str(choice) for choice in choices(["user:14", "node"])] == ["user:14", "node"]


def test_the_reason_has_its_room_at_every_width() -> None:
    for chosen in ((), tuple(ColumnChoice(key) for key in COLUMNS)):
        for space in range(60, 220):
            columns = layout(CLUSTER, space, chosen)
            always = sum(column.width + 1 for column in columns if not column.drop)
            reason = next(column for column in columns if column.key == "reason")
            assert reason.least == max(12, min(30, space - always))


@pytest.mark.parametrize("chosen", [(), tuple(ColumnChoice(key) for key in COLUMNS)])
def test_the_mark_of_the_order_belongs_to_one_title(chosen: tuple[ColumnChoice, ...]) -> None:
    for space in (80, 100, 120, 160, 240):
        columns = layout(CLUSTER, space, chosen)
        widths = share(columns, space)
        for column in (columns[index] for index in widths):
            [(line, _)] = header_runs(
                columns, widths, (column.key, True), indent=0, width=space, base=Style(), look=Look({}, UNICODE)
            )
            assert re.search(rf"(^| )(▼{column.title}|{column.title}▼)( |$)", line), line


async def test_every_column_has_a_description_and_cells(tmp_path: Path) -> None:
    assert ABOUT.keys() == COLUMNS.keys()
    split = scene(node("gpu1", [busy("gpu1", 0, "bob"), mig("gpu1", 1, "free")]))
    async with still(tmp_path, split, (250, 40)) as (app, pilot):
        await pilot.press("t")
        app.screen_stack[1].query_one(GpuTable).choose([ColumnChoice(key, 12) for key in COLUMNS])
        await pilot.pause()
        assert titles(app)[:3] == ["Node", "GPU", "Model"]
        assert len(drawn(app)) == 4  # the header, two GPUs, a MIG device


async def test_users_of_mig_devices_are_named_on_every_screen(tmp_path: Path) -> None:
    held = mig("gpu1", 0, "reserved", "allocated", "busy", "free")
    devices = [
        msgspec.structs.replace(device, reason=reason, jobs=jobs)
        for device, reason, jobs in zip(
            held.mig,
            ["alice, 2h left: notebook", "job 12 of bob in gpu", "python (pid 7)", "no process, no reservation"],
            [[], [JobView("12", "bob", "gpu", None)], [], []],
            strict=True,
        )
    ]
    split = node("gpu1", [msgspec.structs.replace(held, mig=devices)])
    on_device = msgspec.structs.replace(lease("k3f9", "alice", []), gpus=[LeaseGpu("gpu1", 0, devices[0].uuid)])
    async with still(tmp_path, scene(split, node("gpu2", [gpu("gpu2", 0)]), leases=[on_device])) as (app, pilot):
        assert "alice, bob" in lab.screen(app)  # in the cell of the picture
        await pilot.press("t")
        rows = [" ".join(line.split()) for line in drawn(app)[2:6]]
        assert [row.split(" - - - ")[1] for row in rows] == [
            "alice R reserved 2h left: notebook",
            "bob A allocated job 12 in gpu",
            "? B busy python (pid 7)",
            "- F free no process, no reservation",
        ]
        await app.push_screen(NodeScreen("gpu1"))
        await lab.settle(pilot, lambda: lab.shown(app, "0:1 A allocated bob"))
        assert lab.shown(app, "job 12 in gpu")
