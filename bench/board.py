"""The board on 1,000 nodes of 8 GPUs at 1 Hz: CPU, memory, and the time from a key to its frame.

    python bench/board.py [--nodes 1000] [--seconds 20] [--keys 100] [--minutes 0] [--slurm]

A separate process (bench/feeder.py) sends every node's protocol lines; the board decodes them, makes scenes and
draws. Measured once headless (textual's run_test) and once in a real terminal (tmux, 200x60):

* CPU: user and system time of the board's process, decoding included, after a settling time; also by thread.
* key to frame: from the time stamp that the driver gives a key until the frame with the moved cursor is flushed
  to the terminal. Keys come from tmux, at irregular intervals.
* memory: resident size, after the settling time and at the end. Its goal is for ten minutes after the first one:
  only ``--minutes 10`` compares with it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

GOAL_CPU_PERCENT = 15.0
GOAL_KEY_MS = 50.0
GOAL_GROWTH_PERCENT, GOAL_MINUTES = 5.0, 10.0
SETTLE_S = 8.0
SIZE = (200, 60)
START_S = 60.0


def main() -> None:
    """Measure and print, or be the board that is measured."""
    parser = argparse.ArgumentParser(description="CPU, memory and latency of the board")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=0, help="measure memory for this long, in tmux")
    parser.add_argument("--view", choices=("picture", "table"), default="picture")
    parser.add_argument(
        "--slurm", action="store_true", help="the same nodes in a Slurm with 2,000 jobs (bench/slurm.py)"
    )
    parser.add_argument("--kind", choices=("headless", "tmux"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        from measured import run

        run(args, Path(args.folder))
        return
    print(f"{args.nodes} nodes of 8 GPUs, a reading a second; {args.seconds:.0f} s, {args.keys} keys, {args.view}")
    for kind in ("headless", "tmux"):
        if kind == "tmux" and shutil.which("tmux") is None:
            sys.exit("tmux is not installed")
        with tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as folder:
            report(kind, measure(kind, args, Path(folder)), minutes=args.minutes if kind == "tmux" else 0.0)


def measure(kind: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run feeder and board; return the board's report."""
    command = [sys.executable, str(Path(__file__).with_name("feeder.py")), str(folder / "feed"), str(args.nodes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ(folder)) as feeder:
        try:
            assert feeder.stdout is not None
            if feeder.stdout.readline() != "ready\n":
                sys.exit("the feeder did not start")
            board = [sys.executable, __file__, "--kind", kind, "--folder", str(folder), "--nodes", str(args.nodes)]
            board += ["--seconds", str(args.seconds), "--keys", str(args.keys), "--view", args.view]
            minutes = args.minutes if kind == "tmux" else 0.0
            board += ["--minutes", str(minutes), *["--slurm"] * args.slurm]
            limit_s = START_S + SETTLE_S + args.seconds + args.keys + 60 * minutes
            if kind == "headless":
                subprocess.run(board, env=environ(folder), timeout=limit_s, check=True)
            else:
                in_terminal(board, folder, limit_s)
        finally:
            feeder.kill()
    result = folder / "report.json"
    if not result.exists():
        errors = folder / "errors"
        sys.exit(f"{kind}: the board did not report: {errors.read_text() if errors.exists() else 'no message'}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def in_terminal(board: list[str], folder: Path, limit_s: float) -> None:
    """Run the board in tmux and press keys when it asks for them."""
    tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
    size = ["-x", str(SIZE[0]), "-y", str(SIZE[1])]
    subprocess.run([*tmux, "new-session", "-d", *size, " ".join(board)], env=environ(folder), check=True)
    until = time.monotonic() + limit_s
    try:
        while time.monotonic() < until and not (folder / "report.json").exists():
            if (folder / "keys").exists():
                subprocess.run([*tmux, "send-keys", random.choice(("Down", "Down", "Up"))], capture_output=True)
                time.sleep(random.uniform(0.1, 0.3))
            else:
                time.sleep(0.1)
    finally:
        subprocess.run([*tmux, "kill-server"], capture_output=True)


def environ(folder: Path) -> dict[str, str]:
    """Return a clean environment, without the user's config and state."""
    foreign = ("GPUBOARD_", "XDG_", "CUDA_", "PYTHON", "TMUX", "NO_COLOR", "TEXTUAL")
    env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    home = {"HOME": str(folder), "XDG_STATE_HOME": f"{folder}/state", "XDG_CONFIG_HOME": f"{folder}/config"}
    return env | home | {"PYTHONPATH": str(Path(__file__).parents[1]), "LANG": "C.UTF-8", "COLORTERM": "truecolor"}


def report(kind: str, found: dict[str, Any], minutes: float) -> None:
    """Print the results with their goals; ``minutes``: for which memory was measured."""
    cpu = found["cpu_percent"]
    threads = ", ".join(f"{name} {percent:.1f}" for name, percent in found["threads"].items())
    print(
        f"{kind}: CPU {cpu:.1f} % of a core ({0.6 * cpu:.1f} s a minute); goal at most {GOAL_CPU_PERCENT:.0f}: ", end=""
    )
    print(f"{_verdict(cpu <= GOAL_CPU_PERCENT)} (threads: {threads}; {found['scenes']:.1f} scenes a second)")
    keys = sorted(found["keys_ms"])
    if keys:
        p99 = keys[math.ceil(0.99 * len(keys)) - 1]
        median = statistics.median(keys)
        print(
            f"{kind}: key to frame: median {median:.0f} ms, p99 {p99:.0f}, most {keys[-1]:.0f} of {len(keys)}; ", end=""
        )
        print(f"goal at most {GOAL_KEY_MS:.0f} at p99: {_verdict(p99 <= GOAL_KEY_MS)}")
    sizes = found["mib"]
    growth = 100 * (sizes[-1] / sizes[0] - 1)
    print(f"{kind}: memory {sizes[0]:.0f} MiB after {found['first_s']:.0f} s, {sizes[-1]:.0f} after ", end="")
    print(f"{found['last_s']:.0f} s: {growth:+.1f} %; goal at most +{GOAL_GROWTH_PERCENT:.0f} in 10 minutes", end="")
    print(f": {_verdict(growth <= GOAL_GROWTH_PERCENT)}" if minutes >= GOAL_MINUTES else " (measured by --minutes 10)")


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


if __name__ == "__main__":
    main()
