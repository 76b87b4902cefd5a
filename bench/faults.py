"""Every fault of tests/faults/cases.py: seconds from the fault to its explanation, beside torchrun's.

    python bench/faults.py [FAULT…] [--nodes 1|2] [--limit 60] [--alone]
    python bench/faults.py --healthy [SHAPE…]

An explanation of gpuboard counts when one message names rank, node and cause with the words that are listed there; for
torchrun the cause is enough, anywhere in its output. A run that reports nothing within the limit counts as the limit.
Also checked: the exit code, and that no process is left. torchrun's runs follow gpuboard's, six at a time on this
machine: most of them wait. ``--healthy``: runs without a fault (tests/faults/healthy.py), once as they are and once at
a load of 8 more; no message may call anything a stall or a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.cases import IN_A_RANK, ONE_NODE, TWO_NODES, Fault
from tests.faults.measure import Measured, measure, measure_torchrun
from tests.faults.places import OneNode, Place, TwoNodes
from tests.nodes import missing

HEALTHY = Path(__file__).parents[1] / "tests" / "faults" / "healthy.py"
SHAPES = ["slow_start", "slow_steps", "computing", "checkpoint", "accumulation", "joined", "loader", "tiny", "large",
          "subgroups", "barriers", "evaluation", "gpu_evaluation", "last_save", "build", "gathering", "imbalance",
          "turns", "warming"]  # fmt: skip
LOAD = 8


def main() -> int:
    """Measure and print a table; return 1 when anything was not as it should be."""
    parser = argparse.ArgumentParser(description="seconds from a fault to its explanation")
    parser.add_argument("names", nargs="*", metavar="FAULT", default=[])
    parser.add_argument("--nodes", type=int, choices=(1, 2), help="only on this machine, or only on two test nodes")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to wait for an explanation")
    parser.add_argument("--alone", action="store_true", help="without torchrun")
    parser.add_argument("--healthy", action="store_true", help="runs without a fault")
    args = parser.parse_args()
    if args.healthy:
        return healthy(args.names or SHAPES)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so its children
    load = os.getloadavg()[0]
    rows: dict[tuple[int, str], tuple[Fault, Measured]] = {}
    places: dict[int, Place] = {}
    try:
        for nodes, faults in ((1, IN_A_RANK | ONE_NODE), (2, IN_A_RANK | TWO_NODES)):
            chosen = {name: fault for name, fault in faults.items() if not args.names or name in args.names}
            if not chosen or args.nodes not in {None, nodes}:
                continue
            if nodes == 2 and (lacking := missing()):
                print(f"no test nodes: needs {lacking}", file=sys.stderr)
                continue
            places[nodes] = OneNode() if nodes == 1 else TwoNodes()
            for name, fault in chosen.items():
                rows[nodes, name] = fault, (found := once_more(places[nodes], name, fault, args.limit))
                print(row(fault, nodes, found, "-"), file=sys.stderr, flush=True)
                if found.wrong(fault):
                    print(found.output, file=sys.stderr, flush=True)
        loads = f"load {load:.1f} to {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        peers = {} if args.alone else torchruns(rows, places, args.limit)
    finally:
        for place in places.values():
            place.close()
    print("| fault | nodes | gpuboard | torchrun | explanation |\n| --- | --- | --- | --- | --- |")
    for (nodes, name), (fault, found) in rows.items():
        print(row(fault, nodes, found, peers.get((nodes, name), "-")))
    own = [args.limit if m.seconds is None else m.seconds for f, m in rows.values() if f.words is not None]
    wrong = sum(bool(found.wrong(fault)) for fault, found in rows.values())
    times = f"median {statistics.median(own):.1f} s, longest {max(own):.1f} s; " if own else ""
    print(f"\n{len(rows)} runs, {wrong} wrong; {times}{loads}")
    return 1 if wrong else 0


def once_more(place: Place, name: str, fault: Fault, limit_s: float) -> Measured:
    """Measure; again if the explanation was late, which may have been due to other work on the machine."""
    found = measure(place, name, fault, limit_s)
    late = found.seconds is not None and found.seconds > 10.0
    again = measure(place, name, fault, limit_s) if late else None
    return again if again is not None and not again.wrong(fault) else found


def torchruns(
    rows: dict[tuple[int, str], tuple[Fault, Measured]], places: dict[int, Place], limit_s: float
) -> dict[tuple[int, str], str]:
    """Return torchrun's column: faults of a rank on one node only, those of the network on two."""

    def one(place: Place, name: str, fault: Fault) -> str:
        said = measure_torchrun(place, name, fault, limit_s)
        return "silent" if said.seconds is None else f"{said.seconds:.1f} s"

    def alone(name: str, fault: Fault) -> str:
        place = OneNode()
        try:
            return one(place, name, fault)
        finally:
            place.close()

    given = {key: fault for key, (fault, _) in rows.items() if fault.torchrun is not None}
    with ThreadPoolExecutor(6) as many, ThreadPoolExecutor(1) as in_turn:
        found = {
            (nodes, name): many.submit(alone, name, fault)
            if nodes == 1
            else in_turn.submit(partial(one, places[2], name, fault))
            for (nodes, name), fault in given.items()
            if nodes == 1 or name in TWO_NODES
        }
        return {key: future.result() for key, future in found.items()}


def row(fault: Fault, nodes: int, found: Measured, peer: str) -> str:
    """Return a line of the table."""
    problem = found.wrong(fault)
    seconds = "silent" if found.seconds is None else f"{found.seconds:.1f} s"
    shown = "went on" if fault.words is None else seconds
    line = f"WRONG: {problem}; {found.line}" if problem else found.line.removeprefix("gpuboard: ")
    line = " ".join(line.replace("|", "/").split())
    return f"| {fault.title} | {nodes} | {shown} | {peer} | {line if len(line) <= 160 else line[:159] + '…'} |"


def healthy(shapes: list[str]) -> int:
    """Run every shape twice; return 1 if a message called anything a stall or a failure."""
    wrong = 0
    print("| run | load | seconds | false verdicts |\n| --- | --- | --- | --- |")
    with ThreadPoolExecutor(3) as pool:
        for load in (0, LOAD):
            with busy(load):
                for shape, (seconds, lines) in zip(shapes, pool.map(run_healthy, shapes), strict=True):
                    wrong += bool(lines)
                    words = "; ".join(line.replace("|", "/") for line in lines)[:400]
                    print(f"| {shape.replace('_', ' ')} | {load} | {seconds:.0f} | {words or 'none'} |", flush=True)
    print(f"\n{2 * len(shapes)} runs, {wrong} with a false verdict; three at a time, on {os.cpu_count()} cores")
    return 1 if wrong else 0


def run_healthy(shape: str) -> tuple[float, list[str]]:
    """Return the seconds that a run took, and the messages that it should not have printed."""
    place = OneNode()
    try:
        started = time.monotonic()
        running = place.launch([str(HEALTHY), shape], (), (), lambda _: None)
        output = running.communicate()[0]
        lines = [line for line in output.splitlines() if not line.startswith("[rank") and ": warn " not in line]
        lines = [line for line in lines if ": stalled: " in line or ": slow: " in line or running.returncode]
        return time.monotonic() - started, lines
    finally:
        place.close()


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Compute in ``count`` processes meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
