"""What the launcher costs while a run is well: CPU of head, guard, supervisor and store, per rank.

    python bench/watching.py [--ranks 4] [--seconds 30]

The ranks all-reduce every 50 ms and write nothing, so that the CPU is that of pings and of watching.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch import gpuboard
from usage import cpu_ns

GOAL = 0.5  # % of a core per rank
SCRIPT = """
import sys, time, torch
from torch import distributed
distributed.init_process_group("gloo")
batch = torch.ones(1000)
open(f"{sys.argv[1]}/{distributed.get_rank()}", "w").close()
while True:
    distributed.all_reduce(batch)
    time.sleep(0.05)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="cost of watching a run")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as temporary:
        folder = Path(temporary)
        (folder / "script.py").write_text(SCRIPT)
        command = gpuboard(folder, args.ranks)(folder)
        command[command.index(sys.executable, 1) + 1 :] = [str(folder / "script.py"), str(folder)]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not all((folder / str(rank)).exists() for rank in range(args.ranks)):
                if run.poll() is not None:
                    sys.exit(f"the launch ended with exit code {run.returncode}")
                time.sleep(0.1)
            own = [pid for pid in family(run.pid) if b"script.py" not in words(pid)] + [run.pid]
            before, started = sum(cpu_ns(pid) + ended_ns(pid) for pid in own), time.monotonic()
            time.sleep(args.seconds)
            used = sum(cpu_ns(pid) + ended_ns(pid) for pid in own) - before
            percent = used / 1e9 / (time.monotonic() - started) * 100 / args.ranks
        finally:
            run.terminate()
            run.wait()
    print(
        f"{args.ranks} ranks, {args.seconds:.0f} s, {len(own)} processes of gpuboard (head, guard, supervisor, store)"
    )
    print(f"{percent:.2f} % of a core per rank; goal at most {GOAL}: {'met' if percent <= GOAL else 'missed'}")


def ended_ns(pid: int) -> int:
    """Return the CPU nanoseconds of a process's children that have ended: looks at the ranks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) * 10**9 // os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """Return the descendants of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *family(child)]
    return found


def words(pid: int) -> bytes:
    """Return the command line of a process as it was started."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


if __name__ == "__main__":
    main()
