"""`gpuboard launch --detach` on test nodes: what the run survives, and who holds its lease."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.hosts import Host
from tests.integration.launch_lab import kill, write_torch
from tests.integration.test_launch_nodes import HOME, claims, left, put
from tests.nodes import Cluster
from tests.nvml import Gpu
from tests.waiting import until

pytestmark = pytest.mark.nodes

UNTIL_TOLD = """
import os, time
print("up", flush=True)
while not os.path.exists("end"):
    time.sleep(0.02)
print("bye", flush=True)
"""


@pytest.fixture
def lab(nodes: Cluster) -> Iterator[Cluster]:
    """gpu01 and gpu02 with two GPUs each, alice's config, and the replacement of torch in her home."""
    for name in ("gpu01", "gpu02"):
        nodes[name].script([Gpu() for _ in range(2)])
    login = nodes["login1"]
    login.run(["mkdir", "-p", ".config/gpuboard"], check=True)
    put(login, ".config/gpuboard/config.toml", 'nodes = ["gpu0[1-2]"]\n')
    put(login, "script.py", UNTIL_TOLD)
    write_torch(login.path(HOME) / "fake")
    login.run(["chown", "-R", "alice:", f"{HOME}/fake"], user="root", check=True)
    yield nodes
    nodes["gpu01"].run(["rm", "-rf", ".local/state/gpuboard/runs", "fake", "script.py", "end"])


def launch(gpus: str, *options: str) -> list[str]:
    """Return the command line of a detached launch on ``gpus``, with the replacement of torch."""
    fake = f"PYTHONPATH={HOME}/fake"
    words = ["--detach", "--json", "--gpus", gpus, "--device", "cpu", "--env", fake, *options, "script.py"]
    return ["gpuboard", "launch", *words]


def run_state(host: Host, run: str) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(host.path(f"{HOME}/.local/state/gpuboard/runs/{run}/state.json").read_text())
    return state


def kept(host: Host) -> list[str]:
    """Return the leases of alice's keeper on a host."""
    folder = host.path(f"{HOME}/.local/state/gpuboard/keeper")
    return [path.stem for path in folder.glob(f"{host.name}-*/*.json")]


def test_a_run_on_other_nodes_survives_the_reboot_of_the_login_node(lab: Cluster) -> None:
    login, gpu01 = lab["login1"], lab["gpu01"]
    done = login.run(launch("gpu01:0@gpu02:1"))
    assert (done.returncode, done.stderr) == (0, "")
    run = json.loads(done.stdout)["run"]
    assert (run["state"], run["head"]["host"]) == ("running", "gpu01")
    assert len(claims(lab)) == 2
    assert (kept(login), kept(gpu01)) == ([], [run["lease"]])

    for process in login.processes(user="alice"):
        kill(process.pid)
    login.unplug()
    put(gpu01, "end", "")
    until(lambda: run_state(gpu01, run["id"])["state"] == "done", "the run ends", 30)
    assert run_state(gpu01, run["id"])["exit_code"] == 0
    until(lambda: not claims(lab), "its lease is released", 30)
    until(lambda: not [p for p in left(lab) if "keeper" not in " ".join(p)], "its processes end", 30)
