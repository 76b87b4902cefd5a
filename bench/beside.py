"""`gpuboard`, `nvitop` and `gpustat -i 1` side by side on one node of 8 GPUs: CPU, memory, and time to the first data.

    python bench/beside.py [--seconds 60] [--starts 9] [--idle | --real]

All three run at the same time, each in a tmux pane of 200x60, on the tests' NVML library, whose values change every
second; each GPU has two processes. With ``--idle`` there is one GPU that nobody uses, of which only the power varies,
by less than a watt. With ``--real`` they run on this machine's own GPUs, as they are. CPU and memory are
those of the whole process tree, for gpuboard separately for the board and its agent. The start is measured on a
pseudo-terminal of 200x60, alternating, until data of the GPUs is written. gpuboard writes it before it has imported
textual; keys are answered once the whole board is drawn, which is measured too.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' NVML library, which is not in the package

from usage import cpu_ns, pss

from tests.nvml import GIB, Gpu, library, write_script

SIZE = (200, 60)
SETTLE_S = 6.0
WINDOW_S = 10.0
GOAL_START_S = 0.6
GOAL_START_RATIO = 1.2
LIMIT_S = 15.0
# Text that each writes once it has read the GPUs: how many there are, a power limit, memory
DATA = {"gpuboard": rb"free of [1-9]", "nvitop": rb"\d\d+W", "gpustat": rb"\d+ MB"}
_CONTROLS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
WHOLE = b"Reserve"  # gpuboard's footer
COMMANDS = {
    "gpuboard": [sys.executable, "-m", "gpuboard"],
    "nvitop": [sys.executable, "-m", "nvitop", "--interval", "1"],
    "gpustat": [sys.executable, "-m", "gpustat", "-i", "1"],
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="gpuboard beside nvitop and gpustat")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--starts", type=int, default=9)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--idle", action="store_true", help="one GPU that nobody uses in place of 8 busy ones")
    what.add_argument("--real", action="store_true", help="on this machine's own GPUs, as they are")
    args = parser.parse_args()
    for name in ("nvitop", "gpustat"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"{name} is not installed: pip install {name}")
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as path:
        folder = Path(path)
        values = idle if args.idle else busy
        if not args.real:
            write_script(folder / "nvml", values(0))
        running(folder, values, max(2, round(args.seconds / WINDOW_S)))
        starts(folder, args.starts)


def idle(second: int) -> list[Gpu]:
    """Return a GPU without a process, as it is at a second: its power varies as a real one's does."""
    return [Gpu(power=70_100 + 60 * (7 * second % 13))]


def busy(second: int) -> list[Gpu]:
    """Return 8 GPUs with two processes each, as they are at a second."""
    pids = (os.getpid(), os.getppid())
    return [
        Gpu(
            used=(8 + (second + k) % 4) * GIB,
            utilization=50 + (7 * second + 11 * k) % 50,
            temperature=40 + (second + k) % 9,
            power=300_000 + 1000 * ((13 * second + k) % 90),
            processes=tuple(("compute", pid, 4 * GIB) for pid in pids),
        )
        for k in range(8)
    ]


def environ(folder: Path) -> dict[str, str]:
    """Return a clean environment, with the tests' NVML library if values were written for it."""
    foreign = ("GPUBOARD_", "XDG_", "CUDA_", "PYTHON", "TMUX", "NO_COLOR", "TEXTUAL")
    env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    env |= {
        "HOME": str(folder),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
    }
    script = folder / "nvml"
    return env | {"LD_LIBRARY_PATH": str(library()), "FAKE_NVML": str(script)} if script.exists() else env


def running(folder: Path, values: Callable[[int], list[Gpu]], windows: int) -> None:
    """Run all three at once and print their CPU and memory."""
    tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
    size = ["-x", str(SIZE[0]), "-y", str(SIZE[1])]
    try:
        pids = {}
        for name, command in COMMANDS.items():
            words = ["new-session", "-d", "-s", name, *size, "-P", "-F", "#{pane_pid}", "exec " + " ".join(command)]
            started = subprocess.run([*tmux, *words], env=environ(folder), check=True, capture_output=True, text=True)
            pids[name] = int(started.stdout)
        second = _wait(folder, values, 0, SETTLE_S)
        for name in pids:
            pane = subprocess.run([*tmux, "capture-pane", "-p", "-t", name], capture_output=True).stdout
            if not shows(DATA[name], pane):
                sys.exit(f"{name} shows no GPU:\n{pane.decode(errors='replace')}")
        percents: dict[str, list[float]] = {}
        for _ in range(windows):
            before = {name: _parts(name, pid) for name, pid in pids.items()}
            started_ns = time.monotonic_ns()
            second = _wait(folder, values, second, WINDOW_S)
            wall_ns = time.monotonic_ns() - started_ns
            for name, parts in before.items():
                for part, used in parts.items():
                    now = _parts(name, pids[name]).get(part, used)
                    percents.setdefault(part, []).append(100 * (now - used) / wall_ns)
        memory = {part: sum(map(pss, found)) for name, pid in pids.items() for part, found in _tree(name, pid).items()}
    finally:
        subprocess.run([*tmux, "kill-server"], capture_output=True)
    print(f"a reading a second, {windows} windows of {WINDOW_S:.0f} s, medians")
    median = {part: statistics.median(values) for part, values in percents.items()}
    for part, value in median.items():
        print(f"{part}: {value:.2f} % of a core, {memory[part] / 2**20:.0f} MiB (PSS)")
    ours = statistics.median(a + b for a, b in zip(percents["gpuboard"], percents["gpuboard's agent"], strict=True))
    size_mib = (memory["gpuboard"] + memory["gpuboard's agent"]) / 2**20
    verdict = "met" if ours <= median["nvitop"] else "missed"
    print(f"gpuboard in all: {ours:.2f} % of a core, {size_mib:.0f} MiB; goal no more CPU than nvitop: {verdict}")


def shows(pattern: bytes, written: bytes) -> bool:
    """Return whether what was written to a terminal matches, without its control sequences."""
    return re.search(pattern, _CONTROLS.sub(b"", written)) is not None


def starts(folder: Path, rounds: int) -> None:
    """Start gpuboard and nvitop in turn and print how long they take to their first data."""
    found: dict[str, list[float]] = {"gpuboard": [], "nvitop": []}
    for name in found:
        _start(folder, name, DATA[name])  # warm up bytecode and page cache
    for number in range(rounds):
        for name in sorted(found, reverse=bool(number % 2)):
            found[name].append(_start(folder, name, DATA[name]))
    ours, theirs = (statistics.median(values) for values in found.values())
    ratio = statistics.median(a / b for a, b in zip(*found.values(), strict=True))
    print(
        f"start to the first data on the screen, {rounds} rounds: gpuboard {ours:.2f} s, nvitop {theirs:.2f} s, ",
        end="",
    )
    met = ours <= GOAL_START_S and ratio <= GOAL_START_RATIO
    print(f"ratio {ratio:.2f}; goal {GOAL_START_S} s and {GOAL_START_RATIO}: {'met' if met else 'missed'}")
    whole = statistics.median(_start(folder, "gpuboard", WHOLE) for _ in range(rounds))
    print(f"gpuboard whole, with its keys: {whole:.2f} s")
    textual = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import textual.app"], env=environ(folder), check=True)
        textual.append(time.perf_counter() - started)
    print(f"a process that only imports textual.app: {statistics.median(textual):.2f} s")


def _start(folder: Path, name: str, pattern: bytes) -> float:
    """Return seconds from the start of a command on a new terminal until it has written what the pattern matches."""
    command = COMMANDS[name]
    started = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
        os.execvpe(command[0], command, environ(folder))
    written = b""
    try:
        while not shows(pattern, written):
            left = started + LIMIT_S - time.perf_counter()
            if left <= 0 or not select.select([terminal], [], [], left)[0]:
                sys.exit(f"{' '.join(command)} did not write {pattern!r} in {LIMIT_S:.0f} s: {written[-500:]!r}")
            written += os.read(terminal, 65536)
        return time.perf_counter() - started
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(terminal)
        os.waitpid(pid, 0)


def _wait(folder: Path, values: Callable[[int], list[Gpu]], second: int, seconds: float) -> int:
    """Change the GPUs' values for some seconds; return the second reached."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
        second += 1
        if (folder / "nvml").exists():
            write_script(folder / "nvml", values(second))
    return second


def _tree(name: str, pid: int) -> dict[str, list[int]]:
    """Return the processes of a command; gpuboard's agent is its children."""
    below: list[int] = []
    todo = [pid]
    while todo:
        for file in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            children = [int(word) for word in file.read_text().split()]
            below += children
            todo += children
    return {"gpuboard": [pid], "gpuboard's agent": below} if name == "gpuboard" else {name: [pid, *below]}


def _parts(name: str, pid: int) -> dict[str, int]:
    """Return the CPU nanoseconds of each part of a command."""
    return {part: sum(map(cpu_ns, pids)) for part, pids in _tree(name, pid).items()}


if __name__ == "__main__":
    main()
