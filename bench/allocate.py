"""``gpuboard allocate --n 1`` on one local node of 8 GPUs, beside ``nvisel -n 1`` of nvitop on the same NVML library.

    python bench/allocate.py [--rounds 41]

Whole processes, alternating, measured from start to end. nvisel reads and picks; `allocate` reads, picks, claims,
re-checks and hands the lease to the keeper. The release afterwards is not counted. Also shown: `allocate` with no
keeper running yet, and both with one process per core competing for the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' NVML library, which is not in the package

from tests.nvml import GIB, Gpu, library, write_script

GOAL = 1.0
KEEPER_ENDS_S = 20.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="allocate beside nvisel")
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    if os.geteuid() != 0:
        sys.exit("needs root, to create a folder for claims")
    binaries = Path(sys.executable).parent
    nvisel = shutil.which("nvisel", path=f"{binaries}:{os.environ.get('PATH', '')}")
    if nvisel is None:
        sys.exit("nvisel is not installed: pip install nvitop")
    with tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as folder:
        env = world(Path(folder))
        holder = str(os.getpid())
        ours = [sys.executable, "-m", "gpuboard", "allocate", "--n", "1", "--format", "shell", "--holder", holder]
        theirs = [sys.executable, nvisel, "-n", "1"]
        release = [sys.executable, "-m", "gpuboard", "release", "--mine"]
        for command in (ours, theirs, release):
            timed(command, env)  # warm up bytecode, page cache and keeper
        warm = compare(ours, theirs, release, env, rounds)
        report("idle machine", warm)
        with competition():
            report("one busy process a core", compare(ours, theirs, release, env, max(5, rounds // 4)))
        cold = []
        for _ in range(5):
            wait_for_keeper(Path(folder))
            cold.append(timed(ours, env))
            timed(release, env)
        print(f"first lease of a while (the keeper is started too): allocate {statistics.median(cold):.0f} ms")
        wait_for_keeper(Path(folder))
    verdict = "met" if statistics.median(a / b for a, b in warm) <= GOAL else "missed"
    print(f"goal at most {GOAL}: {verdict}")


def world(folder: Path) -> dict[str, str]:
    """Return an environment with 8 GPUs, its own folder for claims and its own state folder."""
    gpu = Gpu(total=80 * GIB, links=("switch",) * 18)
    write_script(folder / "nvml", [gpu] * 8)
    (folder / "claims").mkdir()
    (folder / "claims").chmod(0o1777)
    # PYTHON*: both use bytecode on disk, like installed software (PYTHONDONTWRITEBYTECODE would prevent ours).
    foreign = ("GPUBOARD_", "XDG_", "CUDA_", "PYTHON")
    env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    return env | {
        "LD_LIBRARY_PATH": str(library()),
        "FAKE_NVML": str(folder / "nvml"),
        "GPUBOARD_CLAIMS_DIR": str(folder / "claims"),
        "HOME": str(folder),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }


def timed(command: Sequence[str], env: dict[str, str]) -> float:
    """Run a command, which must succeed; return milliseconds from its start to its end."""
    started = time.perf_counter()
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, cwd="/")
    took = (time.perf_counter() - started) * 1e3
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr.decode()}")
    return took


def compare(
    ours: Sequence[str], theirs: Sequence[str], release: Sequence[str], env: dict[str, str], rounds: int
) -> list[tuple[float, float]]:
    """Return milliseconds of both in each round, with alternating order."""
    found = []
    for number in range(rounds):
        if number % 2:
            their = timed(theirs, env)
            our = timed(ours, env)
        else:
            our = timed(ours, env)
            their = timed(theirs, env)
        timed(release, env)
        found.append((our, their))
    return found


def report(where: str, found: list[tuple[float, float]]) -> None:
    """Print medians and the median ratio of the rounds."""
    our, their = (statistics.median(values) for values in zip(*found, strict=True))
    ratio = statistics.median(a / b for a, b in found)
    print(f"{where}: allocate {our:.0f} ms, nvisel {their:.0f} ms, ratio {ratio:.2f} (medians of {len(found)} rounds)")


@contextlib.contextmanager
def competition() -> Iterator[None]:
    """Keep every core busy with a computing process."""
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in spin:
            process.kill()
            process.wait()


def wait_for_keeper(home: Path) -> None:
    """Wait until the keeper, which has no leases left, has ended."""
    deadline = time.monotonic() + KEEPER_ENDS_S
    folder = str(home / ".local" / "state" / "gpuboard" / "keeper")
    while time.monotonic() < deadline:
        if not any(folder in _command_line(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            return
        time.sleep(0.1)
    sys.exit("the keeper has not ended although it has no leases")


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    main()
