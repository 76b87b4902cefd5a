"""Nodes without python3 or without NVML, over real ssh: what is shown, what can be reserved, what remains."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuboard.model.snapshot import NodeView, Snapshot
from tests.hosts import Host
from tests.nodes import Cluster
from tests.smi import FakeSmi
from tests.waiting import Stopwatch, until

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(180)]

DRIVER = Path(__file__).with_name("fleet_driver.py")
IDLE, BUSY = (f"GPU-5eed0001-0000-4000-8000-00000000000{k}" for k in (0, 1))
MISSING = "; install python3 (3.6 or later) or set `python` in the config"


def give_smi(host: Host) -> FakeSmi:
    """Put an nvidia-smi on the PATH of sessions over ssh."""
    fake = FakeSmi(host.path("/tmp/smi"), seen_as="/tmp/smi")
    fake.says("v13-h100-590")
    host.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/usr/local/bin"], user="root", check=True)
    host.run(["ln", "-s", "/tmp/smi/nvidia-smi", "/usr/local/bin/nvidia-smi"], user="root", check=True)
    host.changed = True
    return fake


@contextmanager
def without_python(host: Host) -> Iterator[None]:
    """Hide the node's python3."""
    program = host.run(["readlink", "-f", "/usr/bin/python3"], check=True).stdout.strip()
    host.run(["mount", "--bind", "/dev/null", program], user="root", check=True)
    try:
        yield
    finally:
        host.run(["umount", "-l", program], user="root", check=True)  # a login may be starting it now


def status(nodes: Cluster, names: str, user: str = "alice") -> dict[str, Any]:
    done = nodes["login1"].run(["gpuboard", "status", "--json", "--nodes", names], user=user)
    return {node["name"]: node for node in json.loads(done.stdout)["nodes"]}


def logins(host: Host) -> int:
    return (host.folder / "sshd.log").read_text().count("Accepted publickey for alice")


def test_each_node_shows_its_source_or_both_that_are_missing(nodes: Cluster) -> None:
    give_smi(nodes["gpu02"])
    give_smi(nodes["gpu03"])
    nodes["gpu03"].hide_library()
    with without_python(nodes["gpu02"]), without_python(nodes["login2"]):
        seen = status(nodes, "gpu[01-03],login2")
        reserving = nodes["login1"].run(["gpuboard", "allocate", "--n", "1", "--nodes", "gpu02", "--dry-run"])
    nothing = seen.pop("login2")
    assert nothing["state"] == "unreachable"
    assert nothing["error"].startswith("python3 cannot be started there (")
    assert nothing["error"].endswith("), nor is there nvidia-smi" + MISSING)
    assert [(node["source"], node["state"], node["error"]) for node in seen.values()] == [
        ("nvml", "up", None),
        ("nvidia-smi", "up", None),
        ("nvidia-smi", "up", None),
    ]
    for name in ("gpu02", "gpu03"):
        assert (seen[name]["driver"], seen[name]["hostname"]) == ("590.44.01", name)
        assert [(gpu["index"], gpu["uuid"], gpu["utilization"]) for gpu in seen[name]["gpus"]] == [
            (0, IDLE, 0),
            (1, BUSY, 97),
        ]
        assert seen[name]["gpus"][1]["processes"][0]["memory"] == 65710 * 2**20
    # without python3 nothing can be reserved there; with it, nvidia-smi is enough
    why = seen["gpu02"]["claims_error"]
    assert why.startswith("python3 cannot be started there (")
    assert why.endswith(MISSING)
    assert seen["gpu03"]["claims_error"] is None
    assert [gpu["state"] for gpu in seen["gpu03"]["gpus"]] == ["free", "busy"]
    assert "free" not in {gpu["state"] for gpu in seen["gpu02"]["gpus"]}
    assert reserving.returncode == 4
    assert "python3 cannot be started there" in reserving.stderr


def test_gpus_seen_through_nvidia_smi_can_be_reserved(nodes: Cluster) -> None:
    give_smi(nodes["gpu03"])
    nodes["gpu03"].hide_library()
    command = ["gpuboard", "allocate", "--n", "1", "--nodes", "gpu03", "--detach", "--for", "1h", "--format", "uuids"]
    taken = nodes["login1"].run(command)
    assert taken.stdout.split() == [IDLE], taken.stderr
    held = status(nodes, "gpu03", user="bob")["gpu03"]["gpus"][0]
    assert (held["state"], len(held["leases"])) == ("reserved", 1)
    again = nodes["login1"].run(command, user="bob")
    assert again.returncode == 4
    assert nodes["login1"].run(["gpuboard", "release", "--mine"]).returncode == 0


class Watched:
    """A fleet that alice keeps open on login1, and its snapshots."""

    def __init__(self, nodes: Cluster, *names: str) -> None:
        options = {"nodes": list(names), "interval_s": 1.0}
        command = [sys.executable, str(DRIVER), json.dumps(options)]
        self.process = nodes["login1"].popen(command, stdin=subprocess.PIPE)
        self.seen: list[Snapshot] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        decoder = msgspec.json.Decoder(Snapshot)
        for line in self.process.stdout:
            self.seen.append(decoder.decode(line))

    def node(self, name: str) -> NodeView:
        """Return a node of the newest snapshot."""
        found = [node for node in self.seen[-1].nodes if node.name == name] if self.seen else []
        return found[0] if found else NodeView(name, "unreachable")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)


@contextmanager
def watching(nodes: Cluster, *names: str) -> Iterator[Watched]:
    watched = Watched(nodes, *names)
    try:
        yield watched
    finally:
        watched.end()


def test_the_route_is_kept_between_readings(nodes: Cluster) -> None:
    gpu02 = nodes["gpu02"]
    fake = give_smi(gpu02)
    before = logins(gpu02)
    with without_python(gpu02), watching(nodes, "gpu01", "gpu02") as watched:
        until(lambda: [gpu.state for gpu in watched.node("gpu02").gpus] == ["unknown", "unknown"], "it is shown")
        assert "reservations" in watched.node("gpu02").gpus[0].reason
        fake.says("v12-lost-535")
        until(lambda: len(watched.node("gpu02").gpus) > 2, "another listing is read")
        since = len(watched.seen)
        calls = len(fake.calls())
        until(lambda: len(fake.calls()) >= calls + 2, "two more")
        shown = [node for shot in watched.seen[since:] for node in shot.nodes if node.name == "gpu02"]
        assert {(node.error, node.source) for node in shown if node.state == "up"} == {(None, "nvidia-smi")}
        assert all(node.state == "up" for node in shown if (node.age_s or 0.0) < 5.0)
        assert logins(gpu02) - before == 2  # the agent's, once, and the shell's
        assert watched.node("gpu01").state == "up"


def test_a_hanging_nvidia_smi_delays_no_other_node_and_leaves_nothing(nodes: Cluster) -> None:
    gpu02 = nodes["gpu02"]
    before = {path.name for path in gpu02.path("/tmp").iterdir()}
    fake = give_smi(gpu02)
    with without_python(gpu02):
        with watching(nodes, "gpu01", "gpu02") as watched:
            until(lambda: len(watched.node("gpu02").gpus) == 2, "it is shown")
            fake.hangs()
            until(lambda: len(fake.calls()) > 1, "it hangs")
            until(lambda: [p.name for p in gpu02.processes(user="alice")].count("sleep") == 1, "it runs")
            since = len(watched.seen)
            until(lambda: all("old" in gpu.reason for gpu in watched.node("gpu02").gpus), "values grow old")
            ages = [node.age_s or 0.0 for shot in watched.seen[since:] for node in shot.nodes if node.name == "gpu01"]
            assert max(ages) < 15  # it would be 30 if it waited for gpu02
            assert {path.name for path in gpu02.path("/tmp").iterdir()} - before == {"smi"}
            killed = Stopwatch()
        until(lambda: not gpu02.processes(user="alice"), "nothing is left")
        assert killed.stop() < 6  # nvidia-smi itself would run on


def test_python_that_comes_back_is_found_at_the_next_connection(nodes: Cluster) -> None:
    gpu02 = nodes["gpu02"]
    give_smi(gpu02)
    with watching(nodes, "gpu02") as watched:
        until(lambda: watched.node("gpu02").source == "nvml" and watched.node("gpu02").gpus, "with python3")
        with without_python(gpu02):
            for process in gpu02.processes(lambda p: p.name.startswith("python"), user="alice"):
                gpu02.run(["kill", "-9", str(process.inner)])

            def without() -> bool:
                node = watched.node("gpu02")
                return (node.source, node.error) == ("nvidia-smi", None)

            until(without, "without")
