"""A recording of a day of 64 nodes: its size and cost, and the board's memory while it plays eight hours of it.

    python bench/recording.py [--nodes 64] [--hours 8] [--sample 300]

Readings come from the demo's simulated nodes, recorded by `gpuboard record` for ``--sample`` seconds. 64 nodes are made
of these by shifting each node's readings in time; eight hours by repeating them. The board plays at 1,800 times the
speed, headless at 200x60.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpuboard.board.overview.log import EventFinder
from gpuboard.board.replay.app import ReplayApp
from gpuboard.board.replay.core import ReplayCore
from gpuboard.cluster.inventory.file import write_nodes
from gpuboard.cluster.simulated import living_nodes
from gpuboard.config import Settings
from gpuboard.model.lease import LeaseList
from gpuboard.model.units import iso
from gpuboard.recording.events import EVENTS_MOST, ClusterEvent
from gpuboard.recording.file import Recording, RecordingWriter
from gpuboard.recording.frames import Frame

EVERY_S = 5.0
KINDS = ("sim01", "sim02", "sim01", "sim02", "sim04")  # nodes of 8 and 4 GPUs
SHIFT = 17  # frames between two nodes of one kind
SPEED = 1800.0
GOAL_GROWTH_PERCENT = 5.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="size and cost of a recording, memory of its replay")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--hours", type=float, default=8)
    parser.add_argument("--sample", type=int, default=300, help="seconds recorded from simulated nodes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sample, file = Path(folder) / "sample.gz", Path(folder) / "recording.gz"
        write_nodes(Path(folder) / "nodes", living_nodes(None))
        command = [sys.executable, "-m", "gpuboard", "record", str(sample), "--for", f"{args.sample}s"]
        subprocess.run(command, env={**os.environ, "GPUBOARD_INVENTORY": f"{folder}/nodes"}, check=True)
        began, count = time.process_time(), 0
        writer = RecordingWriter(file)
        for frame in frames(Recording(sample), args.nodes, args.hours * 3600):
            writer.add(frame)
            count += 1
            gpus = sum(len(node.gpus) for node in frame.snapshot.nodes)
        writer.close()
        spent_s = time.process_time() - began
        print(f"{args.nodes} nodes, {gpus} GPUs, a frame every {EVERY_S:g} s, {args.hours:g} h")
        print(f"size of a day: {writer.bytes / args.hours * 24 / 1e6:.0f} MB")
        print(f"writing, making the frames included: {spent_s / count * 1e3:.1f} ms of CPU a frame")
        asyncio.run(replay(file, Path(folder), args.hours))


def frames(sample: Recording, nodes: int, seconds: float) -> Iterator[Frame]:
    """Yield the frames of a larger and longer cluster."""
    known = list(sample.frames())
    finder, events = EventFinder(), list[ClusterEvent]()
    for number in range(int(seconds / EVERY_S)):
        at = sample.begin + number * EVERY_S
        found = []
        for place in range(nodes):
            source = known[(number + SHIFT * place) % len(known)]
            [like] = [node for node in source.snapshot.nodes if node.name == KINDS[place % len(KINDS)]]
            gpus = [msgspec.structs.replace(gpu, uuid=f"{gpu.uuid}-{place}") for gpu in like.gpus]
            found.append(msgspec.structs.replace(like, name=f"gpu{place:04d}", gpus=gpus, age_s=0.5))
        snapshot = msgspec.structs.replace(known[0].snapshot, at=iso(at), nodes=found)
        leases = LeaseList(1, iso(at), [])
        events = [*events, *finder.find(snapshot, leases, at)][-EVENTS_MOST:]
        yield Frame(at, snapshot, leases, events=events)


async def replay(file: Path, folder: Path, hours: float) -> None:
    """Play a recording to its end and print the memory of this process at the end of each hour."""
    core = ReplayCore(Recording(file), Settings(), {**os.environ, "XDG_STATE_HOME": str(folder)})
    core.player.speed = SPEED
    app = ReplayApp(core)
    sizes: dict[int, float] = {}  # hour → MiB at its end
    async with app.run_test(size=(200, 60)) as pilot:
        began, cpu = time.monotonic(), time.process_time()
        while core.player.position < core.recording.end:
            await pilot.pause(0.1)
            sizes[int((core.player.position - core.recording.begin) / 3600)] = resident()
        wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
        core.close()
        await pilot.pause()
    print(f"{hours:g} h replayed in {wall_s:.0f} s with {cpu_s:.0f} s of CPU")
    growth = (sizes[max(sizes)] / sizes[1] - 1) * 100  # in the first hour histories fill
    met = "met" if growth <= GOAL_GROWTH_PERCENT else "missed"
    print(f"memory at the end of each hour: {', '.join(f'{size:.0f}' for size in sizes.values())} MiB")
    print(f"from the second hour to the end {growth:+.1f} %; goal at most {GOAL_GROWTH_PERCENT:g} %: {met}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak of the whole measurement: {peak:.0f} MiB")


def resident() -> float:
    """Return this process's resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
