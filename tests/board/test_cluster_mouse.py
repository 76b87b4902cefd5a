"""The mouse over the cluster: clicks and drags in the picture and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.gpu import GpuScreen
from gpuboard.board.screens.node import NodeScreen
from gpuboard.board.widgets.pane import Summary
from gpuboard.board.widgets.picture import Picture
from tests.board.lab import drag, screen, settle
from tests.board.made import at_cluster, crowd
from tests.board.test_cluster import LETTERS, lab, status


async def test_dragging_over_the_picture_selects_a_block_of_gpus(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), LETTERS) as (app, shown, pilot):
        left = len(" gpu1   up          ")
        grid = shown.grid
        await drag(pilot, grid, (left + 2, 1), (left + 4, 1), (left + 4, 2))  # GPU 1 of gpu1, 2 of gpu2, which has none
        assert shown.targets() == ["GPU-gpu1-1", "GPU-gpu1-2", "GPU-gpu2-1"]
        assert shown.cursor_uuid == "GPU-gpu2-1"
        assert status(app).startswith("3 selected")
        await drag(pilot, grid, (left + 2 * 4 + 1, 1), (left + 2 * 4 + 1, 0), (left + 60, 1))  # more; as far as it goes
        assert shown.targets() == ["GPU-gpu1-1", "GPU-gpu1-2", "GPU-gpu1-4", "GPU-gpu2-1"]
        await drag(pilot, grid, (left + 1, 1), (left, 1))  # within one cell: a click
        assert (len(shown.targets()), shown.cursor_uuid) == (4, "GPU-gpu1-0")
        await drag(pilot, grid, (2, 1), (left, 3))  # it begins on no GPU
        assert len(shown.targets()) == 4
        await pilot.press("escape")
        await drag(pilot, grid, (left, 3), (left, 5))  # over a node of which no GPU is known
        assert [uuid for uuid in shown.targets() if "gpu4" not in uuid] == ["GPU-gpu3-0"]
        assert shown.cursor_node == "gpu5"
        await pilot.press("escape", "slash", *"state:free", "enter")
        await drag(pilot, grid, (left + 2 * 3, 1), (left, 2))
        assert shown.targets() == ["GPU-gpu1-3", "GPU-gpu2-0", "GPU-gpu2-1"]  # those that the filter leaves
        assert isinstance(app.screen, ClusterScreen)


async def test_dragging_over_the_table_selects_rows(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab()) as (_, shown, pilot):
        await pilot.press("t")
        await drag(pilot, shown.grid, (30, 5), (30, 6), (30, 7))
        assert shown.targets() == ["GPU-gpu1-4", "GPU-gpu2-0", "GPU-gpu2-1"]


async def test_the_mouse_in_the_picture(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), LETTERS) as (app, shown, pilot):
        left = len(" gpu1   up          ")
        await pilot.click(Picture, offset=(left + 2 * 4 + 1, 1))  # beyond the gap after four
        assert shown.cursor_uuid == "GPU-gpu1-4"
        await pilot.click(Picture, offset=(left + 3, 2), control=True)
        assert shown.targets() == ["GPU-gpu2-1"]
        await pilot.click(Picture, offset=(left, 2), button=3)
        assert shown.targets() == ["GPU-gpu2-0", "GPU-gpu2-1"]
        await pilot.click(Picture, offset=(left, 5))
        assert shown.cursor_node == "gpu5"
        await pilot.click(Picture, offset=(2, 1))
        assert shown.cursor_node == "gpu1"
        await pilot.click(Picture, offset=(left + 2, 1), times=2)
        await settle(pilot, lambda: isinstance(app.screen, GpuScreen) and app.screen.uuid == "GPU-gpu1-1")
        await pilot.press("escape")
        await pilot.click(Picture, offset=(2, 2), times=2)
        await settle(pilot, lambda: isinstance(app.screen, NodeScreen))


@pytest.mark.parametrize("view", ["picture", "table"])
async def test_what_the_user_sorted_for_is_at_the_top(tmp_path: Path, view: str) -> None:
    async with at_cluster(tmp_path, crowd(60), (80, 24)) as (app, shown, pilot):
        if view == "table":
            await pilot.press("t")
        grid = shown.grid
        title = (screen(app).splitlines()[1].index("Node"), 0)
        for first in ("gpu0001", "gpu0060"):
            await pilot.press("end", "up", "up")
            await settle(pilot, lambda: grid.scroll_offset.y > 0)
            await pilot.click(grid, offset=title)
            await settle(pilot, lambda: grid.scroll_offset.y == 0)
            assert grid.render_line(1).text.split()[0] == first
            assert (shown.cursor_node or "?") in screen(app), "the cursor is among the first rows"
        await pilot.press("end", "S")
        await settle(pilot, lambda: grid.scroll_offset.y == 0)


async def test_every_title_of_the_picture_sorts(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), LETTERS) as (app, shown, pilot):
        titles = shown.grid.render_line(0).text
        for title, sort in (("Node", "node"), ("State", "age"), ("0 1", "state"), ("Free", "free-gpus")):
            await pilot.click(Picture, offset=(titles.index(title) + 1, 0))
            await pilot.pause()
            assert shown.view.sort == sort
        assert "▼Free" in shown.grid.render_line(0).text
        assert status(app).startswith("by free GPUs ▼")


async def test_a_click_on_a_count_of_the_header_shows_only_these(tmp_path: Path) -> None:
    async with at_cluster(tmp_path, lab(), (160, 40)) as (app, shown, pilot):
        counts = screen(app).splitlines()
        for row, words, wanted, matching in (
            (1, "2 busy", 'model="H100 80GB" state:busy,occupied', "2 GPUs match"),
            (0, "1 unreachable", "state:unreachable", "1 node matches"),
            (1, "2 free of 2", "model=L40S state:free", "2 GPUs match"),
            (1, "H100 80GB 3g", 'model="H100 80GB 3g.40gb" state:free', "1 GPU matches"),
            (1, "3 free", 'model="H100 80GB" state:free', "3 GPUs match"),
        ):
            await pilot.click(Summary, offset=(counts[row].index(words), row))
            await settle(pilot, lambda wanted=wanted: shown.view.filter == wanted)  # type: ignore[misc]
            assert shown.grid.has_focus
            await settle(pilot, lambda matching=matching: status(app).startswith(matching))  # type: ignore[misc]
        await pilot.click(Summary, offset=(counts[0].index("nodes"), 0))  # counts no GPUs
        await pilot.click(Summary, offset=(counts[1].index("3 free"), 1))
        await settle(pilot, lambda: not shown.view.filter)
        assert not shown.field.is_open
