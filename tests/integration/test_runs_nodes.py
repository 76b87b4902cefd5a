"""`runs`, `logs`, `stop` and `explain` for runs whose heads are on nodes, from a login node over ssh."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.hosts import Host, Running
from tests.integration.launch_lab import write_torch
from tests.nodes import Cluster
from tests.waiting import read_line, until

pytestmark = pytest.mark.nodes

STATE = "/tmp/state"  # of each node's own, unlike the homes
COUNT = '#!/bin/sh\ni=0\nwhile :; do echo "line $i"; i=$((i+1)); sleep 0.02; done\n'


@pytest.fixture
def lab(nodes: Cluster) -> Iterator[Cluster]:
    """gpu01 and gpu02 with state folders of their own, and alice's config on the login node."""
    for name in ("gpu01", "gpu02"):
        nodes[name].sshd(f"SetEnv XDG_STATE_HOME={STATE}")
    login = nodes["login1"]
    login.run(["mkdir", "-p", ".config/gpuboard"], check=True)
    login.run(["sh", "-c", "cat > .config/gpuboard/config.toml"], stdin='nodes = ["gpu0[1-2]"]\n', check=True)
    login.run(["sh", "-c", "cat > count.sh; chmod +x count.sh"], stdin=COUNT, check=True)
    yield nodes


@contextlib.contextmanager
def launched(host: Host, state: str | None = STATE) -> Iterator[Running]:
    """Start a run of two programs on a node, whose head is there too."""
    words = ["gpuboard", "launch", "--device", "cpu", "--n", "2", "--no-python", "./count.sh"]
    env = {"GPUBOARD_CONFIG": "/dev/null", **({"XDG_STATE_HOME": state} if state else {})}
    with host.popen(words, user="alice", env=env) as process:
        try:
            assert "line 0" in read_line(process)
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


def runs(login: Host, *words: str, **env: str) -> tuple[int, list[dict[str, Any]], dict[str, str]]:
    """Return the exit code of `gpuboard runs --json`, the runs and the failed nodes."""
    done = login.run(["gpuboard", "runs", "--json", *words], env=env)
    listed = json.loads(done.stdout)
    return done.returncode, listed["runs"], listed["failed"]


def test_a_run_on_a_node_is_listed_followed_explained_and_stopped(lab: Cluster) -> None:
    login, gpu01 = lab["login1"], lab["gpu01"]
    with launched(gpu01):
        code, found, failed = runs(login, "--node", "gpu01,gpu02")
        assert (code, failed, [(run["node"], run["state"], len(run["ranks"])) for run in found]) == (
            0,
            {},
            [("gpu01", "running", 2)],
        )
        run = found[0]["id"]
        assert runs(login) == (0, [], {})
        with login.popen(["gpuboard", "logs", run[:4], "--node", "gpu01", "--rank", "1", "-f"]) as logs:
            assert logs.stdout is not None
            lines = [read_line(logs)]
            lab["gpu02"].unplug()
            gpu01.stop_sshd()
            assert logs.stderr is not None
            assert re.match(r"gpuboard: gpu01: .*; reconnecting\n", logs.stderr.readline())
            gpu01.sshd(f"SetEnv XDG_STATE_HOME={STATE}")
            assert logs.stderr.readline() == "gpuboard: connected again\n"
            lines += [logs.stdout.readline() for _ in range(20)]
            code, found, failed = runs(login, "--all-nodes")
            assert (code, [run["id"] for run in found], list(failed)) == (0, [run], ["gpu02"])
            explained = login.run(["gpuboard", "explain", run, "--node", "gpu01"], check=True)
            assert explained.stdout.startswith(f"run {run}: running\n")
            stopped = login.run(["gpuboard", "stop", "last", "--node", "gpu01"], check=True)
            assert stopped.stdout == f"run {run} is stopping\nrun {run} stopped\n"
            lines += logs.stdout.readlines()
            assert logs.wait(60) == 0
        assert lines == [f"line {n}\n" for n in range(len(lines))], "nothing is lost or repeated"
    gpu01.unplug()
    soon = {"GPUBOARD_CONNECT_TIMEOUT": "2s"}  # no node is reached any more
    code, found, failed = runs(login, "--node", "gpu0[1-2]", **soon)
    assert (code, found, sorted(failed)) == (6, [], ["gpu01", "gpu02"])
    done = login.run(["gpuboard", "stop", run, "--node", "gpu02"], env=soon)
    assert done.returncode == 6
    assert "gpu02: " in done.stderr


def test_a_head_on_another_host_of_a_shared_home_is_found_by_its_name(lab: Cluster) -> None:
    login = lab["login1"]
    lab["gpu02"].sshd("SetEnv XDG_STATE_HOME=")
    with launched(lab["gpu02"], state=None) as head:
        assert "no rank waits for another one\n" in login.run(["gpuboard", "explain"], check=True).stdout
        with login.popen(["gpuboard", "logs", "last", "-f"]) as logs:
            read_line(logs)
            head.send_signal(signal.SIGKILL)
            logs.communicate(timeout=60)
            assert logs.returncode == 0
        [run] = until(lambda: [run for run in runs(login, "--node", "gpu02")[1] if run["state"] == "failed"], "no head")
        verdict = run["verdicts"][0]
        assert (verdict["kind"], verdict["node"]) == ("head-died", "gpu02")
        assert "has ended already: failed" in login.run(["gpuboard", "stop", "last"], check=True).stdout


RANK = """\
import os, sys
from torch.distributed import barrier
open("up-" + os.environ["RANK"], "w").close()
def load():
    sys.stdin.read()
if os.environ["RANK"] == "1":
    load()
barrier()
"""


def test_a_job_started_by_hand_on_two_nodes_is_one_picture(lab: Cluster) -> None:
    """One rank runs below a shell, with a pipe. The nodes have no py-spy."""
    login = lab["login1"]
    write_torch(login.path("/srv/home/alice/fake"))
    login.run(["sh", "-c", "cat > script.py"], stdin=RANK, check=True)
    shared = {"MASTER_ADDR": "10.88.0.11", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "PYTHONPATH": "fake"}
    commands = {"gpu01": ["sh", "-c", f"{sys.executable} script.py | cat"], "gpu02": [sys.executable, "script.py"]}
    with contextlib.ExitStack() as stack:
        for rank, (name, command) in enumerate(commands.items()):
            env = {**shared, "RANK": str(rank), "LOCAL_RANK": "0"}
            stack.enter_context(lab[name].popen(command, env=env, stdin=subprocess.PIPE))

        @stack.callback
        def end() -> None:
            for name in commands:
                for process in lab[name].processes(lambda p: "script.py" in p.argv, user="alice"):
                    lab[name].run(["kill", "-9", str(process.inner)], check=True)

        def explained(*words: str, user: str = "alice", code: int = 0) -> str:
            done = login.run(["gpuboard", "explain", *words], user=user)
            assert done.returncode == code, done
            return done.stdout + done.stderr

        for rank in range(2):
            until(login.path(f"/srv/home/alice/up-{rank}").exists)
        why = "why: waiting for rank 1 (gpu02:0), which is at script.py:5 in load; rank 0 (gpu01:0) waits in barrier"
        [text] = until(lambda: [text for text in [explained("--node", "gpu0[1-2]")] if why in text], "both wait")
        shown = text.splitlines()
        assert shown[0] == "job at 10.88.0.11:29500: 2 of 2 ranks on gpu01, gpu02"
        assert why in shown[3]
        pid = next(p.inner for p in lab["gpu01"].processes(user="alice") if p.argv[1:] == ("script.py",))
        alone = explained("--pid", str(pid), "--node", "gpu01")
        assert "why: waiting for rank 1, which was not found\n" in alone
        assert "not seen: rank 1 of 2: not found on gpu01;" in alone
        second = next(p.inner for p in lab["gpu02"].processes(user="alice") if p.argv[1:] == ("script.py",))
        both = json.loads(explained("--pid", str(second), "--node", "gpu02,gpu01", "--json"))["explanation"]
        assert [rank["rank"] for rank in both["ranks"]] == [1, 0], "first those of the node of --pid"
        assert "you have no distributed job on gpu01" in explained("--node", "gpu01", user="bob")
        refused = explained("--node", "gpu01", "--pid", str(pid), user="bob", code=1)
        assert f"gpu01: cannot inspect pid {pid}: it is another user's process" in refused
