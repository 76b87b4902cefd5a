"""Whose process is it: neither a variable of its environment, nor its name, nor a silent driver hides a rogue one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.nodes import Cluster
from tests.nvml import GIB, Gpu

pytestmark = pytest.mark.nodes
UNKNOWN = -1  # the driver does not report it


class Lab:
    """gpu01 with nine GPUs, on which processes are put."""

    def __init__(self, nodes: Cluster, stack: ExitStack) -> None:
        self.nodes = nodes
        self.node = nodes["gpu01"]
        self._stack = stack
        self.node.script([Gpu()] * 9)

    def gpuboard(self, *args: str, user: str) -> Any:
        """Run a command on login1 that prints JSON; return that."""
        done = self.nodes["login1"].run(["gpuboard", *args, "--nodes", "gpu01"], user=user)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def reserve(self, gpus: str) -> str:
        """Reserve GPUs for alice; return the lease."""
        asked = ["allocate", "--gpus", f"gpu01:{gpus}", "--detach", "--for", "10m", "--format", "json"]
        return str(self.gpuboard(*asked, user="alice")["lease"]["id"])

    def run(self, user: str, name: str = "python", **env: str) -> int:
        """Start a process of this name there; return its pid."""
        folder = f"/tmp/{user}"
        self.node.run(["sh", "-c", f"mkdir -p {folder}; cp /bin/sleep {folder}/{name}"], user=user, check=True)
        command = [f"{folder}/{name}", "600"]
        return self._stack.enter_context(self.node.popen(command, user=user, env=env)).process.inner

    def seen(self, user: str) -> list[dict[str, Any]]:
        """Return the GPUs as this user's `gpuboard status` has them."""
        found: list[dict[str, Any]] = self.gpuboard("status", "--json", user=user)["nodes"][0]["gpus"]
        return found


@pytest.fixture
def lab(nodes: Cluster) -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(nodes, stack)
        nodes["gpu01"].run(["pkill", "-f", "600$"], user="root")


def rogues(gpu: dict[str, Any]) -> list[int]:
    return [process["pid"] for process in gpu["processes"] if process.get("rogue")]


def test_a_process_with_her_lease_in_its_environment_is_still_its_own_uids(lab: Lab) -> None:
    lease = lab.reserve("0")
    thief = lab.run("bob", GPUBOARD_LEASE=lease)
    hers = lab.run("alice", GPUBOARD_LEASE=lease)
    lab.node.script([Gpu(used=2 * GIB, processes=(("compute", thief, GIB), ("compute", hers, GIB)))])
    for user in ("bob", "root", "alice"):  # the first two can read the variable
        gpu = lab.seen(user)[0]
        assert gpu["flags"] == ["rogue"], user
        assert rogues(gpu) == [thief], user


def test_neither_a_display_servers_name_nor_unknown_memory_hides_a_process(lab: Lab) -> None:
    lab.reserve("0,3,6,7")
    thief = lab.run("bob", "Xorg")
    display = lab.run("root", "Xorg")
    hers = lab.run("alice")

    def gpu(used: int, memory: int, *pids: int) -> Gpu:
        return Gpu(used=used, processes=tuple(("compute", pid, memory) for pid in pids))

    little = 100 * 2**20
    lab.node.script([
        gpu(2 * little, little, thief, display), gpu(little, little, thief), gpu(little, little, display),
        gpu(2 * little, UNKNOWN, thief, display), gpu(little, UNKNOWN, thief), gpu(little, UNKNOWN, display),
        gpu(30 * GIB, UNKNOWN, display), gpu(30 * GIB, UNKNOWN, display, hers), gpu(30 * GIB, UNKNOWN, display),
    ])  # fmt: skip
    seen = lab.seen("alice")
    for held, taken, free in (seen[:3], seen[3:6]):
        assert (held["state"], held["flags"], rogues(held)) == ("reserved", ["rogue"], [thief])
        assert (taken["state"], taken["reason"]) == ("busy", f"bob: Xorg (pid {thief})")
        assert (free["state"], free["flags"]) == ("free", [])  # a real one is no use of the GPU
    held, beside_hers, taken = seen[6:]
    assert (held["flags"], rogues(held)) == (["rogue"], [display])
    assert rogues(beside_hers) == []  # then the memory is hers
    assert (taken["state"], taken["reason"]) == ("busy", f"root: Xorg (pid {display})")
