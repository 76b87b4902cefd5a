"""Shared by the tests of the transports: their names, alice's ssh_config, a driver on a login node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import USERS, Host, NodeProcess, Running
from tests.nodes import Cluster
from tests.waiting import read_line, until

TRANSPORTS = ("asyncssh", "openssh", "paramiko")
DRIVER = str(Path(__file__).with_name("transport_driver.py"))
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


class Lab:
    """One transport, used by alice on login1."""

    def __init__(self, nodes: Cluster, transport: str) -> None:
        self.nodes = nodes
        self.transport = transport
        self.here = nodes["login1"]
        self.ssh = nodes.home("alice") / ".ssh"

    def config(self, text: str, name: str = "config", *, key_for: str = "*") -> None:
        """Write a file in alice's ~/.ssh; ``config`` keeps its usual lines, for ``key_for``, after ``text``."""
        usual = f"Host {key_for}\n    IdentityFile ~/.ssh/id_ed25519\n    KexAlgorithms curve25519-sha256\n"
        path = self.ssh / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + usual if name == "config" else text)
        for each in (path.parent, path):
            own(each)

    def status(self, *names: str, check: bool = True, user: str = "alice", **env: str) -> dict[str, dict[str, Any]]:
        """Return the nodes of `gpuboard status` for ``names``, by name."""
        settings = {"GPUBOARD_TRANSPORT": self.transport, "GPUBOARD_CONNECT_TIMEOUT": "30s", **env}
        command = ["gpuboard", "status", "--json", "--nodes", ",".join(names)]
        done = self.here.run(command, env=settings, user=user)
        assert done.returncode in ({0} if check else {0, 6}), done.stderr
        assert done.stderr == "", done.stderr
        return {node["name"]: node for node in json.loads(done.stdout)["nodes"]}

    @contextmanager
    def channels(
        self, *hosts: str, command: str | list[str] | None, env: dict[str, str] | None = None
    ) -> Iterator[Driven]:
        """Channels to ``hosts`` with ``command`` running at their ends, or with one for each; None: agents."""
        settings = {"transport": self.transport, "connect_timeout": "40s"}
        words = json.dumps({"settings": settings, "hosts": hosts, "command": command})
        with self.here.popen([sys.executable, DRIVER, words], stdin=subprocess.PIPE, env=env) as process:
            driven = Driven(process)
            try:
                yield driven
            finally:
                process.kill()

    def children(self) -> list[NodeProcess]:
        """Return the ssh processes of alice on login1."""
        return self.here.processes(lambda p: p.name == "ssh", user="alice")


class Driven:
    """The test's end of the driver."""

    def __init__(self, process: Running) -> None:
        self.process = process

    def send(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def event(self, kind: str, *, after: str = "") -> dict[str, Any]:
        """Return the next event, which must be of this kind; events of the kind ``after`` before it are skipped."""
        line = read_line(self.process)
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(f"no {kind}: the driver ended: {self.process.stderr.read()}")
        found: dict[str, Any] = json.loads(line)
        if found["event"] == after:
            return self.event(kind, after=after)
        assert found["event"] == kind, found
        return found

    def start_agents(self, *nodes: str) -> None:
        """Send the agents' start lines, each on its channel, and wait until all of them have answered."""
        for number, node in enumerate(nodes):
            config = {"node": node, "interval_s": None, "claims_dir": "/var/tmp", "simulate": None, "now": True}
            start = {"t": "start", "nonce": f"{number:016x}", "role": "node", "config": config}
            self.send(op="write", n=number, text=json.dumps(start) + "\n")
        for _ in nodes:
            self.event("connected")
        for number, _ in enumerate(nodes):
            self.received(number, 500)

    def received(self, number: int, size: int) -> dict[str, Any]:
        """Return what a channel has received, once it has ``size`` bytes."""

        def enough() -> dict[str, Any]:
            self.send(op="report", n=number)
            found = self.event("data")
            return found if found["bytes"] >= size else {}

        return until(enough, f"{size} bytes on channel {number}")


@pytest.fixture
def lab(nodes: Cluster, transport: str) -> Lab:
    """The nodes, to be reached from login1 through ``transport``."""
    return Lab(nodes, transport)


def own(path: Path, user: str = "alice") -> None:
    """Give a file to ``user``."""
    os.chown(path, USERS[user], USERS[user])


def agents(host: Host, user: str = "alice") -> list[NodeProcess]:
    """Return the agents of ``user`` on a node, their NVML processes included."""
    return host.processes(lambda p: any("gpuboard.agent.bundle_loader" in word for word in p.argv), user=user)


def logins(host: Host) -> int:
    """Return the number of logins to ``host`` since its sshd was started."""
    return (host.folder / "sshd.log").read_text().count("Accepted publickey for ")


def uuids(node: dict[str, Any]) -> Sequence[str]:
    """Return the GPUs of a node of `status --json`."""
    return [gpu["uuid"] for gpu in node["gpus"]]
