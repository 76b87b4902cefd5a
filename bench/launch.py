"""From the command to the first all-reduce: ``gpuboard launch`` beside ``torchrun --standalone``.

    python bench/launch.py [--ranks 4] [--rounds 7]

Whole processes, alternating, on CPU with gloo, measured until the last rank has its sum.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

GOAL = 0.75
SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "allreduce.py"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="launch to first all-reduce")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as temporary:
        folder = Path(temporary)
        starters = {"gpuboard": gpuboard(folder, args.ranks), "torchrun": torchrun(args.ranks)}
        for command in starters.values():
            measure(command, folder, args.ranks)  # a first round warms the file cache
        seconds: dict[str, list[float]] = {name: [] for name in starters}
        for _ in range(args.rounds):
            for name, command in starters.items():
                seconds[name].append(measure(command, folder, args.ranks))
    print(f"{args.ranks} ranks on {os.cpu_count()} cores, gloo, {args.rounds} rounds, alternating")
    for name, found in seconds.items():
        print(f"{name}: median {statistics.median(found):.2f} s (from {min(found):.2f} to {max(found):.2f})")
    ratio = statistics.median(seconds["gpuboard"]) / statistics.median(seconds["torchrun"])
    print(f"ratio {ratio:.2f}; goal at most {GOAL}: {'met' if ratio <= GOAL else 'missed'}")


def gpuboard(folder: Path, ranks: int) -> Callable[[Path], list[str]]:
    """Return the command line of a launch on a rank map of this machine."""
    host = socket.gethostname()  # the name of the one node of an inventory without config
    uuids = [f"GPU-{rank}" for rank in range(ranks)]
    rank_map = {
        "schema": 1,
        "lease": None,
        "master_addr": "127.0.0.1",
        "master_port": 0,
        "world_size": ranks,
        "nodes": [
            {
                "name": host,
                "address": "127.0.0.1",
                "node_rank": 0,
                "local_world_size": ranks,
                "cuda_visible_devices": ",".join(str(rank) for rank in range(ranks)),
            }
        ],
        "ranks": [
            {"rank": r, "node": host, "local_rank": r, "index": r, "uuid": uuid, "memory_fraction": None}
            for r, uuid in enumerate(uuids)
        ],
    }
    path = folder / "rank_map.json"
    path.write_text(json.dumps(rank_map))
    start = [sys.executable, "-m", "gpuboard", "launch", "--rank-map", str(path), "--device", "cpu"]
    return lambda out: [*start, "--python", sys.executable, str(SCRIPT), str(out)]


def torchrun(ranks: int) -> Callable[[Path], list[str]]:
    """Return torchrun's command line."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return lambda out: [*start, str(SCRIPT), str(out)]


def measure(command: Callable[[Path], list[str]], folder: Path, ranks: int) -> float:
    """Run one launch; return the seconds from its start to the last rank's sum."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
        started = time.monotonic()
        done = subprocess.run(command(Path(out)), env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(done.args)} ended with code {done.returncode}:\n{done.stderr}")
        return max(float((Path(out) / str(rank)).read_text()) for rank in range(ranks)) - started


if __name__ == "__main__":
    main()
