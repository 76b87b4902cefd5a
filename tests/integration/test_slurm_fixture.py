"""The Slurm of the tests is a real one, and is put back in order."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.nodes import Cluster
from tests.nvml import Gpu
from tests.slurm import SlurmCluster
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


@pytest.mark.parametrize("login", ["login1", "login2"])
def test_srun_reaches_every_node_from_login_nodes(slurm: SlurmCluster, login: str) -> None:
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


def test_jobs_of_others_can_be_private(slurm: SlurmCluster) -> None:
    slurm.configure("PrivateData=jobs")
    slurm.submit(["--gres=gpu:1", "--wrap", "sleep 600"], user="bob", running=True)
    assert slurm.run(["squeue", "-h"], user="alice").stdout == ""
    assert slurm.run(["squeue", "-h"], user="bob").stdout != ""


@pytest.mark.parametrize(
    ("gres", "has", "asked", "held"),
    [
        (
            "Name=gpu Type=h100 File=/dev/nvidia[0-3]\nName=gpu Type=a100 File=/dev/nvidia[4-7]",
            "gpu:h100:4,gpu:a100:4",
            "gpu:h100:1,gpu:a100:2",
            {0, 4, 5},
        ),
        ("Name=gpu File=/dev/nvidia[0-7]", "gpu:8", "gpu:2", {0, 1}),
        ("Name=gpu Type=h100 File=/dev/nvidia[1,3,5-7]", "gpu:h100:5", "gpu:2", {0, 1}),
        (
            "Name=gpu Type=h100_1g.10gb File=/dev/nvidia[0-6]\nName=gpu Type=h100_3g.40gb File=/dev/nvidia[7-8]",
            "gpu:h100_1g.10gb:7,gpu:h100_3g.40gb:2",
            "gpu:h100_3g.40gb:1",
            {7},
        ),
    ],
    ids=["two types", "untyped", "holes", "MIG"],
)
def test_nodes_can_have_other_gpus(slurm: SlurmCluster, gres: str, has: str, asked: str, held: set[int]) -> None:
    slurm.configure(gres=gres)
    assert slurm.node("gpu01")["Gres"] == has
    number = slurm.submit([f"--gres={asked}", "-w", "gpu01", "--wrap", "sleep 600"], running=True)
    assert slurm.held(number) == {"gpu01": held}


def test_nodes_can_have_shards_and_none_at_all(slurm: SlurmCluster) -> None:
    lines = [f"NodeName=gpu01 {line}" for line in ("Name=gpu Type=h100 File=/dev/nvidia[0-7]", "Name=shard Count=32")]
    slurm.configure(gres="\n".join(lines))
    assert slurm.node("gpu01")["Gres"] == "gpu:h100:8,shard:h100:32"
    assert slurm.node("gpu02")["Gres"] == "(null)"
    number = slurm.submit(["--gres=shard:3", "--wrap", "sleep 600"], running=True)
    assert slurm.job(number)["GRES"] == "shard:3(IDX:0)"


def test_device_cgroups_hide_the_gpus_of_others(slurm: SlurmCluster) -> None:
    slurm.configure(cgroups=True)
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", "--wrap", "sleep 600"], user="bob", running=True)
    look = "env | sort; for f in /dev/nvidia?; do test -r $f && echo $f; done; echo looked; sleep 600"
    number = slurm.submit(["--gres=gpu:2", "-w", "gpu01", "--wrap", look], running=True)
    given = variables(slurm, number)
    assert (given["SLURM_JOB_GPUS"], given["CUDA_VISIBLE_DEVICES"]) == ("2,3", "0,1")
    output = slurm.nodes.home("alice") / f"slurm-{number}.out"
    until(lambda: "looked\n" in output.read_text(), "it has looked at the files")
    seen = [line for line in output.read_text().splitlines() if line.startswith("/dev")]
    assert seen == ["/dev/nvidia2", "/dev/nvidia3"]


NVML = """
import pynvml as n
n.nvmlInit()
for h in map(n.nvmlDeviceGetHandleByIndex, range(n.nvmlDeviceGetCount())):
    print(n.nvmlDeviceGetIndex(h), n.nvmlDeviceGetMinorNumber(h), n.nvmlDeviceGetUUID(h))
"""


def test_nvml_shows_a_job_in_a_device_cgroup_its_own_gpus(slurm: SlurmCluster) -> None:
    slurm.configure(cgroups=True)
    gpus = slurm.nodes["gpu01"].script([Gpu(minor=7 - k) for k in range(8)])
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", "--wrap", "sleep 600"], user="bob", running=True)
    done = slurm.run(["srun", "--gres=gpu:2", "-w", "gpu01", sys.executable, "-c", NVML], check=True)
    assert done.stdout.splitlines() == [f"0 3 {gpus[4].uuid}", f"1 2 {gpus[5].uuid}"]
    outside = slurm.run([sys.executable, "-c", NVML], host="gpu01", check=True)
    assert outside.stdout.splitlines() == [f"{k} {7 - k} {gpus[k].uuid}" for k in range(8)]


def test_nothing_of_it_is_left_where_it_is_not_asked_for(slurm: SlurmCluster) -> None:
    slurm.configure(cgroups=True)
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
