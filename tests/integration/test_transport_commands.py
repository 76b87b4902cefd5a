"""Reservations, launches and commands over the transports that are not the default."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.hosts import Host
from tests.integration.launch_lab import wait_up, write_torch
from tests.integration.transport_lab import Lab, lab
from tests.nodes import Cluster
from tests.waiting import read_line, until

__all__ = ["lab"]
pytestmark = [pytest.mark.nodes, pytest.mark.parametrize("transport", ["openssh", "paramiko"])]

HOME = "/srv/home/alice"
NODES = ("gpu01", "gpu02")


@pytest.fixture
def home(lab: Lab) -> Iterator[Lab]:
    """alice's config names both nodes and the transport; the stand-in for torch is in alice's home."""
    config = lab.ssh.parent / ".config" / "gpuboard" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'nodes = ["gpu0[1-2]"]\ntransport = "{lab.transport}"\n')
    write_torch(lab.ssh.parent / "fake")
    lab.here.run(["chown", "-R", "alice:", HOME], user="root", check=True)
    yield lab
    lab.here.run(["pkill", "-f", "gpuboard.keeper.daemon"], user="root")


def claims(nodes: Cluster) -> list[str]:
    return [path.name for name in NODES for path in nodes[name].path("/var/tmp").glob("gpuboard.GPU-*")]


def ranks(host: Host) -> list[str]:
    """Return the processes of a run on a node, without the keeper's agents, which release its lease."""
    return [p.name for p in host.processes(user="alice") if any(word in {"script.py", "600"} for word in p.argv)]


def test_a_lease_on_two_nodes_lives_with_its_holder(home: Lab, nodes: Cluster) -> None:
    script = 'eval "$(gpuboard allocate --n 12)"; echo $GPUBOARD_NODES; cat'
    with home.here.popen(["bash", "-c", script], stdin=subprocess.PIPE) as shell:
        assert read_line(shell) == "gpu[01-02]\n"
        assert len(claims(nodes)) == 12
        # allocate and its connections have ended: only the keeper reaches the nodes now
        listed = json.loads(home.here.run(["gpuboard", "leases", "--json"], check=True).stdout)
        assert [(lease["owner"], len(lease["gpus"]), lease["holder"]["alive"]) for lease in listed["leases"]] == [
            ("alice", 12, True)
        ]
        if home.transport == "openssh":  # every 30 s
            first = {path: path.stat().st_mtime for name in NODES for path in nodes[name].path("/var/tmp").glob("gpu*")}
            until(lambda: all(path.stat().st_mtime > at for path, at in first.items()), "heartbeats")
        shell.send_signal(signal.SIGKILL)
        until(lambda: not claims(nodes), "the keeper has released it")


def test_a_launch_on_two_nodes_runs_and_ends_with_its_head(home: Lab, nodes: Cluster) -> None:
    script = home.ssh.parent / "script.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'], os.uname().nodename, flush=True)\n")
    words = ["gpuboard", "launch", "--n", "2", "--per-node", "1", "--device", "cpu", "--env", f"PYTHONPATH={HOME}/fake"]
    done = home.here.run([*words, "script.py"])
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert lines == ["rank 0 gpu01", "rank 1 gpu02"]
    assert claims(nodes) == []
    script.write_text(
        "import subprocess, time\nsubprocess.Popen(['setsid', 'sleep', '600'])\nprint('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    with home.here.popen([*words, "script.py"]) as process:
        wait_up(process, 2)
        until(lambda: all(len(ranks(nodes[name])) >= 2 for name in NODES), "the ranks' children run", 10)
        process.send_signal(signal.SIGKILL)
        until(lambda: not any(ranks(nodes[name]) for name in NODES), "both nodes are empty", 10)


def test_a_command_runs_where_its_gpus_are(home: Lab) -> None:
    command = "echo $(hostname) $CUDA_VISIBLE_DEVICES; cat; exit 9"
    done = home.here.run(["gpuboard", "run", "--n", "3", "--", "sh", "-c", command], stdin="from stdin\n")
    assert (done.returncode, done.stdout) == (9, "gpu01 0,1,2\nfrom stdin\n"), done.stderr
