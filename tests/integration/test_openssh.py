"""Connections that the system's ssh shares: gpuboard's, and the user's own."""

from __future__ import annotations

import os
import select
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from gpuboard.transport.ssh import control_sockets
from tests.integration.transport_lab import Lab, agents, lab, logins, own
from tests.nodes import Cluster
from tests.waiting import until

__all__ = ["lab"]
pytestmark = [pytest.mark.nodes, pytest.mark.parametrize("transport", ["openssh"])]

ECHO = "echo ready; exec cat"
STATE = "/srv/home/alice/.local/state/gpuboard/ssh"


def test_a_second_session_shares_the_first_ones_connection(lab: Lab, nodes: Cluster) -> None:
    gpu01 = nodes["gpu01"]
    before = logins(gpu01)
    with lab.channels("gpu01", command=ECHO) as first:
        first.event("connected")
        folder = lab.here.path(STATE)
        # ssh binds it under another name first and links it to its own
        until(lambda: [path.is_socket() for path in folder.iterdir()] == [True], "a socket and nothing else")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with lab.channels("gpu01", command=ECHO) as second:
            second.event("connected")
            assert logins(gpu01) - before == 1
            # The process that opened it ends: the other one's session continues, and new ones are refused.
            first.send(op="close")
            first.event("closed")
            until(lambda: not list(folder.iterdir()), "no new sessions")
            second.send(op="write", text="still here\n")
            second.received(0, 17)
            second.send(op="close")
            second.event("closed")
            until(lambda: not lab.children(), "nothing is left of it", 8)  # it would last for 10 s


def test_the_socket_of_a_dead_connection_has_no_effect(lab: Lab) -> None:
    with lab.channels("gpu01", command=ECHO) as driven:
        driven.event("connected")
        shared = until(lambda: [one for one in lab.children() if one.argv[0].startswith("ssh: ")], "it is named")
        lab.here.run(["kill", "-9", *(str(process.inner) for process in shared)], check=True)
        assert driven.event("ended")["kind"] == "lost"
    assert len(list(lab.here.path(STATE).iterdir())) == 1
    assert lab.status("gpu01")["gpu01"]["error"] is None


def test_a_process_that_is_ending_listens_but_does_not_answer(transport: str) -> None:
    """Linux closes what a killed process has open one by one, its sockets of sessions before the one that listens."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as ending:
        ending.bind(path := f"{folder}/socket")
        ending.listen()

        def end() -> None:
            select.select([ending], [], [])  # a client has connected
            ending.close()

        closing = threading.Thread(target=end)
        closing.start()
        assert not control_sockets.answers(path, timeout_s=60)
        closing.join()


def test_connections_that_the_user_shares_are_used_and_not_stopped(lab: Lab, nodes: Cluster) -> None:
    gpu01, gpu02 = nodes["gpu01"], nodes["gpu02"]
    lab.config(
        "Host gpu0?\n  ControlMaster auto\n  ControlPath ~/.ssh/own-%n\nHost gpu01\n  ControlPersist 300\n"
        "Host other\n  HostName gpu02\n  ControlPath ~/.ssh/own-gpu02\n"
    )
    before = logins(gpu01), logins(gpu02)
    lab.here.run(["ssh", "gpu01", "true"], check=True)
    with lab.here.popen(["ssh", "-N", "gpu02"]) as master:  # lasts as long as this
        until(lambda: control_sockets.alive(str(lab.here.path("/srv/home/alice/.ssh/own-gpu02"))), "a connection")
        seen = lab.status("gpu01", "gpu02", "other")
        assert [node["error"] for node in seen.values()] == [None] * 3
        assert (logins(gpu01) - before[0], logins(gpu02) - before[1]) == (1, 1)
        assert list(lab.here.path(STATE).iterdir()) == []
        assert lab.here.run(["ssh", "-O", "check", "gpu01"]).returncode == 0
        assert control_sockets.answers(str(lab.here.path("/srv/home/alice/.ssh/own-gpu02")))
        master.terminate()
    # a connection that is not open yet is opened as in ssh_config
    lab.here.run(["ssh", "-O", "exit", "gpu01"], check=True)
    with lab.channels("gpu01", command=ECHO) as driven:
        driven.event("connected")
        assert lab.here.run(["ssh", "-O", "check", "gpu01"]).returncode == 0
    assert lab.here.run(["ssh", "-O", "check", "gpu01"]).returncode == 0
    lab.here.run(["ssh", "-O", "exit", "gpu01"], check=True)


def test_two_names_of_one_address_have_two_connections(lab: Lab, nodes: Cluster) -> None:
    """Behind different jump hosts one address can be two machines; ssh's own %C is the same for both."""
    lab.config(
        "Host one\n  HostName 10.88.0.11\n  HostKeyAlias gpu01\n"
        "Host two\n  HostName 10.88.0.11\n  HostKeyAlias gpu02\n  ProxyCommand ssh -W gpu02:22 login2\n"
    )
    seen = lab.status("one", "two")
    assert [node["error"] for node in seen.values()] == [None, None]
    assert seen["one"]["gpus"][0]["uuid"] != seen["two"]["gpus"][0]["uuid"]


def test_a_killed_agent_and_a_hung_shell_differ_from_a_hung_node(lab: Lab, nodes: Cluster) -> None:
    (lab.ssh.parent / ".bashrc").write_text("sleep 1000\n")
    own(lab.ssh.parent / ".bashrc")
    node = lab.status("gpu01", check=False, GPUBOARD_CONNECT_TIMEOUT="8s")["gpu01"]
    words = (
        "connected, but its shell or python3 did not start the agent in 10 s; if a start-up file of the login shell "
    )
    assert (node["state"], node["error"][: len(words)]) == ("unreachable", words)
    (lab.ssh.parent / ".bashrc").unlink()
    with lab.channels("gpu01", command=None) as driven:
        driven.start_agents("gpu01")
        for agent in agents(nodes["gpu01"]):
            nodes["gpu01"].run(["kill", "-9", str(agent.inner)], user="root")
        ended = driven.event("ended")
        assert (ended["kind"], ended["words"]) == ("exited", "the agent was killed by a signal")


@pytest.mark.parametrize("length", [10, 120])
def test_sockets_lie_where_their_paths_are_short_enough(transport: str, tmp_path: Path, length: int) -> None:
    state = tmp_path / ("x" * length)
    folder = control_sockets.socket_folder({"XDG_STATE_HOME": str(state)})
    assert folder is not None
    assert len(folder) + len("/0123456789abcdefp") + 17 < 108
    assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700


@pytest.mark.skipif(Path("/run/user/0").exists(), reason="needs a machine without /run/user for root")
def test_a_folder_of_another_user_is_not_used(transport: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as state:  # pytest's folders are too long for a socket's path
        theirs = f"{state}/gpuboard/ssh"
        assert control_sockets.socket_folder({"XDG_STATE_HOME": state}) == theirs
        os.chown(theirs, 4711, 4711)
        assert control_sockets.socket_folder({"XDG_STATE_HOME": state}) not in {None, theirs}
