"""The effect of ten lying nodes on a client: its memory and the age of honest nodes' readings, with and without them.

    python bench/lying.py [--rounds 3] [--seconds 20]

Real ssh sessions to two servers on 127.0.0.1: two honest nodes of 2 GPUs, and ten whose agents send endless data,
each of another kind (tests/security/liar.py): ever new UUIDs, 100,000 GPUs, lines of 4 MiB, noise, one byte at a time,
readings as fast as possible, 40,000 claims, 100,000 processes, 100,000 MIG devices, replies without calls.
The clients are separate processes, alternating. Memory is the peak resident size; ages are those of the honest nodes in
every snapshot.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' sshd, liar and NVML library, not in the package

from tests.security.lying_client import INTERVAL_S
from tests.security.test_lying_nodes import MARKS, Servers

MEMORY_MIB = 100.0
INTERVALS = 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="a client beside lying nodes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    mib: dict[str, list[float]] = {"without": [], "beside": []}
    ages: dict[str, list[float]] = {"without": [], "beside": []}
    cpu_s: dict[str, list[float]] = {"without": [], "beside": []}
    with tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as folder:
        servers = Servers(Path(folder))
        try:
            for _ in range(args.rounds):
                for name, marks in (("without", {}), ("beside", MARKS)):
                    seen = servers.watch(marks, args.seconds)
                    mib[name].append(seen["mib"])
                    ages[name] += seen["ages"]
                    cpu_s[name].append(seen["cpu_s"])
        finally:
            servers.stop()
    print(f"two honest nodes, {len(MARKS)} lying ones; {args.rounds} rounds of {args.seconds:.0f} s, alternating")
    for name in ("without", "beside"):
        found = sorted(ages[name])
        print(
            f"{name}: {statistics.median(mib[name]):.0f} MiB, {statistics.median(cpu_s[name]):.1f} s of CPU; ages of "
            f"honest readings: median {statistics.median(found):.2f} s, 99 % {found[int(0.99 * len(found))]:.2f} s, "
            f"largest {found[-1]:.2f} s"
        )
    more = statistics.median(mib["beside"]) - statistics.median(mib["without"])
    late = sorted(ages["beside"])[int(0.99 * len(ages["beside"]))]
    print(f"memory: {more:.0f} MiB more; goal at most {MEMORY_MIB:.0f}: {_verdict(more <= MEMORY_MIB)}")
    print(f"ages: 99 % within {late:.2f} s; goal {INTERVALS} intervals: {_verdict(late <= INTERVALS * INTERVAL_S)}")


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


if __name__ == "__main__":
    main()
