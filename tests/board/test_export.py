"""What leaves the board: pictures of the screen in files, lists on the clipboard."""

from __future__ import annotations

import os
import re
import time
from html import unescape
from pathlib import Path

import pytest
from textual.pilot import Pilot

from gpuboard.board.app import BoardApp
from gpuboard.board.terminal import screenshot
from gpuboard.board.widgets.grid import Grid
from gpuboard.errors import GpuboardError
from gpuboard.model.snapshot import ProcessView
from tests.board import lab, made
from tests.board.made import busy, gpu, lease, mig, node, scene, still, unread

CLUSTER = scene(
    node("gpu1", [busy("gpu1", 0), gpu("gpu1", 1, "reserved", reason="alice, 3h10m left"), mig("gpu1", 2, "free")]),
    unread("gpu2"),
    leases=[lease("k3f9", "alice", [("gpu1", 1)])],
)


async def saved(app: BoardApp, pilot: Pilot[int], *keys: str) -> str:
    before = len(lab.toasts(app))
    await pilot.press(*keys)
    await lab.settle(pilot, lambda: len(lab.toasts(app)) > before)
    return lab.toasts(app)[-1]


async def test_the_screen_is_saved_as_a_picture_and_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    async with still(tmp_path, CLUSTER, (80, 24)) as (app, pilot):
        shown = lab.screen(app)
        toast = await saved(app, pilot, "ctrl+s")
        [picture] = here.glob("gpuboard-cluster-*.svg")
        assert toast == f"Saved: {picture}"
        assert picture.stat().st_mode & 0o777 == 0o600
        svg = picture.read_text()
        words = " ".join(unescape(text) for text in re.findall(r"<text [^>]*>([^<]*)</text>", svg)).replace("\xa0", " ")
        assert "no answer in 5 s" in words
        assert re.findall(r"https?://[^\s\"')]+", svg) == ["http://www.w3.org/2000/svg"]
        await pilot.press("l")
        await pilot.pause()
        shown = lab.screen(app)
        await saved(app, pilot, "alt+s")
        [text] = here.glob("gpuboard-leases-*.txt")
        lines = text.read_text().splitlines()
        assert (len(lines), [line for line in shown.splitlines() if "k3f9" in line]) == (
            24, [line for line in lines if "k3f9" in line],
        )  # fmt: skip


async def test_messages_over_the_screen_are_not_saved_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with still(tmp_path, CLUSTER, (80, 24), toasts=True) as (app, pilot):
        for number in range(3):
            app.notify(f"message {number} over the rows")
        await lab.settle(pilot, lambda: "message 2 over" in lab.screen(app))
        await saved(app, pilot, "alt+s")
        [text] = tmp_path.glob("gpuboard-cluster-*.txt")
        assert "gpu1" in text.read_text()
        assert "message" not in text.read_text()


async def test_a_dialog_opens_without_messages_over_its_buttons(tmp_path: Path) -> None:
    async with still(tmp_path, CLUSTER, (80, 24), toasts=True) as (app, pilot):
        app.notify("older than the dialog")
        await lab.settle(pilot, lambda: "older than" in lab.screen(app))
        await pilot.press("r")
        await lab.settle(pilot, lambda: "Cancel" in lab.screen(app))
        assert "older than" not in lab.screen(app)


async def test_a_dialog_is_saved_with_the_screen_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with still(tmp_path, CLUSTER, (120, 40)) as (app, pilot):
        await pilot.press("y")
        await saved(app, pilot, "alt+s")
        [text] = tmp_path.glob("gpuboard-dialog-*.txt")
        assert "Copy for gpu1:0" in text.read_text()
        assert "gpu2" in text.read_text()


def test_a_picture_never_replaces_a_file_and_goes_to_the_state_folder_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    at = time.mktime((2026, 1, 31, 12, 0, 0, 0, 0, -1))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpuboard-gpu-20260131-120000.svg").write_text("mine")
    (tmp_path / "gpuboard-gpu-20260131-120000-2.svg").symlink_to(tmp_path / "elsewhere")
    assert screenshot.save("<svg/>", "GPU", "svg", env, at) == tmp_path / "gpuboard-gpu-20260131-120000-3.svg"
    assert (tmp_path / "gpuboard-gpu-20260131-120000.svg").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()
    monkeypatch.chdir("/proc/self")  # nobody can make a file there
    path = screenshot.save("text", "../GPU", "txt", env, at)
    assert path == tmp_path / "state" / "gpuboard" / "screenshots" / "gpuboard-gpu-20260131-120000.txt"
    assert path.read_text() == "text"
    with pytest.raises(GpuboardError, match=r"the screen was not saved: /proc/\d+: .*; /proc/nowhere/.*: .*; start"):
        screenshot.save("text", "GPU", "txt", {"HOME": str(tmp_path), "XDG_STATE_HOME": "/proc/nowhere"}, at)


async def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with still(tmp_path, CLUSTER, (120, 40)) as (app, pilot):
        monkeypatch.chdir("/proc/self")
        (tmp_path / "home" / "state").mkdir(exist_ok=True)
        os.rename(tmp_path / "home" / "state", tmp_path / "home" / "gone")
        (tmp_path / "home" / "state").write_text("a file")
        toast = await saved(app, pilot, "ctrl+s")
        assert toast.startswith(": the screen was not saved: /proc/")
        assert [note.severity for note in lab.notifications(app)] == ["error"]


async def test_a_list_is_copied_with_all_its_columns_as_tab_separated_text(tmp_path: Path) -> None:
    async with still(tmp_path, CLUSTER, (80, 24)) as (app, pilot):
        await pilot.press("t", "Y")
        rows = [line.split("\t") for line in app.clipboard.splitlines()]
        assert rows[0] == ["Node", "GPU", "Model", "Memory", "Util", "Power", "Temp", "User", "State", "Reason"]
        assert rows[1] == [
            "gpu1", "0", "H100 80GB", "60/80G", "90%", "540W", "64°C", "bob", "B busy", "python (pid 4000)",
        ]  # fmt: skip
        assert [row[:3] for row in rows[2:]] == [
            ["gpu1", "1", "H100 80GB"], ["gpu1", "2", "H100 80GB"], ["", "2:0", "3g.40gb"],
            ["gpu2", "?", "ssh: no answer in 5 s"],
        ]  # fmt: skip
        assert lab.told(app, "Copied: 5 rows as tab-separated text")
        await pilot.press("l")
        await pilot.pause()
        await pilot.press("Y")
        titles, values = (line.split("\t") for line in app.clipboard.splitlines())
        assert (titles[:3], values[:3]) == (["Lease", "Owner", "GPUs"], ["k3f9", "alice", "gpu1:1"])


@pytest.mark.parametrize("size", [(80, 24), (120, 34)])
async def test_a_picture_is_copied_as_the_table_of_its_gpus(tmp_path: Path, size: tuple[int, int]) -> None:
    alone = scene(node("gpu1", [busy("gpu1", 0), gpu("gpu1", 1), mig("gpu1", 2, "free")]))
    for shown in (CLUSTER, alone):
        async with still(tmp_path, shown, size) as (app, pilot):
            for keys in ((), ("S",), ("slash", *"gpu:0-1", "enter"), ("g",)):
                await pilot.press(*keys, "Y")
                picture = app.clipboard.splitlines()
                assert picture[0].split("\t")[:4] == ["Node", "GPU", "Model", "Memory"]
                assert "gpu1\t0\tH100 80GB\t60/80G\t90%\t540W\t64°C\tbob" in app.clipboard
                await pilot.press("t", "Y", "t")
                assert app.clipboard.splitlines() == picture


async def test_a_column_that_is_a_picture_is_left_out_of_every_list(tmp_path: Path) -> None:
    """Bars and curves; what the time line has no room for is copied, too."""
    process = ProcessView(4000, "bob", "python train.py", 60 * made.GIB, "compute", sm_percent=85)
    used = scene(
        node("gpu1", [busy("gpu1", 0, processes=[process]), gpu("gpu1", 1, "reserved")]),
        leases=[lease("k3f9", "alice", [("gpu1", 1)])],
    )
    async with still(tmp_path, used, (160, 48)) as (app, pilot):
        copied = {}
        for keys in (("n",), ("escape", "P"), ("escape", "l"), ("t",)):
            await pilot.press(*keys)
            await pilot.pause()
            await pilot.press("Y")
            copied[keys[-1]] = [line.split("\t") for line in app.clipboard.splitlines()]
        await pilot.resize_terminal(80, 24)
        await pilot.press("t", "Y")
        copied["80"] = [line.split("\t") for line in app.clipboard.splitlines()]
    node_titles, first, *_ = copied["n"]
    assert node_titles == ["GPU", "State", "User", "GiB", "Util", "Temp", "Power", "Model", "Reason"]
    assert first[2:5] == ["bob", "60.0/80", "90%"]
    assert copied["P"][1][4:6] == ["60G", "85"]
    titles, values = copied["l"]
    assert titles == ["Lease", "Owner", "GPUs", "Left", "Until", "Holder", "From", "Purpose"]
    assert copied["l"] == copied["t"] == copied["80"]
    assert values[1:4] == ["alice", "gpu1:1", "8h00m"]


async def test_a_list_too_long_for_terminals_is_not_copied(tmp_path: Path) -> None:
    async with still(tmp_path, made.crowd(200), (80, 24)) as (app, pilot):
        await pilot.press("t", "Y")
        assert lab.told(app, "Not copied: 1600 rows are ", "filter them")
        assert app.clipboard == ""
        assert len(app.screen.query_one("#table", Grid).tsv().splitlines()) == 1601
