"""A signal through the agent reaches exactly the process that a reading showed, or nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuboard.agent.processes import Processes
from tests.agent import Agent

_OTHER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c")
_OLD = sorted(Path("/root/.pyenv/versions").glob("3.6.*/bin/python"))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def started(pid: int) -> float:
    at = Processes().started(pid)
    assert at is not None
    return at


def refusal(answer: object) -> tuple[str, str]:
    return answer.kind, answer.message  # type: ignore[attr-defined]


@pytest.mark.parametrize("python", [None, *(str(path) for path in _OLD[:1])])
def test_reaches_the_process(sleeper: subprocess.Popen[bytes], python: str | None) -> None:
    with Agent(None, python=python) as agent:
        answer = agent.call("signal", pid=sleeper.pid, started=started(sleeper.pid), signal="USR1")
        assert answer == {"pid": sleeper.pid}
        assert sleeper.wait(60) == -signal.SIGUSR1


def test_stops_and_continues(sleeper: subprocess.Popen[bytes]) -> None:
    with Agent(None) as agent:
        at = started(sleeper.pid)
        agent.call("signal", pid=sleeper.pid, started=at, signal="STOP")
        assert os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED) is not None
        agent.call("signal", pid=sleeper.pid, started=at, signal="CONT")
        assert os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED) is not None
        assert sleeper.poll() is None


def test_refuses_a_reused_pid(sleeper: subprocess.Popen[bytes]) -> None:
    with Agent(None) as agent:
        answer = agent.call("signal", pid=sleeper.pid, started=started(sleeper.pid) - 60, signal="KILL")
        assert refusal(answer) == ("not-found", f"process {sleeper.pid} has ended")
        assert sleeper.poll() is None


def test_reports_that_it_has_ended(sleeper: subprocess.Popen[bytes]) -> None:
    at = started(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    with Agent(None) as agent:
        answer = agent.call("signal", pid=sleeper.pid, started=at, signal="TERM")
        assert refusal(answer) == ("not-found", f"process {sleeper.pid} has ended")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_refuses_processes_of_other_users(sleeper: subprocess.Popen[bytes]) -> None:
    with Agent(None, python="/usr/bin/python3", through=_OTHER) as agent:
        answer = agent.call("signal", pid=sleeper.pid, started=started(sleeper.pid), signal="KILL")
        assert refusal(answer) == ("not-yours", f"process {sleeper.pid} is not yours")
        assert sleeper.poll() is None


@pytest.mark.parametrize(
    "args",
    [
        {"pid": 0, "started": 1.0, "signal": "KILL"},
        {"pid": -1, "started": 1.0, "signal": "KILL"},
        {"pid": 1, "started": 1.0, "signal": "KILL"},
        {"pid": "1", "started": 1.0, "signal": "KILL"},
        {"pid": 77, "started": None, "signal": "KILL"},
        {"pid": 77, "started": 1.0, "signal": "SEGV"},
        {"pid": 77, "started": 1.0, "signal": 9},
        {},
    ],
)
def test_refuses_what_is_no_signal_to_a_process(args: dict[str, Any]) -> None:
    with Agent(None) as agent:
        assert agent.call("signal", **args).kind == "invalid"


def test_leaves_real_processes_alone_where_the_gpus_are_simulated(sleeper: subprocess.Popen[bytes]) -> None:
    with Agent(None, simulate={"cluster": "t", "count": 1}) as agent:
        answer = agent.call("signal", pid=sleeper.pid, started=started(sleeper.pid), signal="KILL")
        assert refusal(answer) == ("not-found", "that process is simulated")
        assert sleeper.poll() is None
