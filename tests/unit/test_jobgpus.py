"""Which of a node's GPUs a job has, by the variables that Slurm gives its processes (recorded from Slurm 22.05)."""

from __future__ import annotations

from typing import Any

import pytest

from gpuboard.agent.slurm_gpus import JobGpus

MIG = [{"uuid": "MIG-a"}, {"uuid": "MIG-b"}]
STEP = {"SLURM_JOB_ID": "2", "SLURM_STEP_GPUS": "1,2", "SLURM_JOB_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1,2"}


def gpus(count: int, **changes: Any) -> list[dict[str, Any]]:
    return [{"index": k, "uuid": f"GPU-{k}", "minor": k, **changes} for k in range(count)]


@pytest.mark.parametrize(
    ("environ", "shown", "indexes"),
    [
        # a step, all GPUs to be seen
        (STEP, 8, [1, 2]),
        # the same under a device cgroup: CUDA counts from 0, NVML shows two
        ({**STEP, "CUDA_VISIBLE_DEVICES": "0,1"}, 2, [0, 1]),
        # under a device cgroup with a third GPU that Slurm does not know and never hides
        ({**STEP, "CUDA_VISIBLE_DEVICES": "0,1"}, 3, [0, 1]),
        # a batch script on the first node, before and after `export CUDA_VISIBLE_DEVICES=`
        ({"SLURM_JOB_ID": "2", "SLURM_NODEID": "0", "SLURM_JOB_GPUS": "4,6", "CUDA_VISIBLE_DEVICES": "4,6"}, 8, [4, 6]),
        ({"SLURM_JOB_ID": "2", "SLURM_NODEID": "0", "SLURM_JOB_GPUS": "4,6", "CUDA_VISIBLE_DEVICES": ""}, 8, [4, 6]),
        # inside a lease on one GPU of the job
        ({"SLURM_JOB_ID": "2", "SLURM_NODEID": "0", "SLURM_JOB_GPUS": "4,6", "CUDA_VISIBLE_DEVICES": "6"}, 8, [4, 6]),
        # a process on another node, with the first node's value
        ({"SLURM_JOB_ID": "2", "SLURM_NODEID": "1", "SLURM_JOB_GPUS": "4,6"}, 8, []),
        # a job without GPUs has none of the variables: none, not all
        ({"SLURM_JOB_ID": "2", "SLURM_NODEID": "0"}, 8, []),
        ({}, 8, []),
        (STEP, 0, []),
    ],
)
def test_indexes(environ: dict[str, str], shown: int, indexes: list[int]) -> None:
    found, trouble = JobGpus(environ).only(gpus(shown))
    assert ([gpu["index"] for gpu in found], trouble) == (indexes, None)


def test_device_files_of_other_numbers_change_nothing() -> None:
    upside_down = [{**gpu, "minor": 7 - gpu["index"]} for gpu in gpus(8)]
    assert [gpu["index"] for gpu in JobGpus(STEP).only(upside_down)[0]] == [1, 2]


def test_a_mismatch_is_reported_and_nothing_is_listed() -> None:
    found, trouble = JobGpus({**STEP, "SLURM_STEP_GPUS": "6,7", "CUDA_VISIBLE_DEVICES": "6,7"}).only(gpus(7))
    assert found == []
    assert trouble == "cannot match the job's GPUs: Slurm lists 2 on this node, NVML shows 7"


def test_a_gpu_that_cannot_be_read_stays_the_jobs() -> None:
    shown = gpus(8)
    shown[2] = {"index": 2, "uuid": "unread-gpu01-2", "name": "GPU that cannot be read", "pci_bus_id": ""}
    found, _ = JobGpus(STEP).only(shown)
    assert [gpu["uuid"] for gpu in found] == ["GPU-1", "unread-gpu01-2"]


def test_mig_devices_are_identified_by_their_uuids() -> None:
    job = JobGpus({**STEP, "CUDA_VISIBLE_DEVICES": "MIG-b"})
    shown = [*gpus(1), {"index": 1, "uuid": "GPU-1", "mig": MIG}]
    found, _ = job.only(shown)
    assert found == [{"index": 1, "uuid": "GPU-1", "mig": MIG[1:]}]
    readings: list[dict[str, Any]] = [{"uuid": "GPU-0"}, {"uuid": "GPU-1", "memory_used": 5, "mig": MIG}]
    assert job.readings(readings, found) == [{"uuid": "GPU-1", "memory_used": 5, "mig": MIG[1:]}]


def test_readings_follow() -> None:
    job = JobGpus(STEP)
    found, _ = job.only(gpus(4))
    readings = [{"uuid": f"GPU-{k}"} for k in range(4)]
    assert [reading["uuid"] for reading in job.readings(readings, found)] == ["GPU-1", "GPU-2"]


def test_a_requeued_job_is_another_one() -> None:
    tags = [JobGpus({"SLURM_JOB_ID": "2", "SLURM_RESTART_COUNT": count}).tag for count in ("", "0", "1")]
    assert tags == ["2", "2", "2.1"]
