"""The probe on the test nodes, over real ssh, as users."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

import msgspec
import pytest

from tests.agent import Agent
from tests.nodes import Cluster, eight, old_python
from tests.nvml import GIB, Gpu
from tests.nvml.direct import DIRECT
from tests.waiting import Stopwatch, kill_each, until

pytestmark = pytest.mark.nodes


def over_ssh(nodes: Cluster, node: str, user: str = "alice", interval_s: float | None = None) -> Agent:
    """Return an agent on ``node``, reached by ``user`` from login1."""
    through = nodes["login1"].command(["ssh", node], user=user)
    return Agent(None, python="python3", through=through, node=node, interval_s=interval_s)


def test_every_node_identifies_itself(nodes: Cluster) -> None:
    names = ("gpu01", "gpu02", "gpu03")
    scripts = {
        name: nodes[name].script([Gpu(temperature=40 + k + 10 * n) for k in range(8)]) for n, name in enumerate(names)
    }
    with ExitStack() as stack:
        agents = {name: stack.enter_context(over_ssh(nodes, name)) for name in names}
        for n, (name, agent) in enumerate(agents.items()):
            reading = agent.reading()
            assert agent.hello is not None
            assert (agent.hello.hostname, agent.hello.user, agent.hello.uid) == (name, "alice", 2001)
            assert agent.hello.addresses == [nodes[name].address]
            assert [gpu.uuid for gpu in reading.gpus] == [gpu.uuid for gpu in scripts[name]]
            assert [gpu.temperature for gpu in reading.gpus] == [40 + k + 10 * n for k in range(8)]
            assert (reading.nvml_error, agent.events) == (None, [])


def test_status_equals_field_by_field_what_nvidia_ml_py_reads_on_the_nodes(nodes: Cluster) -> None:
    names = ("gpu01", "gpu02", "gpu03")
    with ExitStack() as stack:
        expected = {}
        for n, name in enumerate(names):
            worker = stack.enter_context(nodes[name].popen(["sleep", "100"], user="bob"))
            stack.callback(worker.kill)
            pid = worker.process.inner
            nodes[name].script([busy(gpu, n, k, pid) for k, gpu in enumerate(eight())], driver=f"550.{n}")
            expected[name] = json.loads(nodes[name].run([sys.executable, "-c", DIRECT], check=True).stdout)
        done = nodes["login1"].run(["gpuboard", "status", "--json", "--nodes", "gpu[01-03]"], check=True)
    seen = json.loads(done.stdout)
    assert [(node["name"], node["state"], node["error"], node["source"]) for node in seen["nodes"]] == [
        (name, "up", None, "nvml") for name in names
    ]
    for node in seen["nodes"]:
        direct = expected[node["name"]]
        assert (node["driver"], node["cuda"]) == (direct["driver"], "13.0")
        gpus = [
            {key: gpu[key] for key in gpu if key in direct["gpus"][0] and key != "pci"}
            | {"processes": [[p["pid"], p["type"], p["memory"]] for p in gpu["processes"]]}
            for gpu in node["gpus"]
        ]
        assert gpus == [{key: gpu[key] for key in gpus[0]} for gpu in direct["gpus"]]
        assert set(gpus[0]) >= {
            *("index", "uuid", "name", "pci_bus_id", "memory_used", "memory_total", "utilization", "temperature"),
            *("power", "power_limit", "processes"),
        }
        assert [gpu["state"] for gpu in node["gpus"]] == ["free", "busy"] * 4
        assert {p["user"] for gpu in node["gpus"] for p in gpu["processes"]} == {"bob"}


def busy(gpu: Gpu, n: int, k: int, pid: int) -> Gpu:
    """Return GPU ``k`` of node ``n`` with values of its own; every other one has a process."""
    return msgspec.structs.replace(
        gpu,
        temperature=30 + 10 * n + k,
        power=1000 * (100 + k) + n,
        used=(k + 1) * GIB if k % 2 else n * 1000,
        utilization=11 * k if k % 2 else 0,
        processes=(("compute", pid, (k + 1) * GIB),) if k % 2 else (),
    )


def test_processes_of_others_are_named_and_those_of_other_namespaces_are_hidden(nodes: Cluster) -> None:
    gpu01 = nodes["gpu01"]
    with gpu01.popen(["sleep", "100"], user="bob", env={"GPUBOARD_LEASE": "k3f9"}) as sleeper:
        gpu01.script([Gpu(used=GIB, processes=(("compute", sleeper.process.inner, GIB), ("compute", 999999, GIB)))])
        with over_ssh(nodes, "gpu01") as alices, over_ssh(nodes, "gpu01", "bob") as bobs:
            seen = [[(p.user, p.name, p.lease) for p in a.reading().gpus[0].processes or []] for a in (alices, bobs)]
        sleeper.kill()
    assert seen == [  # alice may not read the environment of bob's process
        [("bob", "sleep", None), (None, "", None)],
        [("bob", "sleep", "k3f9"), (None, "", None)],
    ]


def test_nothing_is_left_on_the_node_when_the_client_is_killed(nodes: Cluster) -> None:
    gpu01 = nodes["gpu01"]
    gpu01.script([Gpu(), Gpu(trouble=("hang *",))])
    with over_ssh(nodes, "gpu01") as agent:
        agent.message()
        assert [p.name for p in gpu01.processes(user="alice") if p.name.startswith("python")]
        killed = Stopwatch()
        kill_each(process.pid for process in nodes["login1"].processes(lambda p: p.name == "ssh"))
        until(lambda: not gpu01.processes(user="alice"), "nothing is left there")
        assert killed.stop() < 8.0


def test_a_node_without_a_driver_reports_it_and_still_holds_claims(nodes: Cluster) -> None:
    nodes["gpu02"].hide_library()
    with over_ssh(nodes, "gpu02") as agent:
        reading = agent.reading()
    assert (reading.nvml_error, reading.gpus) == ("no NVIDIA driver here (libnvidia-ml.so.1 not found)", [])
    assert reading.claims_error is None


def test_the_oldest_python_serves(nodes: Cluster) -> None:
    python = old_python()
    if python is None:
        pytest.skip("needs Python 3.6, 3.7 or 3.8")
    nodes["gpu03"].use_python(python)
    with over_ssh(nodes, "gpu03") as agent:
        reading = agent.reading()
        assert agent.hello is not None
        assert agent.hello.python.startswith(("3.6", "3.7", "3.8"))
        assert agent.events == []
    assert [gpu.error for gpu in reading.gpus] == [None] * 8
