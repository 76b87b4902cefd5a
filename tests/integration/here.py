"""gpuboard on this machine as people run it: scripted NVML, a home and claims of its own, whole processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.nvml import Gpu, library, write_script


class Measured(NamedTuple):
    """How a command ended and what it cost."""

    returncode: int | None  # None: it had not ended in time
    stdout: str
    stderr: str
    seconds: float  # of CPU time: no other process's load counts
    peak: int  # bytes of memory resident at most


class Here:
    """A home, a folder of claims and GPUs of a test's own, with UUIDs that nobody else has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "nvml"
        self.seed = uuid.uuid4().hex
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("GPUBOARD_", "CUDA_", "XDG_"))}
        self.env |= {"HOME": str(folder), "FAKE_NVML": str(self.script), "LD_LIBRARY_PATH": str(library())}
        self.now: list[Gpu] = []
        self.claims: Path | None = None
        if os.geteuid() == 0:  # only root can make a folder that claims are taken in
            self.claims = folder / "claims"
            self.claims.mkdir()
            self.claims.chmod(0o1777)
            self.env["GPUBOARD_CLAIMS_DIR"] = str(self.claims)

    def gpus(self, gpus: Sequence[Gpu]) -> list[Gpu]:
        """Give this machine these GPUs from now on; return them with their UUIDs."""
        self.now = write_script(self.script, gpus, seed=self.seed)
        return self.now

    def config(self, text: str) -> Path:
        """Write the user's config file."""
        file = self.folder / ".config" / "gpuboard" / "config.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def ssh_config(self, text: str) -> None:
        """Write the user's ssh config."""
        file = self.folder / ".ssh" / "config"
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def needs_claims(self) -> Path:
        """Return the folder of claims; skips the test where it cannot have one of its own."""
        if self.claims is None:
            pytest.skip("only root can make a folder for claims, and the machine's own is not for tests")
        return self.claims

    def command(self, *args: str) -> list[str]:
        """Return gpuboard's command line."""
        return [sys.executable, "-m", "gpuboard", *args]

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run gpuboard to its end."""
        return subprocess.run(
            self.command(*args), env=self.env | env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=90, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start gpuboard; the test ends it."""
        return subprocess.Popen(
            self.command(*args), env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def json(self, *args: str) -> Any:
        """Run gpuboard, which must succeed, and return the JSON it printed."""
        done = self.run(*args)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    """This machine with two free GPUs, and nothing configured; leases that a test leaves are released."""
    place = Here(tmp_path)
    place.gpus([Gpu(), Gpu()])
    yield place
    if place.claims is not None and any(place.claims.glob("gpuboard.*.*")):
        done = place.run("release", "--mine", "--force", "--config", os.devnull)
        assert done.returncode == 0, done.stderr
