"""Run all measurements and write bench/RESULTS.md.

    python bench/run.py [NAME…]

Each is a script that prints its results; a failed one is recorded as failed, and the exit code is 1.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
LIMIT_S = 900.0
LIMITS_S = {"faults": 5400.0, "faults-healthy": 1800.0}
BENCHES = {
    "allocate": (
        "`allocate` on one local node beside nvitop's `nvisel`, whole processes on the same NVML library, alternating. "
        "Goal: a ratio of at most 1.0."
    ),
    "launch": (
        "From the command to the first all-reduce, 4 ranks on CPU, beside `torchrun --standalone`, alternating. "
        "Goal: a ratio of at most 0.75."
    ),
    "preflight": (
        "Preflight of a launch: on 2 nodes over real ssh sessions on this machine, and of the real head on 64 "
        "simulated nodes that reply late; 20 ms round trip in both. Goals: at most 3 s for 2 nodes, 5 s for 64."
    ),
    "watching": (
        "What the launcher uses while a run is well: CPU of head, guard, supervisor and store per rank, pings and the "
        "signs of activity included. Goal: at most 0.5 % of a core."
    ),
    "feed": (
        "CPU of the feed for 100 real ssh sessions at 1 Hz, per node and poll, beside a bare asyncssh stream in the "
        "same run. Goal: at most 0.1 ms."
    ),
    "board": (
        "The board on 1,000 nodes of 8 GPUs at 1 Hz, decoding included: CPU of its process, the time from a key to its "
        "frame, memory. Headless, and in tmux at 200x60. Goals: at most 15 % of a core; p99 at most 50 ms."
    ),
    "recording": (
        "`gpuboard record` of 64 nodes: the size of a day's file, CPU of writing a frame; memory of the board while it "
        "plays eight hours at 1,800 times the speed. Goal: it grows by at most 5 % after the second hour."
    ),
    "beside": (
        "`gpuboard` beside `nvitop` and `gpustat -i 1`, at the same time on the same NVML library of 8 GPUs: CPU, "
        "memory, and the time from the start to the first data on the screen. Goals: no more CPU than nvitop; at most "
        "0.6 s and 1.2 times nvitop's. gpuboard's first data is a frame drawn before textual is imported; `whole` is "
        "when keys are answered."
    ),
    "cold": (
        "`gpuboard status` of 8, 64 and 256 nodes without open connections, beside `clush true` on them, over one sshd "
        "on this machine: both ends share it. Goals: at most 1.2 times clush's time; no node reported as unreachable."
    ),
    "transports": (
        "The feed over each transport, on real ssh sessions at 1 Hz: CPU per node and poll, and memory; ssh processes "
        "of `openssh` are counted separately."
    ),
    "board-long": "The same board for ten minutes: its memory. Goal: at most 5 % more than after the first minute.",
    "slurm": (
        "One cycle of queries to Slurm, on 1,000 nodes of 8 GPUs with 2,000 jobs, in the form of a real controller's "
        "output: this process's own CPU, Slurm's commands not counted. Goal: at most 60 ms."
    ),
    "claims": (
        "Reading a folder of claims with 100,000 files of another user in it, beside one with 16 claims only. "
        "Goals: the first in at most 5 s of CPU; at most 10 % of a core while a file changes each second; 64 MiB."
    ),
    "lying": (
        "A client beside ten lying nodes of ten kinds, and the same client without them, alternating, over real ssh "
        "sessions: its memory, and the age of honest nodes' readings in every snapshot. Goals: at most 100 MiB more; "
        "99 % of ages within 2 intervals."
    ),
    "faults": (
        "Every fault of tests/faults, on one node and on two test nodes over ssh: seconds from the fault to gpuboard's "
        "explanation, beside torchrun's (`silent`: none within 60 s; `-`: it cannot be given that fault, or it is "
        "measured on one node). Goals: all explained, with the right exit code and no process left; a median of at "
        "most 3 s, none above 10 s."
    ),
    "faults-healthy": (
        "Runs without a fault, of 19 shapes, each once as it is and once at a load of 8 more, three at a time. Goal: "
        "no message calls anything a stall, a failure or slow."
    ),
    "agent": "CPU and memory of the agent on its node, 8 GPUs at 1 Hz. Goal: at most 0.5 % of a core.",
}
WORDS = {  # commands other than the script of that name
    "board-long": ["board.py", "--minutes", "10"],
    "transports": ["feed.py", "--transports"],
    "faults-healthy": ["faults.py", "--healthy"],
}
LONG = {"board-long", "transports", "faults", "faults-healthy"}  # measured only when named
_FENCE = "```text\n"
PEERS = ("torch", "asyncssh", "textual", "nvitop", "gpustat", "nvidia-ml-py")


def main(names: list[str]) -> int:
    """Run the named measurements, all of them by default; return 1 when one failed."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"no measurement {unknown[0]!r}; there are: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    measured = {}
    failed = []
    for name in names or (name for name in BENCHES if name not in LONG):
        print(f"== {name}", flush=True)
        code, text = _run(name)
        if code:
            failed.append(name)
            text += f"failed with exit code {code}\n"
        measured[name] = f"measured {time.strftime('%Y-%m-%d')} on {_machine()}\n{text}"
    _write(measured)
    print(f"written to {RESULTS.relative_to(HERE.parent)}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _run(name: str) -> tuple[int, str]:
    """Run one script, showing its output live; return exit code and output."""
    script, *words = WORDS.get(name, [f"{name}.py"])
    command = [sys.executable, str(HERE / script), *words]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent) as child:
        assert child.stdout is not None
        limit = threading.Timer(LIMITS_S.get(name, LIMIT_S), child.kill)
        limit.start()
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        limit.cancel()
    return child.returncode, "".join(lines)


def _machine() -> str:
    """Return the hardware and versions that the figures depend on."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    found = []
    for name in PEERS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return (
        f"{os.cpu_count()} cores of {model}, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}, {', '.join(found)}"
    )


def _write(measured: dict[str, str]) -> None:
    """Replace the previous figures by the new ones; text written by hand around them stays."""
    page = "# Measurements\n\n`make bench` writes this page; run it on an idle machine. Figures are medians.\n"
    if RESULTS.exists():
        page = RESULTS.read_text(encoding="utf-8")
    head, *sections = page.split("\n## ")
    parts = {section.partition("\n")[0]: section for section in sections}
    for name, figures in measured.items():
        section = parts.get(name, f"{name}\n\n{BENCHES[name]}\n\n{_FENCE}```\n")
        before, _, rest = section.partition(_FENCE)
        parts[name] = f"{before}{_FENCE}{figures.rstrip()}\n```{rest.partition('```')[2]}"
    RESULTS.write_text("\n## ".join([head, *parts.values()]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
