"""The transports' pure parts: errors, ssh_config as ssh itself reads it, known hosts."""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_args

import asyncssh
import pytest

from gpuboard.config import Settings
from gpuboard.errors import ConfigError
from gpuboard.transport.base import Kind, TransportError
from gpuboard.transport.connector import ssh_transport
from gpuboard.transport.link import AgentLink
from gpuboard.transport.ssh.asyncssh import SshChannel, explain
from gpuboard.transport.ssh.asyncssh_config import HostConfig

CONFIG = """\
Include {folder}/more
Host a*
    User alice
    Include {folder}/more
    HostName real.%h.example
    Port 2222
Host b1 b2
    ProxyJump carol@jump:2200,second
    UserKnownHostsFile {folder}/known {folder}/none
Host jump
    ProxyJump outer
Host none
    ProxyJump none
    ProxyCommand none
Host circle1
    ProxyJump circle2
Host circle2
    ProxyJump circle1
Host *
    User bob
    ServerAliveInterval 7
"""


@pytest.fixture
def config(tmp_path: Path) -> HostConfig:
    (tmp_path / "more").write_text("Host elsewhere\n    User x\n    ProxyJump nowhere\n")
    (tmp_path / "known").write_text("")
    path = tmp_path / "config"
    path.write_text(CONFIG.format(folder=tmp_path))
    return HostConfig(str(path), [str(tmp_path / "known")])


@pytest.mark.parametrize("name", ["abc", "b1", "jump", "none", "elsewhere", "other"])
def test_hosts_are_read_as_ssh_reads_them(config: HostConfig, tmp_path: Path, name: str) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("needs ssh (openssh-client)")
    done = subprocess.run(
        ["ssh", "-G", "-F", str(tmp_path / "config"), name], capture_output=True, text=True, timeout=60, check=True
    )
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    host = config.host(name)
    assert host.user == said["user"]
    assert host.key_name == said["hostname"]
    assert host.port == int(said["port"])
    assert ",".join(host.jumps) == said.get("proxyjump", "")
    assert host.options["keepalive_interval"] == int(said["serveraliveinterval"])
    assert host.options["encryption_algs"] == "^aes128-gcm@openssh.com"


def test_jumps_are_followed_to_the_first_one(config: HostConfig) -> None:
    assert config.jumps(config.host("b1")) == ("outer", "carol@jump:2200", "second")
    assert config.jumps(config.host("none")) == ()
    with pytest.raises(TransportError, match="ProxyJump of circle1 is a loop"):
        config.jumps(config.host("circle1"))


@pytest.mark.parametrize(
    ("spec", "user", "name", "port"),
    [
        ("jump", "bob", "jump", 22),
        ("carol@jump", "carol", "jump", 22),
        ("carol@jump:2200", "carol", "jump", 2200),
        ("ssh://carol@jump:2200/", "carol", "jump", 2200),
        ("[2001:db8::1]:2200", "bob", "2001:db8::1", 2200),
        ("abc:99", "alice", "real.abc.example", 99),
    ],
)
def test_a_jump_may_name_user_and_port(config: HostConfig, spec: str, user: str, name: str, port: int) -> None:
    host = config.host(spec)
    assert (host.user, host.key_name, host.port) == (user, name, port)


def test_known_hosts_are_read_again_when_they_change(config: HostConfig, tmp_path: Path) -> None:
    assert not config.host("b1").key_is_known()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    (tmp_path / "known").write_text(f"broken line\nb1 {(tmp_path / 'key.pub').read_text()}")
    assert config.host("b1").key_is_known()
    assert not config.host("b2").key_is_known()
    assert config.host("b1").known_hosts is config.host("b2").known_hosts  # read once


def os_error(code: int) -> OSError:
    return OSError(code, "words of the system")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (TimeoutError(), "timeout", "ssh: no answer in 10 s"),
        (os_error(errno.ECONNREFUSED), "refused", "ssh: connection refused"),
        (os_error(errno.EHOSTUNREACH), "unreachable", "ssh: no route to the host"),
        (os_error(errno.ENETUNREACH), "unreachable", "ssh: the network is unreachable"),
        (os_error(errno.ETIMEDOUT), "timeout", "ssh: connecting timed out"),
        (os_error(errno.ECONNRESET), "lost", "ssh: the connection was reset while logging in"),
        (os_error(errno.ENOBUFS), "unreachable", "ssh: words of the system"),
        (os_error(errno.EMFILE), "unreachable", "ssh: too many open files here"),
        (OSError("Multiple exceptions: [Errno 111] a, [Errno 101] b"), "refused", "ssh: connection refused"),
        (FileNotFoundError(2, "No such file", "nc"), "resolve", "ssh: nc: No such file"),
        (socket.gaierror(-2, "x"), "resolve", "ssh: the name 'gpu01' cannot be resolved"),
        (asyncssh.PermissionDenied("x"), "auth", "ssh: gpu01 was refused: no key was accepted"),
        (asyncssh.HostKeyNotVerifiable("x"), "host-key", "ssh: the host key of gpu01 is unknown"),
        (asyncssh.ConnectionLost("Connection lost"), "lost", "ssh: Connection lost"),
        (asyncssh.ChannelOpenError(2, "Connection refused"), "unreachable",
         "ssh: gpu01 cannot be reached: Connection refused"),
        (ValueError("line 3"), "resolve", "ssh_config: line 3"),
        (TransportError("auth", "of the jump host"), "auth", "of the jump host"),
    ],
)  # fmt: skip
def test_errors_have_a_kind_and_a_message(error: Exception, kind: str, words: str) -> None:
    found = explain(error, "gpu01", None, 10.0)
    assert (found.kind, found.words) == (kind, words)
    assert found.kind in get_args(Kind)
    assert str(found) == (f"{words}; {found.remedy}" if found.remedy else words)


def test_a_transport_without_its_program_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    for name in ("paramiko", "paramiko_login"):
        monkeypatch.delitem(sys.modules, f"gpuboard.transport.ssh.{name}", raising=False)
    with pytest.raises(ConfigError, match='transport = "paramiko" needs the library paramiko, which is not installed'):
        ssh_transport(Settings(transport="paramiko"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match='transport = "openssh": no `ssh` on PATH; install openssh-client'):
        ssh_transport(Settings(transport="openssh"))


def test_a_message_to_a_transport_that_is_being_closed_is_dropped() -> None:
    """As when the board is left while its thread tells nodes the time of their next reading."""
    loop = asyncio.new_event_loop()
    link = AgentLink("gpu01", "node", {}, lambda _: None, lambda _: None)
    channel = SshChannel(loop, threading.Thread(), link, "python3")
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon_threadsafe(channel.close)
    channel.write(b"tick")
    channel.close()
