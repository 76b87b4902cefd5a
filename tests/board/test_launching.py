"""Launching from the board: real `gpuboard launch` on simulated nodes, by key and mouse."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from gpuboard.board.app import BoardApp
from gpuboard.board.dialogs.base import Tick
from gpuboard.board.dialogs.launch import LaunchDialog, open_launch
from gpuboard.board.dialogs.launch_process import (
    FileProblems,
    LaunchForm,
    StartedRun,
    Starter,
    arguments,
    check_command,
    check_files,
    check_variables,
    target_of,
)
from gpuboard.board.screens.runs import RunsScreen
from gpuboard.cluster.inventory.file import VARIABLE, read_nodes, write_nodes
from gpuboard.cluster.simulated import demo_nodes
from gpuboard.errors import UsageError
from gpuboard.launch.runs.index import Runbook
from gpuboard.launch.target import Target
from gpuboard.model.request import Pick, Request
from tests.board import lab, made, other
from tests.board.launches import Exp
from tests.security.hostile import fuse
from tests.waiting import until

# Words → the command line


def test_a_form_becomes_a_command_line() -> None:
    form = LaunchForm("train.py --lr 3e-4 'two words'", "/exp", n=4, model="H100", for_s="8h", variables="A=1 'B=2 3'")
    assert arguments(form) == [
        "--n", "4", "--model", "H100", "--for", "8h", "--device", "cuda", "--grace", "30s", "--env", "A=1", "--env",
        "B=2 3", "train.py", "--lr", "3e-4", "two words",
    ]  # fmt: skip
    form = LaunchForm(
        "-m pkg.train -m x", "/exp", lease="k3f9", device="cpu", python="/opt/python", for_s="8h", grace="0"
    )
    assert arguments(form) == [
        "--lease", "k3f9", "--device", "cpu", "--grace", "0", "--python", "/opt/python", "-m", "pkg.train", "-m", "x",
    ]  # fmt: skip
    form = LaunchForm("train.py", "/exp", n=8, restarts="3", least="6")
    assert arguments(form)[-5:] == ["--max-restarts", "3", "--min-n", "6", "train.py"]
    form = LaunchForm("pkg.train:main", "/exp", gpus="gpu01:GPU-a@gpu02:GPU-b")
    assert arguments(form)[:2] == ["--gpus", "gpu01:GPU-a@gpu02:GPU-b"]
    assert arguments(form)[-1] == "pkg.train:main"
    form = LaunchForm("--no-python sleep 300", "/exp", n=1)
    assert arguments(form)[-3:] == ["--no-python", "sleep", "300"]


def test_what_is_typed_is_checked(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    folder = str(tmp_path)
    assert target_of("-m a.b c") == Target("module", "a.b", ["c"])
    assert target_of("--no-python ./a.sh b") == Target("program", "./a.sh", ["b"])
    for right in ("train.py --lr 1", "-m a.b", "a.b:main x", "--no-python sleep 300", "--no-python ./train.py"):
        assert check_command(right) == ""
        assert check_files(right, folder) == FileProblems(right, folder)
    assert check_command("") == "train.py or -m module"
    assert check_command("train.py 'open") == "the command: no closing quotation"
    assert check_command("-m") == "-m needs a module, like package.train"
    assert check_command("--n 4 train.py") == "--n is not an option of launch"
    assert check_files("nothere.py", folder).no_script == "no file nothere.py in that folder"
    assert check_files("/no/where.py", folder).no_script == "no file /no/where.py"
    assert check_files("--no-python ./nothere", folder).no_script == "no file ./nothere in that folder"
    assert check_files("nothere.py", "/no/such") == FileProblems("nothere.py", "/no/such", no_folder="no such folder")
    assert [check_variables(text) for text in ("", "A=1 B='x y'", "HOME")] == ["", "", ""]
    assert check_variables("RANK=1") == "RANK: gpuboard sets RANK for each rank"
    assert check_variables("1A=2") == "'1A': not a variable name"
    assert check_variables("'") == "the variables: no closing quotation"


def test_a_text_that_takes_long_to_split_is_refused() -> None:
    pasted = "gpu01:" * 170_000
    assert check_command(pasted) == "the command: longer than 64 KiB"
    assert check_variables(pasted) == "the variables: longer than 64 KiB"


def test_nodes_that_no_configuration_has_are_handed_on(tmp_path: Path) -> None:
    nodes = demo_nodes(claims_dir=str(tmp_path))
    write_nodes(tmp_path / "nodes", nodes)
    assert read_nodes(tmp_path / "nodes") == nodes
    assert read_nodes(tmp_path / "nodes", ["sim02"]) == nodes[1:]
    with pytest.raises(UsageError, match=f"no node 'sim03' in {VARIABLE}="):
        read_nodes(tmp_path / "nodes", ["sim[01-03]"])
    (tmp_path / "nodes").write_text("[1]")
    with pytest.raises(UsageError, match="not an inventory"):
        read_nodes(tmp_path / "nodes")


# Starting, without the board around it


def test_what_earlier_launchers_and_the_board_s_own_lease_left_behind_is_left_out(tmp_path: Path) -> None:
    stale = {"RANK": "7", "WORLD_SIZE": "9", "GPUBOARD_LEASE": "zzzz", "GPUBOARD_NODES": "no", "GPUBOARD_RANK_MAP": "x"}
    exp = Exp(tmp_path, **stale)
    for evil in ("gpuboard.py", "signal.py", "msgspec.py"):
        (exp.work / evil).write_text("raise SystemExit('imported')\n")
    starter = Starter(exp.nodes, exp.env)
    started = starter.start(exp.form("end.py", n=2))
    until(lambda: started.over, "the launch to end")
    ((_, entry),) = starter.look(Runbook(exp.env))
    assert entry is not None, started.failure()
    assert (entry.view.state, [rank.last_line for rank in entry.view.ranks]) == ("done", ["bye", "bye"])
    assert starter.look(Runbook(exp.env)) == [], "what has ended is returned once"
    assert exp.claims() == []
    started.clear()
    assert list((Path(exp.env["XDG_STATE_HOME"]) / "gpuboard" / "board").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words", "code"),
    [
        ({"n": 9}, "requested 9 GPUs", 3),
        ({"gpus": "sim01:1"}, "sim01:1 is busy", 4),
        ({"lease": "zzzz"}, "zzzz", 5),
        ({"n": 1, "variables": "RANK=1"}, "gpuboard sets RANK", 2),
    ],
)
def test_the_reason_of_a_failed_launch_is_shown(exp: Exp, changes: dict[str, Any], words: str, code: int) -> None:
    starter = Starter(exp.nodes, exp.env)
    started = starter.start(exp.form("end.py", **changes))
    until(lambda: started.over, "the launch to end")
    assert started.process.returncode == code
    assert words in started.failure()
    assert exp.entries() == []


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "signal 40")])
def test_a_launch_that_is_killed_early_is_reported(exp: Exp, number: int, name: str) -> None:
    starter = Starter(exp.nodes, exp.env)
    started = starter.start(exp.form("sleep.py", n=1))  # however late it is killed, it is still there
    started.process.send_signal(number)
    until(lambda: started.over, "the launch to end")
    assert started.failure().endswith(f"gpuboard launch was killed by {name}")


def test_a_state_folder_that_cannot_be_written_is_an_error(exp: Exp) -> None:
    (exp.folder / "file").touch()
    starter = Starter(exp.nodes, exp.env | {"XDG_STATE_HOME": str(exp.folder / "file")})
    with pytest.raises(Exception, match=r"cannot write to .*: Not a directory"):
        starter.start(exp.form("end.py", n=1))


def test_files_of_a_launch_that_cannot_be_removed_are_left() -> None:
    with subprocess.Popen(["true"]) as process:
        StartedRun("rabc", LaunchForm("true", "/"), process, Path("/dev/null/board")).clear()


# By hand


async def fill(pilot: Pilot[int], **texts: str) -> None:
    """Type into fields in place of what is there."""
    for key, text in texts.items():
        entry = pilot.app.screen.query_one(f"#field-{key}", Input)
        entry.focus()
        await pilot.pause()  # the focus selects what is there
        entry.value = text[:-1]
        entry.cursor_position = len(text)
        await pilot.press(text[-1])


async def fill_all(pilot: Pilot[int], exp: Exp, command: str, **texts: str) -> None:
    """Type a command, and what every launch of the laboratory needs."""
    screen = pilot.app.screen
    screen.query_one("#field-folder", Input).value = str(exp.work)
    screen.query_one("#field-python", Input).value = sys.executable
    screen.query_one("#field-variables", Input).value = exp.variables
    await fill(pilot, command=command, **texts)


def state(app: BoardApp) -> str:
    entry = app.screen.entry if isinstance(app.screen, RunsScreen) and app.screen.query("#list") else None
    return entry.view.state if entry is not None else ""


async def test_marked_gpus_are_used_for_a_launch_and_released(exp: Exp) -> None:
    async with lab.board(exp.core()) as (app, pilot):
        await pilot.press("space")  # sim01:0
        await pilot.press("right", "right" if app.screen.query("#picture") else "down")
        await pilot.press("x")
        await lab.settle(pilot, lambda: isinstance(app.screen, LaunchDialog))
        assert app.screen.query_one("#field-gpus", Input).value == "sim01:0"
        assert app.screen.query_one("#field-cpu", Tick).value, "simulated GPUs cannot compute"
        await fill_all(pilot, exp, "sleep.py")
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve sim01 GPU 0"))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: state(app) == "running")
        assert exp.claims() == ["sim01-0"]
        await lab.settle(pilot, lambda: lab.shown(app, "1 running", "1 GPU, 23h", "up"))
        await pilot.press("s")
        await pilot.press("y")
        await lab.settle(pilot, lambda: lab.told(app, "stopped"))
        await lab.settle(pilot, lambda: exp.claims() == [])


async def test_a_named_gpu_that_vanishes_is_not_left_out(tmp_path: Path) -> None:
    gpus = [made.gpu("gpu01", index) for index in range(2)]
    async with made.still(tmp_path, made.scene(made.node("gpu01", gpus))) as (app, pilot):
        open_launch(app, [gpu.uuid for gpu in gpus])
        await lab.settle(pilot, lambda: isinstance(app.screen, LaunchDialog) and app.screen.is_mounted)
        await made.next_scene(app, pilot, made.scene(made.node("gpu01", gpus[:1])))
        assert isinstance(app.screen, LaunchDialog)
        form = app.screen.form(app.screen.values)
        assert (form.gpus, form.n) == ("gpu01:GPU-gpu01-0@gpu01:GPU-gpu01-1", None)


async def test_a_lease_of_mine_is_launched_on_and_stays(exp: Exp) -> None:
    core = exp.core()
    async with lab.board(core) as (app, pilot):
        request = Request(picks=(Pick("sim01", 2, None), Pick("sim02", 0, None)))
        allocation = await asyncio.to_thread(core.operations.reserve, request, 600.0, "")
        core.operations.published(allocation)
        lease = allocation.lease.id
        await lab.settle(pilot, lambda: app.scene is not None and lease in app.scene.by_lease)
        assert app.scene is not None
        open_launch(app, [gpu.uuid for gpu in allocation.lease.gpus])
        await lab.settle(
            pilot, lambda: isinstance(app.screen, LaunchDialog) and lab.shown(app, f"Will use lease {lease}")
        )
        await fill_all(pilot, exp, "end.py")
        await pilot.click("#commit")
        await lab.settle(pilot, lambda: state(app) == "done")
        await lab.settle(pilot, lambda: lab.told(app, "is done", "end.py ran", "2 ranks"))
        assert lab.shown(app, "sim01", "sim02", f"{lease}, 2 GPUs")
        assert exp.claims() == ["sim01-2", "sim02-0"]
        await asyncio.to_thread(core.operations.release, lease)


async def test_a_launch_takes_the_best_and_a_failure_is_shown_on_any_screen(exp: Exp) -> None:
    async with lab.board(exp.core(), (80, 24)) as (app, pilot):
        open_launch(app)
        await lab.settle(pilot, lambda: isinstance(app.screen, LaunchDialog))
        await fill_all(pilot, exp, "fail.py", gpus="2", model="h100")
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve sim01 GPUs 2-3"))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: isinstance(app.screen, RunsScreen))
        await pilot.press("escape")
        await lab.settle(pilot, lambda: not isinstance(app.screen, RunsScreen))
        await lab.settle(pilot, lambda: lab.told(app, "failed", "exit code 1", "rank 1 (sim01:3) failed", "[/x]"))
        await pilot.press("x")
        await lab.settle(pilot, lambda: isinstance(app.screen, LaunchDialog))
        assert app.screen.query_one("#field-command", Input).value == "fail.py", "the next try begins with the last"
        await pilot.press("escape")
        await pilot.press("u")
        await lab.settle(pilot, lambda: lab.shown(app, "rank 1 (sim01:3) failed", "ValueError: [/x]"))
        await pilot.press("x")
        await lab.settle(pilot, lambda: isinstance(app.screen, LaunchDialog))
        await fill_all(pilot, exp, "end.py", gpus="1")
        await pilot.press("enter")
        await lab.settle(pilot, lambda: state(app) == "done" and lab.shown(app, "end.py"))
        await pilot.press("o")
        await lab.settle(pilot, lambda: lab.shown(app, "bye"))
        await pilot.press("u")
        await lab.settle(pilot, lambda: isinstance(app.screen, RunsScreen))
        assert sum(isinstance(screen, RunsScreen) for screen in app.screen_stack) == 1


async def test_a_launch_that_is_not_possible_is_explained_in_the_dialog(exp: Exp) -> None:
    async with lab.board(exp.core()) as (app, pilot):
        open_launch(app)
        await lab.settle(pilot, lambda: isinstance(app.screen, LaunchDialog))
        await fill_all(pilot, exp, "nothere.py")
        await pilot.press("enter")
        await lab.settle(pilot, lambda: lab.shown(app, "no file nothere.py in that"))
        assert isinstance(app.screen, LaunchDialog)
        await fill(pilot, command="sleep.py", gpus="sim01:1", folder="/no/such")
        await lab.settle(pilot, lambda: lab.shown(app, "no such folder", "No: sim01:1 is busy"))
        await fill(pilot, folder=str(exp.work))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: lab.shown(app, "Not launched: sim01:1 is busy: bob"))
        for _ in range(2):
            before = app.scene
            await lab.settle(pilot, lambda: app.scene is not before)  # noqa: B023
        assert lab.shown(app, "Not launched: sim01:1 is busy: bob"), "it stays until something is typed"
        await fill(pilot, gpus="zzzz")
        assert lab.shown(app, "write 2, gpu01:0,3 or your lease")
        assert not lab.shown(app, "Not launched")
        assert list(app._notifications) == [], "the dialog shows it, so there is no toast"
        await fill(pilot, gpus="1", python="/no/such/python")
        await pilot.press("enter")
        await lab.settle(pilot, lambda: state(app) == "failed")
        await lab.settle(pilot, lambda: lab.shown(app, "exit code 7", "/no/such/python"))
        await lab.settle(pilot, lambda: lab.told(app, "failed", "/no/such/python"))
        assert exp.claims() == []


@other.needs_root
async def test_a_file_system_that_hangs_holds_the_dialog_up_and_not_the_board(exp: Exp) -> None:
    (exp.work / "hung.py").touch()
    async with lab.board(exp.core()) as (app, pilot):
        open_launch(app)
        await lab.settle(pilot, lambda: isinstance(app.screen, LaunchDialog))
        dialog = app.screen
        assert isinstance(dialog, LaunchDialog)
        await fill_all(pilot, exp, "sleep.py")
        await lab.settle(pilot, lambda: dialog._files.command == "sleep.py")
        with fuse(str(exp.work / "hung.py"), "never answers"):
            dialog.query_one("#field-command", Input).value = "hung.py"
            await lab.settle(pilot, lambda: dialog._file_checks.busy)
            await fill(pilot, command="nothere.py", gpus="sim01:2")
            await pilot.press("enter")
            await lab.settle(pilot, lambda: lab.shown(app, "Will reserve sim01 GPU 2"))
            assert (app.screen, dialog._file_checks.busy, dialog._files.command) == (dialog, True, "sleep.py")
        await lab.settle(pilot, lambda: lab.shown(app, "no file nothere.py in that"))
        assert not dialog.busy
        assert exp.entries() == []
        await fill(pilot, command="end.py")
        await pilot.press("enter")
        await lab.settle(pilot, lambda: state(app) == "done")


async def test_a_launch_that_is_given_up_leaves_nothing(exp: Exp, monkeypatch: pytest.MonkeyPatch) -> None:
    class Halted(subprocess.Popen[bytes]):
        """A launch that halts at its start: the dialog is left before there is a run."""

        def __init__(self, args: list[str], **options: Any) -> None:
            super().__init__(args, **options)
            if "launch" in args:
                self.send_signal(signal.SIGSTOP)

    core = exp.core()
    async with lab.board(core) as (app, pilot):
        for left in ("at once", "later", "by going elsewhere"):
            open_launch(app)
            await lab.settle(pilot, lambda: isinstance(app.screen, LaunchDialog))
            dialog = app.screen
            assert isinstance(dialog, LaunchDialog)
            await fill_all(pilot, exp, "sleep.py", gpus="2")
            await lab.settle(pilot, lambda dialog=dialog: not dialog._file_checks.busy)  # type: ignore[misc]
            with monkeypatch.context() as patch:
                patch.setattr(subprocess, "Popen", Halted)
                await pilot.press("enter", *["escape"] * (left == "at once"))
                await lab.settle(pilot, lambda: bool(core.starter.started))
            (started,) = core.starter.started
            if left == "by going elsewhere":
                app.go_to("node:sim01")
            elif left == "later":
                await pilot.press("escape")
            await lab.settle(pilot, lambda started=started: started.cancelled)  # type: ignore[misc]
            started.process.send_signal(signal.SIGCONT)
            await lab.settle(pilot, lambda started=started: started.over)  # type: ignore[misc]
            await lab.settle(pilot, lambda: not core.starter.started)
            assert exp.claims() == []
            assert exp.entries() == []
