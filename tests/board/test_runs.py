"""The runs screen: every run's details, read cheaply; stopping a run; the notification at its end."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot
from textual.screen import Screen

from gpuboard.board.app import BoardApp
from gpuboard.board.screens.logs import LogScreen
from gpuboard.board.screens.runs import RunsScreen, StopConfirm
from gpuboard.board.screens.watches import Watch, holds
from gpuboard.board.text.detail.run import Stop, about, countdown, ended_words, first_rank, state_of
from gpuboard.board.widgets.grid import Grid
from gpuboard.board.widgets.log_view import LogView
from gpuboard.keeper import holder
from gpuboard.launch.preflight.check import Check
from gpuboard.launch.runs import folder as runs
from gpuboard.launch.runs.folder import HeadProcess, RankView, RunFolder, RunView, VerdictView, runs_dir, this_head
from gpuboard.launch.runs.index import Runbook, RunDetail, RunEntry
from gpuboard.model.units import iso
from tests.board import lab, made
from tests.calls import calls_of
from tests.integration.launch_lab import SLEEP, Launch
from tests.waiting import Stopwatch

NOBODY = HeadProcess("login2", "another boot", 4242, 1)


def view(run: str = "rabc2345", state: str = "running", **changes: Any) -> RunView:
    ranks = [RankView(rank, "gpu01", rank, rank + 4, 100 + rank, "running", f"step {rank}") for rank in range(2)]
    values: dict[str, Any] = {
        "id": run, "lease": None, "target": "train.py --lr 3e-4", "started": "2026-01-31T12:00:00.000Z", "state": state,
        "exit_code": None, "ranks": ranks, "verdicts": [], "head": this_head(),
    }  # fmt: skip
    return RunView(**(values | changes))


def keep(env: Mapping[str, str], run: RunView, files: Mapping[str, object] | None = None) -> Path:
    """Write a run's folder as its head would; return it."""
    path = runs_dir(env) / run.id
    if not path.exists():
        RunFolder(env, run.id)
    (path / "state.json").write_bytes(msgspec.json.encode(run))
    for name, value in (files or {}).items():
        (path / name).write_bytes(value if isinstance(value, bytes) else msgspec.json.encode(value))
    return path


def old(path: Path) -> None:
    """Make a state as old as one whose head has died."""
    os.utime(path / "state.json", (1e9, 1e9))


def dead_head() -> HeadProcess:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = holder.identify(child.pid)
    child.kill()
    child.wait()
    assert found is not None
    return HeadProcess(*found)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return lab.environment(tmp_path)


# Reading


def test_live_runs_come_first_then_the_newest(env: dict[str, str]) -> None:
    for minute, (run, state) in enumerate([("raaa", "running"), ("rbbb", "done"), ("rccc", "failed")]):
        keep(env, view(run, state, started=f"2026-01-31T12:0{minute}:00.000Z"))
    assert [entry.view.id for entry in Runbook(env).read()] == ["raaa", "rccc", "rbbb"]


def test_what_has_not_changed_is_not_read_again(env: dict[str, str]) -> None:
    for number in range(50):
        old(keep(env, view(f"rold{number}", "done")))
    live = view("rnew")
    folder = keep(env, live)
    book = Runbook(env)
    with calls_of(runs.read_state) as read:
        assert len(book.read()) == len(read) == 51
        read.clear()
        assert len(book.read()) == 51
        assert read == []
        keep(env, msgspec.structs.replace(live, state="done"))
        os.utime(folder / "state.json", (4e9, 4e9))  # just written, however slow this machine is
        assert book.read()[0].view.state == "done"
        assert [call["folder"].name for call in read] == ["rnew"]
    (folder / "state.json").unlink()
    assert len(book.read()) == 50
    assert Runbook({"HOME": "/nonexistent"}).read() == []


def test_a_state_that_cannot_be_read_now_is_tried_again(env: dict[str, str]) -> None:
    folder = keep(env, view())
    (folder / "state.json").write_bytes(b"{")
    old(folder)
    book = Runbook(env)
    [found] = book.read()
    assert (found.view.state, found.view.verdicts[0].kind) == ("failed", "unreadable")
    assert (found.unreadable, found.live, state_of(found, None)) == (True, True, "?")
    assert holds(Watch(1, 0.0, run=found.view.id), made.scene(), found) == ""  # it may go on
    keep(env, view())
    assert [entry.view.state for entry in book.read()] == ["running"]


def test_dead_heads_and_heads_elsewhere_are_distinguished(env: dict[str, str]) -> None:
    keep(env, view("rdead", head=dead_head()))
    keep(env, view("rfar", head=NOBODY))
    found = {entry.view.id: entry for entry in Runbook(env).read()}
    assert (found["rdead"].view.state, found["rdead"].elsewhere) == ("failed", False)
    assert (found["rfar"].view.state, found["rfar"].elsewhere, found["rfar"].live) == ("running", True, True)


# Words


def entry(run: RunView, **changes: Any) -> RunEntry:
    values: dict[str, Any] = {"view": run, "written": made_at() + 60.0, "elsewhere": False}
    return RunEntry(**(values | changes))


def made_at() -> float:
    return 1769860800.0  # 2026-01-31T12:00:00Z


def test_a_failure_is_reported_with_its_evidence() -> None:
    verdict = VerdictView(
        "", "signal", 1, "gpu01", "rank 1 (gpu01:5) was killed by SIGKILL: out of memory", "cgroup: 1 kill"
    )
    run = view(state="failed", exit_code=137, verdicts=[verdict], lease="k3f9", folder="/state/runs/rabc2345")
    lines = about(entry(run), None, None, None, made_at())
    assert lines == [
        ("Run rabc2345", "failed, exit code 137; ranks: 2 running", "bad"),
        ("Why", "rank 1 (gpu01:5) was killed by SIGKILL: out of memory", "bad"),
        ("", "cgroup: 1 kill", ""),
        ("Target", "train.py --lr 3e-4", ""),
        ("Lease", "k3f9, ended", ""),
        ("Folder", "/state/runs/rabc2345", ""),
    ]
    assert first_rank(entry(run)) == 1
    assert ended_words(entry(run)) == (
        "train.py --lr 3e-4 ran 1m, 2 ranks, exit code 137\nrank 1 (gpu01:5) was killed by SIGKILL: out of memory"
    )


def test_preflight_is_reported_once_with_its_remedies() -> None:
    text = "fail memlock: gpu01: 64 kB; NCCL needs more"
    run = view(
        state="failed", exit_code=7, verdicts=[VerdictView("", "preflight", None, "gpu01", text, "ulimit -l unlimited")]
    )
    checks = [
        Check("memlock", "gpu01", "fail", "64 kB", "NCCL needs more", "ulimit -l unlimited"),
        Check("master address", None, "warn", "127.0.1.1 on gpu02", "it means different things", "write the address"),
    ]
    lines = about(entry(run), RunDetail(checks, ["said"], 30.0, {}), None, None, made_at())
    assert [(name, words) for name, words, _ in lines[1:5]] == [
        ("Why", text),
        ("Remedy", "ulimit -l unlimited"),
        ("Preflight", "master address: 127.0.1.1 on gpu02; it means different things"),
        ("Remedy", "write the address"),
    ]


def test_a_run_of_another_host_is_marked() -> None:
    lines = about(entry(view(head=NOBODY), elsewhere=True), None, None, None, made_at() + 240.0)
    assert (
        "Elsewhere",
        "launched on login2; only there can gpuboard check that it runs; written 3m ago",
        "warn",
    ) in lines


def test_a_stop_counts_down() -> None:
    run, detail = entry(view()), RunDetail([], [], 30.0, {})
    assert state_of(run, Stop(0.0, None)) == "stopping"
    assert countdown(run, detail, Stop(100.0, None), 110.0)[1] == (
        "SIGTERM sent 10 s ago, SIGKILL in 20 s; ranks 0-1 still running"
    )
    assert countdown(run, detail, Stop(100.0, 0.0), 101.0)[1] == "SIGKILL sent 1 s ago; ranks 0-1 still running"
    gone = [msgspec.structs.replace(rank, state="killed") for rank in run.view.ranks]
    ended = entry(msgspec.structs.replace(run.view, ranks=gone))
    assert countdown(ended, None, Stop(100.0, None), 102.0)[1] == "requested 2 s ago; every rank has ended"


def test_the_nodes_of_a_run_are_listed_or_counted() -> None:
    ranks = [RankView(rank, f"gpu{rank // 8 + 1:02d}", rank % 8, rank % 8) for rank in range(512)]
    shown = [runs.places(view(ranks=ranks[:count])) for count in (8, 12, 512)]
    assert shown == ["8: gpu01", "12: gpu01 8, gpu02 4", "512: gpu01 to gpu64, 64 nodes"]


# The screen


@asynccontextmanager
async def opened(
    folder: Path, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[BoardApp, Pilot[int], RunsScreen]]:
    async with made.still(folder, made.scene(), size) as (app, pilot):
        await pilot.press("u")
        await lab.settle(pilot, lambda: isinstance(app.screen, RunsScreen) and "Reading runs" not in lab.screen(app))
        assert isinstance(app.screen, RunsScreen)
        yield app, pilot, app.screen


def counted_down(app: BoardApp, words: str) -> bool:
    """Return whether the countdown of a stop with ten minutes of grace is shown, at any second, with ``words``."""
    text = " ".join(lab.screen(app).replace("│", " ").split())
    found = re.search(rf"SIGTERM sent (\d+) s ago, SIGKILL in (\d+) s; {words}", text)
    return found is not None and 599 <= int(found[1]) + int(found[2]) <= 601


async def test_without_runs_it_shows_how_to_start_one(tmp_path: Path) -> None:
    async with opened(tmp_path, (80, 24)) as (app, pilot, _):
        assert lab.shown(app, "No runs yet.", "x launches", "the best free GPUs.", "gpuboard launch --n 2 train.py")
        await pilot.press("s", "o", "enter", "a")
        assert isinstance(app.screen, RunsScreen)
        await pilot.press("escape")
        await lab.settle(pilot, lambda: not isinstance(app.screen, RunsScreen))


async def test_a_failed_run_is_shown_rank_by_rank_with_the_reason(tmp_path: Path, env: dict[str, str]) -> None:
    verdict = VerdictView(
        "", "raised", 1, "gpu01", "rank 1 (gpu01:5) failed: ValueError: [/x] bad at train.py:41 in step"
    )
    ranks = [
        RankView(0, "gpu01", 0, 4, 100, "killed", "loss 0.3"),
        RankView(1, "gpu01", 1, 5, 101, "failed", "ValueError: \x1b]0;evil\x07[/x] 漢字 bad"),
    ]
    keep(env, view("rbad2345", "failed", exit_code=1, ranks=ranks, verdicts=[verdict]))
    keep(env, view("rgood234", "done", exit_code=0, started=iso(made_at() - 60)))
    reason = "rank 1 (gpu01:5) failed: ValueError: [/x] bad at train.py:41"
    async with opened(tmp_path) as (app, pilot, _):
        for size in ((80, 24), (120, 40), (200, 60)):
            await pilot.resize_terminal(*size)
            await lab.settle(pilot, lambda: lab.shown(app, reason))
            assert lab.shown(app, "rbad2345 failed", "rgood234 done", "1 killed, 1 failed", "loss 0.3", "漢字 bad")
            await pilot.press("down")
            await lab.settle(pilot, lambda: lab.shown(app, "done, exit code 0; ranks: 2 running"))
            await pilot.press("up")


def logged(app: BoardApp, rank: int) -> bool:
    return isinstance(app.screen, LogScreen) and lab.shown(app, f"hello of {rank}")


async def test_the_log_of_the_failed_rank_opens_and_any_by_choice(tmp_path: Path, env: dict[str, str]) -> None:
    verdict = VerdictView("", "raised", 1, "gpu01", "rank 1 failed")
    folder = keep(env, view(state="failed", verdicts=[verdict]))
    for rank in range(2):
        (folder / f"rank-{rank}.out").write_text(f"hello of {rank}\n")
    async with opened(tmp_path) as (app, pilot, screen):
        await lab.settle(pilot, lambda: lab.shown(app, "rank 1 failed"))
        steps = [(("enter",), 1), (("o",), 1), (("tab", "enter"), 0), (("down", "o"), 1)]
        for keys, rank in steps:
            await pilot.press(*keys)
            await lab.settle(pilot, partial(logged, app, rank))
            await pilot.press("escape")
            await lab.settle(pilot, lambda: app.screen is screen)
        ranks = screen.query_one("#ranks", Grid)
        await pilot.click(ranks, offset=(20, 1), times=2)
        await lab.settle(pilot, partial(logged, app, 0))


async def test_a_tall_terminal_shows_the_end_of_a_rank_s_logs_below_the_ranks(
    tmp_path: Path, env: dict[str, str]
) -> None:
    verdict = VerdictView("", "raised", 1, "gpu01", "rank 1 failed")
    folder = keep(env, view(state="failed", verdicts=[verdict]))
    for rank in range(2):
        (folder / f"rank-{rank}.err").write_text(f"hello of {rank}\n")
    async with opened(tmp_path) as (app, pilot, screen):
        await lab.settle(pilot, lambda: lab.shown(app, "Rank 1 stderr", "hello of 1"))
        with (folder / "rank-1.err").open("a") as log:
            log.write("and more\n")
        await lab.settle(pilot, lambda: lab.shown(app, "and more"))
        await pilot.press("tab", "up")
        await lab.settle(pilot, lambda: lab.shown(app, "Rank 0 stderr", "hello of 0"))
        await pilot.click("#err", offset=(5, 1))
        await lab.settle(pilot, partial(logged, app, 0))
        await pilot.press("escape")
        await pilot.resize_terminal(80, 24)
        await lab.settle(pilot, lambda: not lab.shown(app, "stderr") and lab.shown(app, "step 1"))
        assert app.screen is screen


def keep_large_runs(env: Mapping[str, str]) -> None:
    """A run with long evidence, one of two attempts with such, one on 32 nodes whose ranks differ, a small one."""
    evidence = "\n".join(f"  File train.py, line {line}" for line in range(12))
    verdicts = [VerdictView("", "raised", 1, "gpu01", f"failed: {n}", evidence, attempt=n) for n in (1, 2)]
    ranks = [RankView(rank, "gpu01", rank, rank, 100 + rank, "failed", f"step {rank}") for rank in range(8)]
    many = [
        RankView(rank, f"gpu{rank // 8:02d}", rank % 8, rank % 8, 100 + rank, "failed" if rank % 7 else "killed")
        for rank in range(256)
    ]
    for minute, run in enumerate([
        view("rsmall"),
        view("rmany", "failed", ranks=many),
        view("rtwice", "failed", ranks=ranks, verdicts=verdicts, attempt=2),
        view("ronce", "failed", ranks=ranks, verdicts=verdicts[:1]),
    ]):  # fmt: skip
        folder = keep(env, msgspec.structs.replace(run, started=f"2026-01-31T12:0{minute}:00.000Z"))
        for rank in run.ranks:
            for stream in ("out", "err"):
                (folder / f"rank-{rank.rank}.{stream}").write_text("epoch\n" * 50)


def detailed(screen: RunsScreen, run: str) -> bool:
    """Return whether the cursor is on ``run`` and its details are read."""
    entry, detail = screen.entry, screen._detail
    return entry is not None and detail is not None and entry.view.id == detail[0] == run


async def test_all_of_a_run_is_above_the_screen_s_edge(tmp_path: Path, env: dict[str, str]) -> None:
    keep_large_runs(env)
    with_logs: dict[tuple[int, int], set[str]] = {
        (80, 24): set(),
        (120, 36): {"rsmall"},
        (120, 40): {"rsmall"},
        (80, 40): {"rsmall"},
        (160, 48): {"rsmall", "ronce", "rmany"},
    }
    logs: dict[tuple[int, int], set[str]] = {size: set() for size in with_logs}
    async with opened(tmp_path) as (_, pilot, screen):
        for run in ("rsmall", "ronce", "rtwice", "rmany"):
            screen.jump(run)
            await lab.settle(pilot, partial(detailed, screen, run))
            for size in with_logs:
                await pilot.resize_terminal(*size)
                await lab.settle(pilot, lambda size=size: screen.virtual_size == screen.size == size)  # type: ignore[misc]
                shown = [part for part in screen.query("Grid, Lines, LogView, Footer") if part.region]
                assert max(part.region.bottom for part in shown) == size[1], run
                if screen.query_one("#logs").region:
                    logs[size].add(run)
                    assert screen.query_one("#logs").region.height >= 6
                await pilot.press("slash")
                await lab.settle(
                    pilot,
                    lambda size=size: screen.field.size.height > 0 and screen.virtual_size == size,  # type: ignore[misc]
                )
                await pilot.press("escape")
    assert logs == with_logs


async def test_polls_of_a_run_that_stays_the_same_cause_no_layout(tmp_path: Path, env: dict[str, str]) -> None:
    keep(env, view(state="done"))
    async with opened(tmp_path, (80, 24)) as (_, pilot, screen):
        await lab.settle(pilot, lambda: screen._detail is not None)
        await pilot.pause()
        with calls_of(Screen._refresh_layout) as layouts:
            for _ in range(3):
                screen._draw()
                await pilot.pause()
        assert layouts == []


async def test_a_click_on_a_preview_opens_its_stream_once(tmp_path: Path, env: dict[str, str]) -> None:
    folder = keep(env, view())
    for stream in ("out", "err"):
        (folder / f"rank-0.{stream}").write_text("hello of 0\n" * 500)
    async with opened(tmp_path) as (app, pilot, screen):
        err = screen.query_one("#err", LogView)
        await lab.settle(pilot, lambda: err.page is not None and err.page.at_end)
        await pilot.click(err, offset=(err.size.width - 1, 1))
        await lab.settle(pilot, lambda: err.page is not None and not err.page.at_end)
        assert app.screen is screen, "the scroll bar scrolls"
        for stream in ("err", "out"):
            picked = screen.query_one(f"#{stream}", LogView)
            picked.post_message(LogView.StreamPicked(picked))
            await pilot.click(picked, offset=(5, 1))
            await lab.settle(pilot, partial(logged, app, 0))
            opened_log = app.screen_stack[-1]
            assert app.screen_stack[-2] is screen
            assert isinstance(opened_log, LogScreen)
            assert opened_log.active.id == stream
            await pilot.press("escape")
            await lab.settle(pilot, lambda: app.screen is screen)


async def test_a_preview_follows_until_its_run_ends(tmp_path: Path, env: dict[str, str]) -> None:
    (keep(env, view()) / "rank-0.err").write_text("hello of 0\n")
    async with opened(tmp_path) as (app, pilot, _):
        await lab.settle(pilot, lambda: lab.shown(app, "Rank 0 stderr · 11 B · end · following"))
        keep(env, view(state="done"))
        await lab.settle(pilot, lambda: lab.shown(app, "Rank 0 stderr · 11 B · end ─"))


async def test_new_runs_and_states_appear_while_the_cursor_stays(tmp_path: Path, env: dict[str, str]) -> None:
    keep(env, view("rone"))
    async with opened(tmp_path) as (app, pilot, screen):
        await lab.settle(pilot, lambda: screen.entry is not None)
        keep(env, view("rtwo", started=iso(made_at() + 60)))
        await lab.settle(pilot, lambda: lab.shown(app, "rtwo running"))
        assert screen.entry is not None
        assert screen.entry.view.id == "rone"
        keep(env, view("rone", "done", exit_code=0))
        await lab.settle(pilot, lambda: lab.shown(app, "rone done", "done, exit code 0"))
        assert screen.entry.view.id == "rone"


async def test_a_run_of_another_host_or_an_ended_one_is_not_stopped_nor_inspected(
    tmp_path: Path, env: dict[str, str]
) -> None:
    keep(env, view("rfar", head=NOBODY, started=iso(made_at() + 60)))
    keep(env, view("rdone", "done"))
    async with opened(tmp_path) as (app, pilot, _):
        await lab.settle(pilot, lambda: lab.shown(app, "launched on login2"))
        await pilot.press("s", "e")
        await lab.settle(pilot, lambda: lab.told(app, "gpuboard stop rfar` there"))
        await lab.settle(pilot, lambda: lab.told(app, "gpuboard explain rfar` there"))
        await pilot.press("down", "s", "e")
        await lab.settle(pilot, lambda: lab.told(app, "rdone has ended already: done"))
        await lab.settle(pilot, lambda: lab.told(app, "rdone is not running: there is nothing to inspect"))
        assert isinstance(app.screen, RunsScreen)


# Stopping a real run


IGNORE = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)\n"
)


@asynccontextmanager
async def beside(launch: Launch, folder: Path, size: tuple[int, int] = (120, 40)) -> lab.Opened:
    """The board over the state folder of a launch in another terminal, at its runs."""
    launch.wait_for("up", times=2)
    board = lab.environment(folder)
    (Path(board["XDG_STATE_HOME"]) / "gpuboard").parent.mkdir(parents=True, exist_ok=True)
    os.symlink(launch.folder / "state" / "gpuboard", Path(board["XDG_STATE_HOME"]) / "gpuboard")
    async with opened(folder, size) as (app, pilot, screen):
        await lab.settle(pilot, lambda: screen.entry is not None and lab.shown(app, "2 running"))
        yield app, pilot


def test_a_run_is_stopped_after_confirmation_and_its_end_is_shown_on_any_screen(tmp_path: Path) -> None:
    async def scenario(launch: Launch) -> None:
        async with beside(launch, tmp_path) as (app, pilot):
            await pilot.press("s")
            await lab.settle(pilot, lambda: isinstance(app.screen, StopConfirm) and lab.shown(app, "SIGKILL after 20s"))
            await pilot.press("enter")
            await lab.settle(pilot, lambda: isinstance(app.screen, RunsScreen))
            assert launch.view().state == "running", "enter leaves it be"
            await pilot.press("s")
            await lab.settle(pilot, lambda: isinstance(app.screen, StopConfirm))
            await pilot.press("y")
            await lab.settle(pilot, lambda: isinstance(app.screen, RunsScreen))
            await pilot.press("escape")
            await lab.settle(pilot, lambda: not isinstance(app.screen, RunsScreen))
            await lab.settle(pilot, lambda: lab.told(app, f"Run {launch.view().id} stopped", "stopped from the board"))

    with Launch(tmp_path, SLEEP, "--grace", "20s") as launch:
        asyncio.run(scenario(launch))
        assert launch.wait() == 143
        assert launch.view().verdicts[0].text == "stopped from the board"


def test_a_run_that_ignores_it_is_counted_down_and_killed_at_once_by_the_mouse(tmp_path: Path) -> None:
    async def scenario(launch: Launch) -> None:
        async with beside(launch, tmp_path) as (app, pilot):
            await pilot.press("s")
            await lab.settle(pilot, lambda: isinstance(app.screen, StopConfirm))
            await pilot.press("y")
            await lab.settle(pilot, lambda: counted_down(app, "ranks 0-1 still running"))
            await pilot.press("s")
            await lab.settle(pilot, lambda: isinstance(app.screen, StopConfirm))
            await pilot.click("#kill")
            await lab.settle(pilot, lambda: lab.shown(app, "stopped, exit code 143; ranks: 2 killed"))

    began = Stopwatch()
    with Launch(tmp_path, IGNORE, "--grace", "10m") as launch:
        asyncio.run(scenario(launch))
        assert launch.wait() == 143
        assert launch.carriers() == []
    assert began.stop() < 30
