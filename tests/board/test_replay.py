"""The board on a recording: position and speed by keys, and nothing of the cluster can be changed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot

from gpuboard.agent.nvml.terms import NO_DRIVER
from gpuboard.board.history import DAY, HOUR
from gpuboard.board.overview.log import EventFinder
from gpuboard.board.replay.app import ReplayApp
from gpuboard.board.replay.core import ReplayCore
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.widgets.grid import Grid
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError
from gpuboard.model.snapshot import SchedulerView, Snapshot
from gpuboard.model.units import iso
from gpuboard.recording.events import ClusterEvent
from gpuboard.recording.file import Recording, RecordingWriter
from gpuboard.recording.frames import Frame
from tests.board import lab, made

BEGIN = 1_800_000_000.0
HOURS = 3


def frames() -> Iterator[Frame]:
    """Yield three hours of two nodes, a frame a minute: GPU 0 is busy by as many per cent as minutes have passed.

    gpu02 hangs in the second hour, and loses a GPU in the third, in whose second half Slurm does not answer. In the
    middle of the first, nothing was recorded for ten minutes.
    """
    lost = made.gpu("gpu02", 1, "broken", reason="GPU lost: XID 79")
    finder, events = EventFinder(), list[ClusterEvent]()
    for minute in range(60 * HOURS):
        if 25 <= minute < 35:
            continue
        at = BEGIN + 60 * minute
        second = made.node("gpu02", [made.gpu("gpu02", 0), made.gpu("gpu02", 1) if minute < 120 else lost])
        if 60 <= minute < 120:
            second = made.unread("gpu02")
        first = made.node("gpu01", [made.busy("gpu01", 0, utilization=minute % 60), made.gpu("gpu01", 1)])
        leases = [made.lease("k3f9", "alice", [("gpu01", 1)])] if minute < 60 else []
        scene = made.scene(first, second, leases=leases, at=iso(at), uids={"gpu01": 1001})
        silent = SchedulerView("slurm", 60.0 * (minute - 149), "squeue: timed out")
        slurm = silent if minute >= 150 else SchedulerView("slurm", 5.0, current=True)
        snapshot: Snapshot = msgspec.structs.replace(scene.snapshot, scheduler=slurm)
        events = [*events, *finder.find(snapshot, scene.leases, at)]
        yield Frame(at, snapshot, scene.leases, scene.uids, events)


def written(path: Path, found: Iterable[Frame]) -> Path:
    """Write a recording."""
    writer = RecordingWriter(path)
    for frame in found:
        writer.add(frame)
    writer.close()
    return path


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of ``frames``."""
    return written(tmp_path_factory.mktemp("recording") / "day.gz", frames())


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of a gpuboard that did not record events."""
    without = (msgspec.structs.replace(frame, events=None) for frame in frames())
    return written(tmp_path_factory.mktemp("recording") / "old.gz", without)


@asynccontextmanager
async def replay(
    folder: Path, day: Path, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[ReplayApp, ReplayCore, Pilot[int]]]:
    """Run the board on ``day``, paused at its beginning."""
    core = ReplayCore(Recording(day), Settings(), lab.environment(folder))
    core.player.pause()
    app = ReplayApp(core)
    try:
        async with app.run_test(size=size) as pilot:
            await lab.settle(pilot, shows(app, "REPLAY"))
            yield app, core, pilot
            core.close()
            await pilot.pause()  # no scene comes any more while the screens are taken apart
    finally:
        core.close()


def clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGIN + seconds))


def shows(app: ReplayApp, *words: str) -> Callable[[], bool]:
    return lambda: all(word in lab.screen(app) for word in words)


async def test_moving_through_a_recording(tmp_path: Path, day: Path) -> None:
    async with replay(tmp_path, day, (80, 24)) as (app, core, pilot):
        await lab.settle(pilot, shows(app, f"REPLAY {clock(0)}", "1x", "paused", "gpu02"))
        assert lab.screen(app).splitlines()[-1].split()[:6] == ["0", "Pause", "+", "Faster", "-", "Slower"]
        assert not {"Reserve", "Launch"} & set(lab.screen(app).splitlines()[-1].split())  # they are refused
        await pilot.press("slash")
        await lab.settle(pilot, shows(app, "^p Palette"))
        assert "Faster" not in lab.screen(app)  # it would be typed
        await pilot.press("escape", "full_stop", "full_stop")
        await lab.settle(pilot, shows(app, clock(120), "2%"))
        await pilot.press("comma")
        await lab.settle(pilot, shows(app, clock(60), "1%"))
        await pilot.press("greater_than_sign")
        await lab.settle(pilot, shows(app, clock(3660), "unreachable"))
        await pilot.press("greater_than_sign")
        await lab.settle(pilot, shows(app, clock(7260), "2 free of 4", "X broken"))
        core.control(lambda player: player.seek(BEGIN + 9000))
        await lab.settle(pilot, shows(app, clock(9000), "no answer from Slurm for 1m: squeue: timed out"))
        core.control(lambda player: player.seek(BEGIN + 7260))
        await lab.settle(pilot, lambda: "squeue" not in lab.screen(app))
        await pilot.press("less_than_sign", "less_than_sign", "less_than_sign")
        await lab.settle(pilot, shows(app, clock(0)))
        await pilot.press("plus", "plus")
        await lab.settle(pilot, shows(app, "5x"))
        await pilot.press("minus")
        await lab.settle(pilot, shows(app, "2x"))
        core.control(lambda player: player.seek(BEGIN + 31 * 60))
        await lab.settle(pilot, shows(app, "nothing was recorded for 11m"))
        core.control(lambda player: player.seek(BEGIN + HOURS * 3600))
        await pilot.press("0")
        await lab.settle(pilot, shows(app, clock((60 * HOURS - 1) * 60), "at its end"))


async def test_it_plays_by_itself(tmp_path: Path, day: Path) -> None:
    async with replay(tmp_path, day) as (app, core, pilot):
        core.player.speed = 1800.0
        await pilot.press("0")
        await lab.settle(pilot, shows(app, "at its end"))
        assert core.history.of("GPU-gpu01-0").utilization
        assert core.events.events == Recording(day).at(BEGIN + HOURS * 3600).events  # also of frames that were skipped


@pytest.mark.parametrize("back", [False, True])
async def test_after_a_jump_the_graphs_have_the_past_before_it(tmp_path: Path, day: Path, back: bool) -> None:
    async with replay(tmp_path, day) as (_, core, pilot):
        history = core.history
        if back:
            core.control(lambda player: player.seek(BEGIN + 170 * 60))
            await lab.settle(pilot, lambda: history.newest_at == BEGIN + 170 * 60)
        at = BEGIN + 100 * 60.0
        core.control(lambda player: player.seek(at))
        hour_before = tuple(at - 30 * number for number in range(120, -1, -1))
        await lab.settle(pilot, lambda: history.of("GPU-gpu01-0", HOUR).times == hour_before)
        minutes = history.of("GPU-gpu01-0")
        assert (minutes.times[0], minutes.times[-1], len(minutes.times)) == (at - 299, at, 300)
        assert minutes.utilization == tuple(int(time - BEGIN) // 60 % 60 for time in minutes.times)
        hour = history.of("GPU-gpu01-0", HOUR)
        assert hour.utilization == tuple(int(time - BEGIN) // 60 % 60 for time in hour.times)
        day_times = history.of("GPU-gpu01-0", DAY).times
        assert day_times[0] == BEGIN
        assert day_times[-1] == at
        assert max(later - time for time, later in pairwise(day_times)) <= 900  # ten minutes were not recorded
        assert history.means(["GPU-gpu01-0"], 5) == [36.0, 37.0, 38.0, 39.0, 40.0]


KINDS = {3599: [], 3600: ["unreachable", "expired"], 7200: ["unreachable", "expired", "back", "lost"]}  # by second
MOMENTS = (7200, 3600, 3599, 7200, 3599, 3600, 7200)  # forward and back, over one event and over all


def kinds(core: ReplayCore) -> list[str]:
    return [event.kind for event in core.events.events]


def listed(app: ReplayApp) -> list[list[str]]:
    """Return time and kind of the events in the list of the overview, the oldest first."""
    rows = app.screen.query_one(Grid).tsv().splitlines()[:0:-1]
    return [row.split("\t")[:2] for row in rows]


async def test_events_are_the_same_however_a_moment_is_reached(tmp_path: Path, day: Path) -> None:
    times = {"unreachable": clock(3600), "expired": clock(3600), "back": clock(7200), "lost": clock(7200)}
    async with replay(tmp_path, day) as (app, core, pilot):
        await lab.settle(pilot, lambda: lab.shown(app, "No events up to this moment."))
        for moment in MOMENTS:
            core.control(lambda player: player.seek(BEGIN + moment))  # noqa: B023  # called at once
            await lab.settle(pilot, shows(app, clock(moment)))
            found = KINDS[moment]
            assert kinds(core) == found
            beside = lab.screen(app)
            assert [kind for kind in times if f" {kind} " in beside] == found  # the box and the list agree
            await pilot.press("v")
            await lab.settle(pilot, shows(app, " Events"))
            assert [row[1] for row in listed(app)] == found
            assert [row[0][-8:] for row in listed(app)] == [times[kind][-8:] for kind in found]
            await pilot.press("escape")
            await lab.settle(pilot, lambda: len(app.screen_stack) == 2)


async def test_events_of_an_older_recording_have_no_wrong_times(tmp_path: Path, old: Path) -> None:
    async with replay(tmp_path, old) as (app, core, pilot):
        await lab.settle(pilot, lambda: lab.shown(app, "This recording has no events; they are found while it plays."))
        for moment in MOMENTS:
            core.control(lambda player: player.seek(BEGIN + moment))  # noqa: B023  # called at once
            await lab.settle(pilot, shows(app, clock(moment)))
            assert kinds(core) == []
        played = [0.0]
        core.player._clock = lambda: played[0]
        core.control(lambda player: player.seek(BEGIN + 3540))
        await lab.settle(pilot, shows(app, clock(3540)))
        await pilot.press("0")
        played[0] = 60.0  # seconds: the next frame, which a slow machine may pass over
        await lab.settle(pilot, lambda: kinds(core) == ["unreachable", "expired"])
        assert {event.at for event in core.events.events} == {iso(BEGIN + 3600)}


async def test_nothing_can_be_changed(tmp_path: Path, day: Path) -> None:
    async with replay(tmp_path, day, (180, 90)) as (app, _, pilot):
        for screen, refused in (("", "rxKw"), ("l", "dnxrew"), ("u", "sxw"), ("P", "Kw")):
            await pilot.press(*screen)
            await lab.settle(pilot, lambda: len(app.screen_stack) == 2 + len(screen))  # noqa: B023  # waited for
            for key in refused:
                before = len(lab.toasts(app))
                await pilot.press(key)
                await lab.settle(pilot, lambda: len(lab.toasts(app)) > before)  # noqa: B023  # waited for
                assert "this is a replay: nothing can be reserved, launched" in lab.toasts(app)[-1]
                assert len(app.screen_stack) == 2 + len(screen)
            offered = {one.binding.description for one in app.screen.active_bindings.values()}
            assert not offered & {"Reserve", "Launch", "Signal", "Release", "Renew", "Stop", "Watches"}
            assert not lab.shown(app, "r reserves")
            assert not lab.shown(app, "x launches")
            await pilot.press(*["escape"] * len(screen))
            await lab.settle(pilot, lambda: len(app.screen_stack) == 2)
        await pilot.press("question_mark")
        await lab.settle(pilot, shows(app, "Replay of a recording", "replay.pause", "leases.copy", "runs.log"))
        refused = "gpus.reserve gpus.signal leases.release leases.watch runs.stop app.watches watches.add Watches"
        assert not [name for name in refused.split() if name in lab.screen(app)]


async def test_a_recording_without_gpus_opens_no_welcome(tmp_path: Path) -> None:
    scene = made.scene(made.node("login1", [], error=f"NVML: {NO_DRIVER}"), at=iso(BEGIN))
    path = written(tmp_path / "bare.gz", [Frame(BEGIN, scene.snapshot, scene.leases, scene.uids)])
    async with replay(tmp_path, path) as (app, _, pilot):
        await pilot.press("plus")
        await lab.settle(pilot, shows(app, "login1", "2x"))
        assert isinstance(app.screen, ClusterScreen)


def is_damaged(path: Path, minute: int) -> bool:
    try:
        Recording(path).at(BEGIN + 60 * minute)
    except GpuboardError:
        return True
    return False


async def test_a_damaged_part_keeps_what_was_shown(tmp_path: Path, day: Path) -> None:
    content = bytearray(day.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4] = b"\xff" * 4
    (tmp_path / "damaged.gz").write_bytes(content)
    damaged = next(BEGIN + 60 * minute for minute in range(60 * HOURS) if is_damaged(tmp_path / "damaged.gz", minute))
    async with replay(tmp_path, tmp_path / "damaged.gz") as (app, core, pilot):
        core.control(lambda player: player.seek(damaged))
        await lab.settle(pilot, lambda: lab.shown(app, "damaged.gz is damaged at", "gpu01"))
        await pilot.press("less_than_sign", "less_than_sign", "less_than_sign")
        await lab.settle(pilot, lambda: "damaged at" not in lab.screen(app) and clock(0) in lab.screen(app))


async def test_leases_have_the_time_that_was_left(tmp_path: Path) -> None:
    found = []
    for minute in (0, 30):
        at = BEGIN + 60 * minute
        held = msgspec.structs.replace(
            made.lease("k3f9", "alice", [("gpu01", 1)]), since=iso(BEGIN - 3600), until=iso(BEGIN + 5400)
        )
        nodes = [made.node("gpu01", [made.gpu("gpu01", 0), made.gpu("gpu01", 1, "reserved", leases=["k3f9"])])]
        scene = made.scene(*nodes, leases=[held], at=iso(at))
        found.append(Frame(at, scene.snapshot, scene.leases, scene.uids))
    path = written(tmp_path / "left.gz", found)
    async with replay(tmp_path, path, (160, 48)) as (app, core, pilot):
        await pilot.press("l")
        await lab.settle(pilot, shows(app, "k3f9", " 1h30m "))
        core.control(lambda player: player.seek(BEGIN + 1800))
        await lab.settle(pilot, shows(app, "k3f9", " 1h00m "))
        [row] = [line for line in lab.screen(app).splitlines() if line.startswith(" k3f9   alice")]
        assert row.count("━") > row.count("─") > 0  # the hour that is left; a fifth of the axis before it
        await pilot.press("slash", *"left<1h", "enter")
        await lab.settle(pilot, shows(app, "0 of 1 match"))
