"""Agents as steps of Slurm jobs, started from a login node: bytes, ends, and messages of Slurm's refusals."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpuboard.agent.proc import read_process
from tests.hosts import NodeProcess
from tests.integration.slurm_lab import NODES, Lab, opened
from tests.integration.transport_driver import line
from tests.integration.transport_lab import DRIVER, Driven, agents
from tests.slurm import SlurmCluster
from tests.waiting import Stopwatch, until

pytestmark = pytest.mark.nodes

ECHO = "echo ready; exec cat"


@pytest.fixture
def lab(slurm: SlurmCluster) -> Iterator[Lab]:
    """See slurm_lab."""
    with opened(slurm) as lab:
        yield lab


@contextmanager
def channels(
    lab: Lab, job: int | str, *hosts: str, command: str | None = None, timeout: str = "30s", **env: str
) -> Iterator[Driven]:
    """Open channels to ``hosts`` in a job from login1, with ``command`` at their ends; None: agents."""
    words = {"settings": {"connect_timeout": timeout}, "hosts": hosts, "command": command, "job": str(job)}
    driver = [sys.executable, DRIVER, json.dumps(words)]
    with lab.login.popen(driver, user="alice", stdin=subprocess.PIPE, env=env) as process:
        try:
            yield Driven(process)
        finally:
            process.kill()


def ended(lab: Lab, job: int | str, host: str = "gpu01", timeout: str = "30s", **env: str) -> tuple[str, str]:
    """Return kind and message of a channel that fails."""
    with channels(lab, job, host, timeout=timeout, **env) as driven:
        found = driven.event("ended")
    return found["kind"], found["words"]


def running(lab: Lab, *options: str) -> int:
    """Return the number of a job of alice's that runs and does nothing."""
    return lab.slurm.submit([*options, "--output=/dev/null", "--wrap", "exec sleep 600"], running=True)


def clients(lab: Lab) -> list[NodeProcess]:
    """Return the srun processes on login1."""
    return lab.login.processes(lambda p: p.name == "srun", user="alice")


def first(processes: list[NodeProcess]) -> NodeProcess:
    """Return the process that has started the others; pids start again at a low one."""
    pids = {process.pid for process in processes}
    return next(p for p in processes if (stat := read_process(p.pid)) is not None and stat.parent not in pids)


def test_bytes_pass_unchanged(lab: Lab) -> None:
    job = running(lab, "--nodes=3", "--gpus=5")
    with channels(lab, job, *NODES, command=ECHO) as driven:
        for _ in NODES:
            driven.event("connected")
        for number, _ in enumerate(NODES):
            driven.received(number, len("ready\n"))
            driven.send(op="reset", n=number)
            driven.send(op="write", n=number, bytes=2**20)
        digest = hashlib.sha256(line(2**20)).hexdigest()
        assert [driven.received(number, 2**20)["sha256"] for number, _ in enumerate(NODES)] == [digest] * 3
        driven.send(op="close")
        assert driven.event("closed")["s"] < 2.0
    until(lambda: not clients(lab) and len(lab.processes()) == 1, "only the job's own script is left")


def test_the_end_of_driver_srun_or_agent_ends_all(lab: Lab) -> None:
    job = running(lab, "--nodes=1", "--gpus=1", "--nodelist=gpu01")
    for who in ("driver", "srun", "agent"):
        with channels(lab, job, "gpu01") as driven:
            driven.start_agents("gpu01")
            assert agents(lab.host("gpu01"))
            if who == "driver":
                driven.process.kill()
            else:
                # srun is two processes: the second one, its child, ends the step when the first is killed
                found = [first(clients(lab))] if who == "srun" else agents(lab.host("gpu01"))
                host = lab.login if who == "srun" else lab.host("gpu01")
                host.run(["kill", "-9", *(str(process.inner) for process in found)], user="root")
                end = driven.event("ended")
                assert end["kind"] == "exited"
                assert "killed" in end["words"].lower()
            until(lambda: not clients(lab) and not agents(lab.host("gpu01")), f"nothing of it is left; killed: {who}")
    assert lab.slurm.job(job)["JobState"] == "RUNNING"


def test_refusals_of_slurm_have_a_remedy_and_a_missing_python_is_reported(lab: Lab) -> None:
    job = running(lab, "--nodes=1", "--gpus=1", "--nodelist=gpu01")
    over = lab.run("true").number
    pending = lab.slurm.submit(["--begin=now+1hour", "--output=/dev/null", "--wrap", "true"])
    bobs = lab.slurm.submit(["--output=/dev/null", "-w", "gpu01", "--wrap", "sleep 600"], user="bob", running=True)
    assert ended(lab, 999) == ("no-job", "Slurm has no job 999; is it still in `squeue --me`?")
    assert ended(lab, over) == ("no-job", f"Slurm job {over} has ended; is it still in `squeue --me`?")
    assert ended(lab, pending) == ("no-job", f"Slurm job {pending} has not started yet; see `squeue --me --start`")
    assert ended(lab, bobs) == ("no-job", f"Slurm job {bobs} belongs to another user; see `squeue --me`")
    words = f"gpu02 is not a node of Slurm job {job}; its nodes: gpu01"
    assert ended(lab, job, "gpu02") == ("no-job", words)
    kind, words = ended(lab, job, SLURM_CONF="/nowhere/slurm.conf")
    assert kind == "resolve", words
    with channels(lab, job, "gpu01", command="exec python9 -c 1") as driven:
        found = driven.event("ended")
    assert found["kind"] == "no-python", found
    lab.slurm.run(["scontrol", "suspend", str(job)], user="root", check=True)
    kind, words = ended(lab, job, timeout="3s")
    assert (kind, words) == (
        "timeout",
        f"Slurm cannot start a step in job {job} now; is it suspended? see `squeue --me`",
    )


def test_a_job_that_ends_ends_its_channels(lab: Lab) -> None:
    job = running(lab, "--nodes=2", "--gpus=2")
    with channels(lab, job, "gpu01", "gpu02") as driven:
        driven.start_agents("gpu01", "gpu02")
        lab.slurm.run(["scancel", str(job)], check=True)
        found = [driven.event("ended") for _ in range(2)]
    assert {end["kind"] for end in found} == {"no-job"}, found
    assert all(f"Slurm has ended job {job}, or its step on " in end["words"] for end in found), found


def test_a_jobs_end_that_srun_does_not_report_ends_its_channel(lab: Lab) -> None:
    job = running(lab, "--nodes=1", "--gpus=1", "--nodelist=gpu01")
    with channels(lab, job, "gpu01") as driven:
        driven.start_agents("gpu01")
        sruns = [str(process.inner) for process in clients(lab)]
        lab.login.run(["kill", "-STOP", *sruns], user="root")
        lab.host("gpu01").run(["pkill", "-9", "-f", "gpuboard.agent.bundle_loader"], user="root")
        until(lambda: not agents(lab.host("gpu01")), "the agent has ended first")
        lab.slurm.run(["scancel", str(job)], check=True)
        until(lambda: lab.slurm.job(job)["JobState"] == "CANCELLED", "then its job", 180.0)  # slurmd waits for srun
        lab.login.run(["kill", "-CONT", *sruns], user="root")
        end = driven.event("ended")
    words = f"Slurm has ended job {job}, or its step on gpu01; is it still in `squeue --me`?"
    assert (end["kind"], end["words"]) == ("no-job", words)


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_controller_that_does_not_respond_is_reported_in_time(lab: Lab, fault: str) -> None:
    job = running(lab, "--nodes=1", "--gpus=1", "--nodelist=gpu01")
    with channels(lab, job, "gpu01") as before:
        before.start_agents("gpu01")
        lab.slurm.controller(fault)
        started = Stopwatch()
        with channels(lab, job, "gpu01", timeout="3s") as driven:
            found = driven.event("ended")
        assert started.stop() < 15.0
        assert (found["kind"], found["words"].partition("; ")[0]) in {
            ("unreachable", "Slurm's controller did not respond within 3 s"),
            ("unreachable", "cannot connect to Slurm's controller"),
        }
        before.send(op="write", n=0, text='{"t":"call","id":1,"op":"read","args":{}}\n')
        before.send(op="report", n=0)
        before.event("data")  # an open channel needs no controller
        lab.slurm.controller("continue" if fault == "stop" else "restart")


def test_a_node_whose_slurmd_hangs_is_reported(lab: Lab) -> None:
    job = running(lab, "--nodes=1", "--gpus=1", "--nodelist=gpu01")
    lab.slurm.daemon("gpu01", "stop")
    kind, words = ended(lab, job, timeout="3s")
    lab.slurm.daemon("gpu01", "continue")
    assert kind == "timeout", words
    assert words.startswith(f"Slurm did not start a step of job {job} on gpu01 in time")
