"""A node whose agent lies or is broken: what it answers costs that node alone, whoever asked.

The lying agent (tests/integration/fake_agent.py) runs on a real node, over real ssh, with honest nodes beside it.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
import sys
import zlib
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
# Behind a reply's id: what a broken or hostile agent may say to any call. Each is a node of its own, with this name.
RUBBISH = {
    "wrong-types": '"value":{"alive":[],"lapsed":5,"missing":[],"until":"x","released":7,"processes":{},"seq":[]}',
    "no-value": '"value":null',
    "nested": '"value":' + "[" * 20_000 + "]" * 20_000,
    "no-utf8": '"value":{"released":["\udcff\udcfe"],"alive":["\udcff"],"lapsed":[],"missing":[]}',
    "beyond-number": '"value":{"until":1e308,"now":-1e308,"seq":1e400}',
    "wrong-error": NO + '{"claims":[{"lease":5}],"holder":[]}}',
}
LIARS = ",".join(RUBBISH)


@pytest.fixture
def lie(nodes: Cluster) -> Iterator[Lie]:
    """Make gpu03 liars for alice: ``lie({node: {"replies": {op: raw, …}, …}, …})``, again to change what they say."""
    home = nodes.home("alice")
    wrapper, words, config = home / "liar", home / "lies.json", home / ".ssh" / "config"

    def say(lies: dict[str, Any]) -> None:
        words.write_text(json.dumps(lies))
        if not wrapper.exists():
            wrapper.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S {FAKE} /srv/home/alice/lies.json\n")
            wrapper.chmod(0o755)
            nodes["gpu03"].use_python("/srv/home/alice/liar")
            config.write_text(f"Host {' '.join(lies)}\n    HostName gpu03\n" + config.read_text())
        for path in (wrapper, words):
            os.chown(path, USERS["alice"], USERS["alice"])

    yield say


def replies(*ops: str) -> dict[str, Any]:
    """Return the lies of nodes that answer these calls with rubbish, each with its own."""
    return {node: {"replies": dict.fromkeys(ops, raw)} for node, raw in RUBBISH.items()}


def gpuboard(nodes: Cluster, *args: str, scope: str) -> subprocess.CompletedProcess[str]:
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


def keeper(nodes: Cluster) -> tuple[int, str]:
    """Return the pid of alice's keeper on login1, and its log."""
    [folder] = (nodes.home("alice") / ".local/state/gpuboard/keeper").iterdir()
    return int((folder / "lock").read_text()), (folder / "log").read_text()


def lives(nodes: Cluster, pid: int) -> bool:
    return any(process.inner == pid for process in nodes["login1"].processes(user="alice"))


def test_leases_on_honest_nodes_live_on_whatever_a_keeper_is_answered(nodes: Cluster, lie: Lie) -> None:
    lie(replies())
    honest = take(nodes, "gpu02", "--n", "1")
    lied = take(nodes, LIARS, "--n", str(len(RUBBISH)), "--per-node", "1")
    pid, _ = keeper(nodes)
    lie(replies("touch"))
    # a renewed lease is touched at once; the connections that the keeper has there say what they said before
    nodes["gpu03"].run(["pkill", "-f", "fake_agent.py"], user="root")
    gpuboard(nodes, "renew", lied, "--for", "20m", scope=LIARS)
    answers = [f"{node}: heartbeat failed: {node}: malformed answer" for node in RUBBISH]
    until(
        lambda: all(answer in keeper(nodes)[1] for answer in answers) or not lives(nodes, pid),
        "the keeper was answered all of that",
    )
    [claim] = nodes["gpu02"].path("/var/tmp").glob(f"gpuboard.*.{honest}")
    before = claim.stat().st_mtime
    assert gpuboard(nodes, "renew", honest, "--for", "20m", scope="gpu02").returncode == 0
    until(lambda: claim.stat().st_mtime > before)
    assert "Traceback" not in keeper(nodes)[1], keeper(nodes)[1]
    assert keeper(nodes)[0] == pid, "no other keeper has taken over"
    assert lives(nodes, pid), keeper(nodes)[1]


def test_no_command_fails_over_what_one_node_answers(nodes: Cluster, lie: Lie) -> None:
    lie(replies())
    lied = take(nodes, LIARS, "--n", str(len(RUBBISH)), "--per-node", "1")
    lie(replies("release", "renew", "carriers", "signal"))
    # what a node did not answer is not done, and is said
    for command in (["renew", lied, "--for", "20m"], ["release", lied], ["release", "--mine"]):
        done = gpuboard(nodes, *command, scope=LIARS)
        assert done.returncode == 1, (command, done)
        assert [node for node in RUBBISH if node not in done.stderr] == [], (command, done.stderr)
    # and others' GPUs are had, also where those nodes were asked first: half of them answer rubbish to the take, half
    # to the reading after it
    ops = itertools.cycle(("take", "read"))
    lie({node: {"replies": {next(ops): raw}} for node, raw in RUBBISH.items()})
    done = gpuboard(nodes, "allocate", "--n", "1", "--for", "1m", "--detach", scope=f"{LIARS},gpu02")
    assert done.returncode == 0, done.stderr


def test_runs_and_jobs_of_other_nodes_are_seen_whatever_one_node_answers(nodes: Cluster, lie: Lie) -> None:
    bombs = {"bomb": {"replies": {"list": '"value":' + json.dumps(bomb())}}}
    lie(replies("list", "jobs", "state") | bombs)
    done = gpuboard(nodes, "runs", "--json", "--node", f"{LIARS},bomb,gpu02", scope=f"{LIARS},bomb,gpu02")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert listed["failed"].keys() == RUBBISH.keys()
    assert [verdict["kind"] for run in listed["runs"] for verdict in run["verdicts"]] == ["unreadable"]
    done = gpuboard(nodes, "explain", "--node", f"{LIARS},gpu02", scope=f"{LIARS},gpu02")
    assert done.returncode == 0, done.stderr
    assert "you have no distributed job on gpu02" in done.stdout
    done = gpuboard(nodes, "stop", "last", "--node", "no-value", scope=LIARS)
    assert (done.returncode, "malformed answer to list" in done.stderr) == (6, True)


def bomb() -> dict[str, Any]:
    """Return a state that is 100 MB when it is unpacked."""
    state = base64.b64encode(zlib.compress(b" " * 10**8)).decode()
    return {"folder": "/\x1b[31m", "more": True, "runs": [{"run": "a", "alive": True, "state": state}]}


BEYOND: dict[str, dict[str, Any]] = {
    "times": {"at": 1e300, "interval_s": -5, "seq": -1},
    "interval": {"interval_s": 1e308, "at": -1e300},
    "host": {"cpu_percent": 1e308, "memory_used": 10**40, "load1": -1e308, "seq": 10**30,
        "gpus": [{"uuid": "GPU-host-0", "delay_s": -1e308, "power": 1e308, "memory_used": 10**30}]},
    "process": {"at": 1.7e308, "gpus": [{"uuid": "GPU-process-0", "memory_used": 0, "processes":
        [{"pid": 10**20, "type": "compute", "memory": 10**30, "started": -1.7e308, "uid": -(10**20)}]}]},
    "claim": {"claims": [{"lease": "abc", "uuid": "GPU-claim-0", "uid": 10**20, "owner": "bob", "state": "live",
        "from": -1.7e308, "until": 1.7e308, "remaining_s": 1.7e308, "age_s": -1.7e308, "gpus": -(10**20)}]},
}  # fmt: skip


def test_numbers_beyond_any_measure_cost_their_node_alone(nodes: Cluster, lie: Lie) -> None:
    lie({node: {"reading": reading} for node, reading in BEYOND.items()})
    scope = ",".join((*BEYOND, "gpu02"))
    with_claims = "times,claim,gpu02"
    for command, shown in (["status"], scope), (["leases"], with_claims), (["leases", "--json"], with_claims):
        done = gpuboard(nodes, *command, scope=shown)
        assert done.returncode == 0, (command, done.stderr)
    seen = {node["name"]: node for node in json.loads(gpuboard(nodes, "status", "--json", scope=scope).stdout)["nodes"]}
    assert (seen["gpu02"]["state"], {gpu["state"] for gpu in seen["gpu02"]["gpus"]}) == ("up", {"free"})
    assert gpuboard(nodes, "allocate", "--n", "1", "--dry-run", scope=scope).returncode == 0


def test_what_an_allocation_leaves_behind_is_named(nodes: Cluster, lie: Lie) -> None:
    """The claims are not found in the readings after the take, for the hello names another user; nor released."""
    lie({"gpu03": {"hello": {"uid": 4711}, "replies": {"release": RUBBISH["no-value"]}}})
    done = gpuboard(nodes, "allocate", "--n", "1", "--for", "1m", "--detach", scope="gpu03")
    assert done.returncode == 1
    assert " is missing in the readings after it was claimed on gpu03; " in done.stderr
    assert " on gpu03: malformed answer to release: " in done.stderr
    assert "it will expire there within 90 s" in done.stderr
    lie({"gpu03": {"hello": {"uid": 4711}}})
    done = gpuboard(nodes, "allocate", "--n", "1", "--for", "1m", "--detach", scope="gpu03")
    assert (done.returncode, "the lease was released" in done.stderr) == (1, True), done.stderr


def test_a_node_out_of_reach_is_named_and_release_fails(nodes: Cluster) -> None:
    def run(host: str, *command: str) -> subprocess.CompletedProcess[str]:
        words = ["gpuboard", *command, "--nodes", "gpu[01-02]"]
        return nodes[host].run(words, env={"GPUBOARD_CONNECT_TIMEOUT": "3s"})

    # alice's keeper on login1 goes on keeping what another host could not release
    ends = {"login1": "within 90 s", "login2": "when its holder ends, at the latest "}
    leases = {host: take(nodes, "gpu[01-02]", "--n", "2", "--per-node", "1") for host in ends}
    nodes["gpu02"].firewall("add rule inet t in tcp dport 22 drop")
    for host, lease in leases.items():
        done = run(host, "release", lease)
        assert done.returncode == 1, done.stderr
        assert done.stdout.startswith(f"released {lease}: gpu01:")
        assert f"{lease}: not released on gpu02: " in done.stderr
        assert f"it will expire there {ends[host]}" in done.stderr
    nodes["gpu01"].firewall("add rule inet t in tcp dport 22 drop")
    lease = leases["login1"]
    for host, command in (
        ("login1", ["release", "--mine"]),
        ("login2", ["release", lease]),
        ("login1", ["renew", lease, "--for", "5m"]),
    ):
        done = run(host, *command)
        assert done.returncode == 6, (host, command, done.stderr)
