"""Slurm's nodes as the inventory, without a configuration and by partition; what `gpuboard doctor` reports of them."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.slurm import SlurmCluster, configured

pytestmark = pytest.mark.nodes

# cpu01 never comes up, and has no GPUs
MORE = """
NodeName=cpu01 NodeAddr=10.88.0.22 CPUs=8 RealMemory=1000
PartitionName=big Nodes=gpu03,cpu01
PartitionName=cpu Nodes=cpu01
"""


def gpuboard(slurm: SlurmCluster, *args: str) -> subprocess.CompletedProcess[str]:
    return slurm.run(["gpuboard", *args], user="alice", host="login1")


def names(slurm: SlurmCluster, *said: str) -> list[str]:
    """Return the nodes that ``--nodes`` finds, each time from a Slurm that is asked anew."""
    done = gpuboard(slurm, "config", "--json", *(word for text in said for word in ("--nodes", text)))
    found: list[str] = json.loads(done.stdout)["nodes"]
    return found


@configured(MORE)
def test_slurms_nodes_with_gpus_are_the_inventory(slurm: SlurmCluster) -> None:
    assert names(slurm) == names(slurm, "slurm:") == names(slurm, "slurm:gpu") == ["gpu01", "gpu02", "gpu03"]
    assert names(slurm, "slurm:big") == ["gpu03"]
    assert names(slurm, "slurm:big,short", "gpu02") == ["gpu01", "gpu02", "gpu03"]
    for said, words in (
        ("slurm:gup", "'slurm:gup': no partition 'gup' has nodes; Slurm's partitions: big, cpu, gpu, short"),
        ("slurm:cpu", "'slurm:cpu': Slurm has no such node with GPUs"),
    ):
        done = gpuboard(slurm, "status", "--nodes", said)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"gpuboard: {words}")


def test_without_an_answer_from_slurm_named_nodes_are_still_read(slurm: SlurmCluster) -> None:
    slurm.controller("kill")
    done = gpuboard(slurm, "status")
    assert done.returncode == 1
    assert done.stderr.startswith("gpuboard: could not get the nodes from Slurm: ")
    assert "; list nodes with --nodes, or in the config" in done.stderr
    seen = gpuboard(slurm, "status", "--nodes", "gpu01", "--json")
    assert [node["name"] for node in json.loads(seen.stdout)["nodes"]] == ["gpu01"]


def test_doctor_skips_nodes_without_a_job_of_mine_and_reports_the_controller(slurm: SlurmCluster) -> None:
    slurm.update("node", "gpu03", State="DRAIN", Reason="fan")
    slurm.submit(["--gres=gpu:2", "-w", "gpu02", "--wrap", "sleep 600"], running=True)
    done = gpuboard(slurm, "doctor", "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)["checks"]
    assert [(c["node"], c["status"]) for c in found if c["name"] == "ssh"] == [
        ("gpu01", "skipped"), ("gpu02", "ok"), ("gpu03", "skipped"),
    ]  # fmt: skip
    ours, drained = [c for c in found if c["name"] == "slurm"]
    assert (ours["status"], ours["evidence"].partition(": ")[2]) == (
        "ok", "the controller answers; nodes with GPUs: gpu[01-03]",
    )  # fmt: skip
    assert (drained["node"], drained["status"], "fan" in drained["evidence"]) == ("gpu03", "warn", True)
    slurm.controller("kill")
    done = gpuboard(slurm, "doctor", "--json", "--nodes", "gpu01")
    [failed] = [c for c in json.loads(done.stdout)["checks"] if c["status"] == "fail"]
    assert (done.returncode, failed["name"], failed["remedy"]) == (
        1,
        "slurm",
        "is it running there? see `scontrol ping`",
    )
