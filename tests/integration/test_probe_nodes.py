"""The probe on the test nodes, over real ssh, as users."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

import pytest

from tests.agent import Agent
from tests.nodes import Cluster, old_python
from tests.nvml import GIB, Gpu

pytestmark = pytest.mark.nodes


def over_ssh(nodes: Cluster, node: str, user: str = "alice", interval_s: float | None = None) -> Agent:
    """Return an agent on ``node``, reached by ``user`` from login1."""
    through = nodes["login1"].command(["ssh", node], user=user)
    return Agent(None, python="python3", through=through, node=node, interval_s=interval_s)


def test_every_node_says_who_and_what_it_is(nodes: Cluster) -> None:
    names = ("gpu01", "gpu02", "gpu03")
    scripts = {
        name: nodes[name].script([Gpu(temperature=40 + k + 10 * n) for k in range(8)]) for n, name in enumerate(names)
    }
    with ExitStack() as stack:
        agents = {name: stack.enter_context(over_ssh(nodes, name)) for name in names}
        for n, (name, agent) in enumerate(agents.items()):
            reading = agent.reading(15)
            assert agent.hello is not None
            assert (agent.hello.hostname, agent.hello.user, agent.hello.uid) == (name, "alice", 2001)
            assert agent.hello.addresses == [nodes[name].address]
            assert [gpu.uuid for gpu in reading.gpus] == [gpu.uuid for gpu in scripts[name]]
            assert [gpu.temperature for gpu in reading.gpus] == [40 + k + 10 * n for k in range(8)]
            assert (reading.nvml_error, agent.events) == (None, [])


def test_processes_of_others_are_named_and_those_of_other_namespaces_are_hidden(nodes: Cluster) -> None:
    gpu01 = nodes["gpu01"]
    with gpu01.popen(["sleep", "100"], user="bob", env={"GPUBOARD_LEASE": "k3f9"}) as sleeper:
        gpu01.script([Gpu(used=GIB, processes=(("compute", sleeper.process.inner, GIB), ("compute", 999999, GIB)))])
        with over_ssh(nodes, "gpu01") as alices, over_ssh(nodes, "gpu01", "bob") as bobs:
            seen = [[(p.user, p.name, p.lease) for p in a.reading(15).gpus[0].processes or []] for a in (alices, bobs)]
        sleeper.kill()
    assert seen == [  # alice may not read the environment of bob's process
        [("bob", "sleep", None), (None, "", None)],
        [("bob", "sleep", "k3f9"), (None, "", None)],
    ]


def test_nothing_is_left_on_the_node_when_the_client_is_killed(nodes: Cluster) -> None:
    gpu01 = nodes["gpu01"]
    gpu01.script([Gpu(), Gpu(trouble=("hang *",))])
    with over_ssh(nodes, "gpu01") as agent:
        agent.message(15)
        assert [p.name for p in gpu01.processes(user="alice") if p.name.startswith("python")]
        killed = time.monotonic()
        for process in nodes["login1"].processes(lambda p: p.name == "ssh"):
            os.kill(process.pid, signal.SIGKILL)
        while gpu01.processes(user="alice") and time.monotonic() < killed + 5:
            time.sleep(0.02)
    assert gpu01.processes(user="alice") == []
    assert time.monotonic() - killed < 2.0


def test_a_node_without_a_driver_says_so_and_still_holds_claims(nodes: Cluster) -> None:
    nodes["gpu02"].hide_library()
    with over_ssh(nodes, "gpu02") as agent:
        reading = agent.reading(15)
    assert (reading.nvml_error, reading.gpus) == ("no NVIDIA driver here (libnvidia-ml.so.1 not found)", [])
    assert reading.claims_error is None


def test_the_oldest_python_serves(nodes: Cluster) -> None:
    python = old_python()
    if python is None:
        pytest.skip("needs Python 3.6, 3.7 or 3.8")
    nodes["gpu03"].use_python(python)
    with over_ssh(nodes, "gpu03") as agent:
        reading = agent.reading(15)
        assert agent.hello is not None
        assert agent.hello.python.startswith(("3.6", "3.7", "3.8"))
        assert agent.events == []
    assert [gpu.error for gpu in reading.gpus] == [None] * 8
