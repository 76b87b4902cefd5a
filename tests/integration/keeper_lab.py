"""Shared by the keeper's tests: a claims folder, a home, a scripted NVML, and scripts that reserve."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuboard.keeper import runtime_dir
from tests import nvml

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


class Lab:
    """One user's files below ``folder``."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.claims = folder / "claims"
        self.claims.mkdir(mode=0o1777)
        self.claims.chmod(0o1777)
        self.script = folder / "nvml"
        self.gpus()
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("GPUBOARD_")},
            "XDG_STATE_HOME": str(folder / "state"),
            "LD_LIBRARY_PATH": str(library),
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
        return subprocess.Popen(
            ["bash", "-c", script + "\n:"],
            env=self.env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            **options,
        )

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

    def keepers(self) -> list[int]:
        """Return the pids of all processes that are a keeper of this lab."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if (entry / "cmdline").read_bytes().endswith(str(self.place).encode() + b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def close(self) -> None:
        """End every keeper of this lab."""
        for pid in self.keepers():
            with contextlib.suppress(ProcessLookupError):  # a keeper without leases ends by itself
                os.kill(pid, signal.SIGKILL)
