"""Whether a process is in a Slurm job: by its variables, its cgroups and ancestors, and Slurm's answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.inventory.slurm_job import current_job, job_nodes
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.scheduler.slurm.current_job import Inside, JobNode, Outside, is_child, judge, look, surroundings
from gpuboard.transport.base import Kind, TransportError

BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURMD_NODENAME": "gpu01"}
NODES = (JobNode("gpu01", "7"), JobNode("gpu02", "7"))
SHOWN = "JobId=7 JobName=x\n   UserId=alice(2001) GroupId=alice(2001)\n   JobState={}\n   NodeList=gpu[01-02]\n"


def never(_: str) -> str:
    raise AssertionError("Slurm was asked")


def fails(kind: Kind) -> Callable[[str], str]:
    def ask(_: str) -> str:
        raise TransportError(kind, "words")

    return ask


@pytest.mark.parametrize(
    ("text", "child"),
    [
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", True),
        ("5:devices:/slurm/uid_2001/job_7/step_batch", True),
        ("5:devices:/slurm/uid_2001/job_7", True),
        ("5:devices:/slurm/uid_2001/job_77/step_batch", False),
        ("slurmstepd: [7.batch]", True),
        ("slurmstepd: [7.interactive]", True),
        ("slurmstepd: [7+1.0]", True),
        ("slurmstepd: [70.batch]", False),
        ("vim slurmstepd: [7.batch]", False),
    ],
)
def test_cgroups_and_ancestors_of_a_job(text: str, child: bool) -> None:
    assert is_child("7", [text]) == child


def test_a_batch_script_is_inside_without_a_query() -> None:
    assert look(BATCH, never, lambda: ["slurmstepd: [7.batch]"]) == Inside("7", NODES, "gpu01")


def test_components_of_a_heterogeneous_job_are_reached_by_their_number() -> None:
    env = {**BATCH, "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu01", "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[01-02]"}
    found = look(env, never, lambda: ["slurmstepd: [7+0.batch]"])
    assert found == Inside("7", (JobNode("gpu01", "7+0"), JobNode("gpu02", "7+1")), "gpu01")


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "x"}, {"SLURM_JOB_ID": "7; rm"}])
def test_without_a_number_there_is_no_job(env: dict[str, str]) -> None:
    assert look(env, never, list) == Outside()


def test_other_shells_query_slurm_and_are_on_no_node_of_the_job() -> None:
    text = SHOWN.format("RUNNING")
    assert look(BATCH, lambda _: text.replace("2001", "0"), list) == Inside("7", NODES, None)
    assert look({"SLURM_JOB_ID": "7"}, lambda _: text.replace("2001", "0"), list) == Inside("7", NODES, None)


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_a_running_job(state: str) -> None:
    assert judge("7", SHOWN.format(state), 2001) == Inside("7", NODES, None)


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "PENDING", "COMPLETING", "FAILED"])
def test_a_job_that_is_not_running(state: str) -> None:
    found = judge("7", SHOWN.format(state), 2001)
    assert isinstance(found, Outside)
    assert found.stale == "SLURM_JOB_ID=7 of this shell names a job that is not running; ignored"


def test_another_users_job() -> None:
    found = judge("7", SHOWN.format("RUNNING"), 2002)
    assert isinstance(found, Outside)
    assert "another user's job" in found.stale


def test_an_unknown_job_has_ended() -> None:
    found = look({"SLURM_JOB_ID": "7"}, fails("no-job"), list)
    assert found == Outside("SLURM_JOB_ID=7 of this shell names a job that has ended; ignored")


def test_without_an_answer_the_job_is_an_error() -> None:
    with pytest.raises(
        GpuboardError, match="Slurm does not confirm that this job is running: words; unset SLURM_JOB_ID"
    ):
        look({"SLURM_JOB_ID": "7"}, fails("unreachable"), list)


@pytest.mark.parametrize("text", ["", "\n\n", "JobId=7", "JobId=8 JobName=x\n   JobState=RUNNING\n", "garbage"])
def test_an_answer_without_the_job_means_no_job(text: str) -> None:
    assert isinstance(judge("7", text, 0), Outside)


def test_this_process_has_surroundings() -> None:
    assert list(surroundings())


def test_without_slurm_in_the_settings_there_is_no_job() -> None:
    assert current_job(Settings(scheduler="none"), BATCH, print) is None
    assert current_job(Settings(), {}, print) is None
    assert current_job(Settings(), {**BATCH, "GPUBOARD_INVENTORY": "/x"}, print) is None


def test_nodes_of_a_job() -> None:
    job = Inside("7", NODES, "gpu02")
    assert job_nodes(job) == [Node("gpu01", "gpu01", job="7"), Node("gpu02", None, job="7")]
    assert job_nodes(job, ["gpu02"]) == [Node("gpu02", None, job="7")]
    with pytest.raises(
        UsageError, match=r"'gpu03' is not a node of Slurm job 7, which has gpu01, gpu02; unset SLURM_JOB_ID"
    ):
        job_nodes(job, ["gpu[01-03]"])
