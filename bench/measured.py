"""The process that bench/board.py measures: the board with a clock, which writes its own report."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

from feeder import FeederConnector
from slurm import stand_in
from textual import events

from gpuboard.board.app import BoardApp
from gpuboard.board.core import Core
from gpuboard.board.scene import Scene
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.terminal import gc
from gpuboard.board.terminal.driver import TerminalDriver
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.scheduler.find import find

SETTLE_S = 8.0
ALL_S = 60.0
AT_S = 60.0  # start of the memory measurement in the long run


class Clock:
    """Measures the time from a key to its frame. ``flushed`` is called after a frame is written."""

    def __init__(self) -> None:
        self.keys_ms: list[float] = []
        self._pressed: float | None = None
        self._before: str | None = None
        self._shown: float | None = None
        self.cursor: Callable[[], str | None] = lambda: None

    def key(self, at: float) -> None:
        """Record a key received at ``at`` (time.monotonic)."""
        self._pressed, self._before = at, self.cursor()

    def written(self) -> None:
        """Record that a frame is handed to the driver; called in the UI's thread."""
        if self._pressed is not None and self.cursor() != self._before:
            self._shown, self._pressed = self._pressed, None

    def flushed(self) -> None:
        """Record that the frame is flushed."""
        if self._shown is not None:
            self.keys_ms.append((time.monotonic() - self._shown) * 1e3)
            self._shown = None


CLOCK = Clock()


class MeasuredDriver(TerminalDriver):
    """The board's driver, with a clock on its output."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._file = cast(Any, Flushes(cast(TextIO, self._file)))

    def write(self, data: str) -> None:
        """Hand a frame to the thread that writes."""
        CLOCK.written()
        super().write(data)


class Flushes(io.TextIOBase):
    """A terminal's file that tells when it has been written to."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()
        CLOCK.flushed()

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()


class MeasuredApp(BoardApp):
    """The board, with a clock on its keys and scenes."""

    scenes = 0

    async def on_event(self, event: events.Event) -> None:
        """Record when a key was received: textual's driver sets its time in the thread that reads the terminal."""
        if isinstance(event, events.Key):
            CLOCK.key(event.time)
        await super().on_event(event)

    def on_scene_changed(self, message: Any) -> None:
        """Count scenes. Textual calls the handler of every class: one that called super() would draw twice."""
        self.scenes += 1


def run(args: argparse.Namespace, folder: Path) -> None:
    """Run the board, measure, write report.json into ``folder`` and exit."""
    nodes = [Node(name=f"gpu{number:04d}", host=None) for number in range(args.nodes)]
    settings = Settings(interval="1s", ssh="all")
    scheduler = find(settings, stand_in(folder, args.nodes, 2 * args.nodes)) if args.slurm else None
    core = Core(nodes, settings, os.environ, FeederConnector(str(folder / "feed")), scheduler)
    app = MeasuredApp(core)
    gc.calm(len(nodes))
    CLOCK.cursor = lambda: app.screen.grid.cursor if isinstance(app.screen, ClusterScreen) else None
    threading.Thread(target=_watch, args=(app, args, folder), name="measure", daemon=True).start()
    if args.kind == "tmux":
        app.driver_class = MeasuredDriver
        app.run()
    else:
        asyncio.run(_headless(app))
    os._exit(0)


async def _headless(app: MeasuredApp) -> None:
    async with app.run_test(size=(200, 60)):
        while app.is_running:
            await asyncio.sleep(0.2)


def _watch(app: MeasuredApp, args: argparse.Namespace, folder: Path) -> None:
    """Measure in a thread beside the UI."""
    try:
        _until(lambda: _all_up(app.scene, args.nodes), ALL_S)
        if args.view == "table":
            app.call_from_thread(lambda: cast(ClusterScreen, app.screen).action_view())
        time.sleep(SETTLE_S)
        started, before, scenes = time.monotonic(), _threads(), app.scenes
        used = _cpu_s()
        mib = [(time.monotonic(), _rss_mib())]
        time.sleep(args.seconds)
        wall_s = time.monotonic() - started
        found: dict[str, Any] = {
            "cpu_percent": 100 * (_cpu_s() - used) / wall_s,
            "threads": {
                name: round(100 * (ns - before.get(name, 0)) / 1e9 / wall_s, 1) for name, ns in _threads().items()
            },
            "scenes": (app.scenes - scenes) / wall_s,
        }
        if args.kind == "tmux":  # headless writes nothing to measure
            _keys(args, folder)
        found["keys_ms"] = CLOCK.keys_ms
        if args.minutes:
            time.sleep(max(0.0, started + AT_S - time.monotonic()))
            mib = [(time.monotonic(), _rss_mib())]
            time.sleep(max(0.0, started + 60 * args.minutes - time.monotonic()))
        mib.append((time.monotonic(), _rss_mib()))
        found["mib"] = [size for _, size in mib]
        found["first_s"], found["last_s"] = (at - started + SETTLE_S for at, _ in mib)
        (folder / "report.tmp").write_text(json.dumps(found))
        (folder / "report.tmp").rename(folder / "report.json")
    except BaseException as error:
        (folder / "errors").write_text(f"{type(error).__name__}: {error}")  # stderr is the terminal
    os._exit(0)


def _keys(args: argparse.Namespace, folder: Path) -> None:
    """Request keys by creating a file that bench/board.py polls, until enough were answered."""
    CLOCK.keys_ms.clear()
    (folder / "keys").touch()
    _until(lambda: len(CLOCK.keys_ms) >= args.keys, args.keys)
    (folder / "keys").unlink()


def _all_up(scene: Scene | None, nodes: int) -> bool:
    return scene is not None and sum(node.state == "up" for node in scene.snapshot.nodes) == nodes


def _until(condition: Callable[[], bool], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the board did not reach the expected state")
        time.sleep(0.1)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _threads() -> dict[str, int]:
    """Return the CPU nanoseconds of each thread."""
    found: dict[str, int] = {}
    for thread in threading.enumerate():
        file = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        name = "UI" if thread is threading.main_thread() else thread.name
        if file.exists():
            found[name] = found.get(name, 0) + int(file.read_text().split()[0])
    return found


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
