"""Slurm's controller killed, hung and restarted while a user reserves or uses GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

import pytest

from tests.hosts import Running
from tests.integration.slurm_lab import FAKE, opened
from tests.slurm import SlurmCluster
from tests.waiting import read_line, until

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(300)]

SLEEP = ("--wrap", "sleep 600")
TAKE = """
text=$(gpuboard allocate {options}); code=$?
eval "$text" || {{ echo "code $code, left: '$CUDA_VISIBLE_DEVICES'"; exit $code; }}
echo "lease $GPUBOARD_LEASE on $GPUBOARD_NODES"
exec sleep 600
"""
WAIT = """import os, time
print("up", flush=True)
while not os.path.exists("stop"):
    time.sleep(0.05)
print("done", flush=True)
"""


def pause(seconds: float, why: str) -> None:
    begun = time.monotonic()
    until(lambda: time.monotonic() - begun > seconds, why)


def full(slurm: SlurmCluster) -> int:
    """Give all GPUs to bob; return his job."""
    return slurm.submit(["--gres=gpu:8", "-N3", *SLEEP], user="bob", running=True)


def reserving(
    slurm: SlurmCluster, options: str = "--n 4 --wait 5m", stderr: int | IO[str] = subprocess.PIPE
) -> Running:
    """Start a shell of alice's that reserves GPUs and keeps them."""
    argv, env = ["sh", "-c", TAKE.format(options=options)], {"CUDA_VISIBLE_DEVICES": "all"}
    return slurm.nodes["login1"].popen(argv, user="alice", env=env, stderr=stderr)


def queued(slurm: SlurmCluster, shell: Running, other: int) -> int:
    """Return the job that ``shell`` waits for, once it is in the queue beside ``other``."""

    def found() -> set[int]:
        assert shell.poll() is None, shell.communicate()
        return slurm.jobs() - {other}

    [number] = until(found, "alice's job is in the queue")
    return number


@pytest.mark.parametrize(("fault", "cure"), [("kill", "restart"), ("stop", "continue")])
def test_waiting_for_gpus_survives_a_failed_controller(
    slurm: SlurmCluster, tmp_path: Path, fault: str, cure: str
) -> None:
    other = full(slurm)
    printed = tmp_path / "stderr"
    with printed.open("w") as stderr, reserving(slurm, stderr=stderr) as shell:
        number = queued(slurm, shell, other)
        slurm.save()
        slurm.controller(fault)
        until(lambda: "could not reach" in printed.read_text(), "a query failed")
        assert shell.poll() is None, printed.read_text()
        slurm.controller(cure)
        until(lambda: slurm.run(["scancel", str(other)], user="root").returncode == 0, "bob's job is cancelled")
        line = read_line(shell)
        assert line.startswith("lease "), printed.read_text()
        assert slurm.job(number)["JobState"] == "RUNNING"
        assert sum(len(held) for held in slurm.held(number).values()) == 4
        until(lambda: slurm.jobs() == {number}, "bob's job has ended")
        shell.kill()
    until(lambda: slurm.jobs() == set(), "the job ends with its shell", timeout_s=60)


@pytest.mark.parametrize(("fault", "cure"), [("kill", "restart"), ("stop", "continue")])
def test_an_interrupt_without_a_controller_leaves_no_job(slurm: SlurmCluster, fault: str, cure: str) -> None:
    other = full(slurm)
    with reserving(slurm) as shell:
        queued(slurm, shell, other)
        slurm.save()
        slurm.controller(fault)
        found = slurm.nodes["login1"].processes(lambda p: "allocate" in p.argv and "keeper" not in p.name)
        process = min(found, key=lambda p: p.inner)  # a younger one is a fork that has not called exec yet
        os.kill(process.pid, signal.SIGINT)
        out, err = shell.communicate(timeout=90)
    assert out == "code 130, left: ''\n", err
    slurm.controller(cure)
    until(lambda: slurm.jobs() == {other}, f"the job is cancelled when the controller answers again; stderr: {err}", 90)


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_allocate_without_a_controller_fails_in_time(slurm: SlurmCluster, fault: str) -> None:
    slurm.controller(fault)
    begun = time.monotonic()
    with reserving(slurm, "--n 1 --nodes 'gpu[01-03]'") as shell:
        out, err = shell.communicate(timeout=90)
    assert time.monotonic() - begun < 45
    assert out == "code 6, left: ''\n", err
    assert "slurmctld" in err


@pytest.mark.parametrize(
    ("faults", "after_end"), [(["kill"], "restart"), (["restart", "stop", "continue"], None)], ids=["kill", "others"]
)
def test_a_launch_continues_without_the_controller(
    slurm: SlurmCluster, faults: list[str], after_end: str | None
) -> None:
    with opened(slurm) as lab:
        lab.put("script.py", WAIT)
        command = f"gpuboard launch --n 2 --per-node 1 {FAKE} script.py"
        with lab.login.popen(["sh", "-c", command], user="alice") as process:
            lines = [read_line(process) for _ in range(2)]
            assert all("up" in line for line in lines), (lines, process.communicate())
            slurm.save()
            for fault in faults:
                slurm.controller(fault)
                pause(5, "it had time to notice")
                assert process.poll() is None, (fault, process.communicate())
            lab.put("stop", "")
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, (out, err)
            assert out.count("done") == 2
        if after_end:
            slurm.controller(after_end)
        until(lambda: slurm.jobs() == set(), f"no job is left; stderr: {err}", 90)
        until(lambda: lab.processes() == [], "nothing of it is left on the nodes")
