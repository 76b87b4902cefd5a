"""A node whose agent lies or is broken: what it answers costs that node alone, whoever asked.

The lying agent (tests/integration/fake_agent.py) runs on a real node, over real ssh, with honest nodes beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import USERS
from tests.nodes import Cluster
from tests.waiting import until

pytestmark = pytest.mark.nodes
FAKE = Path(__file__).parents[1] / "integration" / "fake_agent.py"
Lie = Callable[..., None]

NO = '"error":{"kind":"conflict","message":"no","detail":'
# Behind a reply's id: what a broken or hostile agent may say to any call.
RUBBISH = {
    "wrong types": '"value":{"alive":[],"lapsed":5,"missing":[],"until":"x","released":7,"processes":{},"seq":[]}',
    "no value": '"value":null',
    "nested without end": '"value":' + "[" * 20_000 + "]" * 20_000,
    "no UTF-8": '"value":{"released":["\udcff\udcfe"],"alive":["\udcff"],"lapsed":[],"missing":[]}',
    "beyond any number": '"value":{"until":1e308,"now":-1e308,"seq":1e400}',
    "an error of wrong types": NO + '{"claims":[{"lease":5}],"holder":[]}}',
}


@pytest.fixture
def lie(nodes: Cluster) -> Iterator[Lie]:
    """Make gpu03 a liar for alice: ``lie(replies={op: [raw, …]}, …)``, the same again to change what it says."""
    home = nodes.home("alice")
    wrapper, words = home / "liar", home / "lies.json"

    def say(**lies: Any) -> None:
        words.write_text(json.dumps(lies))
        if not wrapper.exists():
            wrapper.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S {FAKE} /srv/home/alice/lies.json\n")
            wrapper.chmod(0o755)
            nodes["gpu03"].use_python("/srv/home/alice/liar")
        for path in (wrapper, words):
            os.chown(path, USERS["alice"], USERS["alice"])

    yield say


def gpuboard(nodes: Cluster, *args: str, scope: str = "gpu[01-03]") -> subprocess.CompletedProcess[str]:
    """Run a command as alice on login1; whatever nodes say is no bug of ours."""
    done = nodes["login1"].run(["gpuboard", args[0], "--nodes", scope, *args[1:]])
    assert "this is a bug" not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def take(nodes: Cluster, scope: str, *more: str) -> str:
    """Reserve a GPU of every node in ``scope`` and return the lease."""
    words = ["--for", "10m", "--detach", "--format", "json", *more]
    done = gpuboard(nodes, "allocate", *words, scope=scope)
    assert done.returncode == 0, done.stderr
    lease: str = json.loads(done.stdout)["lease"]["id"]
    return lease


def claims(nodes: Cluster, lease: str) -> list[Path]:
    """Return a lease's claims on the honest nodes."""
    return [path for name in ("gpu01", "gpu02") for path in nodes[name].path("/var/tmp").glob(f"gpuboard.*.{lease}")]


def keeper(nodes: Cluster) -> tuple[int, str]:
    """Return the pid of alice's keeper on login1, and its log."""
    [folder] = (nodes.home("alice") / ".local/state/gpuboard/keeper").iterdir()
    return int((folder / "lock").read_text()), (folder / "log").read_text()


def lives(nodes: Cluster, pid: int) -> bool:
    return any(process.inner == pid for process in nodes["login1"].processes(user="alice"))


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_leases_on_honest_nodes_live_on_whatever_a_keeper_is_answered(nodes: Cluster, lie: Lie, rubbish: str) -> None:
    lie()
    honest = take(nodes, "gpu[01-02]", "--n", "2", "--per-node", "1")
    lied = take(nodes, "gpu03", "--n", "1")
    pid, _ = keeper(nodes)
    lie(replies={"touch": [RUBBISH[rubbish]]})
    # a renewed lease is touched at once; the connection that the keeper has there says what it said before
    nodes["gpu03"].run(["pkill", "-f", "fake_agent.py"], user="root")
    gpuboard(nodes, "renew", lied, "--for", "20m", scope="gpu03")
    until(
        lambda: "gpu03: heartbeat failed: " in keeper(nodes)[1] or not lives(nodes, pid), "the keeper was answered that"
    )
    before = [path.stat().st_mtime for path in claims(nodes, honest)]
    assert len(before) == 2
    assert gpuboard(nodes, "renew", honest, "--for", "20m", scope="gpu[01-02]").returncode == 0
    until(lambda: all(path.stat().st_mtime > then for path, then in zip(claims(nodes, honest), before, strict=True)))
    assert "Traceback" not in keeper(nodes)[1], keeper(nodes)[1]
    assert keeper(nodes)[0] == pid, "no other keeper has taken over"
    assert lives(nodes, pid), keeper(nodes)[1]


@pytest.mark.parametrize(("changing", "reading"), list(zip(*[iter(RUBBISH)] * 2, strict=True)))
def test_no_command_fails_over_what_one_node_answers(nodes: Cluster, lie: Lie, changing: str, reading: str) -> None:
    lie()
    lied = take(nodes, "gpu03", "--n", "1")
    lie(replies={op: [RUBBISH[changing]] for op in ("take", "release", "renew", "carriers", "signal")})
    # what a node did not answer is not done, and is said
    for command in (["renew", lied, "--for", "20m"], ["release", lied], ["release", "--mine"]):
        done = gpuboard(nodes, *command)
        assert done.returncode == 1, (command, done)
        assert "gpu03" in done.stderr
    # and others' GPUs are had, also where that node was asked first
    done = gpuboard(nodes, "allocate", "--n", "1", "--exclude", "gpu01", "--for", "1m", "--detach")
    assert done.returncode == 0, done.stderr
    lie(replies={"read": [RUBBISH[reading]]})
    assert gpuboard(nodes, "allocate", "--n", "1", "--for", "1m", "--detach").returncode == 0


@pytest.mark.parametrize(
    "reading",
    [
        {"at": 1e300, "interval_s": -5, "seq": -1},
        {"interval_s": 1e308, "at": -1e300},
        {"cpu_percent": 1e308, "memory_used": 10**40, "load1": -1e308, "seq": 10**30,
            "gpus": [{"uuid": "GPU-gpu03-0", "delay_s": -1e308, "power": 1e308, "memory_used": 10**30}]},
        {"at": 1.7e308, "gpus": [{"uuid": "GPU-gpu03-0", "memory_used": 0, "processes":
            [{"pid": 10**20, "type": "compute", "memory": 10**30, "started": -1.7e308, "uid": -(10**20)}]}]},
        {"claims": [{"lease": "abc", "uuid": "GPU-gpu03-0", "uid": 10**20, "owner": "bob", "state": "live",
            "from": -1.7e308, "until": 1.7e308, "remaining_s": 1.7e308, "age_s": -1.7e308, "gpus": -(10**20)}]},
    ],
)  # fmt: skip
def test_numbers_beyond_any_measure_cost_their_node_alone(nodes: Cluster, lie: Lie, reading: dict[str, Any]) -> None:
    lie(reading=reading)
    for command in (["status"], ["leases"], ["leases", "--json"]):
        done = gpuboard(nodes, *command)
        assert done.returncode == 0, (command, done.stderr)
    seen = {node["name"]: node for node in json.loads(gpuboard(nodes, "status", "--json").stdout)["nodes"]}
    assert [seen[name]["state"] for name in ("gpu01", "gpu02")] == ["up", "up"]
    assert {gpu["state"] for name in ("gpu01", "gpu02") for gpu in seen[name]["gpus"]} == {"free"}
    assert gpuboard(nodes, "allocate", "--n", "1", "--dry-run").returncode == 0


def test_what_an_allocation_leaves_behind_is_named(nodes: Cluster, lie: Lie) -> None:
    """The claims are not found in the readings after the take, for the hello names another user; nor released."""
    lie(hello={"uid": 4711}, replies={"release": [RUBBISH["no value"]]})
    done = gpuboard(nodes, "allocate", "--n", "1", "--for", "1m", "--detach", scope="gpu03")
    assert done.returncode == 1
    assert " is missing in the readings after it was claimed on gpu03; " in done.stderr
    assert " on gpu03: gpu03: malformed answer to release: " in done.stderr
    assert "it will expire there within 90 s" in done.stderr
    lie(hello={"uid": 4711})
    done = gpuboard(nodes, "allocate", "--n", "1", "--for", "1m", "--detach", scope="gpu03")
    assert (done.returncode, "the lease was released" in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize("host", ["login1", "login2"])
def test_a_node_out_of_reach_is_named_and_release_fails(nodes: Cluster, host: str) -> None:
    lease = take(nodes, "gpu[01-02]", "--n", "2", "--per-node", "1")
    nodes["gpu02"].firewall("add rule inet t in tcp dport 22 drop")
    words = ["gpuboard", "release", "--nodes", "gpu[01-02]", lease]
    done = nodes[host].run(words, env={"GPUBOARD_CONNECT_TIMEOUT": "3s"})
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(f"released {lease}: gpu01:")
    assert f"{lease}: not released on gpu02: " in done.stderr
    # alice's keeper on login1 goes on keeping what another host could not release
    when = "within 90 s" if host == "login1" else "when its holder ends, at the latest "
    assert f"it will expire there {when}" in done.stderr
    nodes["gpu01"].firewall("add rule inet t in tcp dport 22 drop")
    for command in (["release", "--mine"], ["release", lease], ["renew", lease, "--for", "5m"]):
        done = nodes[host].run(["gpuboard", *command, "--nodes", "gpu[01-02]"], env={"GPUBOARD_CONNECT_TIMEOUT": "3s"})
        assert done.returncode == 6, done.stderr
