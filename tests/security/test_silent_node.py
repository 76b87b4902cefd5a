"""A node that gives readings and then answers no call: whoever wants GPUs gets those of the other nodes, at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuboard.leases.claims.client import CALL_S
from tests.hosts import Host, NodeProcess, Running
from tests.nodes import Cluster
from tests.nvml import Gpu
from tests.waiting import Stopwatch, until

pytestmark = pytest.mark.nodes
SCOPE = ("--nodes", "gpu[01-03]")
DETACHED = ("--detach", "--for", "10m", "--format", "json")
DROP = "add rule inet t in tcp dport 22 drop"
# A node's python3 whose first agent with a reading is stopped before the reading is sent.
FALLS_SILENT = """#!/usr/bin/python3 -S
import os, signal, subprocess, sys
agent = subprocess.Popen(["/usr/bin/python3", *sys.argv[1:]], stdout=subprocess.PIPE)
for line in agent.stdout:
    if b'"t":"reading"' in line and not os.path.exists("/tmp/silent"):
        os.kill(agent.pid, signal.SIGSTOP)
        with open("/tmp/silent", "x"):
            pass
    os.write(1, line)
"""


def agents(host: Host) -> list[NodeProcess]:
    """Return alice's agents there that have sent a reading: then they are nice, and wait for what comes."""
    return [
        process
        for process in host.processes(lambda p: p.name.startswith("python"), user="alice")
        if _nice_and_waiting(process.pid) and _is_agent(process.pid)
    ]


def _nice_and_waiting(pid: int) -> bool:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0] == "S" and fields[16] == "19"


def _is_agent(pid: int) -> bool:
    """Return whether it is the agent itself and not its NVML process, which is a child of it."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return b"python" not in Path(f"/proc/{parent}/cmdline").read_bytes().partition(b"\0")[0]


def arm(lab: Cluster, name: str) -> None:
    """Let alice's next agent there be stopped once it has given a reading."""
    python = lab.home("alice") / "falls-silent"
    python.write_text(FALLS_SILENT)
    python.chmod(0o755)
    lab[name].use_python(f"/srv/home/alice/{python.name}")


def claims(host: Host) -> list[str]:
    return sorted(path.name for path in host.path("/var/tmp").glob("gpuboard.GPU-*"))


@pytest.fixture
def lab(nodes: Cluster) -> Cluster:
    """gpu01 and gpu02 with two GPUs; of gpu03 the first reading takes 3 s, in which gpu01 can fall silent."""
    for name in ("gpu01", "gpu02"):
        nodes[name].script([Gpu(), Gpu()])
    nodes["gpu03"].script([Gpu(trouble=("hang *",))])
    return nodes


def allocate(lab: Cluster, *args: str, scope: tuple[str, ...] = SCOPE) -> Running:
    return lab["login1"].popen(["gpuboard", "allocate", *args, *scope, *DETACHED], user="alice")


def result(process: Running) -> tuple[int, Any]:
    out, err = process.communicate(timeout=120)
    assert out, err
    return process.returncode, json.loads(out)


def hang(host: Host) -> Callable[[], object]:
    """Wait until the agent is stopped on a node that ``arm`` has prepared; return what lets it go on."""
    until(host.path("/tmp/silent").exists, "an agent that has given a reading is stopped")
    return lambda: host.run(["pkill", "-CONT", "python"])


def drop(host: Host) -> Callable[[], object]:
    """Drop all packets to the node's sshd; return what ends that."""
    until(lambda: agents(host), "there is an agent that has given a reading")
    host.firewall(DROP)
    return host.firewall


@pytest.mark.parametrize("silence", [hang, drop])
def test_allocate_goes_on_with_the_other_nodes(lab: Cluster, silence: Callable[[Host], Callable[[], object]]) -> None:
    if silence is hang:
        arm(lab, "gpu01")
    with allocate(lab, "--n", "1") as process:
        end = silence(lab["gpu01"])
        watch = Stopwatch()
        code, answer = result(process)
        spent_s = watch.stop()
    assert code == 0, answer
    assert [gpu["node"] for gpu in answer["lease"]["gpus"]] == ["gpu02"]
    assert "gpu01: no answer in" in answer["why"]
    assert "will expire within 90 s" in answer["why"]
    assert spent_s < 15.0
    end()

    def counts() -> bool:
        if silence is hang or not claims(lab["gpu01"]):  # an agent that goes on reads that it is to take the claim back
            return bool(claims(lab["gpu01"]))
        status = lab["login1"].run(["gpuboard", "status", "--json", "--nodes", "gpu01"], user="alice")
        return any(gpu["state"] != "free" for node in json.loads(status.stdout)["nodes"] for gpu in node["gpus"])

    until(lambda: not counts(), "the claim on gpu01 ends", 120.0)


def test_all_or_nothing_over_several_nodes(lab: Cluster) -> None:
    """gpu02 is asked second: what gpu01 gave by then is given back, and no other set is there."""
    arm(lab, "gpu02")
    with allocate(lab, "--n", "4") as process:
        end = hang(lab["gpu02"])
        code, answer = result(process)
    assert code == 4
    assert "not read: gpu02 (no answer in" in answer["error"]["message"]
    assert "will expire within 90 s" in answer["error"]["message"]
    assert claims(lab["gpu01"]) == []
    end()
    until(lambda: not claims(lab["gpu02"]), "gpu02 drops the claim once it goes on")


def test_a_node_that_is_only_slow_is_taken_where_no_other_can_serve(lab: Cluster) -> None:
    arm(lab, "gpu01")
    with allocate(lab, "--n", "1", scope=("--nodes", "gpu01,gpu03")) as process:
        end = hang(lab["gpu01"])
        given_up_at = time.monotonic() + CALL_S + 2.0  # the take is sent within 2 s; it has until 10 s after that
        until(lambda: time.monotonic() > given_up_at, "the first call is given up")
        end()
        code, answer = result(process)
    assert code == 0, answer
    assert [gpu["node"] for gpu in answer["lease"]["gpus"]] == ["gpu01"]
    assert len(claims(lab["gpu01"])) == 1


def test_waiting_for_a_gpu_is_not_held_up(lab: Cluster) -> None:
    """All are busy at first; then gpu01 hangs, and those of gpu02 become free."""
    busy = lab["gpu01"].popen(["sleep", "600"], user="bob")
    for name in ("gpu01", "gpu02"):
        lab[name].script([Gpu(utilization=90)])
    arm(lab, "gpu01")
    lab["gpu03"].script([Gpu(utilization=90)])
    with busy, allocate(lab, "--n", "1", "--wait", "2m") as process:
        end = hang(lab["gpu01"])
        lab["gpu02"].script([Gpu()])
        watch = Stopwatch()
        code, answer = result(process)
        spent_s = watch.stop()
        busy.kill()
    assert code == 0, answer
    assert [gpu["node"] for gpu in answer["lease"]["gpus"]] == ["gpu02"]
    assert spent_s < 40.0
    end()
