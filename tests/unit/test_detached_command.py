"""The command of `launch --detach`: what it returns when its head detaches, or ends before that."""

from __future__ import annotations

import os
import socket

import pytest

from gpuboard.launch.detached.process import WaitingCommand


@pytest.mark.parametrize(
    ("sent", "code", "expected"),
    [(b"{}\n", 0, b"{}\n"), (b"", 3, 3), (b"{", 3, 3)],
    ids=["ends right after its message", "ends without a message", "ends within its message"],
)
def test_a_head_that_has_ended_already(sent: bytes, code: int, expected: bytes | int) -> None:
    """As where it runs on another node: the process here then has nothing left to do."""
    ours, theirs = socket.socketpair()
    theirs.sendall(sent)
    theirs.close()
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"exit {code}"], os.environ)
    with ours:
        assert WaitingCommand(pid, ours).wait() == expected
    if isinstance(expected, bytes):
        os.waitpid(pid, 0)
