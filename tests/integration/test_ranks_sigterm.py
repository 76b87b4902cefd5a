"""SIGTERM to a node's processes, as from Slurm and a shutdown, is reported even if one of them is suspended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.launch_lab import parent
from tests.integration.ranks_driver import go, node, with_fake_torch
from tests.integration.test_ranks import wait_dead

SLEEP = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
REPORT = {"reason": "Slurm is ending job 7: it was cancelled, or it reached its time limit", "killed": False}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return with_fake_torch(tmp_path)


def test_the_guard_reports_it_for_a_suspended_supervisor(folder: Path) -> None:
    with node(folder, SLEEP) as here:
        rank = go(here)["0"]
        here.wait(lambda n: "ready" in n.text())
        supervisor = parent(rank)
        guard = parent(supervisor)
        os.kill(supervisor, signal.SIGSTOP)
        for each in (supervisor, guard):
            os.kill(each, signal.SIGTERM)
        here.wait(lambda n: n.over is not None)
        assert here.data("stopping") == [REPORT]
        wait_dead({guard, supervisor, rank})
