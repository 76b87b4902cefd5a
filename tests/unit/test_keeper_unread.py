"""A lease with a claim that its node cannot read: it has neither ended nor been renewed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gpuboard.keeper.client import KeptNode, record
from gpuboard.keeper.daemon.calls import NodeAnswer
from gpuboard.keeper.daemon.commands import ConnectedCommand
from gpuboard.keeper.daemon.heartbeats import Nodes
from gpuboard.keeper.daemon.lease import KeeperContext, KeptLease
from gpuboard.keeper.daemon.loop import KeeperLoop
from gpuboard.keeper.runtime_dir import receive
from gpuboard.keeper.timing import TIMING

WHY = "gpuboard.GPU-a.k3f9 cannot be read: Input/output error"
ANSWER = NodeAnswer({"alive": [], "lapsed": [], "missing": [], "claims": {}, "unread": {"k3f9": WHY}})


def kept(folder: Path, command: ConnectedCommand | None = None) -> KeptLease:
    loop = KeeperLoop()
    nodes = Nodes(loop, lambda *_: None, TIMING)
    context = KeeperContext(str(folder), loop, nodes, TIMING, lambda _: None)
    node = KeptNode("gpu01", ["GPU-a"], None, str(folder), None)
    return KeptLease(record("k3f9", [node], {}, None, 60.0), context, command)


def test_a_lease_with_an_unreadable_claim_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lease = kept(tmp_path)
    lease.touched("gpu01", ANSWER)
    assert not lease.gone
    assert list(tmp_path.iterdir()) == []  # no message about a loss
    assert f"k3f9: gpu01: heartbeat failed: {WHY}" in capfd.readouterr().err


def test_a_lease_without_its_first_heartbeat_is_refused(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lease = kept(tmp_path, ConnectedCommand(ours))
        lease.touched("gpu01", ANSWER)
        assert lease.gone
        assert receive(theirs, 1.0) == {"error": f"gpu01: {WHY}", "node": "gpu01"}
