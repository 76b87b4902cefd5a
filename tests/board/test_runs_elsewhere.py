"""Runs whose heads are on other nodes: read over a real ssh connection, followed, explained and stopped."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest

from gpuboard.board.dialogs.base import Dialog
from gpuboard.board.screens.logs import LogScreen
from gpuboard.board.screens.runs import RunsScreen, StopConfirm
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.snapshot.scheduler_monitor import Permitted
from gpuboard.config import Settings
from gpuboard.launch.runs.elsewhere import ClusterRunbook, RunbookTiming
from gpuboard.launch.runs.folder import note, runs_dir
from tests.board import lab, made
from tests.board.test_runs import keep, view
from tests.integration.launch_lab import SLEEP, Launch
from tests.sshd import SSHD, Sshd, children
from tests.waiting import until

pytestmark = pytest.mark.skipif(not SSHD, reason="needs sshd (openssh-server)")
FAR = Node("far01", "far01")


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Sshd]:
    """The node far01, whose state folder is that of a launch in ``tmp_path``."""
    sshd = Sshd(tmp_path / "sshd", extra=f"SetEnv XDG_STATE_HOME={tmp_path}/state\n")
    sshd.host("far01")
    yield sshd
    sshd.stop()


@asynccontextmanager
async def opened(folder: Path, sshd: Sshd, *nodes: Node) -> lab.Opened:
    """The board of another host at its runs."""
    settings = Settings(ssh_config=str(sshd.ssh_config))
    async with made.still(folder, made.scene(), nodes=nodes, settings=settings) as (app, pilot):
        app.core.runbook.timing = RunbookTiming(live_s=0.5, rest_s=2.0)
        await pilot.press("u")
        await lab.settle(pilot, lambda: isinstance(app.screen, RunsScreen) and "Reading runs" not in lab.screen(app))
        yield app, pilot


def test_a_run_of_another_node_is_listed_followed_explained_and_stopped(tmp_path: Path, far: Sshd) -> None:
    async def scenario(launch: Launch) -> None:
        run = launch.view().id
        async with opened(tmp_path, far, FAR) as (app, pilot):
            await lab.settle(pilot, lambda: lab.shown(app, f"{run} running", "far01, read", "Folder far01:"))
            await pilot.press("o")
            await lab.settle(pilot, lambda: isinstance(app.screen, LogScreen) and lab.shown(app, "up", "3 B"))
            await pilot.press("escape", "e")
            await lab.settle(pilot, lambda: lab.shown(app, "no rank waits for another one"))
            far.stop()
            await lab.settle(pilot, lambda: lab.shown(app, f"{run} running?", "no answer from far01: ", "last read"))
            far.start()
            await lab.settle(pilot, lambda: lab.shown(app, f"{run} running ", "far01, read"))
            await pilot.press("s")
            await lab.settle(pilot, lambda: isinstance(app.screen, StopConfirm) and lab.shown(app, "SIGKILL after 20s"))
            await pilot.press("y", "escape")
            await lab.settle(pilot, lambda: lab.told(app, f"Run {run} stopped", "stopped from the board"))
            assert not isinstance(app.screen, (RunsScreen, Dialog))

    with Launch(tmp_path, SLEEP, "--grace", "20s") as launch:
        launch.wait_for("up", times=2)
        asyncio.run(scenario(launch))
        assert launch.wait() == 143


async def test_a_noted_run_gets_its_state_from_its_node_which_delays_no_other(tmp_path: Path, far: Sshd) -> None:
    board = lab.environment(tmp_path)
    there = {**board, "XDG_STATE_HOME": str(tmp_path / "state")}
    here = msgspec.structs.replace(
        view("rnoted", head=msgspec.structs.replace(view().head, host="far01")), node="far01"
    )
    note(board, msgspec.structs.replace(here, head=msgspec.structs.replace(here.head, boot_id="another")))
    keep(there, view("rnoted", "done", exit_code=0), {"head.log": b"12:00:00 gpuboard: all ranks have ended\n"})
    lost = msgspec.structs.replace(here, id="rlost", node="far02", started="2026-01-31T13:00:00.000Z")
    note(board, msgspec.structs.replace(lost, head=msgspec.structs.replace(lost.head, host="far02", boot_id="another")))
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # without listening: connections are refused
    far.host("far02", Port=closed.getsockname()[1])
    async with opened(tmp_path, far, FAR, Node("far02", "far02")) as (app, pilot):
        await lab.settle(pilot, lambda: lab.shown(app, "rnoted done", "rlost running?"))
        await lab.settle(pilot, lambda: lab.shown(app, "far02: ", "refused"))
        await pilot.press("down")
        await lab.settle(pilot, lambda: lab.shown(app, "Head all ranks have ended"))
        keep(there, view("rnew", started="2026-01-31T14:00:00.000Z"))
        await pilot.press("a")
        await lab.settle(pilot, lambda: lab.shown(app, "rnew running"))
    closed.close()
    stored = msgspec.json.decode((runs_dir(board) / "rnoted" / "state.json").read_bytes())
    assert (stored["state"], stored["node"]) == ("done", "far01")


def test_a_node_of_a_scheduler_is_asked_only_over_permitted_routes(tmp_path: Path, far: Sshd) -> None:
    keep({"XDG_STATE_HOME": str(tmp_path / "state")}, view("rfar2345"))
    routes: dict[str, Permitted | None] = {"far01": Permitted(ssh=False)}
    settings = Settings(ssh_config=str(far.ssh_config))
    book = ClusterRunbook(lab.environment(tmp_path), settings, {"far01": FAR}, lambda name: routes[name])
    book.timing = RunbookTiming(live_s=0.1, rest_s=0.2)

    def seen() -> list[str]:
        book.look(["far01"], now=True)
        return [entry.unread or entry.view.state for entry in book.read()]

    with closing(book):
        note(lab.environment(tmp_path), msgspec.structs.replace(view("rfar2345"), node="far01"))
        refused = ['not permitted: you have no job running there; start a job there, or set ssh = "all"']
        until(lambda: seen() == refused, "the reason why it is not asked")
        assert not children(far.process.pid), "no connection was tried"
        routes["far01"] = Permitted(ssh=True)
        until(lambda: seen() == ["running"], "the node's answer")
        assert children(far.process.pid)
        routes["far01"] = Permitted(ssh=False)
        until(lambda: seen() == refused, "the reason why it is not asked any more")
        until(
            lambda: not children(far.process.pid),
            "the connection over a route that is not permitted any more is closed",
        )
