"""Activity and throughput beyond utilization through the real probe and a scripted NVML library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuboard.model.gpu import GpuReading, Sensors
from gpuboard.model.reading import Reading
from tests import nvml
from tests.agent import Agent
from tests.nodes import old_python
from tests.nvml import Gpu, Mig, write_script
from tests.waiting import until

MIB = 2**20
# SM, occupancy, any tensor, HMMA, IMMA, memory, PCIe sent and received, NVLink received and sent (pynvml's numbers)
GPM = {2: 85.4, 3: 40.6, 5: 61.0, 7: 60.5, 9: float("nan"), 10: 100.3, 20: 1200.5, 21: 300.0, 60: 9000.0, 61: 8000.0}
BASE = Sensors(performance_state=0, sm_clock=345, sm_clock_max=1980, memory_clock=345, encoder=0, decoder=0)


def look(agent: Agent, uuid: str | None) -> None:
    """Have the agent measure rates, and the throughput of one GPU."""
    call = {"t": "call", "id": 7, "op": "look", "args": {"uuid": uuid}}
    agent.write(json.dumps(call).encode() + b"\n")


def near(value: int | None, expected: float) -> bool:
    return value is not None and abs(value - expected) < expected / 4


def sensors(gpu: GpuReading) -> Sensors:
    assert gpu.sensors is not None
    return gpu.sensors


@pytest.mark.parametrize("python", [None, old_python() or "none"])
def test_gpm_is_reported_of_all_gpus_and_throughput_of_the_one_looked_at(tmp_path: Path, python: str | None) -> None:
    if python == "none":
        pytest.skip("needs an older Python")
    script = tmp_path / "script"
    bare = Gpu(links=("switch", "down", "switch"), link_rates=(25_000, 2_000_000, 1_000_000))
    older = replace(bare, name="NVIDIA A100-SXM4-40GB", throughput=(5000, 7000))
    gpus = write_script(
        script,
        [
            replace(bare, gpm=GPM, throughput=(9, 9)),
            older,
            older,
            Gpu(gpm=GPM, mig=(Mig("MIG-0"),)),
            Gpu(gpm=GPM, trouble=(f"fault nvmlGpmSampleGet {nvml.NO_PERMISSION}",)),
            Gpu(gpm={}, throughput=(-1, -1)),
            Gpu(gpm=GPM),
        ],
    )
    seen: dict[str, Sensors] = {}
    with Agent(script, python=python, interval_s=0.5) as agent:

        def measured() -> bool:
            look(agent, gpus[1].uuid)
            seen.update({gpu.uuid: sensors(gpu) for gpu in agent.reading().gpus})
            rates = seen[gpus[1].uuid]
            both = near(rates.nvlink_sent, 2 * 2_048e6) and near(rates.nvlink_received, 2_048e6)
            return both and seen[gpus[0].uuid].sm_activity is not None

        until(measured, "all that can be measured")
        look(agent, gpus[0].uuid)
        last = agent.reading(when=lambda reading: sensors(reading.gpus[0]).nvlink_max is not None).gpus
    first, looked, *others, unlinked = (seen[gpu.uuid] for gpu in gpus)
    assert first == replace(
        BASE, sm_activity=85, sm_occupancy=41, tensor_activity=61, tensor_hmma=61, dram_activity=100,
        pcie_sent=int(1200.5 * MIB), pcie_received=300 * MIB, nvlink_sent=8000 * MIB, nvlink_received=9000 * MIB,
    )  # fmt: skip
    assert replace(looked, nvlink_sent=None, nvlink_received=None) == replace(
        BASE, pcie_sent=5_000_000, pcie_received=7_000_000, nvlink_max=50_000_000_000
    )
    assert others == [BASE] * 4
    assert unlinked == replace(first, nvlink_sent=None, nvlink_received=None)
    assert sensors(last[0]) == replace(first, nvlink_max=50_000_000_000), "GPM takes the place of the counters"
    assert sensors(last[1]) == BASE, "another GPU is looked at now"


def test_readings_on_request_measure_nothing_unless_asked(tmp_path: Path) -> None:
    script = tmp_path / "script"
    write_script(script, [Gpu(gpm=GPM, trouble=("crash nvmlGpmQueryDeviceSupport",))])

    def again(agent: Agent) -> Reading:
        agent.write(b'{"t":"call","id":1,"op":"read","args":{}}\n')
        return agent.reading()

    with Agent(script) as agent:
        agent.reading()
        first = agent.children()
        assert [sensors(again(agent).gpus[0]) for _ in range(2)] == [BASE] * 2
        assert agent.children() == first, "the process that reads NVML has not crashed"
        write_script(script, [Gpu(gpm=GPM)])
        look(agent, None)
        until(lambda: sensors(again(agent).gpus[0]).sm_activity == 85, "the average between two samples")


@pytest.mark.parametrize("old", [False, True])
def test_a_driver_without_gpm_reports_none(tmp_path: Path, old: bool) -> None:
    script = tmp_path / "script"
    trouble = [] if old else [f"fault nvmlGpmSampleAlloc {nvml.NOT_SUPPORTED}"]
    write_script(script, [Gpu(gpm=GPM)], trouble=trouble)
    with Agent(script, old=old, interval_s=0.3) as agent:
        readings = [agent.reading() for _ in range(4)]
    assert [(sensors(one.gpus[0]), one.gpus[0].error) for one in readings] == [(BASE, None)] * 4


@pytest.mark.parametrize("trouble", ["hang", "crash"])
def test_measuring_that_hangs_or_crashes_is_given_up(tmp_path: Path, trouble: str) -> None:
    script = tmp_path / "script"
    gpus = [Gpu(gpm=GPM), Gpu()]
    write_script(script, gpus)
    with Agent(script, interval_s=0.5) as agent:
        agent.reading(when=lambda reading: sensors(reading.gpus[0]).sm_activity == 85)
        first = agent.children()
        write_script(script, gpus, trouble=[f"{trouble} nvmlGpmMetricsGet"])
        until(lambda: agent.reading() is not None and agent.children() not in ([], first), "another NVML process")
        write_script(script, gpus)
        agent.reading(when=lambda reading: sensors(reading.gpus[0]) == BASE)
        later = [agent.reading() for _ in range(3)]
    assert [(reading.nvml_error, [gpu.error for gpu in reading.gpus]) for reading in later] == [(None, [None] * 2)] * 3
    assert [[gpu.sensors for gpu in reading.gpus] for reading in later] == [[BASE] * 2] * 3
