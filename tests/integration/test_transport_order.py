"""The events of a transport when one of its threads pauses at the wrong moment: the same, in the same order."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import paramiko
import pytest

from gpuboard.config import Settings
from gpuboard.transport.base import Channel, Transport, TransportError
from gpuboard.transport.connector import ssh_transport
from gpuboard.transport.ssh import paramiko_login
from gpuboard.transport.ssh.command_line import SshRoutes
from tests.sshd import SSHD, Sshd, children
from tests.waiting import alive, until

pytestmark = pytest.mark.skipif(SSHD is None or os.geteuid() != 0, reason="needs sshd (openssh-server) and root")

PAUSE_S = 1.0  # a thread pauses this long, unless something happens that must not


class Listener:
    """The events of a channel, in order; ``pause`` is called during the first one."""

    channel: Channel

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.events: list[str] = []
        self.error: TransportError | None = None

    def open(self, transport: Transport, command: str) -> None:
        self.channel = transport.open("one", "node", self, command)
        self.opened.set()

    def go(self) -> None:
        """Send a line to the other end."""
        assert self.opened.wait(60)
        self.channel.write(b"go\n")

    def connected(self) -> None:
        self.events.append("connected")
        self.pause()

    def received(self, data: bytes) -> None:
        self.events.append("received")

    def ended(self, error: TransportError) -> None:
        self.error = error

    def pause(self) -> None:
        pass


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    server = Sshd(tmp_path / "sshd")
    server.host("one")
    try:
        yield server
    finally:
        server.stop()


def settings(server: Sshd, transport: str) -> Settings:
    return Settings(ssh_config=str(server.ssh_config), transport=transport, connect_timeout="30s")


def test_connected_is_reported_once_and_first(sshd: Sshd) -> None:
    class Slow(Listener):
        def pause(self) -> None:
            self.go()  # output arrives while the handler is still being called
            output.wait(PAUSE_S)

        def received(self, data: bytes) -> None:
            super().received(data)
            output.set()

    output = threading.Event()
    slow = Slow()
    with closing(ssh_transport(settings(sshd, "openssh"))) as transport:
        slow.open(transport, "read first; echo ready; exec cat")
        assert output.wait(60)
        until(lambda: len(slow.events) >= 2, "both events")
    assert slow.events == ["connected", "received"]


def test_a_lost_connection_is_detected_before_paramikos_thread_ends(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = paramiko.Channel._unlink
    reported = threading.Event()

    class Events(Listener):
        def ended(self, error: TransportError) -> None:
            super().ended(error)
            reported.set()

    def late(channel: paramiko.Channel) -> None:
        unlink(channel)
        reported.wait(PAUSE_S)

    monkeypatch.setattr(paramiko.Channel, "_unlink", late)
    seen = Events()
    with closing(ssh_transport(settings(sshd, "paramiko"))) as transport:
        seen.open(transport, "echo ready; exec cat")
        until(lambda: "received" in seen.events, "output")
        for pid in children(sshd.process.pid):
            if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                os.kill(pid, signal.SIGKILL)
        assert reported.wait(60)
    assert seen.error is not None
    assert (seen.error.kind, seen.error.words[:23]) == ("lost", "the connection was lost")


def test_output_that_arrives_with_the_end_is_read(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = paramiko.Channel.recv_ready
    seen = Listener()

    def late(channel: paramiko.Channel) -> bool:
        found = bool(ready(channel))
        if not found:
            seen.go()
            until(lambda: channel.eof_received, "all output has arrived")
        return found

    monkeypatch.setattr(paramiko.Channel, "recv_ready", late)
    with closing(ssh_transport(settings(sshd, "paramiko"))) as transport:
        seen.open(transport, "echo first >&2; read go; echo last >&2; exit 9")
        until(lambda: seen.error is not None, "it has ended")
    assert seen.error is not None
    assert seen.error.words == "the agent ended with exit code 9: last"


def test_a_server_that_stops_before_the_command_starts_times_out(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    """paramiko waits for the answer without a limit; until then the node would count as one that is being set up."""
    start = paramiko.Channel.exec_command
    seen = Listener()

    def stalled(session: paramiko.Channel, command: str) -> None:
        for pid in children(sshd.process.pid):
            os.kill(pid, signal.SIGSTOP)
        start(session, command)

    short = Settings(ssh_config=str(sshd.ssh_config), transport="paramiko", connect_timeout="2s", max_connections=1)
    with closing(ssh_transport(short)) as transport:
        with monkeypatch.context() as patch:
            patch.setattr(paramiko.Channel, "exec_command", stalled)
            seen.open(transport, "echo ready; exec cat")
            until(lambda: seen.error is not None, "it has ended", 15)
        assert seen.error is not None
        assert (seen.error.kind, seen.events) == ("timeout", [])
        second = Listener()  # the only slot is free again
        second.open(transport, "echo ready; exec cat")
        until(lambda: second.events == ["connected", "received"], "output")


def test_a_jump_host_that_is_reached_after_the_end_is_left(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    sshd.host("behind", ProxyJump="one")
    started, go = threading.Event(), threading.Event()
    verify = paramiko_login._verify

    def late(*args: Any) -> None:
        started.set()
        assert go.wait(60)
        verify(*args)

    monkeypatch.setattr(paramiko_login, "_verify", late)
    with closing(ssh_transport(settings(sshd, "paramiko"))) as transport:
        transport.open("behind", "node", Listener(), "exec cat")
        assert started.wait(60)
    go.set()
    until(lambda: not children(sshd.process.pid), "no connection is left", 15)


@pytest.mark.parametrize("transport", ["asyncssh", "openssh", "paramiko"])
def test_sessions_that_have_ended_leave_no_descriptors(sshd: Sshd, transport: str) -> None:
    """Also without passes of the cycle collector, which are rare in gpuboard's processes."""
    with closing(ssh_transport(settings(sshd, transport))) as opened:

        def run_once() -> None:
            seen = Listener()
            seen.open(opened, "echo ready")
            until(lambda: seen.error is not None, "it has ended")

        def descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        gc.collect()
        gc.disable()
        try:
            run_once()
            until(lambda: not children(sshd.process.pid) or transport == "openssh", "the connection has ended")
            before = descriptors()
            for _ in range(5):
                run_once()
            until(lambda: descriptors() <= before, "no more descriptors than before", 15)
        finally:
            gc.enable()


def test_a_node_whose_turn_comes_during_the_end_does_not_disturb_it(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that hang end all at once then, and as many others get their turn."""
    sshd.host("two")
    before = SshRoutes(settings(sshd, "openssh"), os.environ)
    before.find("two")
    before.close()  # keeps ssh's answer, so that it is not asked again
    routes = SshRoutes(settings(sshd, "openssh"), os.environ)
    routes.find("one")
    exists = os.path.exists
    others: list[threading.Thread] = []

    def late(path: str) -> bool:
        if not others:
            others.append(threading.Thread(target=routes.find, args=("two",)))
            others[0].start()
            others[0].join()
        return exists(path)

    monkeypatch.setattr(os.path, "exists", late)
    routes.close()
    assert others


@pytest.mark.parametrize("transport", ["asyncssh", "paramiko"])
def test_a_proxy_command_that_hangs_ends_with_its_connection(sshd: Sshd, tmp_path: Path, transport: str) -> None:
    """It does not read its input: the end of that alone would leave it, and another one at each retry."""
    proxy, pid = tmp_path / "proxy", tmp_path / "pid"
    proxy.write_text(f"#!/bin/sh\necho $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 1000\n")
    proxy.chmod(0o755)
    sshd.host("two", ProxyCommand=proxy)
    short = Settings(ssh_config=str(sshd.ssh_config), transport=transport, connect_timeout="2s")
    with closing(ssh_transport(short)) as opened:
        seen = Listener()
        opened.open("two", "node", seen, "exec cat")
        until(pid.exists, "it has started")
        until(lambda: seen.error is not None, "it has ended")
        until(lambda: not alive(int(pid.read_text())), "and its proxy", 15)


@pytest.mark.parametrize("transport", ["asyncssh", "openssh", "paramiko"])
def test_a_closed_transport_leaves_no_connection_to_a_jump_host(sshd: Sshd, transport: str) -> None:
    """Also without passes of the cycle collector, which close forgotten sockets."""
    sshd.host("behind", ProxyJump="one")
    gc.disable()
    try:
        for _ in range(3):
            seen = Listener()
            with closing(ssh_transport(settings(sshd, transport))) as opened:
                seen.channel = opened.open("behind", "node", seen, "echo ready; exec cat")
                until(lambda: "received" in seen.events, "output")  # noqa: B023
            until(lambda: not children(sshd.process.pid), "no connection is left", 20)
    finally:
        gc.enable()
