"""XID errors through the real probe and a scripted NVML library: reported once, kept, and harmless to readings."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuboard.model.reading import Reading
from tests import nvml
from tests.agent import Agent
from tests.nodes import old_python
from tests.nvml import Gpu, write_script
from tests.waiting import until


def next_reading(agent: Agent) -> Reading:
    """Return a reading that started after this call."""
    agent.write(b'{"t":"call","id":1,"op":"read","args":{}}\n')
    return agent.reading()


def codes(reading: Reading) -> list[list[int] | None]:
    """Return the XID errors of each GPU, newest first."""
    return [None if gpu.xids is None else [xid.code for xid in gpu.xids] for gpu in reading.gpus]


@pytest.mark.parametrize("python", [None, old_python() or "none"])
def test_errors_are_reported_newest_first_with_the_nodes_time(tmp_path: Path, python: str | None) -> None:
    if python == "none":
        pytest.skip("needs an older Python")
    script = tmp_path / "script"
    write_script(script, [Gpu(xids=(13,)), Gpu()])
    with Agent(script, python=python) as agent:
        first = agent.reading()
        second = next_reading(agent)
        write_script(script, [Gpu(xids=(13,)), Gpu(xids=(79, 48))])
        third = next_reading(agent)
        fourth = next_reading(agent)
    assert [codes(reading) for reading in (first, second, third, fourth)] == [
        [None, None],  # the first reading does not wait for them
        [[], []],  # earlier errors are not reported
        [[], [48, 79]],
        [[], [48, 79]],
    ]
    xids = fourth.gpus[1].xids
    assert xids is not None
    assert all(abs(xid.at - third.at) < 60 for xid in xids)
    assert [xid.at for xid in third.gpus[1].xids or []] == [xid.at for xid in xids]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "script"
    write_script(script, [Gpu()])
    with Agent(script) as agent:
        agent.reading()
        next_reading(agent)
        write_script(script, [Gpu(xids=tuple(range(1, 21)))])
        assert codes(next_reading(agent)) == [list(range(20, 12, -1))]


def test_they_stay_when_the_gpu_is_lost(tmp_path: Path) -> None:
    script = tmp_path / "script"
    write_script(script, [Gpu(), Gpu()])
    with Agent(script) as agent:
        agent.reading()
        next_reading(agent)
        write_script(script, [Gpu(), Gpu(xids=(79,), trouble=(f"fault * {nvml.LOST}",))])
        reading = next_reading(agent)
    assert ([gpu.lost for gpu in reading.gpus], codes(reading)) == ([False, True], [[], [79]])


def test_an_old_driver_reports_none(tmp_path: Path) -> None:
    script = tmp_path / "script"
    write_script(script, [Gpu()], driver="470.57.02")
    with Agent(script, old=True) as agent:
        agent.reading()
        reading = next_reading(agent)
    assert (codes(reading), reading.gpus[0].error, reading.gpus[0].memory_used is not None) == ([None], None, True)


@pytest.mark.parametrize("function", ["nvmlEventSetCreate", "nvmlEventSetWait_v2"])
def test_a_library_that_refuses_reports_none(tmp_path: Path, function: str) -> None:
    script = tmp_path / "script"
    write_script(script, [Gpu()], trouble=[f"fault {function} {nvml.NOT_SUPPORTED}"])
    with Agent(script) as agent:
        agent.reading()
        reading = next_reading(agent)
    assert (codes(reading), reading.gpus[0].error) == ([None], None)


def test_a_gpu_that_refuses_reports_none_and_others_do(tmp_path: Path) -> None:
    script = tmp_path / "script"
    write_script(script, [Gpu(trouble=(f"fault nvmlDeviceRegisterEvents {nvml.NO_PERMISSION}",)), Gpu()])
    with Agent(script) as agent:
        agent.reading()
        assert codes(next_reading(agent)) == [None, []]


@pytest.mark.parametrize("trouble", ["hang", "crash"])
def test_listening_that_hangs_or_crashes_is_given_up(tmp_path: Path, trouble: str) -> None:
    script = tmp_path / "script"
    write_script(script, [Gpu(), Gpu()], trouble=[f"{trouble} nvmlEventSetWait_v2"])
    with Agent(script) as agent:
        agent.reading()

        def fresh() -> Reading | None:
            reading = next_reading(agent)
            return reading if reading.seq >= 3 and all(gpu.delay_s <= 0.5 for gpu in reading.gpus) else None

        late = until(fresh, "a reading without old values")
        assert late is not None
    assert (codes(late), [gpu.error for gpu in late.gpus], late.nvml_error) == ([None, None], [None, None], None)
