"""Passwords and codes: ssh asks for them on a terminal, before the first frame; without a terminal never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.board.pty_lab import Terminal
from tests.hosts import Host
from tests.integration.transport_lab import Lab, lab, logins, own
from tests.nodes import Cluster
from tests.sshd import make_key
from tests.waiting import until

__all__ = ["lab"]
pytestmark = [pytest.mark.nodes, pytest.mark.parametrize("transport", ["openssh"])]

PASSWORD = "over the hills"
HASHED = (  # crypt(3), SHA-512
    "$6$gpuboardtest$6uekedCVRA0tUvLbEggoRgkbkihPPYNU8fUtLeZEAoZvvEigWOem6tyNzWe3Ibytj2sN4ljBewbLHRaA1X9jV/"
)
KEY_AND_PASSWORD = "AuthenticationMethods publickey,password\nPasswordAuthentication yes"
ENV = {"GPUBOARD_TRANSPORT": "openssh", "TERM": "xterm-256color", "GPUBOARD_CONNECT_TIMEOUT": "30s"}


@contextmanager
def password(host: Host, user: str = "alice") -> Iterator[None]:
    """Give ``user`` a password on a host."""
    shadow = host.path("/etc/shadow")
    before = shadow.read_text()
    shadow.write_text(before.replace(f"\n{user}:*:", f"\n{user}:{HASHED}:"))
    try:
        yield
    finally:
        shadow.write_text(before)


@contextmanager
def terminal(lab: Lab, *argv: str, size: tuple[int, int] = (120, 40)) -> Iterator[Terminal]:
    """Run a command on login1, on alice's terminal."""
    command = lab.here.command(argv, user="alice", env=ENV)
    # The session leader is a shell that survives ctrl-C, like a login shell; nsenter does not.
    leader = ["sh", "-c", 'trap : INT; "$@"; code=$?; [ $code -ne 130 ] || exec cat; exit $code', "sh", *command]
    screen = Terminal(leader, dict(os.environ), size)
    try:
        yield screen
    finally:
        screen.close()


def end_connections(lab: Lab) -> None:
    """End the shared connections that are open for the next command."""
    lab.here.run(["pkill", "-x", "ssh"], user="root")
    until(lambda: not lab.children(), "no connection is left")


def test_status_asks_once_and_later_commands_share_the_connection(lab: Lab, nodes: Cluster) -> None:
    gpu01 = nodes["gpu01"]
    gpu01.sshd(KEY_AND_PASSWORD)
    before = logins(nodes["gpu02"])
    with password(gpu01), terminal(lab, "gpuboard", "status", "--nodes", "gpu01,gpu02") as screen:
        screen.shows("gpu01 requires a password, a passphrase or a code:")
        screen.shows("alice@gpu01's password:")
        screen.press(PASSWORD.encode() + b"\r")
        screen.ends(60)
        assert screen.process.returncode == 0
        assert screen.text.count("password:") == 1
        assert PASSWORD not in screen.text
        assert screen.text.count("no process, no reservation") == 16
        assert "gpu02 requires" not in screen.text
        assert logins(nodes["gpu02"]) - before == 1  # hosts that ask for nothing are logged in to once, too
        # for a minute commands without a terminal can use the connection
        done = lab.here.run(["gpuboard", "status", "--nodes", "gpu01"], env=ENV)
        assert (done.returncode, done.stdout.count("no process, no reservation")) == (0, 8)
        with terminal(lab, "gpuboard", "run", "--n", "1", "--nodes", "gpu01", "--", "hostname") as command:
            command.ends(60)
            assert (command.process.returncode, command.text.splitlines()) == (0, ["gpu01"])


def test_a_jump_host_asks_once_for_all_nodes_behind_it(lab: Lab, nodes: Cluster) -> None:
    login2 = nodes["login2"]
    pam = login2.path("/etc/pam.d/sshd")
    login2.sshd("UsePAM yes\nAuthenticationMethods keyboard-interactive\nKbdInteractiveAuthentication yes")
    before = pam.read_text()
    pam.write_text("auth required pam_unix.so\naccount required pam_permit.so\nsession required pam_permit.so\n")
    lab.config("Host gpu0?\n  ProxyJump login2\n")
    for name in ("gpu01", "gpu02"):
        nodes[name].firewall(f"add rule inet t in ip saddr != {login2.address} tcp dport 22 drop")
    try:
        with password(login2), terminal(lab, "gpuboard", "status", "--nodes", "gpu[01-02]") as screen:
            screen.shows("login2 requires a password, a passphrase or a code:")
            screen.shows("Password:")
            screen.press(PASSWORD.encode() + b"\r")
            screen.ends(60)
            assert screen.process.returncode == 0, screen.text
            assert screen.text.count("no process, no reservation") == 16
            assert screen.text.count("Password:") == 1
    finally:
        pam.write_text(before)


def test_the_board_asks_before_it_draws(lab: Lab, nodes: Cluster) -> None:
    nodes["gpu01"].sshd(KEY_AND_PASSWORD)
    with password(nodes["gpu01"]), terminal(lab, "gpuboard", "--nodes", "gpu01,gpu02") as screen:
        screen.shows("alice@gpu01's password:")
        assert b"\x1b[?1049h" not in screen.written
        screen.press(b"wrong\r")
        until(lambda: screen.text.count("password:") == 2, "the next question")
        screen.press(PASSWORD.encode() + b"\r")
        screen.shows("16 free of 16")
        screen.press(b"q")
        screen.ends(60)
        assert screen.restored


def test_the_keeper_uses_the_opened_connection(lab: Lab, nodes: Cluster) -> None:
    """The keeper has no terminal: it sends heartbeats over the connection opened on the terminal."""
    nodes["gpu01"].sshd(KEY_AND_PASSWORD)
    script = (
        'eval "$(gpuboard allocate --n 1 --nodes gpu01)" && echo "got $CUDA_VISIBLE_DEVICES of $GPUBOARD_NODES"; cat'
    )
    with password(nodes["gpu01"]), terminal(lab, "bash", "-c", script) as screen:
        screen.shows("alice@gpu01's password:")
        screen.press(PASSWORD.encode() + b"\r")
        screen.shows("got  of gpu01")
        assert len(claims(nodes["gpu01"])) == 1
        screen.process.send_signal(signal.SIGKILL)
        until(lambda: not claims(nodes["gpu01"]), "the keeper has released it")
    lab.here.run(["pkill", "-f", "gpuboard.keeper.daemon"], user="root")


def claims(host: Host) -> list[Path]:
    return list(host.path("/var/tmp").glob("gpuboard.GPU-*"))


def test_a_key_with_a_passphrase_and_ctrl_c(lab: Lab, nodes: Cluster) -> None:
    key = lab.ssh / "locked"
    make_key(key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", PASSWORD, "-f", key], check=True)
    own(key)
    with (lab.ssh / "authorized_keys").open("a") as file:
        file.write(Path(f"{key}.pub").read_text())
    lab.config("Host gpu*\n  IdentityFile ~/.ssh/locked\n  IdentitiesOnly yes\n", key_for="* !gpu*")
    with terminal(lab, "gpuboard", "status", "--nodes", "gpu01") as screen:
        screen.shows("Enter passphrase for key")
        screen.press(PASSWORD.encode() + b"\r")
        screen.ends(60)
        assert (screen.process.returncode, screen.text.count("no process, no reservation")) == (0, 8)
    end_connections(lab)
    with terminal(lab, "sh", "-c", "trap : INT; gpuboard status --nodes gpu01; echo code $?") as screen:
        screen.shows("Enter passphrase for key")
        screen.press(b"\x03")
        until(lambda: "code 130" in screen.text, "its end")
        assert "Traceback" not in screen.text


def test_wrong_answers_leave_the_node_unreachable_and_the_others_shown(lab: Lab, nodes: Cluster) -> None:
    nodes["gpu01"].sshd(KEY_AND_PASSWORD)
    with password(nodes["gpu01"]), terminal(lab, "gpuboard", "status", "--nodes", "gpu01,gpu02") as screen:
        for number in range(3):
            until(lambda n=number: screen.text.count("password:") == n + 1, "the next question")  # type: ignore[misc]
            screen.press(b"wrong\r")
        screen.shows("gpu01: not logged in: no answer was accepted")
        screen.ends(60)
        assert screen.process.returncode == 0
        assert screen.text.count("no process, no reservation") == 8


def test_without_a_terminal_ssh_does_not_ask(lab: Lab, nodes: Cluster) -> None:
    nodes["gpu01"].sshd(KEY_AND_PASSWORD)
    asked = lab.ssh.parent / "asked"
    helper = lab.ssh.parent / "askpass"
    helper.write_text(f"#!/bin/sh\ntouch {lab.here.path('/srv/home/alice/asked')}; echo no\n")
    helper.chmod(0o755)
    own(helper)
    env = {**ENV, "DISPLAY": ":0", "SSH_ASKPASS": "/srv/home/alice/askpass"}
    with password(nodes["gpu01"]):
        command = lab.here.command(["gpuboard", "status", "--nodes", "gpu01"], user="alice", env=env)
        for stdin in (subprocess.DEVNULL, subprocess.PIPE):
            done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (6, "")
            assert "asks for a password or a code" in done.stdout
            assert "on a terminal" in done.stdout
    assert not asked.exists()


def test_other_transports_never_ask(lab: Lab, nodes: Cluster) -> None:
    nodes["gpu01"].sshd(KEY_AND_PASSWORD)
    for transport in ("asyncssh", "paramiko"):
        words = ["sh", "-c", f"GPUBOARD_TRANSPORT={transport} {sys.executable} -m gpuboard status --nodes gpu01"]
        with password(nodes["gpu01"]), terminal(lab, *words) as screen:
            screen.ends(60)
            assert screen.process.returncode == 6
            assert "asks for a password or a code" in screen.text
            assert "assword:" not in screen.text
