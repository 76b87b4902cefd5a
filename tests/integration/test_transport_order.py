"""What a transport tells when one of its threads stands still at the wrong moment: the same, and in the same order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import paramiko
import pytest

from gpuboard.config import Settings
from gpuboard.transport.base import Channel, Transport, TransportError
from gpuboard.transport.connector import ssh_transport
from tests.sshd import SSHD, Sshd, children
from tests.waiting import until

pytestmark = pytest.mark.skipif(SSHD is None or os.geteuid() != 0, reason="needs sshd (openssh-server) and root")

STILL_S = 1.0  # a thread stands still for so long, unless something happens that should not


class Listener:
    """What a channel told, in order; ``stand_still`` is called in the middle of its first word."""

    channel: Channel

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.told: list[str] = []
        self.error: TransportError | None = None

    def open(self, transport: Transport, command: str) -> None:
        self.channel = transport.open("one", "node", self, command)
        self.opened.set()

    def go(self) -> None:
        """Say a line to the far end."""
        assert self.opened.wait(60)
        self.channel.write(b"go\n")

    def connected(self) -> None:
        self.told.append("connected")
        self.stand_still()

    def received(self, data: bytes) -> None:
        self.told.append("received")

    def ended(self, error: TransportError) -> None:
        self.error = error

    def stand_still(self) -> None:
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


def test_connected_is_told_once_and_first_also_while_the_far_end_speaks(sshd: Sshd) -> None:
    class Slow(Listener):
        def stand_still(self) -> None:
            self.go()  # it speaks while we are still being told
            spoke.wait(STILL_S)

        def received(self, data: bytes) -> None:
            super().received(data)
            spoke.set()

    spoke = threading.Event()
    slow = Slow()
    with closing(ssh_transport(settings(sshd, "openssh"))) as transport:
        slow.open(transport, "read first; echo ready; exec cat")
        assert spoke.wait(60)
        until(lambda: len(slow.told) >= 2, "both are told")
    assert slow.told == ["connected", "received"]


def test_a_lost_connection_is_lost_before_paramikos_thread_is_through(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = paramiko.Channel._unlink
    told = threading.Event()

    class Told(Listener):
        def ended(self, error: TransportError) -> None:
            super().ended(error)
            told.set()

    def late(channel: paramiko.Channel) -> None:
        unlink(channel)
        told.wait(STILL_S)

    monkeypatch.setattr(paramiko.Channel, "_unlink", late)
    heard = Told()
    with closing(ssh_transport(settings(sshd, "paramiko"))) as transport:
        heard.open(transport, "echo ready; exec cat")
        until(lambda: "received" in heard.told, "it speaks")
        for pid in children(sshd.process.pid):
            if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                os.kill(pid, signal.SIGKILL)
        assert told.wait(60)
    assert heard.error is not None
    assert (heard.error.kind, heard.error.words[:23]) == ("lost", "the connection was lost")


def test_the_last_words_are_read_though_the_end_comes_with_them(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = paramiko.Channel.recv_ready
    heard = Listener()

    def late(channel: paramiko.Channel) -> bool:
        found = bool(ready(channel))
        if not found:
            heard.go()
            until(lambda: channel.eof_received, "it has said all")
        return found

    monkeypatch.setattr(paramiko.Channel, "recv_ready", late)
    with closing(ssh_transport(settings(sshd, "paramiko"))) as transport:
        heard.open(transport, "echo first >&2; read go; echo last >&2; exit 9")
        until(lambda: heard.error is not None, "it has ended")
    assert heard.error is not None
    assert heard.error.words == "the agent ended with exit code 9: last"
