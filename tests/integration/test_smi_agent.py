"""The agent where NVML cannot be loaded: it runs nvidia-smi, rarely, and reports the source and the age of values."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpuboard.agent.proc import COMMAND_LIMIT
from gpuboard.model.reading import Reading
from tests.agent import Agent, still_there
from tests.nodes import old_python
from tests.nvml import MISMATCH, Gpu, write_script
from tests.smi import FakeSmi
from tests.waiting import Stopwatch, until

NO_LIBRARY = 12
BUSY, IDLE = "GPU-5eed0001-0000-4000-8000-000000000001", "GPU-5eed0001-0000-4000-8000-000000000000"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    """nvidia-smi on PATH."""
    fake = FakeSmi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:/usr/bin:/bin")
    return fake


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """An NVML that cannot be loaded."""
    return no_nvml(tmp_path / "script")


def no_nvml(path: Path, code: int = NO_LIBRARY) -> Path:
    write_script(path, [], trouble=[f"fault nvmlInitWithFlags {code}"])
    return path


def test_nvidia_smi_replaces_nvml_and_is_named_as_the_source(script: Path, fake: FakeSmi) -> None:
    fake.says("v13-h100-590")
    with Agent(script) as agent:
        reading = agent.reading()
        assert agent.static is not None
        assert (agent.static.source, agent.static.driver, agent.static.cuda) == ("nvidia-smi", "590.44.01", "13.1")
        assert [(gpu.index, gpu.uuid, gpu.minor) for gpu in agent.static.gpus] == [(0, IDLE, 2), (1, BUSY, 0)]
        assert (reading.nvml_error, reading.claims_error) == (None, None)
        assert [(gpu.uuid, gpu.error, gpu.utilization) for gpu in reading.gpus] == [(IDLE, None, 0), (BUSY, None, 97)]
        assert agent.call("touch", leases=["x"]) == {"alive": [], "lapsed": [], "missing": ["x"], "claims": {}}
        assert agent.events == []
    assert fake.calls() == ["-q -x"]


@pytest.mark.parametrize("python", [old_python()])
def test_it_does_so_under_the_oldest_python(script: Path, fake: FakeSmi, python: str | None) -> None:
    if python is None:
        pytest.skip("needs Python 3.6, 3.7 or 3.8")
    fake.says("v11-v100-470")
    with Agent(script, python=python) as agent:
        assert [gpu.compute_mode for gpu in agent.reading().gpus] == [3, 2]
        assert agent.events == []


def test_processes_are_named_out_of_proc(script: Path, fake: FakeSmi) -> None:
    listing = (Path(__file__).parent.parent / "data/nvidia-smi/v13-h100-590.xml").read_text()
    fake.prints(listing.replace("<pid>4242<", f"<pid>{os.getpid()}<").replace("<pid>99<", "<pid>2147483000<").encode())
    with Agent(script) as agent:
        gpu = agent.reading().gpus[1]
    ours, hidden = gpu.processes or []
    assert [(load.sm_percent, bool(load.host_memory)) for load in gpu.loads] == [(None, True), (None, False)]
    assert (ours.pid, ours.uid, ours.type, ours.memory) == (os.getpid(), os.getuid(), "compute", 65710 * 2**20)
    assert ours.command == Path("/proc/self/cmdline").read_text().replace("\0", " ").strip()[:COMMAND_LIMIT]
    assert (hidden.user, hidden.type) == (None, "graphics")


def test_a_driver_that_nvidia_smi_survives_is_read_through_it(tmp_path: Path, fake: FakeSmi) -> None:
    fake.says("v12-lost-535")
    with Agent(no_nvml(tmp_path / "other", MISMATCH)) as agent:
        reading = agent.reading()
    assert [(gpu.error, gpu.lost) for gpu in reading.gpus] == [(None, False), ("Unknown Error", False), (None, False)]


def test_without_nvidia_smi_the_error_is_nvmls(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Agent(script) as agent:
        assert agent.reading().nvml_error == "no NVIDIA driver here (libnvidia-ml.so.1 not found)"


def test_errors_of_nvidia_smi_are_reported(script: Path, fake: FakeSmi) -> None:
    fake.says("says-no-driver", code=9)
    fake.answers("csv-no-handle")
    (fake.folder / "rows").write_bytes((fake.folder / "listing").read_bytes())
    with Agent(script) as agent:
        error = agent.reading().nvml_error or ""
    assert error.startswith("no NVIDIA driver here (libnvidia-ml.so.1 not found); nvidia-smi: NVIDIA-SMI has failed")


@pytest.mark.parametrize("name", ["v13-gb10-580", "v12-orin-540"])
def test_unified_memory_is_the_hosts(script: Path, fake: FakeSmi, name: str) -> None:
    fake.says(name)
    with Agent(script) as agent:
        reading = agent.reading()
    assert agent.static is not None
    assert [(gpu.memory_shared, gpu.memory_total) for gpu in agent.static.gpus] == [(True, reading.memory_total)]
    assert [(gpu.memory_used, gpu.error) for gpu in reading.gpus] == [(reading.memory_used, None)]


def test_the_only_gpu_that_is_lost_is_shown_as_unknown(script: Path, fake: FakeSmi) -> None:
    fake.says("says-only-gpu-lost", code=6)
    with Agent(script) as agent:
        reading = agent.reading()
    assert reading.nvml_error is None
    assert [gpu.error for gpu in reading.gpus] == ["Unknown Error"]
    assert agent.static is not None
    assert [gpu.name for gpu in agent.static.gpus] == ["GPU that cannot be read"]


def test_xml_that_cannot_be_read_is_asked_for_again_by_queries_without_unknown_fields(
    script: Path, fake: FakeSmi
) -> None:
    fake.prints(b"<nvidia_smi_log><gpu>&bomb;</gpu></nvidia_smi_log>")
    fake.answers("csv-old")
    fake.lacks("memory.reserved", "remapped_rows.pending")
    with Agent(script) as agent:
        first = agent.reading()
        agent.call("read")  # refused after 10 s, which a busy machine may need; what it asked for goes on
        until(lambda: len(fake.calls()) == 8, "the second reading")
    assert [(gpu.memory_used, gpu.processes) for gpu in first.gpus] == [(0, []), (1204 * 2**20, None)]
    words = [call.split(",")[0] for call in fake.calls()]
    query, apps = "--query-gpu=index", "--query-compute-apps=gpu_uuid"
    assert words == ["-q -x", query, query, query, apps, "-q -x", query, apps]  # what a driver lacks it is asked once
    assert "memory.reserved" not in fake.calls()[-2]


def test_it_runs_rarely_and_each_reading_has_the_interval(script: Path, fake: FakeSmi) -> None:
    fake.says("v13-h100-590")
    fake.takes(0.6)
    began = time.time()
    with Agent(script, interval_s=0.2) as agent:
        first = agent.reading(when=lambda reading: reading.nvml_error is None)
        assert 0.5 < first.gpus[0].delay_s < 10
        second = agent.reading(when=lambda _: len(fake.calls()) > 1)
        assert fake.calls() == ["-q -x"] * 2
    assert first.interval_s > 5.9  # ten times what a run takes
    assert first.interval_s < second.at - began < first.interval_s + 20


@pytest.mark.slow
def test_one_that_hangs_is_killed_and_the_last_values_go_on_with_their_age(script: Path, fake: FakeSmi) -> None:
    fake.says("v13-h100-590")
    with Agent(script, interval_s=0.5) as agent:
        agent.reading(when=lambda reading: len(reading.gpus) == 2)
        fake.hangs()
        until(lambda: len(fake.calls()) > 1, "it hangs")
        nvml_process = agent.children()[0]
        sleeping = until(lambda: _children(nvml_process), "nvidia-smi runs")

        def old(reading: Reading) -> bool:
            return reading.gpus[0].delay_s > 12

        late = agent.reading(when=old)
        assert (late.nvml_error, late.gpus[0].utilization) == (None, 0)
        dead = agent.reading(when=lambda reading: reading.nvml_error is not None)
        assert dead.nvml_error == (
            "no NVIDIA driver here (libnvidia-ml.so.1 not found); nvidia-smi: it did not end within 30 s"
        )
        assert still_there(sleeping) == []
        assert dead.gpus[0].delay_s > 30
        fake.hangs(False)
        agent.reading(when=lambda reading: reading.nvml_error is None and reading.gpus[0].delay_s < 5)


@pytest.mark.slow
def test_the_output_of_one_that_lingers_in_its_exit_is_used_and_no_second_one_started(
    script: Path, fake: FakeSmi
) -> None:
    fake.says("v13-h100-590")
    fake.lingers()
    with Agent(script, interval_s=0.2) as agent:
        reading = agent.reading(when=lambda reading: len(reading.gpus) == 2)
        assert reading.nvml_error is None
        late = agent.reading(when=lambda reading: reading.gpus[0].delay_s > 15)
        assert (late.nvml_error, fake.calls()) == (None, ["-q -x"])
        fake.lingers(False)
        agent.reading(when=lambda _: len(fake.calls()) > 1)


def test_it_ends_with_the_agent_also_when_it_hangs(script: Path, fake: FakeSmi) -> None:
    fake.hangs()
    with Agent(script) as agent:
        agent.message()
        below = until(lambda: _children(agent.children()[0]), "nvidia-smi runs")
        started = Stopwatch()
        agent.end()
        assert still_there(below) == []
    assert started.stop() < 2


def test_nvml_is_taken_again_when_a_new_process_can_load_it(script: Path, fake: FakeSmi) -> None:
    fake.says("says-no-driver", code=9)
    with Agent(script, interval_s=0.2) as agent:
        agent.reading(when=lambda reading: reading.nvml_error is not None)
        write_script(script, [Gpu(temperature=55)])
        back = agent.reading(when=lambda reading: reading.nvml_error is None)
        assert agent.static is not None
        assert (agent.static.source, [gpu.temperature for gpu in back.gpus]) == ("nvml", [55])


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
