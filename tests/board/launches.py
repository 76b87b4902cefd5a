"""A folder to launch in from the board: scripts, a stand-in for torch, simulated nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gpuboard.board.core import Core
from gpuboard.board.dialogs.launch_process import LaunchForm
from gpuboard.cluster.simulated import demo_nodes
from gpuboard.launch.runs.index import Runbook, RunEntry
from tests.board import lab
from tests.integration.launch_lab import SLEEP, write_torch
from tests.waiting import until

FAIL = """
import os, time
print("up", flush=True)
time.sleep(0.3)
if os.environ["RANK"] == "1":
    raise ValueError("[/x]")
time.sleep(60)
"""


class Exp:
    """A folder to launch in, with scripts, and the stand-in for torch."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder = folder
        self.work = folder / "exp"
        self.work.mkdir()
        self.variables = f"PYTHONPATH={write_torch(folder / 'fake')}"
        for name, text in (("sleep.py", SLEEP), ("fail.py", FAIL), ("end.py", "print('bye')\n")):
            (self.work / name).write_text(text)
        self.nodes = demo_nodes(claims_dir=str(lab.claims_folder(folder)))
        self.env = lab.environment(folder) | environ
        for stale in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            self.env.pop(stale, None)

    def core(self) -> Core:
        return Core(self.nodes, lab.PATIENT, self.env)

    def form(self, command: str, **changes: Any) -> LaunchForm:
        values: dict[str, Any] = {
            "command": command, "folder": str(self.work), "device": "cpu", "python": sys.executable,
            "variables": self.variables, "grace": "5s",
        }  # fmt: skip
        return LaunchForm(**(values | changes))

    def claims(self) -> list[str]:
        """Return the GPUs that are reserved."""
        return [claim.partition(": ")[2] for claim in lab.claims(self.folder)]

    def entries(self) -> list[RunEntry]:
        return Runbook(self.env).read()

    def running(self) -> RunEntry:
        """Wait until the newest run is running; return it."""

        def found() -> list[RunEntry]:
            return [entry for entry in self.entries() if entry.view.state == "running"]

        return until(found, "a run that is running")[0]
