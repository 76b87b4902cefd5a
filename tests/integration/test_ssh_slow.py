"""Nodes whose ssh is slow: the timeout starts again with every progress of the handshake."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.model.snapshot import NodeView
from tests.sshd import SSHD, Sshd
from tests.waiting import Stopwatch

pytestmark = pytest.mark.skipif(SSHD is None or os.geteuid() != 0, reason="needs sshd (openssh-server) and root")

# A proxy that delays each answer by 1.5 s; a handshake needs more than three answers.
SLOW = """
import os, select, socket, sys, time
server = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while True:
    for fd in select.select([0, server.fileno()], [], [])[0]:
        data = os.read(fd, 65536)
        if not data:
            sys.exit()
        if fd == 0:
            server.sendall(data)
        else:
            time.sleep(1.5)
            os.write(1, data)
"""


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    server = Sshd(tmp_path / "sshd")
    try:
        yield server
    finally:
        server.stop()


def look(server: Sshd, name: str, timeout: str) -> NodeView:
    settings = Settings(ssh_config=str(server.ssh_config), python=sys.executable, connect_timeout=timeout)
    with closing(Fleet([Node(name, name)], settings, interval_s=None)) as fleet:
        fleet.start()
        fleet.wait_all(60.0)
        [node] = fleet.snapshot().nodes
        return node


def test_a_handshake_with_progress_does_not_time_out(sshd: Sshd, tmp_path: Path) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(SLOW)
    sshd.host("slow", ProxyCommand=f"{sys.executable} -S -E {relay} {sshd.port}")
    node = look(sshd, "slow", "4s")
    assert (node.state, node.age_s is not None) == ("up", True), node.error


def test_a_server_that_sends_without_end_times_out(sshd: Sshd) -> None:
    over = threading.Event()

    def talk(listener: socket.socket) -> None:
        with closing(listener.accept()[0]) as connection:
            while not over.wait(0.1):
                try:
                    connection.sendall(b"please hold the line\r\n")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=talk, args=(listener,), daemon=True).start()
        sshd.host("talks", Port=listener.getsockname()[1])
        watch = Stopwatch()
        node = look(sshd, "talks", "1s")
        over.set()
        assert watch.stop() < 40.0
    assert node.state == "unreachable"
    assert "no answer in 1 s" in (node.error or "")
