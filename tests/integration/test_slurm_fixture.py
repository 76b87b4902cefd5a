"""The Slurm of the tests is a real one, and is put back in order."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.nodes import Cluster
from tests.nvml import Gpu
from tests.slurm import SlurmCluster, configured
from tests.waiting import until

pytestmark = pytest.mark.nodes


def variables(slurm: SlurmCluster, number: int) -> dict[str, str]:
    """The variables that a job of alice's was given, by what `env` has written into its output."""
    output = slurm.nodes.home("alice") / f"slurm-{number}.out"
    until(lambda: output.exists() and "SLURM_JOB_ID=" in output.read_text(), f"job {number} wrote its variables")
    return dict(line.split("=", 1) for line in output.read_text().splitlines() if "=" in line)


def test_a_job_runs_on_its_node_as_its_user_with_its_gpus(slurm: SlurmCluster) -> None:
    first = slurm.submit(["--gres=gpu:2", "-w", "gpu02", "--wrap", "sleep 600"], running=True)
    number = slurm.submit(["--gres=gpu:3", "-w", "gpu02", "--wrap", "env | sort; sleep 600"], running=True)
    assert slurm.held(first) == {"gpu02": {0, 1}}
    assert slurm.held(number) == {"gpu02": {2, 3, 4}}
    assert slurm.node("gpu02")["GresUsed"] == "gpu:h100:5(IDX:0-4)"
    given = variables(slurm, number)
    assert given["SLURM_JOB_GPUS"] == given["CUDA_VISIBLE_DEVICES"] == "2,3,4"

    def runs() -> set[str]:
        return {p.name for p in slurm.nodes["gpu02"].processes(user="alice")}

    until(lambda: runs() == {"slurm_script", "sleep"}, "both scripts sleep")
    assert slurm.jobs() == {first, number}


def test_srun_reaches_every_node_from_login_nodes(slurm: SlurmCluster) -> None:
    for login in ("login1", "login2"):
        done = slurm.run(["srun", "-N3", "--gres=gpu:1", "sh", "-c", "hostname; id -un"], user="bob", host=login)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.split()) == ["bob"] * 3 + ["gpu01", "gpu02", "gpu03"]


def test_the_controller_can_be_killed_and_comes_back_with_its_jobs(slurm: SlurmCluster) -> None:
    number = slurm.submit(["--gres=gpu:1", "--wrap", "sleep 600"], running=True)
    slurm.controller("restart")
    assert slurm.job(number)["JobState"] == "RUNNING"
    slurm.save()
    slurm.controller("kill")
    assert "DOWN" in slurm.run(["scontrol", "ping"]).stdout
    slurm.controller("restart")
    assert slurm.job(number)["JobState"] == "RUNNING"
    slurm.controller("stop")
    slurm.controller("continue")
    assert slurm.jobs() == {number}


def test_each_test_begins_with_an_empty_slurm(slurm: SlurmCluster, nodes: Cluster) -> None:
    for user in ("alice", "bob"):
        slurm.submit(["--gres=gpu:8", "--wrap", "trap '' TERM; setsid sleep 600 & wait"], user=user, running=True)
    slurm.update("node", "gpu03", State="DRAIN", Reason="bad NVLink")
    slurm.controller("stop")
    slurm.configure()
    assert slurm.jobs() == set()
    assert slurm.node("gpu03")["State"] == "IDLE"
    assert [p for host in nodes for p in host.processes() if p.uid] == []
    assert slurm.submit(["--wrap", "true"]) == 1


@configured("PrivateData=jobs")
def test_jobs_of_others_can_be_private(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:1", "--wrap", "sleep 600"], user="bob", running=True)
    assert slurm.run(["squeue", "-h"], user="alice").stdout == ""
    assert slurm.run(["squeue", "-h"], user="bob").stdout != ""


@pytest.mark.parametrize(
    ("slurm", "has", "asked", "held"),
    [
        (
            {"gres": "Name=gpu Type=h100 File=/dev/nvidia[0-3]\nName=gpu Type=a100 File=/dev/nvidia[4-7]"},
            "gpu:h100:4,gpu:a100:4",
            "gpu:h100:1,gpu:a100:2",
            {0, 4, 5},
        ),
        ({"gres": "Name=gpu File=/dev/nvidia[0-7]"}, "gpu:8", "gpu:2", {0, 1}),
        ({"gres": "Name=gpu Type=h100 File=/dev/nvidia[1,3,5-7]"}, "gpu:h100:5", "gpu:2", {0, 1}),
        (
            {
                "gres": "Name=gpu Type=h100_1g.10gb File=/dev/nvidia[0-6]\n"
                "Name=gpu Type=h100_3g.40gb File=/dev/nvidia[7-8]"
            },
            "gpu:h100_1g.10gb:7,gpu:h100_3g.40gb:2",
            "gpu:h100_3g.40gb:1",
            {7},
        ),
    ],
    indirect=["slurm"],
    ids=["two types", "untyped", "holes", "MIG"],
)
def test_nodes_can_have_other_gpus(slurm: SlurmCluster, has: str, asked: str, held: set[int]) -> None:
    assert slurm.node("gpu01")["Gres"] == has
    number = slurm.submit([f"--gres={asked}", "-w", "gpu01", "--wrap", "sleep 600"], running=True)
    assert slurm.held(number) == {"gpu01": held}


@configured(gres="NodeName=gpu01 Name=gpu Type=h100 File=/dev/nvidia[0-7]\nNodeName=gpu01 Name=shard Count=32")
def test_nodes_can_have_shards_and_none_at_all(slurm: SlurmCluster) -> None:
    assert slurm.node("gpu01")["Gres"] == "gpu:h100:8,shard:h100:32"
    assert slurm.node("gpu02")["Gres"] == "(null)"
    number = slurm.submit(["--gres=shard:3", "--wrap", "sleep 600"], running=True)
    assert slurm.job(number)["GRES"] == "shard:3(IDX:0)"


NVML = """
import pynvml as n
n.nvmlInit()
for h in map(n.nvmlDeviceGetHandleByIndex, range(n.nvmlDeviceGetCount())):
    print(n.nvmlDeviceGetIndex(h), n.nvmlDeviceGetMinorNumber(h), n.nvmlDeviceGetUUID(h))
"""


@configured(cgroups=True)
def test_device_cgroups_hide_the_gpus_of_others_from_files_and_nvml(slurm: SlurmCluster) -> None:
    gpus = slurm.nodes["gpu01"].script([Gpu(minor=7 - k) for k in range(8)])
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", "--wrap", "sleep 600"], user="bob", running=True)
    look = "env | sort; for f in /dev/nvidia?; do test -r $f && echo $f; done"
    command = ["srun", "--gres=gpu:2", "-w", "gpu01", "sh", "-c", f'{look}; "$0" -c "$1"', sys.executable, NVML]
    seen = slurm.run(command, check=True).stdout.splitlines()
    assert {"SLURM_STEP_GPUS=2,3", "CUDA_VISIBLE_DEVICES=0,1"} <= set(seen)
    assert seen[-4:] == ["/dev/nvidia2", "/dev/nvidia3", f"0 3 {gpus[4].uuid}", f"1 2 {gpus[5].uuid}"]
    outside = slurm.run([sys.executable, "-c", NVML], host="gpu01", check=True)
    assert outside.stdout.splitlines() == [f"{k} {7 - k} {gpus[k].uuid}" for k in range(8)]


@configured(cgroups=True)
def test_nothing_of_it_is_left_where_it_is_not_asked_for(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", "--wrap", "sleep 600"], running=True)
    slurm.controller("stop")
    slurm.stop()
    try:
        for host in slurm.nodes:
            assert {p.name for p in host.processes()} <= {"sshd"}
            assert not host.path("/etc/slurm/slurm.conf").exists()
            assert not host.path("/run/munge").exists()
            assert host.run(["sh", "-c", "echo lost >/dev/null; ls -d /dev/nvidia0 /dev/shm"]).stdout == "/dev/shm\n"
        assert list(Path("/sys/fs/cgroup/devices").glob(f"gpuboard-{os.getpid()}-*")) == []
    finally:
        slurm.start()
