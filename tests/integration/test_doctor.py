"""`gpuboard doctor` on real nodes: each fault is named on its node, with its remedy; no process is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch_lab import write_torch
from tests.integration.test_launch_nodes import put, rank_map
from tests.nodes import Cluster, Host
from tests.nvml import Gpu
from tests.waiting import until

pytestmark = pytest.mark.nodes

HOME = "/srv/home/alice"


@pytest.fixture
def login(nodes: Cluster) -> Iterator[Host]:
    """The host where alice works, with the three GPU nodes in her config."""
    login = nodes["login1"]
    login.run(["mkdir", "-p", ".config/gpuboard"], check=True)
    put(login, ".config/gpuboard/config.toml", 'nodes = ["gpu0[1-3]"]\n')
    yield login
    nodes["gpu03"].run(["chmod", "1777", "/var/tmp"], user="root", check=True)


def other_key(nodes: Cluster, *names: str) -> None:
    """Let alice's known_hosts have the key of another host for the nodes ``names``."""
    file = nodes.home("alice") / ".ssh" / "known_hosts"
    keys = {name: (nodes.root / "keys" / f"{name}.pub").read_text() for name in (*names, "login2")}
    text = file.read_text()
    for name in names:
        text = text.replace(keys[name].split()[1], keys["login2"].split()[1])
    file.write_text(text)


def checks(login: Host, *words: str, code: int = 1, **env: str) -> list[dict[str, Any]]:
    """Return the checks that `doctor --json` prints."""
    done = login.run(["gpuboard", "doctor", "--json", *words], env=env)
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {"schema", "checks"}
    assert all(list(c) == ["name", "node", "status", "evidence", "cause", "remedy"] for c in found["checks"])
    return list(found["checks"])


def test_each_node_has_its_own_results(nodes: Cluster, login: Host) -> None:
    nodes["gpu01"].script([Gpu(), Gpu(remap=(1, 0))])
    other_key(nodes, "gpu02")
    nodes["gpu03"].hide_library()
    nodes["gpu03"].run(["chmod", "777", "/var/tmp"], user="root", check=True)
    found = checks(login)
    statuses = {(c["node"], c["name"]): c["status"] for c in found if c["name"] != "/dev/shm"}  # of this machine
    assert {key: status for key, status in statuses.items() if key[0] is not None} == {
        ("gpu01", "ssh"): "ok", ("gpu01", "agent"): "ok", ("gpu01", "NVML"): "ok", ("gpu01", "GPU"): "warn",
        ("gpu01", "reservations"): "ok", ("gpu01", "clock"): "ok",
        ("gpu02", "ssh"): "fail",
        ("gpu03", "ssh"): "ok", ("gpu03", "agent"): "ok", ("gpu03", "NVML"): "fail", ("gpu03", "reservations"): "fail",
        ("gpu03", "clock"): "ok",
    }  # fmt: skip
    assert {name for (node, name), status in statuses.items() if node is None and status == "ok"} >= {
        "config", "nodes", "state folder", "keeper", "py-spy", "ledger", "rank traffic",
    }  # fmt: skip
    by_key = {(c["node"], c["name"]): c for c in found}
    assert by_key["gpu01", "GPU"]["cause"] == "sick: row remap pending; reset the GPU"
    assert "the host key of gpu02 has CHANGED" in by_key["gpu02", "ssh"]["evidence"]
    assert "ssh-keygen -R 'gpu02'" in by_key["gpu02", "ssh"]["remedy"]
    assert by_key["gpu03", "NVML"]["evidence"] == "no NVIDIA driver here (libnvidia-ml.so.1 not found)"
    assert "it is not sticky (chmod 1777)" in by_key["gpu03", "reservations"]["evidence"]
    assert by_key["gpu03", "reservations"]["remedy"] == "set claims_dir to another folder"

    shown = login.run(["gpuboard", "doctor"])
    assert (shown.returncode, shown.stderr) == (1, "")
    lines = shown.stdout.splitlines()
    assert "  ok       ssh             gpu[01,03]: connected as alice" in lines
    assert "                           → set claims_dir to another folder" in lines
    assert lines[-1].endswith(" ok, 1 warning, 3 failed, 1 skipped")
    assert "\x1b" not in shown.stdout


def test_nothing_failed_and_nothing_reached(nodes: Cluster, login: Host) -> None:
    found = checks(login, code=0)
    assert {c["status"] for c in found} == {"ok", "skipped"}
    assert [c["evidence"] for c in found if c["name"] == "driver"] == ["580.159.04 on every node"]
    found = checks(login, code=6, GPUBOARD_PYTHON="python3-not-there")
    without = [(c["node"], c["name"], c["status"]) for c in found if c["name"] in {"ssh", "agent"}]
    assert without[:2] == [("gpu01", "ssh", "ok"), ("gpu01", "agent", "fail")]
    other_key(nodes, "gpu02", "gpu03")
    nodes["gpu01"].sshd("MaxSessions 0")
    for transport in ("asyncssh", "paramiko"):
        failed = [c for c in checks(login, code=6, GPUBOARD_TRANSPORT=transport) if c["status"] == "fail"]
        assert [(c["node"], c["name"]) for c in failed] == [("gpu01", "ssh"), ("gpu02", "ssh"), ("gpu03", "ssh")]
        assert "opened no session" in failed[0]["evidence"]
        assert "MaxSessions" in failed[0]["remedy"]


def test_a_config_that_cannot_be_read_is_a_failed_check(login: Host) -> None:
    put(login, ".config/gpuboard/config.toml", 'nodez = ["gpu01"]\n')
    [found] = checks(login)
    assert (found["name"], found["status"]) == ("config", "fail")
    assert "nodez" in found["evidence"]


def test_the_checks_of_a_launch_start_no_rank(nodes: Cluster, login: Host) -> None:
    write_torch(Path(login.path(f"{HOME}/fake")))
    login.run(["chown", "-R", "alice:", f"{HOME}/fake"], user="root", check=True)
    put(login, "map.json", rank_map(2, 1))
    nodes["gpu02"].firewall("add rule inet t in tcp dport 1024-65535 ct state new drop")
    words = ("--rank-map", "map.json", "--device", "cpu")
    found = checks(login, *words, PYTHONPATH=f"{HOME}/fake")
    launch = [(c["node"], c["name"], c["status"]) for c in found]
    for node in ("gpu01", "gpu02"):
        assert {(node, "start", "ok"), (node, "torch", "ok")} <= set(launch)
    assert (None, "torch version", "ok") in launch
    assert ("gpu02", "connect", "ok") in launch
    [failed] = [c for c in found if c["status"] == "fail"]
    assert (failed["node"], failed["name"], failed["cause"]) == (
        "gpu01", "connect", "no reply: a firewall drops it",
    )  # fmt: skip
    assert failed["remedy"].startswith("on gpu02, as root: iptables -I INPUT")
    assert not login.path(f"{HOME}/.local/state/gpuboard/runs").exists()
    until(lambda: not [*nodes["gpu01"].processes(user="alice"), *nodes["gpu02"].processes(user="alice")], "all ended")

    done = login.run(["gpuboard", "doctor", "--device", "cpu"])
    wrong = "gpuboard: --device and --python belong to --n, --gpus, --lease, --rank-map and --nccl"
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, wrong)


def test_a_launch_is_checked_on_the_gpus_that_it_would_choose(nodes: Cluster, login: Host) -> None:
    """One node is full, another one forbids connections between nodes; nothing is reserved."""
    write_torch(Path(login.path(f"{HOME}/fake")))
    login.run(["chown", "-R", "alice:", f"{HOME}/fake"], user="root", check=True)
    nodes["gpu01"].script([Gpu(used=70 * 2**30)])
    nodes["gpu02"].script([Gpu(), Gpu()])
    nodes["gpu03"].script([Gpu(), Gpu()])
    nodes["gpu02"].firewall("add rule inet t in tcp dport 1024-65535 ct state new drop")
    found = checks(login, "--n", "3", "--max-nodes", "2", PYTHONPATH=f"{HOME}/fake")
    [request] = [c for c in found if c["name"] == "request"]
    assert request["status"] == "ok"
    assert request["evidence"].startswith("a launch would start 3 ranks on gpu02:0-1@gpu03:")
    chosen = [c["node"] for c in found if c["name"] == "GPU" and c["evidence"].endswith(" is free")]
    assert sorted(chosen) == ["gpu02"] * 2 + ["gpu03"]
    failed = {(c["node"], c["name"]) for c in found if c["status"] == "fail"}
    assert failed == {("gpu03", "connect")}
    assert json.loads(login.run(["gpuboard", "leases", "--json"], check=True).stdout)["leases"] == []

    done = login.run(["gpuboard", "doctor", "--n", "3", "--max-nodes", "1"])
    assert done.returncode == 1
    assert "fail     request         " in done.stdout
    assert "`gpuboard allocate --dry-run` has the reason for every GPU" in done.stdout
