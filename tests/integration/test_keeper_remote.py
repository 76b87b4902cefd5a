"""The keeper with a node behind a real sshd: connect, lose the connection, reconnect."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuboard.keeper import client as keeper
from tests.integration.keeper_lab import Lab, lab
from tests.sshd import SSHD, Sshd
from tests.waiting import kill_each, until

__all__ = ["lab"]
pytestmark = pytest.mark.skipif(os.geteuid() != 0 or SSHD is None, reason="needs root and an sshd")


@pytest.fixture
def sshd(lab: Lab) -> Iterator[Sshd]:
    far = " ".join(f"{name}={lab.env[name]}" for name in ("LD_LIBRARY_PATH", "FAKE_NVML"))
    server = Sshd(lab.folder / "sshd", extra=f"SetEnv {far}\n")
    server.host("far")
    settings = {
        "ssh_config": str(server.ssh_config),
        "known_hosts": [str(server.known_hosts)],
        "connect_timeout": "15s",
    }
    lab.env["TAKER_SETTINGS"] = json.dumps(settings)
    yield server
    lab.close()
    server.stop()


def far_lease(lab: Lab, lease: str) -> subprocess.Popen[str]:
    """Run a script that holds ``lease`` on the far node."""
    script = lab.holding(lease, host="far")
    assert lab.held() == lab.records() == {lease}
    return script


@pytest.mark.usefixtures("sshd")
def test_lease_on_another_machine_ends_with_its_holder(lab: Lab) -> None:
    script = far_lease(lab, "far1")
    script.kill()
    script.communicate()
    until(lambda: not lab.held() and not lab.records())


@pytest.mark.usefixtures("sshd")
def test_process_on_the_far_gpu_keeps_the_lease(lab: Lab) -> None:
    train = subprocess.Popen(["sleep", "300"])
    lab.gpus({0: train.pid})
    script = far_lease(lab, "far2")
    script.kill()
    script.communicate()
    until(lambda: "holder has ended" in lab.log())
    time.sleep(2.0)
    assert lab.held() == {"far2"}
    train.kill()
    train.wait()
    lab.gpus()
    until(lambda: not lab.held())


def test_node_that_cannot_be_reached_is_refused(lab: Lab, sshd: Sshd) -> None:
    sshd.stop()
    script = lab.bash(lab.take("far3", host="far") + "echo go", stderr=subprocess.PIPE)
    _, error = script.communicate(timeout=60)
    assert script.returncode == 9
    assert "the keeper refused the lease: n: " in error
    assert lab.held() == lab.records() == set()


def test_lost_connection_is_reopened(lab: Lab, sshd: Sshd) -> None:
    script = far_lease(lab, "far4")
    claim = next(lab.claims.iterdir())
    before = claim.stat().st_mtime
    kill_each(map(int, Path(f"/proc/{sshd.process.pid}/task/{sshd.process.pid}/children").read_text().split()))
    keeper.renew("far4", 3600.0, lab.env)  # sends a heartbeat at once instead of after 30 s
    until(lambda: claim.stat().st_mtime > before)
    script.kill()
    script.communicate()
    until(lambda: not lab.held())


def test_release_on_an_unreachable_node_is_retried(lab: Lab, sshd: Sshd) -> None:
    """Released when the node answers again; after 90 s the claim would have expired."""
    script = far_lease(lab, "far5")
    sshd.stop()
    script.kill()
    script.communicate()
    until(lambda: "cannot look for carriers" in lab.log())
    assert lab.held() == {"far5"}
    sshd.start()
    until(lambda: not lab.held())


def agent(lab: Lab, sshd: Sshd, name: str) -> subprocess.Popen[str]:
    """Start an ssh agent with the key; leases are reserved in its login from now on."""
    path = str(lab.folder / name)
    running = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL, text=True)
    lab.env["SSH_AUTH_SOCK"] = path
    add = ["ssh-add", "-q", str(sshd.key)]
    until(lambda: not subprocess.run(add, env=lab.env, stderr=subprocess.DEVNULL).returncode, "the agent has the key")
    return running


def test_keeper_outlives_the_login_whose_ssh_agent_it_was_started_with(lab: Lab, sshd: Sshd) -> None:
    for host in ("one", "two", "three"):
        sshd.host(host, IdentityFile="none", IdentitiesOnly="no")
    first = agent(lab, sshd, "first")
    lab.holding("log1", 0, host="one")
    keeper_pid = lab.keeper_pid()
    first.kill()
    first.wait()
    second = agent(lab, sshd, "second")
    lab.holding("log2", 1, host="two")
    lab.env.pop("SSH_AUTH_SOCK")  # as in a cron job, which uses another login's agent
    lab.holding("log3", 2, host="three")
    assert lab.keeper_pid() == keeper_pid
    assert lab.held() == {"log1", "log2", "log3"}
    second.kill()
    second.wait()
