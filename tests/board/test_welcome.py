"""A first start without GPUs: three ways to go on, each of which works."""

from __future__ import annotations

import os
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList

from gpuboard.board.app import BoardApp
from gpuboard.board.dialogs.base import Choose
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.welcome import NameNodes, WhyNone
from gpuboard.cluster.inventory.first_run import keep_nodes
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.errors import GpuboardError
from gpuboard.model.snapshot import NodeView
from tests.board import lab, made
from tests.board.pty_lab import Terminal
from tests.integration.here import Here
from tests.waiting import until

HERE = (Node("lap", None),)
NO_DRIVER = "NVML: no NVIDIA driver here (libnvidia-ml.so.1 not found)"
BARE = made.node("lap", error=NO_DRIVER)


@pytest.fixture(autouse=True)
def _no_driver_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuboard.cluster.inventory.first_run.own_uuids", list)  # this machine may have GPUs


async def test_three_choices_in_place_of_a_blank_screen(tmp_path: Path) -> None:
    async with made.still(tmp_path, made.scene(BARE), (200, 60), HERE) as (app, pilot):
        await lab.settle(pilot, lambda: isinstance(app.screen, Choose))
        for size in ((200, 60), (80, 24)):
            await pilot.resize_terminal(*size)
            text = lab.screen(app)
            assert app.screen.query_one(OptionList).option_count == 3
            assert "gpuboard demo --board" in text
            assert "Name the nodes that have GPUs" in text
            assert "lap: no NVIDIA driver here" in text
        await pilot.press("down", "down", "enter")
        await lab.settle(pilot, lambda: isinstance(app.screen, WhyNone))
        assert "nvidia-smi" in lab.screen(app)
        assert "Back" in lab.screen(app), "all of it has room"
        await pilot.press("enter")
        await lab.settle(pilot, lambda: isinstance(app.screen, Choose))
        await pilot.press("enter")  # without a way to start another command, the toast names it
        await lab.settle(pilot, lambda: isinstance(app.screen, ClusterScreen))
        assert [note.message for note in lab.notifications(app)] == ["in a terminal: gpuboard demo --board"]
        await made.next_scene(app, pilot, made.scene(BARE))
        assert isinstance(app.screen, ClusterScreen), "it is offered once"


@pytest.mark.parametrize(
    ("node", "nodes"),
    [
        (made.node("lap", [made.gpu("lap", 0)]), HERE),
        (made.awaited("lap"), HERE),
        (made.node("lap", error="NVML: the NVIDIA driver is not loaded on this node"), HERE),
        (made.node("gpu01", error=NO_DRIVER), (Node("gpu01", "gpu01"),)),
    ],
)
async def test_nothing_is_offered_where_there_is_or_may_be_a_gpu(
    tmp_path: Path, node: NodeView, nodes: tuple[Node, ...]
) -> None:
    async with made.still(tmp_path, made.scene(node), nodes=nodes) as (app, _):
        assert isinstance(app.screen, ClusterScreen)


async def test_nodes_are_named_checked_kept_and_shown(tmp_path: Path) -> None:
    async def name(app: BoardApp, pilot: Pilot[int], text: str, *more: str) -> None:
        await lab.settle(pilot, lambda: isinstance(app.screen, Choose))
        await pilot.press("down", "enter")
        await lab.settle(pilot, lambda: isinstance(app.screen, NameNodes))
        await pilot.press(*text, *more, "enter")

    file = tmp_path / "home" / "config" / "gpuboard" / "config.toml"
    async with made.still(tmp_path, made.scene(BARE), nodes=HERE) as (app, pilot):
        app.may_restart = True
        await name(app, pilot, "gpu[1-")
        await lab.settle(pilot, lambda: "gpu[1-" in str(app.screen.query_one("#words").render()))
        assert not file.exists()
        await pilot.press("escape")
        await name(app, pilot, "gpu[01-02]")
        await lab.settle(pilot, lambda: app.next is not None)
        assert app.next == ["board"]
        assert file.read_text() == 'nodes = ["gpu[01-02]"]\n'
    file.unlink()
    async with made.still(tmp_path, made.scene(BARE), nodes=HERE) as (app, pilot):
        app.may_restart = True
        await name(app, pilot, "gpu03", "down", "space")
        await lab.settle(pilot, lambda: app.next is not None)
        assert app.next == ["board", "--nodes", "gpu03"]
        assert not file.exists()


def test_nodes_are_kept_beside_what_a_config_has(tmp_path: Path) -> None:
    dotfiles = tmp_path / "dotfiles.toml"
    dotfiles.write_text('theme = "dark"\n[keys.cluster]\nreserve = "R"\n')
    dotfiles.chmod(0o640)
    link = tmp_path / "config.toml"
    link.symlink_to(dotfiles)
    env = {"GPUBOARD_CONFIG": str(link)}
    assert keep_nodes(env, "gpu[01-02]") == link
    expected = {"nodes": ["gpu[01-02]"], "theme": "dark", "keys": {"cluster": {"reserve": "R"}}}
    assert tomllib.loads(dotfiles.read_text()) == expected
    assert link.is_symlink()
    assert dotfiles.stat().st_mode & 0o777 == 0o640
    with pytest.raises(GpuboardError, match="has `nodes` already"):
        keep_nodes(env, "gpu03")
    assert tomllib.loads(dotfiles.read_text()) == expected
    dotfiles.write_text("not toml")
    with pytest.raises(GpuboardError, match="cannot be written"):
        keep_nodes(env, "gpu03")


def test_a_person_at_a_terminal_comes_to_the_demo_and_to_named_nodes(here: Here) -> None:
    here.needs_claims()
    env = here.env | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": ""}
    with closing(Terminal(here.command(), env, (120, 40))) as terminal:
        terminal.shows("Try a simulated cluster")
        terminal.press(b"\r")
        terminal.shows("SIMULATED")
        terminal.press(b"q")
        terminal.ends(60.0)
        assert terminal.process.returncode == 0
        assert terminal.restored
        assert "no process of the demo is left" in terminal.text
    with closing(Terminal(here.command(), env, (120, 40))) as terminal:
        terminal.shows("Name the nodes that have GPUs")
        terminal.press(b"\x1b[B\r")
        terminal.shows("by their ssh host names")
        since = len(terminal.written)
        terminal.press(b"127.0.0.9\r")  # this machine by another name: it answers, with the reason
        until(lambda: b"\x1b[?1049h" in terminal.written[since:], "the board starts again")
        since = terminal.written.rfind(b"\x1b[?1049h")
        terminal.shows("127.0.0.9", since=since)
        terminal.shows("no NVIDIA driver here", since=since)
        terminal.press(b"q")
        terminal.ends(60.0)
        assert terminal.restored
    assert os.listdir(here.folder / ".config" / "gpuboard") == ["config.toml"]
