"""`gpuboard launch --detach` on test nodes: what the run survives, and who holds its lease."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpuboard import __version__
from tests.hosts import Host
from tests.integration.launch_lab import kill, write_torch
from tests.integration.test_launch_nodes import HOME, claims, left, put
from tests.nodes import Cluster
from tests.nvml import Gpu
from tests.waiting import kill_each, read_line, until

pytestmark = pytest.mark.nodes

UNTIL_TOLD = """
import os, time
print("up", flush=True)
while not os.path.exists("end"): time.sleep(0.02)
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


def runs(host: Host, env: list[str]) -> list[tuple[str, str, int | None]]:
    """Return what `gpuboard runs` lists: id, state, exit code."""
    found = json.loads(host.run([*env, "gpuboard", "runs", "--json"], check=True).stdout)["runs"]
    return [(run["id"], run["state"], run["exit_code"]) for run in found]


def kept(host: Host) -> list[str]:
    """Return the leases of alice's keeper on a host."""
    folder = host.path(f"{HOME}/.local/state/gpuboard/keeper")
    return [path.stem for path in folder.glob(f"{host.name}-*/*.json")]


def wait_started(lab: Cluster, ranks: int) -> None:
    until(lambda: len([p for p in left(lab) if "script.py" in p]) == ranks, "its ranks start", 60)


def test_a_run_on_other_nodes_survives_the_reboot_of_the_login_node(lab: Cluster) -> None:
    login, gpu01 = lab["login1"], lab["gpu01"]
    own = ["env", "XDG_STATE_HOME=/tmp/own"]  # as without a shared home
    done = login.run([*own, *launch("gpu01:0@gpu02:1")])
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)["run"]
    assert (run["state"], run["head"]["host"]) == ("running", "gpu01")
    assert len(claims(lab)) == 2
    assert (list(login.path("/tmp/own/gpuboard/keeper").glob("*/*.json")), kept(gpu01)) == ([], [run["lease"]])
    assert runs(login, own) == [(run["id"], "running", None)]
    explained = login.run([*own, "gpuboard", "explain", run["id"]], check=True).stdout
    # Idle after 3 s: the script sleeps most of the time. It may wait for the disk, too.
    there = r"(running|idle|in uninterruptible sleep) at script\.py:4"
    each = rf"rank 0 \(gpu01:0\): {there}.*\n  rank 1 \(gpu02:1\): {there}"
    assert re.search(rf"ranks 0-1: {there}|{each}", explained), explained
    assert "py-spy" not in explained, "it is sent to the other node before its ranks are inspected"
    (lease,) = json.loads(login.run(["gpuboard", "leases", "--json"], check=True).stdout)["leases"]
    assert (lease["id"], lease["holder"]) == (run["lease"], None)

    attached = lab["login2"].popen(["gpuboard", "attach", run["id"]], user="alice")
    assert read_line(attached).endswith("] up\n")
    kill_each(process.pid for process in login.processes(user="alice"))
    login.unplug()
    put(gpu01, "end", "")
    until(lambda: run_state(gpu01, run["id"])["state"] == "done", "the run ends", 30)
    assert run_state(gpu01, run["id"])["exit_code"] == 0
    until(lambda: not claims(lab), "its lease is released", 30)
    out, _ = attached.communicate(timeout=30)
    assert (attached.returncode, "bye" in out) == (0, True)
    until(lambda: not [p for p in left(lab) if "keeper" not in " ".join(p)], "its processes end", 30)

    login.plug()
    assert runs(login, own) == [(run["id"], "done", 0)]
    assert "bye" in login.run([*own, "gpuboard", "logs", "last"]).stdout


def test_a_lease_of_the_shell_is_kept_from_the_node_too_while_the_run_goes_on(lab: Cluster) -> None:
    login, gpu01 = lab["login1"], lab["gpu01"]
    own = ["env", "XDG_STATE_HOME=/tmp/own"]  # as without a shared home
    allocate = ["gpuboard", "allocate", "--gpus", "gpu01:0@gpu02:1", "--detach", "--for", "1h", "--format", "uuids"]
    login.run([*own, *allocate], check=True)
    (lease,) = {claim.rpartition(".")[2] for claim in claims(lab)}
    words = [word for word in launch("") if word not in {"--gpus", ""}]
    done = login.run([*own, *words[:-1], "--lease", lease, words[-1]])
    assert done.returncode == 0, done.stderr
    assert f"lease {lease} gets its heartbeats from gpu01, too, until the run or the lease ends" in done.stderr
    run = json.loads(done.stdout)["run"]["id"]
    assert (len(list(login.path("/tmp/own/gpuboard/keeper").glob("*/*.json"))), kept(gpu01)) == (1, [lease])

    kill_each(process.pid for process in login.processes(user="alice"))
    login.unplug()
    (keeper,) = gpu01.processes(lambda p: p.name == "gpuboard-keeper", user="alice")
    kill(keeper.pid)
    files = [path for name in ("gpu01", "gpu02") for path in lab[name].path("/var/tmp").glob(f"gpuboard.GPU-*.{lease}")]
    assert len(files) == 2
    for path in files:
        os.utime(path, (time.time() - 20, time.time() - 20))
    gpu01.run(["gpuboard", "leases"], check=True)  # it starts the keeper again, from its record
    until(lambda: all(time.time() - path.stat().st_mtime < 15 for path in files), "a heartbeat", 60)

    put(gpu01, "end", "")
    until(lambda: run_state(gpu01, run)["state"] == "done", "the run ends", 60)
    until(lambda: not kept(gpu01), "its node's keeper forgets the lease", 60)
    assert len(claims(lab)) == 2, "the lease is not released by a run that has not reserved it"

    gpu01.run(["rm", "end"], check=True)
    for path in files:
        os.utime(path)  # no keeper has the lease now: it expires after 90 s
    done = gpu01.run([*words[:-1], "--lease", lease, words[-1]])  # the head is on the node where it is typed
    assert f"lease {lease} gets its heartbeats from gpu01, too" in done.stderr
    assert (done.returncode, kept(gpu01)) == (0, [lease])
    gpu01.run(["gpuboard", "stop", "last"], check=True)
    until(lambda: not kept(gpu01), "the keeper forgets the lease again", 60)
    assert len(claims(lab)) == 2


def test_until_it_is_detached_a_run_on_other_nodes_ends_with_its_command(lab: Cluster) -> None:
    login = lab["login1"]
    put(login, "script.py", "import sys\nsys.exit(3)\n")
    put(login, "fake/sitecustomize.py", "import os, time\nif os.environ.get('RANK') == '1': time.sleep(600)\n")
    done = login.run(launch("gpu01:0@gpu02:1", "--status-file", "status.json"))
    assert done.returncode == 3
    assert "rank 0 (gpu01:0) ended with exit code 3" in done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["exit_code"], outcome["run"]["state"]) == (3, "failed")
    assert json.loads(login.path(f"{HOME}/status.json").read_text()) == outcome
    until(lambda: not claims(lab), "its lease is released", 30)

    put(login, "script.py", UNTIL_TOLD)
    put(login, "fake/sitecustomize.py", "import os, time\nif 'RANK' in os.environ: time.sleep(600)\n")
    for gpus, number, code in (("gpu01:0", signal.SIGINT, 130), ("gpu01:0@gpu02:1", signal.SIGKILL, -signal.SIGKILL)):
        with login.popen(launch(gpus), user="alice") as process:
            wait_started(lab, gpus.count(":"))
            process.send_signal(number)
            assert process.wait(30) == code
        until(lambda: not claims(lab), "its lease is released", 30)
        until(lambda: not [p for p in left(lab) if "keeper" not in " ".join(p)], "its processes end", 30)


def test_a_first_node_that_cannot_lead_the_run_is_named_with_the_cure(lab: Cluster) -> None:
    login, gpu01, gpu02 = lab["login1"], lab["gpu01"], lab["gpu02"]
    gpu02.firewall(f"add rule inet t in ip saddr {gpu01.address} tcp dport 22 reject")
    done = login.run(launch("gpu01:0@gpu02:1"))
    assert done.returncode == 1
    assert "gpu01 cannot lead this run: the keeper refused the lease: gpu02:" in done.stderr
    assert "without the ssh agent of this login; `ssh gpu01 ssh gpu02 true` shows whether it can" in done.stderr
    until(lambda: not claims(lab), "its lease is released", 30)
    gpu02.firewall()

    environment = os.path.dirname(sys.executable)
    gpu01.run(["mount", "-t", "tmpfs", "none", environment], user="root", check=True)
    try:
        done = login.run(launch("gpu01:0@gpu02:1"))
    finally:
        gpu01.run(["umount", environment], user="root", check=True)
    assert done.returncode == 1
    assert f"gpu01 cannot lead a detached run: gpuboard {__version__} is needed there" in done.stderr
    assert "gpuboard: No such file or directory); install it on gpu01, or run" in done.stderr
    assert not claims(lab)


def test_a_run_on_this_node_survives_the_end_of_its_ssh_session(lab: Cluster) -> None:
    gpu01 = lab["gpu01"]
    words = [sys.executable, "-m", *launch("gpu01:0")]
    with lab["login1"].popen(["ssh", "-tt", "gpu01", *words], user="alice") as session:
        out, _ = session.communicate(timeout=60)
    assert session.returncode == 0, out
    run = json.loads(out.splitlines()[-1])["run"]
    assert gpu01.run(["gpuboard", "leases", "--json"]).stdout.count(f'"pid":{run["head"]["pid"]},"alive":true') == 1
    gpu01.run(["kill", "-HUP", str(run["head"]["pid"])], check=True)
    put(gpu01, "end", "")
    until(lambda: run_state(gpu01, run["id"])["state"] == "done", "the run ends", 30)
    assert run_state(gpu01, run["id"])["exit_code"] == 0
    until(lambda: not claims(lab), "its lease is released", 30)
