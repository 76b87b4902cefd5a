"""Every fault of tests/faults/target.py: seconds from the fault to its explanation, beside torchrun's.

    python bench/faults.py [FAULT…] [--ranks 3] [--limit 60] [--alone]

An explanation of gpuboard counts when one line names rank and cause with the words below; for torchrun the cause
is enough, anywhere in its output. A run that reports nothing within the limit counts as the
limit. Also checked: no process is left after the run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from launch import gpuboard

TARGET = Path(__file__).parents[1] / "tests" / "faults" / "target.py"
BEHIND = r"waiting \d+ s for rank 1 .*target\.py:\d+ in "
SIZES = r"data size doesn't match"
VALUE_ERROR = r"ValueError: label 17 is out of range"
NEVER = r"(?!)"
# fault → what an explanation of gpuboard must contain, and what is enough for torchrun, which does not name ranks so
FAULTS = {
    "hang": (BEHIND + "hang", NEVER),
    "spin": (BEHIND + "spin", NEVER),
    "stop": (r"rank 1 .* is stopped", NEVER),
    "kill": (r"rank 1 .*was killed by SIGKILL", "SIGKILL"),
    "segfault": (r"rank 1 .*was killed by SIGSEGV", "SIGSEGV"),
    "exit0": (r"rank 1 .*exit code 0", NEVER),
    "exit3": (r"rank 1 .*exit code 3", r"exitcode: 3"),
    "raise": (rf"rank 1 .*{VALUE_ERROR}.*target\.py:\d+ in raise_error", VALUE_ERROR),
    "out-of-memory": (r"rank 1 .*can't allocate memory", r"can't allocate memory"),
    "hang-before-init": (r"rank 1 .*has not called init_process_group.*target\.py:\d+ in hang", NEVER),
    "exit0-before-init": (r"rank 1 .*exit code 0 before init_process_group", NEVER),
    "raise-before-init": (rf"rank 1 .*{VALUE_ERROR}", VALUE_ERROR),
    "loader-hangs": (r"rank 1 .*DataLoader.*worker \d+ is at target\.py:\d+ in hang", NEVER),
    "loader-killed": (r"rank 1 .*DataLoader worker .*killed", r"DataLoader worker .*killed"),
    "loader-raises": (rf"rank 1 .*{VALUE_ERROR}", VALUE_ERROR),
    "skip": (r"(ranks differ|rank 1 .*exit code 0)", NEVER),
    "swallow": (r"(ranks differ|rank 1 .*exit code 0)", NEVER),
    "op": (r"ranks differ at collective \d+.*rank 1 .*broadcast", SIZES),
    "order": (r"ranks differ at collective \d+", SIZES),
    "shape": (r"ranks differ at collective \d+", SIZES),
    "dtype": (r"ranks differ at collective \d+", SIZES),
    "uneven": (r"rank 1 .*target\.py:\d+ in hang", NEVER),
}


def main() -> int:
    """Measure and print a table; return 1 when a fault was not explained or left a process."""
    parser = argparse.ArgumentParser(description="seconds from a fault to its explanation")
    parser.add_argument("faults", nargs="*", metavar="FAULT", default=[])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to wait for an explanation")
    parser.add_argument("--alone", action="store_true", help="without torchrun")
    args = parser.parse_args()
    print(f"{'fault':<20}{'gpuboard':>10}{'torchrun':>10}  explanation")
    own, wrong = [], 0
    for fault in args.faults or FAULTS:
        with tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as temporary:
            folder = Path(temporary)
            seconds, line, left = measure(command_of_gpuboard(folder, fault, args.ranks), folder, fault, args.limit)
            own.append(seconds)
            wrong += line is None or bool(left)
            peer = "-"
            if not args.alone:
                (folder / "fault").unlink(missing_ok=True)
                found, said, _ = measure(command_of_torchrun(folder, fault, args.ranks), folder, fault, args.limit)
                peer = f"{found:.1f} s" if said else f"> {args.limit:.0f} s"
        shown = f"{seconds:.1f} s" if line else f"> {args.limit:.0f} s"
        print(f"{fault:<20}{shown:>10}{peer:>10}  {(line or 'NOT EXPLAINED')[:160]}{' LEFT: ' + left if left else ''}")
        sys.stdout.flush()
    print(f"median {statistics.median(own):.1f} s, longest {max(own):.1f} s, {wrong} of {len(own)} wrong")
    return 1 if wrong else 0


def command_of_gpuboard(folder: Path, fault: str, ranks: int) -> list[str]:
    """Return the command line of a launch of a fault."""
    command = gpuboard(folder, ranks)(folder)
    until = command.index(sys.executable, 1) + 1
    return [*command[:4], "--grace", "1s", *command[4:until], str(TARGET), fault, str(folder / "fault")]


def command_of_torchrun(folder: Path, fault: str, ranks: int) -> list[str]:
    """Return torchrun's command line for a fault."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*start, str(TARGET), fault, str(folder / "fault")]


def measure(command: list[str], folder: Path, fault: str, limit_s: float) -> tuple[float, str | None, str]:
    """Return the seconds from the fault to a line that explains it, that line, and the processes left afterwards."""
    environ = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1", "BENCH_FAULT": str(folder)}
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
    )
    lines: queue.SimpleQueue[tuple[float, str] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(run, lines), daemon=True).start()
    begun = folder / "fault"
    found = None
    until = time.monotonic() + 60.0 + limit_s
    own = command[1:3] == ["-m", "gpuboard"]
    text = ""
    while found is None and time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            item = lines.get(timeout=0.2)
            if item is None:
                break
            at, line = item
            text = line if own else text + line
            if (not own or line.startswith("gpuboard: ")) and re.search(FAULTS[fault][0 if own else 1], text):
                found = at, line.strip()
        if begun.exists() and time.time() - float(begun.read_text() or time.time()) > limit_s:
            break
    started = float(begun.read_text()) if begun.exists() else time.time()
    run.send_signal(signal.SIGINT)
    try:
        run.wait(40)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
    left = ", ".join(_left(folder))
    for pid in _left(folder):
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)
    return (found[0] - started if found else limit_s), (found[1] if found else None), left


def _read(run: subprocess.Popen[str], lines: queue.SimpleQueue[tuple[float, str] | None]) -> None:
    assert run.stdout is not None
    for line in run.stdout:
        lines.put((time.time(), line))
    lines.put(None)


def _left(folder: Path) -> Iterator[str]:
    """Yield the pids of living processes that were started for this measurement."""
    mark = f"BENCH_FAULT={folder}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if mark in (entry / "environ").read_bytes().split(b"\0") and state not in "ZX":
                    yield entry.name


if __name__ == "__main__":
    sys.exit(main())
