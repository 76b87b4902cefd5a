"""A signal reaches the intended process or none."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator

import pytest

from gpuboard.agent import signals
from gpuboard.agent.processes import Processes


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("wrong_by", [5.0, -5.0, math.nan, math.inf])
def test_another_start_is_another_process(sleeping: subprocess.Popen[bytes], wrong_by: float) -> None:
    processes = Processes()
    started = processes.started(sleeping.pid)
    assert started is not None
    with pytest.raises(signals.SignalRefused) as refused:
        signals.send({"pid": sleeping.pid, "started": started + wrong_by, "signal": "TERM"}, processes)
    assert refused.value.kind == "not-found"
    assert sleeping.poll() is None


def test_the_one_that_was_meant_gets_it(sleeping: subprocess.Popen[bytes]) -> None:
    processes = Processes()
    started = processes.started(sleeping.pid)
    assert signals.send({"pid": sleeping.pid, "started": started, "signal": "TERM"}, processes) == {"pid": sleeping.pid}
    assert sleeping.wait(60) == -15


@pytest.mark.parametrize("pid", [0, 1, -1, True, "1"])
def test_groups_and_init_are_no_processes(pid: object) -> None:
    with pytest.raises(signals.SignalRefused) as refused:
        signals.send({"pid": pid, "started": 0.0, "signal": "KILL"}, Processes())
    assert refused.value.kind == "invalid"
