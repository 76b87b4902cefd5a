"""The probe against a scripted NVML library: readings equal those of nvidia-ml-py, and failures stay with their GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuboard.model.gpu import GpuReading, GpuStatic, Sensors
from gpuboard.model.reading import Reading, ReadingDelta, applied
from gpuboard.model.state import Facts, Thresholds, judge
from tests import nvml
from tests.agent import Agent, still_there
from tests.nodes import old_python
from tests.nvml import GIB, Gpu, Mig, library, write_script
from tests.nvml.direct import DIRECT
from tests.waiting import Stopwatch, until

HANGS = "NVML hangs: a call on this GPU does not return"
CRASHED = "NVML crashed while it read this GPU"
FREE = ("free", "no process, no reservation")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script"


def direct(script: Path) -> Any:
    """Return what nvidia-ml-py reads with a script."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(library()), "FAKE_NVML": str(script)}
    command = [sys.executable, "-c", DIRECT]
    return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=True).stdout)


def cpu_words(text: str | None) -> list[int]:
    words = [0, 0]
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        for cpu in range(int(first), int(last or first) + 1):
            words[cpu // 64] |= 1 << cpu % 64
    return words


LEVELS = {(0, 1): 0, (0, 2): 10, (0, 3): 20, (1, 2): 30, (1, 3): 40}  # NVML's; the other pairs 50


def levels(k: int) -> tuple[tuple[int, int], ...]:
    """Return (peer, level) of GPU k; NVML gives the same both ways."""
    return tuple((sum(pair) - k, level) for pair, level in LEVELS.items() if k in pair)


def plain(static: GpuStatic, reading: GpuReading) -> dict[str, Any]:
    """Return facts and values of one GPU in one dict, as DIRECT prints them."""
    both: dict[str, Any] = msgspec.to_builtins(static) | msgspec.to_builtins(reading)
    both["processes"] = [[p.pid, p.type, p.memory] for p in reading.processes or []]
    both["affinity"] = cpu_words(static.cpus)
    return both


def uuids(readings: Sequence[GpuReading]) -> list[str]:
    return [reading.uuid for reading in readings]


def test_a_start_imports_nothing_that_takes_as_long_as_the_rest(script: Path, tmp_path: Path) -> None:
    write_script(script, [Gpu(processes=(("compute", os.getpid(), GIB),))])
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -X importtime "$@" 2>{tmp_path}/imported\n')
    python.chmod(0o755)
    with Agent(script, python=str(python)) as agent:
        agent.reading()
        noise = "".join(text["text"] for kind, text in agent.events if kind == "stderr")
    lines = (tmp_path / "imported").read_text() + noise
    imported = {line.rpartition("|")[2].strip() for line in lines.splitlines() if line.startswith("import time:")}
    assert {"gpuboard.agent.nvml.monitor", "pynvml", "_json"} <= imported
    assert not imported & {"re", "enum", "json", "signal", "string", "threading", "importlib.machinery"}


@pytest.mark.parametrize("python", [None, "/usr/bin/python3", old_python() or "none"])
def test_equals_what_nvidia_ml_py_reads(script: Path, python: str | None) -> None:
    if python is not None and not Path(python).exists():
        pytest.skip("needs an older Python" if python == "none" else f"needs {python}")
    me = os.getpid()
    write_script(
        script,
        [
            Gpu(
                used=7 * GIB,
                utilization=93,
                temperature=71,
                power=512345,
                processes=(("compute", me, 7 * GIB),),
                numa=0,
                cpus="0-15,32-47",
                levels=levels(0),
            ),
            Gpu(
                name="NVIDIA A100-SXM4-40GB",
                total=40 * GIB,
                compute_mode=3,
                pcie=(1, 8, 4, 16),
                ecc=5,
                remap=(1, 0),
                numa=1,
                cpus="3",
                levels=levels(1),
            ),
            Gpu(
                processes=(("graphics", me, 1), ("mps", 1, 2 * GIB)),
                numa=1,
                cpus="16-31,96-127",
                levels=levels(2),
                throttle=0xC4,
            ),
            Gpu(
                reserved=0,
                remap=(0, 1),
                recovery=1,
                throttle=0x28,
                power_limit=300000,
                numa=0,
                cpus="0-127",
                levels=levels(3),
            ),
        ],
        driver="550.54.15",
        cuda=12040,
    )
    expected = direct(script)
    with Agent(script, python=python) as agent:
        reading = agent.reading()
        static = agent.static
        assert agent.events == []
    assert static is not None
    assert (static.driver, static.cuda, static.source) == (expected["driver"], "12.4", "nvml")
    ours = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}  # NVIDIA's best-effort scores
    for row in expected["gpus"]:
        row["pci"] = {uuid: ours[level] for uuid, level in row["pci"].items()}
    seen = [plain(fact, values) for fact, values in zip(static.gpus, reading.gpus, strict=True)]
    assert [{key: row[key] for key in expected["gpus"][0]} for row in seen] == expected["gpus"]
    assert [(g.throttle, g.recovery_action) for g in reading.gpus] == [
        ([], "none"),
        ([], "none"),
        (["hw_thermal", "hw_power_brake", "sw_power_cap"], "none"),
        (["hw_slowdown", "sw_thermal"], "GPU reset"),
    ]
    assert reading.gpus[0].sensors == Sensors(
        performance_state=0, sm_clock=345, sm_clock_max=1980, memory_clock=345, encoder=0, decoder=0
    )
    assert (reading.nvml_error, reading.memory_total is not None) == (None, True)


def test_nvlinks_are_counted_a_pair_directly_and_through_a_switch(script: Path) -> None:
    gpus = write_script(
        script,
        [
            Gpu(links=("1", "1", "2", "down")),
            Gpu(links=("0", "0")),
            Gpu(links=("0",)),
            Gpu(links=("switch",) * 18),
            Gpu(links=("hidden-switch",) * 12),
            Gpu(),
        ],
    )
    with Agent(script) as agent:
        agent.reading()
    assert agent.static is not None
    number = {gpu.uuid: k for k, gpu in enumerate(gpus)}
    links = [{number[uuid]: count for uuid, count in fact.links.items()} for fact in agent.static.gpus]
    assert links == [{1: 2, 2: 1}, {0: 2}, {0: 1}, {4: 12}, {3: 12}, {}]


@pytest.mark.parametrize("code", [nvml.LOST, nvml.UNKNOWN, nvml.NO_PERMISSION, nvml.TIMEOUT, nvml.NOT_SUPPORTED])
@pytest.mark.parametrize(
    "function",
    [
        "*",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetUUID",
    ],
)
def test_one_failing_gpu_hides_no_other_and_is_never_readable_as_free(script: Path, function: str, code: int) -> None:
    write_script(script, [Gpu(), Gpu(trouble=(f"fault {function} {code}",)), Gpu(utilization=50)])
    with Agent(script) as agent:
        reading = agent.reading()
    assert reading.nvml_error is None
    first, bad, last = reading.gpus
    for good in (first, last):
        assert (good.error, good.processes, good.compute_mode) == (None, [], 0)
        assert good.delay_s < 3.5  # the first reading waits no longer
    assert bad.error is not None or None in {bad.memory_used, bad.compute_mode} or bad.processes is None
    assert bad.lost == (code == nvml.LOST)


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPerformanceState"]
)
def test_an_unknown_error_of_a_sensor_is_a_failing_gpu_and_one_without_the_sensor_is_well(
    script: Path, function: str
) -> None:
    codes = (nvml.UNKNOWN, nvml.NOT_SUPPORTED)
    write_script(script, [Gpu(trouble=(f"fault {function} {code}",)) for code in codes])
    with Agent(script) as agent:
        reading = agent.reading()
    assert [gpu.error for gpu in reading.gpus] == ["Unknown Error", None]


@pytest.mark.parametrize("function", ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeMode"])
def test_a_failing_gpu_still_reports_what_breaks_it(script: Path, function: str) -> None:
    fails = (f"fault {function} {nvml.UNKNOWN}",)
    write_script(script, [Gpu(recovery=1, trouble=fails), Gpu(remap=(0, 1), trouble=fails)])
    with Agent(script) as agent:
        reset, remap = agent.reading().gpus
    assert (reset.error, reset.recovery_action) == ("Unknown Error", "GPU reset")
    assert (remap.error, remap.remap_failed) == ("Unknown Error", True)


def test_mig_devices_are_known_once_the_memory_of_their_gpu_can_be_read(script: Path) -> None:
    fails = (f"fault nvmlDeviceGetMemoryInfo_v2 {nvml.UNKNOWN}",)
    write_script(script, [Gpu(mig=(Mig("MIG-a"),), trouble=fails)])
    with Agent(script, interval_s=0.2) as agent:
        agent.reading(when=lambda reading: reading.gpus[0].error == "Unknown Error")
        assert agent.static is not None
        assert agent.static.gpus[0].mig == []  # in MIG mode
        write_script(script, [Gpu(mig=(Mig("MIG-a"),))])
        agent.reading(when=lambda reading: bool(reading.gpus[0].mig))
        assert [device.memory_total for device in agent.static.gpus[0].mig or ()] == [40 * GIB]
        write_script(script, [Gpu(mig=(Mig("MIG-a"),), trouble=fails)])
        agent.reading(when=lambda reading: reading.gpus[0].error == "Unknown Error")
        assert [device.memory_total for device in agent.static.gpus[0].mig or ()] == [40 * GIB]


def test_failures_of_what_the_state_does_not_need_leave_only_that_unknown(script: Path) -> None:
    sensors = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetUtilizationRates")
    functions = (
        "nvmlDeviceGetPowerUsage", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetName",
    )  # fmt: skip
    trouble = [f"fault {function} {nvml.UNKNOWN}" for function in functions]
    trouble += [f"fault {function} {nvml.TIMEOUT}" for function in sensors]
    write_script(script, [Gpu(trouble=tuple(trouble))])
    with Agent(script) as agent:
        gpu = agent.reading().gpus[0]
    assert (gpu.error, gpu.memory_used, gpu.processes, gpu.compute_mode) == (None, 0, [], 0)
    assert (gpu.temperature, gpu.power, gpu.utilization, gpu.remap_failed, gpu.recovery_action) == (None,) * 5


@pytest.mark.parametrize(
    ("function", "code", "listed"),
    [
        ("nvmlDeviceGetGraphicsRunningProcesses_v3", nvml.NOT_SUPPORTED, True),
        ("nvmlDeviceGetGraphicsRunningProcesses_v3", nvml.NO_PERMISSION, False),
        ("nvmlDeviceGetMPSComputeRunningProcesses_v3", nvml.UNKNOWN, True),
        ("nvmlDeviceGetComputeRunningProcesses_v3", nvml.NOT_SUPPORTED, False),
        ("nvmlDeviceGetComputeRunningProcesses_v3", nvml.NO_PERMISSION, False),
    ],
)
def test_a_list_of_processes_is_whole_or_unknown(script: Path, function: str, code: int, listed: bool) -> None:
    me = os.getpid()
    write_script(script, [Gpu(processes=(("compute", me, GIB),), trouble=(f"fault {function} {code}",))])
    with Agent(script) as agent:
        gpu = agent.reading().gpus[0]
    seen = None if gpu.processes is None else [p.pid for p in gpu.processes]
    assert (gpu.error, seen) == (None, [me] if listed else None)


def test_a_driver_that_fails_as_a_whole_is_reported(script: Path) -> None:
    write_script(script, [Gpu()], trouble=[f"fault nvmlInitWithFlags {nvml.MISMATCH}"])
    with Agent(script) as agent:
        reading = agent.reading()
        assert str(reading.nvml_error).startswith("driver/library version mismatch")
        assert reading.gpus == []
        refused = agent.call("read")
        assert (refused.kind, refused.message) == ("nvml", reading.nvml_error)


def test_a_missing_library_is_reported() -> None:
    with Agent(None) as agent:
        reading = agent.reading()
    assert (reading.nvml_error, reading.gpus) == ("no NVIDIA driver here (libnvidia-ml.so.1 not found)", [])
    assert agent.static is not None
    assert agent.static.gpus == []


def test_an_old_driver_is_read_through_its_older_functions(script: Path) -> None:
    me = os.getpid()
    write_script(
        script,
        [Gpu(used=3 * GIB, remap=None, retired_pending=1, processes=(("compute", me, 3 * GIB), ("graphics", 1, -1)))],
        driver="470.57.02",
    )
    with Agent(script, old=True) as agent:
        gpu = agent.reading().gpus[0]
        assert agent.static is not None
        fact = agent.static.gpus[0]
    assert [(p.pid, p.type, p.memory) for p in gpu.processes or []] == [(me, "compute", 3 * GIB), (1, "graphics", None)]
    assert (gpu.memory_used, fact.memory_total, fact.memory_reserved) == (3 * GIB + 512 * 2**20, 80 * GIB, None)
    assert (gpu.temperature, gpu.remap_pending, gpu.remap_failed, gpu.recovery_action) == (31, True, None, None)


@pytest.mark.parametrize("driver", ["535.43.02", "535.86.10"])
def test_drivers_with_the_long_process_record_lose_no_process(script: Path, driver: str) -> None:
    processes = (("compute", os.getpid(), 1 * GIB), ("compute", 1, 2 * GIB), ("compute", os.getppid(), 3 * GIB))
    write_script(script, [Gpu(processes=processes)], driver=driver, record=32)
    with Agent(script) as agent:
        seen = agent.reading().gpus[0].processes
    assert [("compute", p.pid, p.memory) for p in seen or []] == list(processes)


def test_mig_devices_and_their_processes(script: Path) -> None:
    me = os.getpid()
    parts = (
        Mig("MIG-a", "3g.40gb", 1, 0, 40 * GIB, 5 * GIB),
        Mig("MIG-b", "1g.10gb", 7, 0, 10 * GIB),
    )
    write_script(script, [Gpu(mig=parts, processes=(("compute", me, 5 * GIB, "MIG-a"),)), Gpu(mig=()), Gpu()])
    with Agent(script, interval_s=0.1) as agent:
        reading = agent.reading()
        assert agent.static is not None
        facts = [fact.mig for fact in agent.static.gpus]
        assert facts[1:] == [[], None]
        assert [(m.uuid, m.profile, m.memory_total, m.gpu_instance) for m in facts[0] or []] == [
            ("MIG-a", "3g.40gb", 40 * GIB, 1),
            ("MIG-b", "1g.10gb", 10 * GIB, 7),
        ]
        parent = reading.gpus[0]
        assert [(m.uuid, m.memory_used, [p.pid for p in m.processes or []]) for m in parent.mig] == [
            ("MIG-a", 5 * GIB, [me]),
            ("MIG-b", 0, []),
        ]
        write_script(script, [Gpu(mig=parts[:1]), Gpu(mig=()), Gpu()])
        agent.reading(when=lambda r: len(r.gpus[0].mig) == 1)
        assert [m.uuid for m in agent.static.gpus[0].mig or []] == ["MIG-a"]


def test_a_gpu_whose_mig_mode_changes_is_read_as_it_is(script: Path) -> None:
    write_script(script, [Gpu()])
    with Agent(script, interval_s=0.1) as agent:
        agent.reading()
        write_script(script, [Gpu(mig=(Mig("MIG-a"),))])
        first = agent.reading(when=lambda r: r.gpus[0].utilization is None)
        assert [device.uuid for device in first.gpus[0].mig] == ["MIG-a"]
        write_script(script, [Gpu()])
        agent.reading(when=lambda r: not r.gpus[0].mig)
        write_script(script, [Gpu(trouble=(f"fault nvmlDeviceGetMigMode {nvml.TIMEOUT}",))])
        failed = agent.reading(when=lambda r: r.gpus[0].error is not None)
        later = [agent.reading(when=lambda r, seq=failed.seq + k: r.seq >= seq) for k in range(5)]  # type: ignore[misc]
        assert all(reading.gpus[0].error for reading in later)


def test_a_gpu_whose_mig_mode_is_unknown_is_not_read_as_one_without_mig(script: Path) -> None:
    parts = (Mig("MIG-a"),)
    calls = ("nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount")
    failing = [Gpu(mig=parts, trouble=(f"fault {call} {nvml.TIMEOUT}",)) for call in calls]
    unnamed = Gpu(mig=parts, trouble=(f"fault nvmlDeviceGetName {nvml.LOST}",))
    write_script(script, [*failing, unnamed, Gpu(mig=())])
    with Agent(script, interval_s=0.1) as agent:
        reading = agent.reading()
        assert agent.static is not None
        facts = agent.static.gpus
        assert [gpu.error for gpu in reading.gpus] == ["Timeout", "Timeout", None, None]
        assert [fact.memory_total for fact in facts] == [80 * GIB] * 4
        assert [m.uuid for m in facts[2].mig or []] == ["MIG-a"]
        write_script(script, [*failing, unnamed, Gpu(mig=(Mig("MIG-new"),))])  # facts are read again
        agent.reading(when=lambda r: len(r.gpus[3].mig) == 1)
        write_script(script, [Gpu(mig=parts)] * 4)
        agent.reading(when=lambda r: all(gpu.error is None and gpu.mig for gpu in r.gpus))
        write_script(script, [Gpu(mig=parts, trouble=(f"fault * {nvml.LOST}",))] * 4)
        agent.reading(when=lambda r: all(gpu.lost for gpu in r.gpus))
        assert [[m.uuid for m in fact.mig or []] for fact in agent.static.gpus] == [["MIG-a"]] * 4


def test_mig_devices_that_could_not_be_described_are_asked_for_again(script: Path) -> None:
    parts = (Mig("MIG-a"),)
    unknown = Gpu(mig=parts, trouble=(f"fault nvmlDeviceGetGpuInstanceId {nvml.LOST}",))
    write_script(script, [unknown, Gpu()])
    with Agent(script, interval_s=0.1) as agent:
        assert [gpu.lost for gpu in agent.reading().gpus] == [True, False]
        write_script(script, [Gpu(mig=parts), unknown])
        agent.reading(when=lambda r: [gpu.lost for gpu in r.gpus] == [False, True])
        write_script(script, [Gpu(mig=parts), Gpu(mig=parts)])
        agent.reading(when=lambda r: not any(gpu.lost for gpu in r.gpus))
        assert agent.static is not None
        assert [[m.uuid for m in fact.mig or []] for fact in agent.static.gpus] == [["MIG-a"], ["MIG-a"]]


def test_gpus_that_change_places_take_their_readings_with_them(script: Path) -> None:
    first, second, third = (Gpu(uuid=f"GPU-{k}", temperature=30 + k) for k in range(3))
    write_script(script, [first, second])

    def seen(reading: Reading) -> list[tuple[str, int | None]]:
        return [(gpu.uuid, gpu.temperature) for gpu in reading.gpus]

    with Agent(script, interval_s=0.1) as agent:
        assert seen(agent.reading()) == [("GPU-0", 30), ("GPU-1", 31)]
        for gpus in ([second, first], [second, third], [third], [first, second, third]):
            write_script(script, gpus)
            expected = [(gpu.uuid, gpu.temperature) for gpu in gpus]
            agent.reading(when=lambda r, expected=expected: seen(r) == expected)  # type: ignore[misc]
            assert agent.static is not None
            assert [(gpu.index, gpu.uuid) for gpu in agent.static.gpus] == [(k, g.uuid) for k, g in enumerate(gpus)]


def test_a_hung_gpu_ages_alone_and_comes_back(script: Path) -> None:
    good = [Gpu(temperature=30 + k) for k in range(4)]
    hung = [*good[:2], Gpu(temperature=99, trouble=("hang nvmlDeviceGetUtilizationRates",)), good[3]]
    write_script(script, good)
    with Agent(script, interval_s=0.2) as agent:
        agent.reading()
        write_script(script, hung)
        started = Stopwatch()
        reading = agent.reading(when=lambda r: [g.delay_s == 0 for g in r.gpus] == [True, True, False, True])
        assert started.stop() < 5.0  # sooner than a reading is called stale
        assert (reading.gpus[2].temperature, reading.nvml_error) == (32, None)
        assert [g.error for g in reading.gpus] == [None, None, HANGS, None]
        late_s = reading.gpus[2].delay_s + 0.5
        late = agent.reading(
            when=lambda r: r.gpus[2].delay_s > late_s and {r.gpus[k].delay_s for k in (0, 1, 3)} == {0.0}
        )
        assert late.gpus[2].error == HANGS  # the same words: only the age grows
        write_script(script, good)
        back = agent.reading(when=lambda r: r.gpus[2].delay_s == 0)
        assert [(g.temperature, g.error) for g in back.gpus] == [(30 + k, None) for k in range(4)]


def test_the_reason_of_a_gpu_that_begins_to_hang_is_the_hang(script: Path) -> None:
    write_script(script, [Gpu(), Gpu()])

    def verdicts(reading: Reading) -> list[tuple[str, str]]:
        assert agent.static is not None
        both = zip(agent.static.gpus, reading.gpus, strict=True)
        found = [judge(Facts(static=fact, reading=gpu), Thresholds()) for fact, gpu in both]
        return [(verdict.state, verdict.reason) for verdict in found]

    with Agent(script, interval_s=0.2) as agent:
        assert [state for state, _ in verdicts(agent.reading())] == ["free", "free"]
        write_script(script, [Gpu(), Gpu(trouble=("hang *",))])
        state, reason = verdicts(agent.reading(when=lambda r: r.gpus[1].error is not None))[1]
        assert (state, reason.partition("; ")[0]) == ("unknown", HANGS)
        agent.reading(when=lambda r: verdicts(r)[0] == FREE and r.gpus[1].error is not None)  # the other one is read
        old = agent.reading(when=lambda r: r.gpus[1].delay_s > 5.5)
        age_s = old.gpus[1].delay_s
        assert verdicts(old)[1] == ("unknown", f"{HANGS}; last reading is {age_s:.0f} s old")
        write_script(script, [Gpu(), Gpu()])
        agent.reading(when=lambda r: verdicts(r) == [FREE, FREE])


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group whose processes cannot even be killed: as in a call into the driver that does not return."""
    folder = Path(f"/sys/fs/cgroup/freezer/gpuboard-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs root and the freezer of control groups, version 1")
    yield folder
    (folder / "freezer.state").write_text("THAWED")
    until(lambda: not (folder / "cgroup.procs").read_text(), "its processes have ended")
    folder.rmdir()


@pytest.mark.slow
def test_a_process_that_cannot_be_killed_is_abandoned(script: Path, freezer: Path) -> None:
    good = [Gpu(), Gpu(), Gpu()]
    write_script(script, good)
    with Agent(script, interval_s=0.2) as agent:
        agent.reading()
        (stuck,) = agent.children()
        (freezer / "freezer.state").write_text("FROZEN")
        write_script(script, [Gpu(), Gpu(trouble=("hang *",)), Gpu()], trouble=[f"freezer {freezer}"])
        agent.reading(when=lambda r: r.gpus[1].delay_s > 2 + max(r.gpus[0].delay_s, r.gpus[2].delay_s))
        write_script(script, good)  # the GPU works again, but must not be queried while the old call hangs
        agent.reading(when=lambda r: r.gpus[1].delay_s > 9.0)
        assert len(agent.children()) == 2
        assert stuck in agent.children()
        (freezer / "freezer.state").write_text("THAWED")
        agent.reading(when=lambda r: r.gpus[1].delay_s < 1)
        now = until(lambda: agent.children()[0] if len(agent.children()) == 1 else 0, "one process reads all of them")
        (freezer / "cgroup.procs").write_text(str(now))
        (freezer / "freezer.state").write_text("FROZEN")
        assert agent.end() == 0


@pytest.mark.parametrize(("trouble", "most_s"), [([], 5), (["slow nvmlInitWithFlags 1000"], 8)])
def test_a_gpu_that_hangs_from_the_start_is_shown_and_the_first_reading_is_in_time(
    script: Path, trouble: list[str], most_s: float
) -> None:
    write_script(script, [Gpu(), Gpu(trouble=("hang *",)), Gpu()], trouble=trouble)
    with Agent(script) as agent:
        reading = agent.reading(most_s)  # 2 s, and the start of two interpreters and of NVML twice
        assert agent.static is not None
        assert [fact.index for fact in agent.static.gpus] == [0, 1, 2]
        assert [fact.uuid for fact in agent.static.gpus] == uuids(reading.gpus)
    assert (reading.seq, [bool(g.error) for g in reading.gpus]) == (1, [False, True, False])
    assert "not returned" in str(reading.gpus[1].error)


def test_a_gpu_that_crashes_the_library_hides_no_other(script: Path) -> None:
    write_script(script, [Gpu(), Gpu(trouble=("crash nvmlDeviceGetComputeMode",)), Gpu()])
    with Agent(script) as agent:
        reading = agent.reading()
    assert [g.error for g in reading.gpus] == [None, CRASHED, None]


def test_a_gpu_that_begins_to_crash_the_library_keeps_its_values_and_has_the_error(script: Path) -> None:
    write_script(script, [Gpu(temperature=30), Gpu(temperature=31)])
    with Agent(script, interval_s=0.2) as agent:
        agent.reading()
        write_script(script, [Gpu(temperature=30), Gpu(trouble=("crash nvmlDeviceGetComputeMode",))])
        reading = agent.reading(when=lambda r: r.gpus[1].error is not None)
    assert [(g.temperature, g.error) for g in reading.gpus] == [(30, None), (31, CRASHED)]


def test_a_gpu_that_is_lost_while_we_watch_keeps_its_name(script: Path) -> None:
    (gpu,) = write_script(script, [Gpu(used=GIB)])
    with Agent(script, interval_s=0.1) as agent:
        assert agent.reading().gpus[0].memory_used == GIB
        write_script(script, [Gpu(trouble=(f"fault * {nvml.LOST}",))])
        lost = agent.reading(when=lambda r: r.gpus[0].lost).gpus[0]
        assert (lost.uuid, lost.memory_used, lost.processes) == (gpu.uuid, None, None)
        write_script(script, [Gpu()])
        assert agent.reading(when=lambda r: r.gpus[0].error is None).gpus[0].memory_used == 0


def test_slow_calls_delay_readings_but_lose_nothing(script: Path) -> None:
    write_script(script, [Gpu(), Gpu(temperature=77, trouble=("slow nvmlDeviceGetUtilizationRates 700",))])
    with Agent(script, interval_s=0.2) as agent:
        agent.reading()
        readings = [agent.reading() for _ in range(4)]
    assert {reading.gpus[1].temperature for reading in readings} == {77}
    assert max(reading.gpus[1].delay_s for reading in readings) < 5.0  # or it would be called stale
    assert [reading.nvml_error for reading in readings] == [None] * 4


def test_claims_are_answered_while_nvml_hangs(script: Path) -> None:
    write_script(script, [Gpu()], trouble=["hang nvmlInitWithFlags"])
    with Agent(script) as agent:
        asked = Stopwatch()
        assert agent.call("claims")["error"] is None
        assert asked.stop() < 3.0  # the first reading waits for NVML for 3.5 s


@pytest.mark.parametrize("trouble", ["", "hang *"])
def test_ends_with_its_connection_within_two_seconds_and_leaves_nothing(script: Path, trouble: str) -> None:
    write_script(script, [Gpu(trouble=(trouble,) if trouble else ())])
    with Agent(script, now=not trouble) as agent:
        if trouble:
            agent.message()  # the hello: NVML's process is at work
        else:
            agent.reading()
        children = agent.children()
        assert children
        assert agent.end() == 0
    assert still_there(children) == []


def test_the_nvml_process_ends_with_a_killed_agent_and_holds_no_connection(script: Path) -> None:
    write_script(script, [Gpu(trouble=("hang *",))])
    with Agent(script) as agent:
        agent.message()
        agent.process.send_signal(signal.SIGSTOP)  # it would replace the process that hangs
        (child,) = agent.children()
        until(lambda: "libnvidia-ml" in Path(f"/proc/{child}/maps").read_text(), "it has loaded the library")
        links = {os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")}
        ours = {os.readlink(f"/proc/{agent.process.pid}/fd/{fd}") for fd in (10, 11)}
        assert len(ours) == 2
        assert not links & ours
        agent.process.send_signal(signal.SIGKILL)
        agent.process.wait()
    assert still_there([child]) == []


def test_the_agent_never_loads_nvml_itself(script: Path) -> None:
    write_script(script, [Gpu()])
    with Agent(script) as agent:
        agent.reading()
        assert "libnvidia-ml" not in Path(f"/proc/{agent.process.pid}/maps").read_text()
        assert "libffi" not in Path(f"/proc/{agent.process.pid}/maps").read_text()


def test_ticks_follow_the_client_and_keep_their_interval(script: Path) -> None:
    write_script(script, [Gpu()])
    with Agent(script, interval_s=30, now=False) as agent:
        agent.write(b'{"t":"tick","in_ms":50}\n')
        came = (message for message in iter(agent.message, None) if isinstance(message, Reading))
        assert next(came).seq == 1  # whether NVML has answered by then or not
    with Agent(script, interval_s=0.5) as agent:
        readings = [agent.reading() for _ in range(3)]

        def kept() -> bool:
            readings.append(agent.reading())
            return 0.9 < readings[-1].at - readings[-3].at < 1.1

        until(kept, "two intervals are a second")
        assert [reading.seq for reading in readings] == list(range(1, len(readings) + 1))


def test_read_answers_with_a_reading_that_started_after_the_call(script: Path) -> None:
    write_script(script, [Gpu()])
    with Agent(script) as agent:
        assert agent.reading().gpus[0].memory_used == 0
        for used in (1 * GIB, 2 * GIB, 3 * GIB):
            write_script(script, [Gpu(used=used)])
            agent.write(b'{"t":"call","id":1,"op":"read"}\n')
            reading = agent.reading()
            assert reading.gpus[0].memory_used == used
            reply = agent.message()
            assert msgspec.to_builtins(reply, enc_hook=bytes)["id"] == 1


def test_carriers_are_own_processes_with_the_lease_or_on_the_gpus(script: Path) -> None:
    lease = f"c{os.getpid()}"  # other workers' processes have leases, too
    sleeper = ["sleep", "60"]
    with (
        subprocess.Popen(sleeper, env={**os.environ, "GPUBOARD_LEASE": lease}) as carrier,
        subprocess.Popen(sleeper) as worker,
        subprocess.Popen(sleeper, env={**os.environ, "GPUBOARD_LEASE": "other"}) as stranger,
    ):
        try:
            gpu, _ = write_script(script, [Gpu(processes=(("compute", worker.pid, GIB),)), Gpu()])
            with Agent(script) as agent:
                seen = agent.reading().gpus[0].processes
                found = agent.call("carriers", lease=lease, uuids=[gpu.uuid])["processes"]
        finally:
            for process in (carrier, worker, stranger):
                process.kill()
    assert {(p["pid"], p["name"], p["why"]) for p in found} == {
        (carrier.pid, "sleep", "environment"),
        (worker.pid, "sleep", "gpu"),
    }
    assert [(p.pid, p.user, p.name, p.command) for p in seen or []] == [(worker.pid, "root", "sleep", "sleep 60")]


def test_simulated_gpus_are_marked_and_change_only_with_the_clock() -> None:
    description = {"cluster": "demo-1000-42", "count": 4, "busy": {"2": {"user": "bob", "memory": 3 * GIB}}}
    with Agent(None, simulate=description) as agent:
        reading = agent.reading()
        assert agent.call("read") == {"seq": 2}
    assert agent.static is not None
    assert (agent.static.source, uuids(reading.gpus)) == ("simulated", [f"SIM-demo-1000-42-n1-{k}" for k in range(4)])
    assert [[p.user for p in g.processes or []] for g in reading.gpus] == [[], [], ["bob"], []]
    assert [g.memory_used for g in reading.gpus] == [0, 0, 3 * GIB, 0]


def test_what_is_printed_in_the_agent_travels_as_an_event(script: Path) -> None:
    write_script(script, [Gpu()])
    with Agent(script) as agent:
        agent.reading()
        with open(f"/proc/{agent.process.pid}/fd/1", "w") as noise:
            noise.write("a library says hello\n")
        while not agent.events:
            agent.message()
    assert agent.events == [("stderr", {"text": "a library says hello\n"})]


def test_a_client_that_asks_for_deltas_gets_numbers_until_more_than_those_changes(script: Path) -> None:
    write_script(script, [Gpu(used=2 * GIB, utilization=10), Gpu(utilization=20)])
    with Agent(script, interval_s=0.1, deltas=True) as agent:
        whole = agent.reading()
        write_script(script, [Gpu(used=3 * GIB, utilization=11), Gpu(utilization=20)])
        while True:
            message = agent.message()
            if isinstance(message, Reading):  # also on a busy machine, where values arrive late
                whole = message
            elif isinstance(message, ReadingDelta) and message.gpus[0].utilization == 11:
                break
        assert message.of == whole.seq
        assert [(gpu.uuid, gpu.utilization) for gpu in applied(message, whole).gpus] == [
            (whole.gpus[0].uuid, 11),
            (whole.gpus[1].uuid, 20),
        ]
        assert message.gpus[0].memory_used == 3 * GIB
        write_script(script, [Gpu(used=3 * GIB, processes=(("compute", os.getpid(), GIB),)), Gpu(utilization=20)])
        changed = agent.reading(when=lambda reading: bool(reading.gpus[0].processes))
        assert [process.pid for process in changed.gpus[0].processes or ()] == [os.getpid()]
