"""The pictures of docs/screenshots, drawn by the board itself from the demo's cluster: python scripts/screenshots.py

Each is the same whenever and wherever it is drawn: the cluster is the demo's at one moment of its story, the clock
stands still, and what a real run has left (its id, times, pids and folder) is given fixed values. ``--to FOLDER`` draws
elsewhere, which is how a test sees that those of the repository are not out of date.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from textual.pilot import Pilot

from gpuboard.agent.simulate.gpus import Simulated
from gpuboard.board.app import BoardApp
from gpuboard.board.core import Core
from gpuboard.board.dialogs.launch_process import LaunchForm
from gpuboard.board.history import History
from gpuboard.board.scene import Scene
from gpuboard.board.terminal.screenshot import plain
from gpuboard.cli.setup import demo_board
from gpuboard.cluster.simulated import living_nodes
from gpuboard.cluster.simulated_script import uid
from gpuboard.cluster.snapshot.builder import SnapshotBuilder
from gpuboard.cluster.snapshot.views import NodeFacts, View, inert_static, node_claims
from gpuboard.config import Settings
from gpuboard.launch.runs.elsewhere import ClusterRunbook
from gpuboard.launch.runs.folder import HeadProcess, RunView, runs_dir
from gpuboard.launch.runs.index import RunEntry
from gpuboard.leases.claims.client import leases_of, slots
from gpuboard.model.gpu import GpuStatic
from gpuboard.model.lease import LeaseList
from gpuboard.model.reading import Hello, Reading, Static
from gpuboard.model.snapshot import Snapshot
from gpuboard.model.state import counted
from gpuboard.model.units import iso

FOLDER = Path(__file__).parents[1] / "docs" / "screenshots"
_EPOCH = 1769860800.0  # 2026-01-31 12:00 UTC, when the story begins
_T = 95.0  # the moment that is shown: a node hangs, a rogue has come, a GPU is lost
_WATCHED_S = 300  # what the board remembers
_VIEWER = "alice"
_RUN, _LEASE, _PROJECT = "r7k2m9xq", "w5k8ra", "/home/alice/vit"
_STATE = "/home/alice/.local/state/gpuboard"
# A training in which a shard of the data is missing. The others are busy with theirs when a rank fails, so that what
# they say last does not depend on who is quicker.
_TRAIN = '''\
"""Train on shards of data, each rank on its own."""
import os
import time

import torch
import torch.distributed as dist


def load(shard: int) -> torch.Tensor:
    path = f"data/shard-{shard:03d}.txt"
    for _ in range(3):  # the disk is far away
        if os.path.exists(path):
            break
        time.sleep(1)
    with open(path) as file:
        seconds = float(file.read())
    time.sleep(seconds)
    return torch.ones(8)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(4):
        batch = load(step * world + rank)
        dist.all_reduce(batch)
        print(f"step {step}: {world} shards, {int(batch.sum())} samples", flush=True)


main()
'''
_SHARDS, _MISSING = 16, 14


class Clock:
    """A clock that stands where it was put; it takes the place of ``time.time``."""

    now = _EPOCH

    def __call__(self) -> float:
        """Return epoch seconds."""
        return self.now


class Book(ClusterRunbook):
    """The runs, in a folder that has a fixed name on the screen."""

    def read(self) -> list[RunEntry]:
        """Return all runs."""
        return [
            msgspec.structs.replace(e, view=msgspec.structs.replace(e.view, folder=f"{_STATE}/runs/{e.view.id}"))
            for e in super().read()
        ]


class Story:
    """The demo's cluster at one moment of its story, with the minutes before it; worked out instead of watched."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.nodes = living_nodes("/var/tmp", epoch=_EPOCH, cluster="demo")
        self.history = History()
        self._clock = clock
        self._thresholds = settings.state.thresholds()
        self._probes = {node.name: Simulated(node.simulate or {}, node.name) for node in self.nodes}
        self._known: dict[str, Static] = {
            name: Static(msgspec.convert(probe.statics(), list[GpuStatic]), "simulated", None, "simulated")
            for name, probe in self._probes.items()
        }
        self._facts = {name: self._at_first(name) for name in self._probes}
        builder = SnapshotBuilder()
        for second in range(_WATCHED_S, -1, -1):
            shown = self._look(builder, _T - second)
            self.history.add(shown, _T - second)
        claims = {name: node_claims(facts, {}) for name, facts in self._facts.items()}
        unread = [node.name for node in shown.nodes if node.state != "up"]
        read = {name: found for name, found in claims.items() if name not in unread}
        uids = dict.fromkeys(self._probes, uid(_VIEWER))
        leases = leases_of(read, slots(shown.nodes), clock(), uids=uids)
        self.scene = Scene(shown, LeaseList(schema=1, at=iso(clock()), leases=leases, unread=unread), uids=uids)

    def _at_first(self, name: str) -> NodeFacts:
        hello = Hello(name, "simulated", uid(_VIEWER), _VIEWER, 4100, "3.9.18", ["192.0.2.1"])
        known = {gpu.uuid: gpu for gpu in map(inert_static, self._known[name].gpus)}
        return NodeFacts(name=name, hello=hello, static=self._known[name], known=known)

    def _look(self, builder: SnapshotBuilder, t: float) -> Snapshot:
        self._clock.now = _EPOCH + t
        for name, probe in self._probes.items():
            if any(start <= t < until for start, until in probe.script["hangs"]):
                continue
            old = self._facts[name]
            reading = self._reading(probe, t)
            busy = dict(old.last_busy)
            for gpu in reading.gpus:
                if gpu.processes is None or gpu.uuid not in busy or counted(gpu, self._thresholds):
                    busy[gpu.uuid] = t
            self._facts[name] = msgspec.structs.replace(
                old, reading=reading, previous=old.reading, arrived=t - 0.4, last_busy=busy
            )
        at, limits = self._clock(), self._thresholds
        view = View(now=t, at=at, cluster="demo", thresholds=limits, users={}, interval_s=1.0, one_shot=False)
        return builder.snapshot(list(self._facts.values()), view)

    def _reading(self, probe: Simulated, t: float) -> Reading:
        values: dict[str, Any] = {
            "seq": 1,
            "at": self._clock(),
            "interval_s": 1.0,
            "gpus": probe.readings(t, lambda *_: None),
            "claims": probe.folder("/var/tmp").others([]),
            **probe.host.reading(),
        }
        return msgspec.convert({"t": "reading", **values}, Reading)


class Still(Core):
    """A board's core that shows the last scene of a story."""

    def __init__(self, settings: Settings, env: Mapping[str, str], story: Story) -> None:
        super().__init__(story.nodes, settings, env)
        self.runbook = Book(env, settings, self.nodes, self.fleet.permitted)
        self.history = story.history
        self._story = story

    def start(self, changed: Callable[[Scene], object]) -> None:
        """Show it."""
        changed(self.scene())

    def scene(self) -> Scene:
        """Return the scene that is shown."""
        return self._story.scene


def failing_run(env: Mapping[str, str], folder: Path) -> None:
    """Let a real run fail, and give fixed values to what is different each time."""
    project = folder / "project"
    (project / "data").mkdir(parents=True)
    (project / "train.py").write_text(_TRAIN, encoding="utf-8")
    for shard in set(range(_SHARDS)) - {_MISSING}:
        seconds = 60.0 if shard > _SHARDS - 5 else 0.0
        (project / "data" / f"shard-{shard:03d}.txt").write_text(f"{seconds}\n", encoding="utf-8")
    core = demo_board.make(Settings(claims_dir=env.get("GPUBOARD_CLAIMS_DIR", "/var/tmp")), env)
    try:
        sim03 = core.nodes["sim03"].simulate or {}
        gpus = "sim03:12,13,14,15"
        form = LaunchForm("train.py --config vit_b16.yaml", str(project), gpus=gpus, device="cpu", grace="5s")
        started = core.starter.start(form)
        code = started.process.wait(120)
        made = runs_dir(core.env) / started.run
        if code == 0 or not made.is_dir():
            raise SystemExit(f"the run was to fail, and ended with {code}: {started.messages}")
    finally:
        core.close()
        demo_board.end(core)
    _fix(made, {str(project): _PROJECT, str(made.parents[1]): _STATE, f"SIM-{sim03['cluster']}-": "SIM-demo-"})
    shutil.move(made, runs_dir(env) / _RUN)
    os.utime(runs_dir(env) / _RUN / "state.json", (_EPOCH + _T - 21.0,) * 2)


def _fix(made: Path, names: dict[str, str]) -> None:
    view = msgspec.json.decode((made / "state.json").read_bytes(), type=RunView)
    names = {**names, view.id: _RUN, str(view.lease): _LEASE}
    for path in made.iterdir():
        text = path.read_text(encoding="utf-8")
        for name, instead in names.items():
            text = text.replace(name, instead)
        text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", iso(_EPOCH + _T - 26.0), text)
        text = re.sub(r"at \d\d:\d\d:\d\d after \d+s", "at 12:01:10 after 39s", text)
        path.write_text(text, encoding="utf-8")
    (made / "preflight.json").write_text('{"checks": []}', encoding="utf-8")  # what this machine was warned of
    view = msgspec.json.decode((made / "state.json").read_bytes(), type=RunView)
    fixed = msgspec.structs.replace(
        view,
        started=iso(_EPOCH + _T - 64.0),
        ranks=[msgspec.structs.replace(rank, pid=41200 + rank.rank) for rank in view.ranks],
        verdicts=[msgspec.structs.replace(verdict, at=iso(_EPOCH + _T - 26.0)) for verdict in view.verdicts],
        head=HeadProcess("login1", "simulated", 41100, 1),
        folder="",
    )
    (made / "state.json").write_bytes(msgspec.json.encode(fixed))


async def settled(pilot: Pilot[int], text: str) -> None:
    """Wait until ``text`` is on the screen, and the keys in its footer."""
    until = time.monotonic() + 20
    while text not in shown(pilot.app) or not shown(pilot.app).splitlines()[-1].strip():
        if time.monotonic() > until:
            raise SystemExit(f"{text!r} did not come; on the screen:\n{shown(pilot.app)}")
        await pilot.pause(0.05)
    await pilot.pause(0.1)


def shown(app: Any) -> str:
    """Return what is on the screen as text, a line a row."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


Act = Callable[[Pilot[int]], Awaitable[None]]


async def cluster(pilot: Pilot[int]) -> None:
    """Every node and GPU; the cursor on a GPU that a rogue has come to."""
    await settled(pilot, "sim07")
    await pilot.press("down", "right")


async def table(pilot: Pilot[int]) -> None:
    """One row a GPU."""
    await settled(pilot, "sim07")
    await pilot.press("t")
    await settled(pilot, "Temp")


async def gpu(pilot: Pilot[int]) -> None:
    """One GPU in detail."""
    await settled(pilot, "sim07")
    await pilot.press("down", "down", "down", "down", "right", "right", "right", "enter")
    await settled(pilot, "too hot")


async def leases(pilot: Pilot[int]) -> None:
    """Who holds what until when."""
    await settled(pilot, "sim07")
    await pilot.press("l", "t")
    await settled(pilot, "h4t9wd")


async def run(pilot: Pilot[int]) -> None:
    """A run that failed, and why."""
    await settled(pilot, "sim07")
    await pilot.press("u")
    await settled(pilot, "FileNotFoundError")


PICTURES: dict[str, tuple[Act, tuple[int, int]]] = {
    "cluster": (cluster, (120, 24)),
    "table": (table, (120, 40)),
    "gpu": (gpu, (120, 34)),
    "leases": (leases, (160, 18)),
    "run": (run, (120, 24)),
}


def draw(name: str, env: Mapping[str, str], settings: Settings, story: Story) -> str:
    """Return a picture as SVG."""
    act, size = PICTURES[name]
    # A state folder of its own: a board saves its view half a second later, in the background.
    own = {**env, "XDG_STATE_HOME": str(Path(env["HOME"], name))}
    shutil.copytree(runs_dir(env), runs_dir(own))

    async def picture() -> str:
        app = BoardApp(Still(settings, own, story))
        async with app.run_test(size=size) as pilot:
            await act(pilot)
            await settled(pilot, "")
            return app.export_screenshot(title=f"gpuboard demo: {name}")

    return plain(asyncio.run(picture()))


@contextmanager
def quiet_place() -> Iterator[tuple[Path, dict[str, str]]]:
    """Make a folder, and an environment in which nothing of this machine's user is seen."""
    with tempfile.TemporaryDirectory(prefix="gpuboard-screenshots-") as name:
        folder = Path(name)
        kept = {key: os.environ[key] for key in ("PATH", "GPUBOARD_CLAIMS_DIR", "LD_LIBRARY_PATH") if key in os.environ}
        yield folder, kept | {
            "HOME": name, "XDG_STATE_HOME": f"{name}/state", "XDG_CONFIG_HOME": f"{name}/config", "LANG": "C.UTF-8",
            "TERM": "xterm-256color", "COLORTERM": "truecolor", "TZ": "UTC", "USER": _VIEWER, "LOGNAME": _VIEWER,
        }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the pictures; return the exit code."""
    parser = argparse.ArgumentParser(description="draw the pictures of docs/screenshots")
    parser.add_argument("--to", type=Path, default=FOLDER, help="the folder to draw into")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; none: all of them")
    args = parser.parse_args(argv)
    args.to.mkdir(parents=True, exist_ok=True)
    with quiet_place() as (folder, env):
        os.environ.clear()
        os.environ.update(env)
        time.tzset()
        runs_dir(env).mkdir(parents=True)
        if not args.names or set(args.names) & {"run"}:
            failing_run(env, folder)
        clock = Clock()
        time.time = clock  # for whoever asks in this process
        settings = Settings(cluster="demo", state=demo_board.STATE)
        story = Story(settings, clock)
        drawn = {args.to / f"{name}.svg": draw(name, env, settings, story) for name in args.names or PICTURES}
    for path, svg in drawn.items():
        path.write_text(svg, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
