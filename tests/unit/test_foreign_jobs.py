"""Jobs that gpuboard did not start: their ranks among real processes, and one picture of several nodes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from gpuboard.agent.launch import CallRefused
from gpuboard.agent.runs import jobs
from gpuboard.launch.stalls.evidence import Inspection, RankEvidence, StackFrame
from gpuboard.launch.stalls.foreign import ForeignJob, JobProcess, NodeJob, NodeJobs, explain_job, joined
from tests.waiting import until

PORT = str(os.getpid() % 60000)  # of no other job on this machine
WAIT = "print(flush=True); input()"


def started(stack: contextlib.ExitStack, command: list[str], **variables: str) -> subprocess.Popen[str]:
    """Start a process with variables of a launcher; it ends with the test."""
    clean = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    process = stack.enter_context(
        subprocess.Popen(command, env={**clean, **variables}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def test_ranks_are_found_below_launchers_and_shells() -> None:
    python = [sys.executable, "-c", WAIT]
    job = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": PORT}
    task = {"SLURM_JOB_ID": PORT, "SLURM_NTASKS": "2"}
    with contextlib.ExitStack() as stack:
        # torchrun as a task of srun, with a rank below it; another task whose rank is below a shell
        below = (
            f"import os, subprocess, sys; subprocess.run({python!r}, env=dict(os.environ, RANK='2', WORLD_SIZE='4'))"
        )
        torchrun = started(stack, [sys.executable, "-c", below], SLURM_PROCID="1", **task, **job)
        shell = started(stack, ["sh", "-c", f"{sys.executable} -c '{WAIT}' | cat"], SLURM_PROCID="0", **task)
        alone = started(stack, python, SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_JOB_ID=PORT)
        found = [one for one in jobs.find(None) if PORT in one["job"].values()]
        assert [(one["job"], [(rank["rank"], rank["size"]) for rank in one["ranks"]]) for one in found] == [
            ({"SLURM_JOB_ID": PORT}, [(0, 2)]),
            ({**job, "SLURM_JOB_ID": PORT}, [(2, 4)]),
        ]
        pids = [one["ranks"][0]["pid"] for one in found]
        assert not {shell.pid, torchrun.pid, alone.pid} & set(pids), "the Python below, not what started it"
        assert jobs.find(pids[1]) == [found[1]]
        starter = started(stack, [sys.executable, "-c", below.replace("'2'", "'3'")], MASTER_ADDR="h", MASTER_PORT=PORT)
        [of_starter] = jobs.find(starter.pid)
        assert (of_starter["job"], [rank["rank"] for rank in of_starter["ranks"]]) == (
            {"MASTER_ADDR": "h", "MASTER_PORT": PORT},
            [3],
        ), "the ranks that a launcher has started, not itself"
        assert [rank["pid"] for one in jobs.find(alone.pid) for rank in one["ranks"]] != []
        alone.kill()
        until(lambda: alone.poll() is not None, "it has ended")
        with pytest.raises(CallRefused, match="there is no such process"):
            jobs.find(alone.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes capabilities away from root")
def test_root_in_a_container_is_told_what_it_lacks() -> None:
    code = "import sys; from gpuboard.agent.runs import jobs; jobs.find(int(sys.argv[1]))"
    without = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", sys.executable, "-c", code]
    with subprocess.Popen(["sleep", "60"], user=65534) as other:
        done = subprocess.run([*without, str(other.pid)], capture_output=True, text=True, check=False)
        other.kill()
    assert f"cannot inspect pid {other.pid}: root may not read its environment here" in done.stderr


def part(*ranks: int, size: int = 4, address: str = "10.0.0.1") -> NodeJobs:
    """Return one node's answer."""
    placed = [JobProcess(rank, 100 + rank, at, size) for at, rank in enumerate(ranks)]
    return NodeJobs([NodeJob({"MASTER_ADDR": address, "MASTER_PORT": "1"}, placed)])


def waiting(count: int) -> Inspection:
    """Return an inspection of ranks that wait in a barrier."""
    stack = [StackFrame("barrier", "/x/site-packages/torch/distributed/c10d.py", 1), StackFrame("f", "train.py", 7)]
    return Inspection([RankEvidence(number, 100 + number, "S", stack=stack) for number in range(count)])


def explained(**nodes: NodeJobs) -> tuple[ForeignJob, str | None]:
    """Return the only job of these nodes, and the verdict on it."""
    [job] = joined(nodes, {name: waiting(len(answer.jobs[0].ranks)) for name, answer in nodes.items()})
    return job, explain_job(job).verdict


def test_ranks_that_wait_in_init_for_others_passed_the_right_numbers() -> None:
    stack = [StackFrame("init_process_group", "/x/site-packages/torch/distributed/c10d.py", 1)]
    seen = Inspection([RankEvidence(0, 100, "S", stack=stack, joins_as=(0, 4))])
    [job] = joined({"gpu01": part(0)}, {"gpu01": seen})
    assert explain_job(job).verdict == "waiting for ranks 1-3, which were not found"


def test_parts_of_a_job_are_joined_and_contradictions_are_named() -> None:
    whole, verdict = explained(gpu01=part(0, 1), gpu02=part(2, 3))
    assert whole.title() == "job at 10.0.0.1:1: 4 of 4 ranks on gpu01, gpu02"
    assert verdict is not None
    assert "so the network between gpu01, gpu02 may not deliver" in verdict
    assert explained(gpu01=part(0, 1), gpu02=part(3))[1] == "waiting for rank 2, which was not found"
    assert explained(gpu01=part(0, 1), gpu02=part(1, 2))[1] == "rank 1 runs 2 times: gpu01 (pid 101), gpu02 (pid 101)"
    wrong = explained(gpu01=part(0, 1), gpu02=part(2, 3, size=8))[1]
    assert wrong == "WORLD_SIZE differs: 4 on gpu01 (rank 0), 8 on gpu02 (rank 2)"
    assert explained(gpu01=part(1, 4))[1] == "rank 4: out of range, as WORLD_SIZE is 4"
    local = {name: part(0, 1, size=2, address="127.0.0.1") for name in ("gpu01", "gpu02")}
    assert len(joined(local, {})) == 2, "a loopback address is another job on each node"
