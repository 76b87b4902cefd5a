"""A node that is ended by SIGTERM, as Slurm and a shutdown do: the head hears of that, whoever stands still."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.ranks_driver import go, node, with_fake_torch
from tests.integration.test_ranks import parent, wait_dead

SLEEP = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
WORDS = {"reason": "Slurm is ending job 7: it was cancelled, or it reached its time limit"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return with_fake_torch(tmp_path)


def test_a_guard_tells_what_its_supervisor_stands_still_for(folder: Path) -> None:
    with node(folder, SLEEP) as here:
        rank = go(here)["0"]
        here.wait(lambda n: "ready" in n.text())
        supervisor = parent(rank)
        guard = parent(supervisor)
        os.kill(supervisor, signal.SIGSTOP)
        for each in (supervisor, guard):
            os.kill(each, signal.SIGTERM)
        here.wait(lambda n: n.over is not None)
        assert here.data("stopping") == [WORDS]
        wait_dead({guard, supervisor, rank})
