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
    """gpu01 with three GPUs, on which processes are put."""

    def __init__(self, nodes: Cluster, stack: ExitStack) -> None:
        self.nodes = nodes
        self.node = nodes["gpu01"]
        self._stack = stack
        self.node.script([Gpu(), Gpu(), Gpu()])

    def gpuboard(self, *args: str, user: str) -> Any:
        """Run a command on login1 that prints JSON; return that."""
        done = self.nodes["login1"].run(["gpuboard", *args, "--nodes", "gpu01"], user=user)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def reserve(self) -> str:
        """Reserve GPU 0 for alice; return the lease."""
        asked = ["allocate", "--gpus", "gpu01:0", "--detach", "--for", "10m", "--format", "json"]
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
    lease = lab.reserve()
    thief = lab.run("bob", GPUBOARD_LEASE=lease)
    hers = lab.run("alice", GPUBOARD_LEASE=lease)
    lab.node.script([Gpu(used=2 * GIB, processes=(("compute", thief, GIB), ("compute", hers, GIB))), Gpu(), Gpu()])
    for user in ("bob", "root", "alice"):  # the first two can read the variable
        gpu = lab.seen(user)[0]
        assert gpu["flags"] == ["rogue"], user
        assert rogues(gpu) == [thief], user


def test_the_name_of_a_display_server_hides_nobodys_process(lab: Lab) -> None:
    lab.reserve()
    thief = lab.run("bob", "Xorg")
    display = lab.run("root", "Xorg")
    for memory in (100 * 2**20, UNKNOWN):
        processes = (("compute", thief, memory), ("compute", display, memory))
        lab.node.script([
            Gpu(used=200 * 2**20, processes=processes),
            Gpu(used=100 * 2**20, processes=processes[:1]),
            Gpu(used=100 * 2**20, processes=processes[1:]),
        ])  # fmt: skip
        held, taken, free = lab.seen("alice")
        assert (held["state"], held["flags"], rogues(held)) == ("reserved", ["rogue"], [thief]), memory
        assert (taken["state"], taken["reason"]) == ("busy", f"bob: Xorg (pid {thief})"), memory
        assert (free["state"], free["flags"]) == ("free", []), memory  # a real one is no use of the GPU


def test_unknown_memory_is_not_little_where_much_is_used(lab: Lab) -> None:
    lab.reserve()
    display = lab.run("root", "Xorg")
    hers = lab.run("alice")
    big: dict[str, Any] = {"used": 30 * GIB, "processes": (("compute", display, UNKNOWN),)}
    lab.node.script([Gpu(**big), Gpu(**big), Gpu()])
    held, taken, _ = lab.seen("alice")
    assert (held["flags"], rogues(held)) == (["rogue"], [display])
    assert (taken["state"], taken["reason"]) == ("busy", f"root: Xorg (pid {display})")
    beside = (("compute", display, UNKNOWN), ("compute", hers, UNKNOWN))  # then it is hers
    lab.node.script([Gpu(used=30 * GIB, processes=beside), Gpu(), Gpu()])
    assert rogues(lab.seen("alice")[0]) == []
