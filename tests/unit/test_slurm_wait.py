"""Waiting for a job, with a program in squeue's place that fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuboard.errors import GpuboardError, NotFree
from gpuboard.leases.slurm.wait import JobWait
from gpuboard.scheduler.slurm.client import Jobs

SQUEUE = """#!/bin/sh
echo >>{folder}/log
case $(wc -l <{folder}/log) in
  1) echo "5|PENDING|Resources|N/A|1:00:00|0:00|gpu|2001||gpuboard-k3f9" ;;
  2) echo "squeue: fatal: the moon is full" >&2; exit 1 ;;
  *) echo "5|RUNNING|None|N/A|1:00:00|0:00|gpu|2001|gpu01|gpuboard-k3f9" ;;
esac
"""


HELD = """#!/bin/sh
echo "5|RESV_DEL_HOLD|None|N/A|1:00:00|0:00|gpu|2001||gpuboard-k3f9"
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a squeue whose second query fails counts the queries."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "squeue").write_text(SQUEUE.format(folder=tmp_path))
    (tmp_path / "squeue").chmod(0o755)
    return tmp_path / "log"


def wait(wait_s: float | None, shown: list[str]) -> JobWait:
    return JobWait(Jobs(os.environ), 5, wait_s, 0.0, progress=shown.append, before_poll=lambda: None)


def test_a_failed_query_does_not_end_the_wait(log: Path) -> None:
    shown: list[str] = []
    job = wait(60.0, shown).run()
    assert (job.state, job.nodes) == ("RUNNING", "gpu01")
    assert "Slurm: squeue: fatal: the moon is full" in shown[0]


def test_when_the_wait_is_over_a_failed_query_is_the_reason(log: Path) -> None:
    log.write_text("\n")
    with pytest.raises(GpuboardError, match="the moon is full"):
        wait(None, []).run()


def test_the_wait_for_a_held_job_is_limited(log: Path) -> None:
    (log.parent / "squeue").write_text(HELD)
    with pytest.raises(NotFree, match=r"^not free within 0s: Slurm job 5 is resv_del_hold$"):
        wait(0.0, []).run()
