"""`gpuboard run` on another machine: signals reach the command, and run exits with its code."""

from __future__ import annotations

import signal

import pytest

from tests.hosts import Running
from tests.nodes import Cluster
from tests.waiting import read_line, until

pytestmark = pytest.mark.nodes

HANDLING = """
trap 'echo told; sleep 1; echo saved; exit 5' TERM
trap 'echo noted' USR1
echo up
while :; do sleep 0.1; done
"""
GROUP = "import os, sys; os.setpgid(0, 0); os.execvp(sys.argv[1], sys.argv[1:])"


def start(nodes: Cluster, *argv: str, before: tuple[str, ...] = ()) -> Running:
    """Run a command on gpu02 from login1; return once it is up."""
    words = [*before, "gpuboard", "run", "--nodes", "gpu02", "--n", "1", "--", *argv]
    process = nodes["login1"].popen(words, env={"GPUBOARD_CONNECT_TIMEOUT": "10s"})
    assert read_line(process) == "up\n"
    return process


def left(nodes: Cluster) -> list[str]:
    """Return the reservations and processes of a run on gpu02."""
    claims = [path.name for path in nodes["gpu02"].path("/var/tmp").glob("gpuboard.GPU-*")]
    return claims + [p.name for p in nodes["gpu02"].processes(user="alice") if "trap" in " ".join(p.argv)]


def test_signal_to_gpuboard_alone_reaches_the_command(nodes: Cluster) -> None:
    with start(nodes, "sh", "-c", HANDLING) as process:
        process.send_signal(signal.SIGUSR1)
        assert read_line(process) == "noted\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (5, "told\nsaved\n", "")
    until(lambda: not left(nodes), "nothing is left")


def to_its_group(nodes: Cluster, process: Running, number: int) -> None:
    """Send a signal to the process group of a command started with ``GROUP``, as a terminal does."""
    group = f"-{process.process.inner}"
    nodes["login1"].run(["kill", f"-{number}", "--", group], user="alice", check=True)


def test_signal_to_the_process_group_reaches_the_command_once(nodes: Cluster) -> None:
    with start(nodes, "sh", "-c", HANDLING, before=("python3", "-c", GROUP)) as process:
        to_its_group(nodes, process, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, "told\nsaved\n")


def test_exit_code_after_a_signal_is_128_plus_its_number(nodes: Cluster) -> None:
    with start(nodes, "sh", "-c", "echo up; exec sleep 300", before=("python3", "-c", GROUP)) as process:
        to_its_group(nodes, process, signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT


def test_connection_is_closed_where_a_signal_cannot_be_forwarded(nodes: Cluster) -> None:
    with start(nodes, "sh", "-c", HANDLING) as process:
        nodes["gpu02"].unplug()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
