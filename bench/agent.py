"""Measure the agent on its node: CPU and memory of its processes, with 8 GPUs read once a second.

    python bench/agent.py [--seconds 60] [--gpus 8]

The NVML library is the tests' scripted one, which answers at once, so this measures the agent itself, as with a fast
driver. Each GPU has two processes, which are looked up in /proc as on a busy node.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' NVML library, which is not in the package

from usage import cpu_ns, pss

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from tests.nvml import GIB, Gpu, library, write_script

GOAL_PERCENT = 0.5
WINDOW_S = 10.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU and memory of the agent on a node")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--gpus", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as folder:
        script = Path(folder) / "nvml"
        pids = (os.getpid(), os.getppid())
        gpm = dict.fromkeys((2, 3, 5, 7, 8, 9, 10, 20, 21, 60, 61), 50.0)  # all that the agent asks for, as of Hopper
        gpu = Gpu(used=8 * GIB, utilization=50, processes=tuple(("compute", pid, 4 * GIB) for pid in pids), gpm=gpm)
        write_script(script, [gpu] * args.gpus)
        # For the agent, our child process: the loader reads the path when a process starts.
        os.environ["LD_LIBRARY_PATH"] = str(library())
        os.environ["FAKE_NVML"] = str(script)
        settings = Settings()
        with contextlib.closing(Fleet([Node(name="bench", host=None)], settings, interval_s=1.0)) as fleet:
            fleet.start()
            fleet.wait(10)
            [node] = fleet.snapshot().nodes
            if node.state != "up" or len(node.gpus) != args.gpus:
                sys.exit(f"the agent does not read the {args.gpus} GPUs: {node.state}, {node.error}")
            time.sleep(3)  # after the start: imports, static facts
            percents = [_percent(WINDOW_S) for _ in range(max(1, int(args.seconds / WINDOW_S)))]
            memory = {pid: pss(pid) for pid in _descendants()}
    median = statistics.median(percents)
    verdict = "met" if median <= GOAL_PERCENT else "missed"
    print(f"{args.gpus} GPUs with 2 processes each, a reading a second, {len(percents)} windows of {WINDOW_S:.0f} s")
    print(
        f"CPU: median {median:.2f} % of a core (from {min(percents):.2f} to {max(percents):.2f}); "
        f"goal at most {GOAL_PERCENT} %: {verdict}"
    )
    each = ", ".join(f"{size / 2**20:.1f}" for size in memory.values())
    print(f"memory (PSS): {sum(memory.values()) / 2**20:.1f} MiB in {len(memory)} processes ({each})")


def _percent(seconds: float) -> float:
    """Return the CPU use of our descendants during ``seconds``, in percent of a core."""
    before = {pid: cpu_ns(pid) for pid in _descendants()}
    started = time.monotonic_ns()
    time.sleep(seconds)
    used = sum(cpu_ns(pid) - since for pid, since in before.items())
    return 100 * used / (time.monotonic_ns() - started)


def _descendants() -> list[int]:
    """Return the pids of all our descendants."""
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        pid = todo.pop()
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            children = [int(word) for word in file.read_text().split()]
            found += children
            todo += children
    return found


if __name__ == "__main__":
    main()
