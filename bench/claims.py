"""Measure how the agent reads claims in a folder full of another user's files.

    sudo python bench/claims.py [--files 100000] [--ticks 60]

Half of the files cannot be claims by their mode (others may write them), half have to be read to be rejected; all are
named like claims. Beside them are 16 valid claims. Each folder is read by a separate process.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from usage import pss

from gpuboard.agent.claims import store as claims

BOB = 20002
HONEST = 16
GOAL_S, GOAL_PERCENT, GOAL_MIB = 5.0, 10.0, 64.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="the survey of a folder of claims")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--ticks", type=int, default=60)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        _measure(args.read, args.ticks)
        return
    if os.geteuid():
        sys.exit("needs root, to create files of another user")
    for files in (0, args.files):
        with tempfile.TemporaryDirectory(prefix="gpuboard-bench-claims-", dir="/var/tmp") as folder:
            os.chmod(folder, 0o1777)
            _fill(folder, files)
            print(f"{HONEST} claims and {files:,} files of another user:", flush=True)
            subprocess.run([sys.executable, __file__, "--read", folder, "--ticks", str(args.ticks)], check=True)
    print(f"goals: first at most {GOAL_S:g} s of CPU, changing at most {GOAL_PERCENT:g} % of a core, {GOAL_MIB:g} MiB")


def _fill(folder: str, files: int) -> None:
    args = {"lease": "k3f9", "uuids": [f"GPU-{number:02}" for number in range(HONEST)], "for_s": 3600.0}
    claims.handle("take", {**args, "nodes": ["gpu01"], "gpus": HONEST}, claims.Folder(folder))
    for number in range(files):
        path = f"{folder}/gpuboard.GPU-{number % HONEST:02}.z{number:06}"
        Path(path).write_bytes(b'{"lease": "none"}')
        os.chmod(path, 0o666 if number % 2 else 0o644)
        os.chown(path, BOB, BOB)


def _measure(folder: str, ticks: int) -> None:
    before = pss(os.getpid())
    reader = claims.Folder(folder)
    first_s, first_cpu_s = _read(reader)
    claims.handle("touch", {"leases": ["k3f9"]}, claims.Folder(folder))
    steady = [_read(reader)[1] for _ in range(ticks)]
    changing, slowest, began = 0.0, 0.0, time.monotonic()
    for number in range(ticks):
        path = Path(folder, f"gpuboard.GPU-00.y{number % 2}")
        path.unlink(missing_ok=True)
        path.touch()
        os.chown(path, BOB, BOB)
        spent_s, cpu_s = _read(reader)
        changing, slowest = changing + cpu_s, max(slowest, spent_s)
        time.sleep(max(0.0, began + number + 1 - time.monotonic()))  # a tick a second
        if not number % 20:
            claims.handle("touch", {"leases": ["k3f9"]}, claims.Folder(folder))
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"  first survey: {first_s:.3f} s, {first_cpu_s:.3f} s of CPU")
    print(f"  steady tick: median {1e3 * statistics.median(steady):.2f} ms of CPU")
    print(
        f"  one file changes a second, {ticks} ticks of 1 s: {100 * changing / ticks:.2f} % of a core, "
        f"the slowest tick {slowest:.3f} s"
    )
    print(
        f"  memory: {(pss(os.getpid()) - before) / 2**20:.1f} MiB more than before; {peak_kib / 1024:.0f} MiB at most"
    )


def _read(reader: claims.Folder) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of one reading; all honest claims must be in it."""
    began, cpu = time.monotonic(), time.process_time()
    found, error = reader.read()
    spent = time.monotonic() - began, time.process_time() - cpu
    live = sum(claim["state"] == "live" for claim in found)
    if error is not None or live != HONEST:
        sys.exit(f"{live} of {HONEST} claims are seen: {error}")
    return spent


if __name__ == "__main__":
    main()
