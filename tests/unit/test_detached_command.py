"""The command of `launch --detach`: what it returns when its head detaches, or ends before that."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

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


def test_a_signal_that_arrives_with_the_config_reaches_the_head() -> None:
    """As when it is sent while the head's interpreter starts: both lines are read at once."""
    lines = [{"config": ""}, {"signal": int(signal.SIGTERM)}]
    script = """
import signal
from gpuboard.launch.detached import served
served.unpacked = str
served.ServedHead()
signal.pause()
"""
    head = subprocess.run(
        [sys.executable, "-c", script], input="".join(json.dumps(line) + "\n" for line in lines), text=True, check=False
    )
    assert head.returncode == -signal.SIGTERM
