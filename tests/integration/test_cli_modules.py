"""Libraries that commands on the local node must not load."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.integration.here import Here

HEAVY = {
    "textual", "torch", "asyncio", "asyncssh", "paramiko", "click", "ClusterShell", "platformdirs", "pynvml",
    "cryptography",
}  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        "allocate --n 1 --detach --for 10m",
        "allocate --n 1 --holder {pid} --format json",
        "allocate --n 99",
        "allocate --n 1 --dry-run",
        "status",
        "leases --json",
        "release --mine",
        "config",
    ],
)
def test_local_commands_load_no_heavy_library(here: Here, command: str) -> None:
    here.needs_claims()
    with subprocess.Popen(["sleep", "60"]) as holder:
        argv = command.format(pid=holder.pid).split()
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "gpuboard", *argv], env=here.env, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        holder.kill()
    assert done.returncode == (3 if "99" in command else 0), done.stderr
    loaded = {match[1] for match in re.finditer(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE)}
    assert "gpuboard.cli.main" in loaded
    assert {name.split(".")[0] for name in loaded} & HEAVY == set()
