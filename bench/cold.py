"""`gpuboard status` without open connections, beside `clush true`: time, and nodes reported as unreachable.

    python bench/cold.py [--nodes 8 64 256] [--rounds 3] [--busy 0] [--start-up] [--blocks]

One sshd on 127.0.0.1 with an alias and a session for every node. Both ends share this machine, so both are slower
with more nodes, and status waits for agents that real nodes start on CPUs of their own: the CPU time of the client's
end, with clush's ssh, is printed too. ``--busy``: processes that use CPU all the time. ``--start-up``: shells of the
nodes read the user's own start-up file, as real ones do. ``--blocks``: a block of ssh_config for every node, as many
clusters have. The two commands alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' sshd and NVML library, not in the package

from feed import server, until_gone

GOAL_RATIO = 1.2
LIMIT_S = 300.0
CLUSH = shutil.which("clush", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="the status of cold nodes over ssh")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0, help="processes that use CPU all the time")
    parser.add_argument("--start-up", action="store_true", help="the nodes' shells read your start-up file")
    parser.add_argument("--blocks", action="store_true", help="ssh_config has a block for every node")
    args = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.1f}; {args.busy} busy processes beside it")
    with busy(args.busy):
        for count in args.nodes:
            compare(count, args.rounds, start_up=args.start_up, blocks=args.blocks)


def compare(count: int, rounds: int, *, start_up: bool, blocks: bool) -> None:
    """Run both in turn on ``count`` nodes and print their times."""
    clush = CLUSH or sys.exit("clush (ClusterShell's) is not on PATH")
    names = [f"node{number:03d}" for number in range(1, count + 1)]
    status, beside, missing = Times([], []), Times([], []), list[int]()
    with (
        tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as path,
        server(Path(path), names, blocks=blocks) as sshd,
    ):
        if start_up:  # bash skips the file where SHLVL is set
            keys = sshd.folder / "authorized_keys"
            keys.write_text(keys.read_text().partition('" ')[2])
        nodeset = f"node[001-{count:03d}]"
        ours = {name: value for name, value in os.environ.items() if not name.startswith("GPUBOARD_")}
        ours |= {"HOME": path, "GPUBOARD_SSH_CONFIG": str(sshd.ssh_config), "GPUBOARD_PYTHON": sys.executable}
        ours |= {"GPUBOARD_SCHEDULER": "none", "XDG_STATE_HOME": path, "XDG_CONFIG_HOME": path, "XDG_CACHE_HOME": path}
        for _ in range(rounds):
            done = status.run([sys.executable, "-m", "gpuboard", "status", "--json", "--nodes", nodeset], ours)
            missing.append(sum(node["age_s"] is None for node in json.loads(done.stdout)["nodes"]))
            until_gone(sshd)
            done = beside.run([clush, "-S", "-w", nodeset, "-o", f"-F {sshd.ssh_config}", "true"], ours)
            if done.returncode:
                sys.exit(f"clush exits with {done.returncode}: {done.stderr[-500:]}")
            until_gone(sshd)
    status_s, clush_s = map(statistics.median, (status.wall_s, beside.wall_s))
    met = "met" if status_s <= GOAL_RATIO * clush_s and not any(missing) else "missed"
    print(
        f"{count} nodes: gpuboard status {status_s:.2f} s, clush true {clush_s:.2f} s, ratio {status_s / clush_s:.2f} "
        f"(goal at most {GOAL_RATIO}); reported unreachable: {', '.join(map(str, missing))} (goal 0): {met}; "
        f"CPU of the client's end {statistics.median(status.cpu_s):.2f} and {statistics.median(beside.cpu_s):.2f} s",
        flush=True,
    )


class Times(NamedTuple):
    """Of one command's runs: the time to its end, and the CPU time of its processes."""

    wall_s: list[float]
    cpu_s: list[float]

    def run(self, command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run it once more, to its end."""
        used, started = cpu_s(), time.monotonic()
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        self.wall_s.append(time.monotonic() - started)
        self.cpu_s.append(cpu_s() - used)
        return done


def cpu_s() -> float:
    """Return the CPU time of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run ``count`` busy processes."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
