"""Start-up files of a login shell that print or read where the protocol runs, on real nodes over each transport.

A user's own ``.bashrc`` is not an attack, but its output or input must never hide a reservation.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.test_transport_conformance import login_shell
from tests.integration.transport_lab import Lab, each_transport, lab, own
from tests.nodes import Cluster
from tests.waiting import Stopwatch

__all__ = ["lab"]
pytestmark = pytest.mark.nodes
one_transport = pytest.mark.parametrize("transport", ["asyncssh"])  # they read the same stream: one each is enough
other_transports = pytest.mark.parametrize("transport", ["openssh", "paramiko"])
GREETING = "printf '\\033]0;n1\\007'\n"
LATER = "(for i in 1 2 3 4 5 6 7 8 9 10; do printf 'later '; sleep 0.3; done) &\n"
READS = "reads standard input"


def startup(lab: Lab, text: str, name: str = ".bashrc") -> None:
    """Write one of alice's start-up files; her home is on every host."""
    path = lab.ssh.parent / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for each in (path.parent, path):
        own(each)


def on_each_host(**texts: str) -> str:
    """Return a .bashrc with another text on each host."""
    return "case $HOSTNAME in\n" + "".join(f"{host})\n{text};;\n" for host, text in texts.items()) + "esac\n"


def gpuboard(lab: Lab, *args: str, scope: str = "gpu01") -> subprocess.CompletedProcess[str]:
    """Run a command as alice on login1."""
    settings = {"GPUBOARD_TRANSPORT": lab.transport, "GPUBOARD_CONNECT_TIMEOUT": "30s"}
    return lab.here.run(["gpuboard", args[0], "--nodes", scope, *args[1:]], env=settings)


def claims(nodes: Cluster) -> list[Path]:
    """Return the claim files on all nodes."""
    return [path for host in nodes if host.has_gpus for path in host.path("/var/tmp").glob("gpuboard.*")]


def take_and_release(lab: Lab, nodes: Cluster, *names: str) -> None:
    """Reserve two GPUs of each node, list and release them: no claim remains, and every message is true."""
    n, scope = 2 * len(names), ",".join(names)
    words = ["allocate", "--n", str(n), "--per-node", "2", "--detach", "--for", "10m", "--format", "json"]
    taken = gpuboard(lab, *words, scope=scope)
    assert (taken.returncode, taken.stderr) == (0, ""), taken.stdout + taken.stderr
    lease = json.loads(taken.stdout)["lease"]["id"]
    assert len(claims(nodes)) == n
    listed = json.loads(gpuboard(lab, "leases", "--json", scope=scope).stdout)["leases"]
    assert [(each["id"], len(each["gpus"])) for each in listed] == [(lease, n)]
    done = gpuboard(lab, "release", "--mine", scope=scope)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"released {lease}: ")
    assert claims(nodes) == []


@other_transports
def test_output_without_a_line_end_hides_no_lease(lab: Lab, nodes: Cluster) -> None:
    startup(lab, GREETING)
    take_and_release(lab, nodes, "gpu01")


@one_transport
def test_other_output_without_a_line_end_hides_no_lease(lab: Lab, nodes: Cluster) -> None:
    startup(lab, on_each_host(gpu01=GREETING, gpu02="echo hi; echo -n there\n", gpu03=LATER))
    take_and_release(lab, nodes, "gpu01", "gpu02", "gpu03")


@one_transport
def test_other_shells_output_without_a_line_end_hides_no_lease(lab: Lab, nodes: Cluster) -> None:
    with ExitStack() as shells:
        for node, shell, file in (
            ("gpu01", "zsh", ".zshenv"),
            ("gpu02", "tcsh", ".cshrc"),
            ("gpu03", "fish", ".config/fish/config.fish"),
        ):
            shells.enter_context(login_shell(nodes[node], shell))
            startup(lab, "printf hi\n", file)
        take_and_release(lab, nodes, "gpu01", "gpu02", "gpu03")


@each_transport
def test_a_node_without_python_is_read_through_such_output(lab: Lab, nodes: Cluster) -> None:
    startup(lab, GREETING + LATER)
    found = lab.status("gpu01", GPUBOARD_PYTHON="python3-not-there", check=False)["gpu01"]
    assert "python3-not-there cannot be started there" in (found["error"] or "")


@one_transport
def test_a_start_up_file_that_reads_is_reported_at_once(lab: Lab) -> None:
    lab.config("Host back\n  HostName login1\n")
    startup(lab, on_each_host(
        gpu01="read x\n", gpu02="read a; read b; read c\n", gpu03="read -n 1 x\n", login1="exec sh\n",
        login2="head -c 50000 >/dev/null\n",
    ))  # fmt: skip
    watch = Stopwatch()
    found = lab.status("gpu01", "gpu02", "gpu03", "back", "login2", check=False)
    took_s = watch.stop()
    for name, node in found.items():
        assert node["state"] == "unreachable", name
        assert READS in node["error"], (name, node["error"])
        assert "~/.bashrc" in node["error"], (name, node["error"])
        assert "ValueError" not in node["error"], name
    assert took_s < 8, "reported at once, not at the timeout"


@each_transport
def test_a_start_up_file_that_reads_all_is_reported_at_the_timeout(lab: Lab) -> None:
    asks = "printf 'Which project? '; read a; while :; do sleep 60; done\n"
    startup(lab, on_each_host(gpu01="cat >/dev/null\n", gpu02=asks))
    found = lab.status("gpu01", "gpu02", check=False, GPUBOARD_CONNECT_TIMEOUT="8s")
    for name, node in found.items():
        assert node["state"] == "unreachable", name
        assert READS in node["error"], (name, node["error"])
        assert ("Which project?" in node["error"]) == (name == "gpu02"), node["error"]


@each_transport
def test_a_command_on_a_node_gets_its_own_standard_input(lab: Lab) -> None:
    startup(lab, GREETING)
    done = gpuboard(lab, "run", "--n", "1", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 7")
    assert (done.returncode, done.stdout.endswith("\n")) == (7, True), done.stderr


@each_transport
def test_a_launch_works_with_such_output(lab: Lab) -> None:
    startup(lab, GREETING + LATER)
    script = lab.ssh.parent / "train.py"
    script.write_text("print('trained')\n")
    own(script)
    done = gpuboard(lab, "launch", "--n", "1", "--device", "cpu", "--no-preimport", "train.py")
    assert (done.returncode, "trained" in done.stdout) == (0, True), done.stderr
    assert "Traceback" not in done.stderr
    assert "no answer" not in done.stderr, done.stderr
