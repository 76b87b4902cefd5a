"""`gpuboard doctor --nccl` with gloo: the links between real ranks are measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes import Cluster

pytestmark = pytest.mark.torch


def doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Measure for a second in ranks on this machine."""
    env = {**os.environ, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "gpuboard", "doctor", "--nccl", "--device", "cpu", "--python", sys.executable]
    command += ["--seconds", "1", *words]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)


def test_link_and_all_reduce_of_two_ranks(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--n", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (link,) = found["links"]
    assert (link["ranks"], link["kind"]) == ([0, 1], "same node")
    assert link["there"] > 0
    assert link["back"] > 0
    assert [one["bytes"] for one in found["all_reduce"]] == [2**14, 2**18, 2**22]
    assert all(one["bus"] == one["algorithm"] > 0 for one in found["all_reduce"])  # 2 (n - 1) / n is 1 for two ranks
    assert {check["name"] for check in found["checks"]} >= {"start", "torch", "link", "all-reduce"}


def test_a_measurement_that_fails_has_its_cause(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--n", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpuboard: links need two GPUs at least; pass --n 2 or more\n"


@pytest.mark.nodes
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc (iproute2)")
def test_a_node_behind_a_slow_link_is_named(nodes: Cluster) -> None:
    login, slow = nodes["login1"], nodes["gpu03"]
    limit = ["root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "200ms"]
    slow.run(["tc", "qdisc", "add", "dev", "eth0", *limit], user="root", check=True)
    try:
        words = ["--device", "cpu", "--python", sys.executable, "--n", "3", "--seconds", "1", "--nodes", "gpu0[1-3]"]
        done = login.run(["gpuboard", "doctor", "--nccl", *words])
    finally:
        slow.run(["tc", "qdisc", "del", "dev", "eth0", "root"], user="root", check=True)
        login.run(["rm", "-rf", ".local/state/gpuboard/runs"], check=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "between nodes" in line]
    assert [(line[: len("gpu01:0 ↔ gpu02:0")], "slow: the others have" in line) for line in lines] == [
        ("gpu01:0 ↔ gpu02:0", False), ("gpu02:0 ↔ gpu03:0", True), ("gpu03:0 ↔ gpu01:0", True),
    ]  # fmt: skip
    assert done.stdout.endswith(
        "→ all links of gpu03 are slow: its network card, cable or switch port (ethtool, ibstat)\n"
    )
