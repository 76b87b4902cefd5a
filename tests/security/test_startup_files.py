"""Start-up files of a login shell that print or read where the protocol runs, on real nodes over each transport.

A user's own ``.bashrc`` is not an attack, but its output or input must never hide a reservation.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.test_transport_conformance import login_shell
from tests.integration.transport_lab import Lab, each_transport, lab, own
from tests.nodes import Cluster
from tests.waiting import Stopwatch

__all__ = ["lab"]
pytestmark = pytest.mark.nodes
one_transport = pytest.mark.parametrize("transport", ["asyncssh"])  # they read the same stream: one each is enough
SCOPE = "gpu[01-02]"
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


def gpuboard(lab: Lab, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command as alice on login1."""
    settings = {"GPUBOARD_TRANSPORT": lab.transport, "GPUBOARD_CONNECT_TIMEOUT": "30s"}
    return lab.here.run(["gpuboard", args[0], "--nodes", SCOPE, *args[1:]], env=settings | env)


def claims(nodes: Cluster) -> list[Path]:
    """Return the claim files on all nodes."""
    return [path for host in nodes if host.has_gpus for path in host.path("/var/tmp").glob("gpuboard.*")]


def take_and_release(lab: Lab, nodes: Cluster) -> None:
    """Reserve GPUs of two nodes, list and release them: no claim remains, and every message is true."""
    words = ["allocate", "--n", "4", "--per-node", "2", "--detach", "--for", "10m", "--format", "json"]
    taken = gpuboard(lab, *words)
    assert (taken.returncode, taken.stderr) == (0, ""), taken.stdout + taken.stderr
    lease = json.loads(taken.stdout)["lease"]["id"]
    assert len(claims(nodes)) == 4
    listed = json.loads(gpuboard(lab, "leases", "--json").stdout)["leases"]
    assert [(each["id"], len(each["gpus"])) for each in listed] == [(lease, 4)]
    done = gpuboard(lab, "release", "--mine")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"released {lease}: ")
    assert claims(nodes) == []


@each_transport
def test_output_without_a_line_end_hides_no_lease(lab: Lab, nodes: Cluster) -> None:
    startup(lab, GREETING)
    take_and_release(lab, nodes)


@one_transport
@pytest.mark.parametrize("noise", ["echo -n hi\n", "echo hi; echo -n there\n", LATER])
def test_other_output_without_a_line_end_hides_no_lease(lab: Lab, nodes: Cluster, noise: str) -> None:
    startup(lab, noise)
    take_and_release(lab, nodes)


@one_transport
@pytest.mark.parametrize(
    ("shell", "file"), [("zsh", ".zshenv"), ("tcsh", ".cshrc"), ("fish", ".config/fish/config.fish")]
)
def test_other_shells_output_without_a_line_end_hides_no_lease(lab: Lab, nodes: Cluster, shell: str, file: str) -> None:
    with login_shell(nodes["gpu01"], shell):
        startup(lab, "printf hi\n", file)
        take_and_release(lab, nodes)


@each_transport
def test_a_node_without_python_is_read_through_such_output(lab: Lab, nodes: Cluster) -> None:
    startup(lab, GREETING + LATER)
    found = lab.status("gpu01", GPUBOARD_PYTHON="python3-not-there", check=False)["gpu01"]
    assert "python3-not-there cannot be started there" in (found["error"] or "")


@one_transport
@pytest.mark.parametrize(
    "text",
    ["read x\n", "read a; read b; read c\n", "read -n 1 x\n", "exec sh\n", "head -c 100000 >/dev/null\n"],
)
def test_a_start_up_file_that_reads_is_reported_at_once(lab: Lab, text: str) -> None:
    startup(lab, text)
    watch = Stopwatch()
    found = lab.status("gpu01", check=False)["gpu01"]
    took_s = watch.stop()
    assert found["state"] == "unreachable"
    assert READS in found["error"], found["error"]
    assert "~/.bashrc" in found["error"], found["error"]
    assert "ValueError" not in found["error"]
    assert took_s < 8, "reported at once, not at the timeout"


@each_transport
@pytest.mark.parametrize("text", ["cat >/dev/null\n", "printf 'Which project? '; read a; while :; do sleep 60; done\n"])
def test_a_start_up_file_that_reads_all_is_reported_at_the_timeout(lab: Lab, text: str) -> None:
    startup(lab, text)
    found = lab.status("gpu01", check=False, GPUBOARD_CONNECT_TIMEOUT="8s")["gpu01"]
    assert found["state"] == "unreachable"
    assert READS in found["error"], found["error"]
    assert ("Which project?" in found["error"]) == ("Which" in text)


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
    done = gpuboard(lab, "launch", "--n", "2", "--device", "cpu", "train.py")
    assert "Traceback" not in done.stderr
    assert "no answer" not in done.stderr, done.stderr
