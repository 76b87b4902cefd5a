"""Output of srun and scontrol: GPUs of a job per node, and errors."""

from __future__ import annotations

import pytest

from gpuboard.transport.base import TransportError
from gpuboard.transport.process import Exit
from gpuboard.transport.slurm.srun import program, slurm_environ
from gpuboard.transport.slurm.srun_errors import explain_end, explain_refusal, gpu_count, gpus_by_nodes
from tests.slurmtext import holding, recorded, recordings

NOISE = "srun: cluster configuration lacks support for cpu binding\n"


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("", 0),
        ("gpu:2(IDX:0,5)", 2),
        ("gpu:h100:4(IDX:0-3)", 4),
        ("gpu:h100:2(IDX:0-1),gpu:a100:1(IDX:4)", 3),
        ("gpu:h100(CNT:2)", 2),
        ("gpu(CNT:3)", 3),
        ("gpu:4090:2(IDX:0-1)", 2),
        ("shard:3(IDX:1)", 0),
        ("gpu:nvidia_a100_3g.40gb:1(IDX:2),shard:h100:3(IDX:1)", 1),
        ("gpu:0(IDX:)", 0),
    ],
)
def test_gpus_are_counted(gres: str, count: int) -> None:
    assert gpu_count(gres) == count


@pytest.mark.parametrize("name", recordings("*job-d"))
def test_the_count_equals_the_schedulers(name: str) -> None:
    text = recorded(name)
    for job in holding(text):
        whole = {grant.node: sum(gres.count for gres in grant.gpus) for grant in job.grants}
        number, _, component = job.id.partition("+")
        found = gpus_by_nodes(text, number if component else str(job.number), component)
        assert sum(count for _, count in found) >= max(whole.values(), default=0)
        assert {count for _, count in found} == set(whole.values())


def test_a_component_of_a_heterogeneous_job_is_found() -> None:
    text = (
        "JobId=13 HetJobId=13 HetJobOffset=0 JobName=x\n   JobState=RUNNING\n"
        "     Nodes=node2 CPU_IDs=5 Mem=100 GRES=gpu:h100:1(IDX:7)\n\n"
        "JobId=14 HetJobId=13 HetJobOffset=1 JobName=x\n   JobState=RUNNING\n"
        "     Nodes=node[1,3] CPU_IDs=3 Mem=100 GRES=gpu:h100:2(IDX:6-7)\n"
    )
    assert gpus_by_nodes(text, "13", "1") == [("node[1,3]", 2)]
    assert gpus_by_nodes(text, "13", "0") == [("node2", 1)]
    assert gpus_by_nodes(text, "1", "") == []


def test_names_of_jobs_are_not_records() -> None:
    text = "JobId=7 JobName=Nodes=evil CPU_IDs=0 Mem=0 GRES=gpu:99\n   Comment=JobId=8\n\nJobId=8 JobName=y\n"
    assert gpus_by_nodes(text, "7", "") == []
    assert gpus_by_nodes(text, "8", "") == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ctld-down/dead-scontrol-show-job-d.txt", "unreachable"),
        ("ctld-down/no-munge-squeue.txt", "unreachable"),
        ("ctld-down/no-conf-squeue.txt", "resolve"),
        ("ctld-down/stopped-squeue.txt", "unreachable"),
    ],
)
def test_recorded_errors_have_their_kind(name: str, kind: str) -> None:
    from tests.slurmtext import FOLDER

    error = explain_refusal((FOLDER / f"{name}.stderr").read_bytes(), "7")
    assert error.kind == kind, error


@pytest.mark.parametrize(
    ("ending", "kind", "words"),
    [
        (Exit(127, b"sh: 1: exec: python9: not found\nsrun: error: n: task 0: Exited with exit code 127\n", False),
         "no-python", "python3 cannot be started there (sh: 1: exec: python9: not found)"),
        (Exit(137, b"srun: error: gpu01: task 0: Killed\nsrun: Force Terminated StepId=1.0\n", False),
         "exited", "the agent was killed by signal 9"),
        (Exit(-9, NOISE.encode(), False), "exited", "the agent was killed by signal 9"),
        (Exit(143, b"slurmstepd-gpu01: error: *** STEP 9.0 ON gpu01 CANCELLED AT 2026-11-21T17:18:06 ***\n", False),
         "no-job", "Slurm has ended job 9, or its step on gpu01"),
        (Exit(143, b"slurmstepd: error: *** STEP 9.0 ON gpu01 CANCELLED AT x DUE TO TIME LIMIT ***\n", False),
         "no-job", "Slurm has ended job 9, or its step on gpu01 (time limit)"),
        (Exit(-15, b"", True), "timeout", "Slurm did not start a step of job 9 on gpu01 in time"),
        (Exit(-15, b"srun: Job 9 step creation temporarily disabled, retrying (Requested nodes are busy)\n", True),
         "timeout", "Slurm cannot start a step in job 9 now"),
        (Exit(1, b"srun: error: Unable to create step for job 9: Requested operation is presently disabled\n", False),
         "timeout", "Slurm cannot start a step in job 9 now"),
        (Exit(1, b"srun: error: Slurm job 9 has expired\nsrun: Check SLURM_JOB_ID environment variable. x\n", False),
         "no-job", "Slurm job 9 has ended"),
        (Exit(1, b"srun: error: something new\n", False), "exited", "srun: something new"),
        (Exit(1, b"", False), "exited", "srun failed without an error message"),
    ],
)  # fmt: skip
def test_ends_are_explained(ending: Exit, kind: str, words: str) -> None:
    error = explain_end(ending, "9", "gpu01", "python3")
    assert (error.kind, error.words) == (kind, words)


def test_variables_of_a_job_are_removed() -> None:
    environ = {
        "PATH": "/bin",
        "SLURM_GPUS": "3",
        "SLURMD_NODENAME": "a",
        "SLURM_CONF": "/c",
        "SLURM_RESTART_COUNT": "1",
    }
    assert slurm_environ(environ) == {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_RESTART_COUNT": "1"}


def test_a_missing_command_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TransportError, match="`srun` is not on PATH here; load the site's Slurm module"):
        program("srun")
