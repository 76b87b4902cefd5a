"""Shared by the keeper's tests: a claims folder, a home, a scripted NVML, and scripts that reserve."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuboard.keeper import client, runtime_dir
from tests import nvml
from tests.waiting import read_line, stopped, until

ROOT = Path(__file__).parents[2]
TAKER = Path(__file__).with_name("keeper_taker.py")
UUIDS = tuple(f"GPU-0000000{number}" for number in range(4))


def unlocked(lock: Path) -> bool:
    """Return whether a keeper's lock is free: after a kill the command line disappears before the open files."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def command_line(pid: str) -> bytes:
    """Return a process's command line, b"" after its end. A poll reads all of them: pathlib takes 4 times as long."""
    try:
        fd = os.open(f"/proc/{pid}/cmdline", os.O_RDONLY)
        try:
            return os.read(fd, 65536)
        finally:
            os.close(fd)
    except OSError:
        return b""


def watched_by(keeper: int) -> set[int]:
    """Return the processes whose end a keeper waits for: those of its pidfds."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError):  # closed meanwhile, or the keeper has ended
        for entry in os.scandir(f"/proc/{keeper}/fdinfo"):
            found.update(int(pid) for pid in re.findall(r"^Pid:\t(\d+)", Path(entry.path).read_text(), re.MULTILINE))
    return found


class Lab:
    """One user's files below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scripts: list[subprocess.Popen[str]] = []
        self.claims = folder / "claims"
        self.claims.mkdir(mode=0o1777)
        self.claims.chmod(0o1777)
        self.script = folder / "nvml"
        self.gpus()
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("GPUBOARD_")},
            "XDG_STATE_HOME": str(folder / "state"),
            "LD_LIBRARY_PATH": str(nvml.library()),
            "FAKE_NVML": str(self.script),
            "PYTHONPATH": str(ROOT),
            "TAKE": f"{sys.executable} {TAKER}",
            "CLAIMS": str(self.claims),
        }
        self.place = folder / "state" / "gpuboard" / "keeper" / runtime_dir.folder_name({})

    def gpus(self, processes: Mapping[int, int] | None = None) -> None:
        """Script four GPUs; ``processes``: by GPU, a pid that computes on it."""
        running = processes or {}
        nvml.write_script(
            self.script,
            [
                nvml.Gpu(uuid=uuid, processes=(("compute", running[number], 1 << 30),) if number in running else ())
                for number, uuid in enumerate(UUIDS)
            ],
        )

    def take(self, lease: str, gpu: int = 0, *, seconds: float = 3600, host: str = "-") -> str:
        """Return the line of a script that takes ``lease``."""
        return f'eval "$($TAKE {lease} {UUIDS[gpu]} "$CLAIMS" {seconds} {host})" || exit 9\n'

    def bash(self, script: str, **options: Any) -> subprocess.Popen[str]:
        """Run a script as its own process group, as an interactive shell would."""
        process = subprocess.Popen(
            ["bash", "-c", script + "\n:"],
            env=self.env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            **options,
        )
        self.scripts.append(process)
        return process

    def started(self, script: str) -> subprocess.Popen[str]:
        """Run ``script`` and wait until it prints ``go``."""
        process = self.bash(script)
        assert read_line(process) == "go\n"
        return process

    def holding(self, lease: str, gpu: int = 0, **options: Any) -> subprocess.Popen[str]:
        """Run a script that takes ``lease`` and holds it until it is killed or reads a line."""
        return self.started(self.take(lease, gpu, **options) + "echo go; read")

    def adopt(self, lease: str, gpu: int = 0, **options: Any) -> None:
        """Hand a lease without a holder to the keeper."""
        node = client.KeptNode("n", [UUIDS[gpu]], None, str(self.claims), None)
        holder = options.pop("holder", None)
        client.hand_over(client.record(lease, [node], {}, holder, 60.0), self.env, **options).confirm()

    def held(self) -> set[str]:
        """Return the leases that have a claim file."""
        return {path.name.rpartition(".")[2] for path in self.claims.glob("gpuboard.*")}

    def records(self) -> set[str]:
        """Return the leases that the keeper has records of."""
        return {path.stem for path in self.place.glob("*.json")}

    def log(self) -> str:
        """Return the keeper's log."""
        path = self.place / "log"
        return path.read_text() if path.exists() else ""

    def keeper_pid(self) -> int | None:
        """Return the pid of the keeper that accepts connections; None without one."""
        connection = runtime_dir.connect(str(self.place))
        if connection is None:
            return None
        connection.close()
        return int((self.place / "lock").read_text())

    def signal_keeper(self, number: int) -> int:
        """Send a signal to the keeper and return its pid; it has ended or stopped after SIGKILL and SIGSTOP."""
        pid = self.keeper_pid()
        assert pid is not None
        os.kill(pid, number)
        until(lambda: number != signal.SIGKILL or self.keeper_pid() is None)
        until(lambda: number != signal.SIGSTOP or stopped(pid))
        return pid

    def watched(self) -> set[int]:
        """Return the processes whose end the keeper waits for."""
        return watched_by(int((self.place / "lock").read_text()))

    def keepers(self) -> list[int]:
        """Return the pids of all processes that are a keeper of this lab."""
        folder = f"{self.place}\0".encode()
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and command_line(pid).endswith(folder)]

    def close(self) -> None:
        """End every keeper and script of this lab."""
        for pid in self.keepers():
            with contextlib.suppress(ProcessLookupError):  # a keeper without leases ends by itself
                os.kill(pid, signal.SIGKILL)
        for script in self.scripts:
            with script:
                script.kill()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()
