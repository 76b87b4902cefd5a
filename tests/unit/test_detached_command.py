"""The command of `launch --detach`: what it returns when its head detaches, or ends before that."""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuboard.cli.context import Context
from gpuboard.cli.use import remote_head
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Configuration, Settings
from gpuboard.launch.detached.process import WaitingCommand
from gpuboard.launch.detached.remote import FromHead, HeadConfig, RemoteHead
from gpuboard.launch.output import Screen
from gpuboard.launch.runs.folder import read_state, runs_dir, this_head
from tests.unit.test_plan import planned
from tests.unit.test_runs import view
from tests.waiting import read_line


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


def test_a_command_that_was_suspended_waits_on() -> None:
    """As after ctrl-Z and fg, for longer than the interval of its loop."""
    script = """
import os, socket, sys
from gpuboard.launch.detached.process import WaitingCommand
print("up", flush=True)
print(WaitingCommand(os.getpid(), socket.socket(fileno=int(sys.argv[1]))).wait())
"""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = subprocess.Popen(
            [sys.executable, "-c", script, str(ours.fileno())],
            pass_fds=[ours.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert read_line(command) == "up\n"
        for _ in range(5):
            command.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            command.send_signal(signal.SIGCONT)
            time.sleep(0.05)
        theirs.sendall(b"{}\n")
        assert command.communicate() == ("b'{}\\n'\n", "")


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


def test_a_head_elsewhere_reports_its_outcome_despite_one_more_interrupt() -> None:
    """Without it the command says that the head was killed."""
    script = """
import signal
from gpuboard.cli.context import Context
from gpuboard.cli.use import served_head
from gpuboard.config import Settings
from gpuboard.launch.detached import served

class Config:
    settings, status_file = Settings(), None

def write_all(*written):
    signal.raise_signal(signal.SIGINT)
    real(*written)

def lead(*_):
    raise KeyboardInterrupt

served.unpacked, served.Lifeline = lambda _: Config, lambda *_: None
real, served.write_all = served.write_all, write_all
served_head._lead = lead
raise SystemExit(served_head.serve_head(Context([])))
"""
    head = subprocess.run(
        [sys.executable, "-c", script], input='{"config": ""}\n', capture_output=True, text=True, check=False
    )
    assert (head.returncode, head.stderr) == (130, "gpuboard: interrupted\n")
    line = json.loads(head.stdout)
    assert (line["kind"], json.loads(line["message"])["exit_code"]) == ("ended", 130)


class Detached:
    """The process of a launch whose head is on another node."""

    reserved = None
    message = b""

    def leave(self, _screen: Screen, message: bytes) -> None:
        self.message = message


@pytest.mark.parametrize("moment", ["read", "closed"])
def test_an_interrupt_after_a_head_elsewhere_has_detached_does_not_hide_its_run(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on there: the user has to be told of it."""
    started = msgspec.json.encode({"run": view("rabc", this_head()), "checks": []})

    class Inbox(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            item = super().get(block, timeout)
            if moment == "read":
                signal.raise_signal(signal.SIGINT)
            return item

    class Head(RemoteHead):
        def __init__(self, node: Node, *_: object) -> None:
            self.node = node
            self._inbox = Inbox()

        def start(self) -> None:
            pass

        def send(self, **line: object) -> None:
            if "config" in line:
                self._inbox.put(FromHead("started", started.decode()))
                self._inbox.put(FromHead("closed"))  # it has left the connection

        def close(self) -> None:
            if moment == "closed":
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(remote_head, "RemoteHead", Head)
    context = Context(["launch"], {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)})
    context.configuration = Configuration(Settings(), {})
    plan = planned()
    nodes = [Node(config.node, config.node) for config in plan.nodes]
    config = HeadConfig(plan, nodes, context.settings, [], None)
    detaching: Any = Detached()
    usual = signal.getsignal(signal.SIGINT)
    with closing(Screen(io.StringIO(), io.StringIO())) as screen:
        assert remote_head.lead_elsewhere(config, context, screen, {}, detaching) == 0
    assert detaching.message == started
    noted = read_state(runs_dir(context.env) / "rabc")
    assert noted is not None
    assert noted.node == nodes[0].name
    assert signal.getsignal(signal.SIGINT) is usual
