"""`gpuboard allocate` itself in the shells and surroundings that people use: who holds, and when it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.keeper_lab import Lab, lab
from tests.waiting import until

__all__ = ["lab"]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a claims folder must belong to root")


@pytest.fixture(autouse=True)
def _settings(lab: Lab) -> None:
    lab.env |= {
        "GPUBOARD": f"{sys.executable} -m gpuboard",
        "GPUBOARD_CLAIMS_DIR": str(lab.claims),
        "XDG_CONFIG_HOME": str(lab.folder / "config"),
    }


def printed(lab: Lab, command: list[str]) -> tuple[str, Any]:
    """Run a job that prints its pid and JSON; return both."""
    done = subprocess.run(command, env=lab.env, text=True, capture_output=True, timeout=60, check=False)
    pid, _, text = done.stdout.partition(" ")
    assert done.returncode == 0, done.stderr
    return pid, json.loads(text)


def rank_maps(lab: Lab) -> list[str]:
    """Return the rank maps that `allocate` wrote and nobody has removed."""
    return sorted(path.name for path in Path(lab.env["XDG_STATE_HOME"], "gpuboard/leases").iterdir())


SHELLS = {  # the claim has the holder that `leases` shows, and costs no other process
    "bash": 'eval "$($GPUBOARD allocate --n 1)" || exit; echo $$ "$(cat $CLAIMS/gpuboard.*)"',
    "dash": 'eval "$($GPUBOARD allocate --n 1)" || exit; echo $$ "$(cat $CLAIMS/gpuboard.*)"',
    "zsh": 'eval "$(${=GPUBOARD} allocate --n 1)" || exit; echo $$ "$(cat $CLAIMS/gpuboard.*)"',
    "fish": "eval $GPUBOARD allocate --n 1 | source; or exit; echo $fish_pid (cat $CLAIMS/gpuboard.*)",
    "tcsh": 'eval "`$GPUBOARD:q allocate --n 1`" || exit 1\necho $$ "`cat $CLAIMS/gpuboard.*`"',
}


@pytest.mark.parametrize("shell", SHELLS)
def test_script_holds_its_lease(lab: Lab, shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "gpuboard").write_text(f'#!/bin/sh\nexec {sys.executable} -m gpuboard "$@"\n')
    (tmp_path / "gpuboard").chmod(0o755)
    if shell in {"tcsh", "fish"}:
        lab.env["GPUBOARD"] = str(tmp_path / "gpuboard")
    (tmp_path / "job").write_text(SHELLS[shell] + "\n")
    pid, claim = printed(lab, [shell, str(tmp_path / "job")])
    assert str(claim["holder"]["pid"]) == pid
    until(lambda: not lab.held())
    until(lambda: not rank_maps(lab))


WAYS = {
    "a script in a pipeline": "true | bash job.sh",
    "xargs": "echo job.sh | xargs bash",
    "make": "make -s",
    "nohup": "nohup bash job.sh",
    "timeout": "timeout 60 bash job.sh",
    "setsid": "setsid --wait bash job.sh",
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_run_a_script(lab: Lab, way: str, tmp_path: Path) -> None:
    job = SHELLS["bash"]
    (tmp_path / "job.sh").write_text(job + "\n")
    (tmp_path / "Makefile").write_text("all:\n\t@" + job.replace("$", "$$") + "\n")
    pid, claim = printed(lab, ["bash", "-c", f"cd {tmp_path}; {WAYS[way]}"])
    assert str(claim["holder"]["pid"]) == pid
    until(lambda: not lab.held())


def test_python_block_holds_it_itself(lab: Lab) -> None:
    """As in a notebook: released at the end of the block, and the kernel is the holder meanwhile."""
    code = (
        "import gpuboard, os, subprocess, sys\n"
        "with gpuboard.lease(n=2):\n"
        "    command = os.environ['GPUBOARD'].split() + ['leases', '--json']\n"
        "    print(os.getpid(), subprocess.check_output(command, text=True))\n"
        "assert not [n for n in os.listdir(os.environ['CLAIMS']) if n.startswith('gpuboard.')]\n"
    )
    pid, found = printed(lab, [sys.executable, "-c", code])
    assert [str(lease["holder"]["pid"]) for lease in found["leases"]] == [pid]


def test_training_in_the_background_keeps_the_lease(lab: Lab) -> None:
    job = 'eval "$($GPUBOARD allocate --n 1)" || exit; nohup sleep 300 >/dev/null 2>&1 & echo $!'
    done = subprocess.run(["bash", "-c", job], env=lab.env, text=True, capture_output=True, timeout=60, check=True)
    until(lambda: "holder has ended" in lab.log())
    assert len(lab.held()) == 1
    os.kill(int(done.stdout), 9)
    until(lambda: not lab.held())
