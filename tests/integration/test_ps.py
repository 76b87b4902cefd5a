"""`gpuboard ps` over real nodes: other users' processes, loads, jobs and leases, and a node that cannot be reached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.here import Here
from tests.nodes import Cluster
from tests.nvml import GIB, Gpu, write_script


@pytest.fixture
def busy(nodes: Cluster) -> Iterator[dict[str, int]]:
    """Return the pids of a process of alice on gpu01's first two GPUs, one of bob there, and one of bob on gpu02."""
    with ExitStack() as stack:
        found = {}
        for name, node, user, env in (
            ("alice", "gpu01", "alice", {"GPUBOARD_LEASE": "k3f9qa"}),
            ("bob", "gpu01", "bob", {}),
            ("other", "gpu02", "bob", {}),
        ):
            worker = stack.enter_context(nodes[node].popen(["sleep", "600"], user=user, env=env))
            stack.callback(worker.kill)
            found[name] = worker.process.inner
        alice, bob = ("compute", found["alice"]), ("compute", found["bob"], GIB)
        samples = ((found["alice"], 80, 0.1), (found["bob"], 7, 0.1))
        nodes["gpu01"].script(
            [
                Gpu(used=9 * GIB, processes=((*alice, 8 * GIB), bob), samples=samples),
                Gpu(used=4 * GIB, processes=((*alice, 4 * GIB),), samples=((found["alice"], 60, 0.1),)),
            ]
        )
        nodes["gpu02"].script([Gpu(used=GIB, processes=(("compute", found["other"], GIB),))])
        yield found


def ps(nodes: Cluster, *words: str, code: int = 0) -> Any:
    """Run it as alice; return its JSON, or its output."""
    done = nodes["login1"].run(["gpuboard", "ps", *words, "--nodes", "gpu[01-02]"], user="alice")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if "--json" in words else done.stdout


@pytest.mark.nodes
def test_lists_everybodys_processes_and_names_what_is_missing(nodes: Cluster, busy: dict[str, int]) -> None:
    found = ps(nodes, "--json", "--sort", "memory")
    first, *others = found["processes"]
    expected = {
        "node": "gpu01", "pid": busy["alice"], "user": "alice", "uid": 2001, "command": "sleep 600",
        "memory": 12 * GIB, "sm_percent": 70, "cpu_percent": 0.0, "lease": "k3f9qa", "job": None, "container": None,
        "rogue": False, "type": "compute",
    }  # fmt: skip
    assert {key: first[key] for key in expected} == expected
    assert [(gpu["index"], gpu["memory"], gpu["sm_percent"]) for gpu in first["gpus"]] == [
        (0, 8 * GIB, 80), (1, 4 * GIB, 60),
    ]  # fmt: skip
    assert first["host_memory"] > 0
    assert first["runtime_s"] > 0
    assert [(one["node"], one["user"], one["sm_percent"]) for one in others] == [
        ("gpu01", "bob", 7), ("gpu02", "bob", None),
    ]  # fmt: skip
    assert (found["schema"], found["unread"]) == (1, [])
    assert [one["pid"] for one in ps(nodes, "--json", "--user", "me")["processes"]] == [busy["alice"]]
    bobs = ps(nodes, "--user", "Bob").splitlines()
    assert [line.split()[:4] for line in bobs[1:3]] == [
        ["bob", "gpu01", "0", str(busy["bob"])], ["bob", "gpu02", "0", str(busy["other"])],
    ]  # fmt: skip
    assert bobs[-1] == "2 processes on 2 GPUs of 2 nodes"
    tree = ps(nodes, "--tree").splitlines()
    assert [line for line in tree if ": " in line] == [
        "ended lease k3f9qa of alice: 1 process on 2 GPUs of 1 node",
        "no run, job or lease: 2 processes on 2 GPUs of 2 nodes",
    ]

    nodes["gpu02"].unplug()
    done = nodes["login1"].run(["gpuboard", "ps", "--nodes", "gpu[01-02]"], user="alice")
    assert done.returncode == 0
    assert done.stderr == (
        "gpuboard: not read, so processes there are not listed: gpu02; `gpuboard status` shows why\n"
    )
    assert done.stdout.splitlines()[-1] == "2 processes on 2 GPUs of 1 node, 2 users"


def test_without_any_reading_the_code_is_6(here: Here) -> None:
    done = here.run("ps", "--nodes", "no-such-host.invalid")
    assert (done.returncode, done.stdout) == (6, "no processes on the GPUs that were read\n")
    assert "no-such-host.invalid" in done.stderr


def test_a_node_whose_nvml_fails_is_not_one_without_processes(here: Here) -> None:
    write_script(here.script, [Gpu()], trouble=("fault * 18",))
    done = here.run("ps")
    assert (done.returncode, done.stdout) == (0, "no processes on the GPUs that were read\n")
    assert "gpuboard: not read, so processes there are not listed: " in done.stderr
    assert len(here.json("ps", "--json")["unread"]) == 1
    assert here.run("status").stdout.endswith("0 GPUs; the node is without working NVML, its GPUs are not counted\n")


def test_without_processes(here: Here) -> None:
    for words, nothing in ((["ps"], "no processes"), (["ps", "--user", "zoe"], "no processes of zoe"),
                           (["leases", "--mine"], "you have no leases")):  # fmt: skip
        done = here.run(*words)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{nothing}\n", "")
    assert here.json("ps", "--json")["processes"] == []
