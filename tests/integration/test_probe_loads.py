"""What processes on GPUs use now: SM time from NVML's samples, CPU and host memory of exactly that process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpuboard.model.gpu import Load
from gpuboard.model.reading import Reading
from tests.agent import Agent
from tests.nodes import old_python
from tests.nvml import GIB, NO_PERMISSION, NOT_SUPPORTED, UNKNOWN, Gpu, write_script


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """Return the pids of a shell that waits, and of its child, which computes."""
    words = ["sh", "-c", "sh -c 'while :; do :; done' & echo $!; trap 'kill $!' TERM; wait"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        yield shell.pid, int(shell.stdout.readline())
        shell.terminate()


def loads(reading: Reading) -> dict[int, Load]:
    """Return the loads by pid."""
    return {p.pid: load for gpu in reading.gpus for p, load in zip(gpu.processes or (), gpu.loads, strict=True)}


def percents(reading: Reading) -> list[int | None]:
    return [load.sm_percent for load in loads(reading).values()]


@pytest.mark.parametrize("python", [None, old_python() or "none"])
def test_cpu_and_memory_of_the_process_alone(tmp_path: Path, family: tuple[int, int], python: str | None) -> None:
    if python == "none":
        pytest.skip("needs an older Python")
    script, (shell, child) = tmp_path / "script", family
    gone = 2**22 + 1  # above the kernel's highest pid
    write_script(script, [Gpu(processes=tuple(("compute", pid, GIB) for pid in (shell, child, gone)))])
    with Agent(script, python=python, interval_s=0.5) as agent:
        first = loads(agent.reading())
        assert [load.cpu_percent for load in first.values()] == [None, None, None]  # measured between two readings
        found = loads(agent.reading(when=lambda reading: bool((cpu := loads(reading)[child].cpu_percent) and cpu > 1)))
        if found[shell].cpu_percent != 0.0:  # its own start was in the first interval
            found = loads(agent.reading(when=lambda reading: loads(reading)[shell].cpu_percent == 0.0))
    resident = int(Path(f"/proc/{shell}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert 0.5 < (found[shell].host_memory or 0) / resident < 2  # the kernel counts pages in batches per CPU
    assert found[gone] == Load()


def test_sm_time_is_that_of_the_newest_recent_sample(tmp_path: Path) -> None:
    script, me, parent = tmp_path / "script", os.getpid(), os.getppid()
    both = (("compute", me, GIB), ("compute", parent, GIB))
    write_script(
        script,
        [
            Gpu(processes=both, samples=((me, 10, 1.5), (me, 83, 0.1), (me, 20, 1.0), (parent, 4, 0.2))),
            Gpu(processes=both, samples=((me, 55, 30.0), (parent, 7, 0.1))),  # an old one is not "now"
            Gpu(processes=both, samples=((me, 4_000_000_000, 0.1),)),  # not a percentage
            Gpu(processes=both),  # no sample at all
            Gpu(samples=((me, 9, 0.1),)),  # not in the list of processes
        ],
    )
    with Agent(script) as agent:
        gpus = agent.reading().gpus
    assert [[load.sm_percent for load in gpu.loads] for gpu in gpus] == [[83, 4], [None, 7], [None] * 2, [None] * 2, []]


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN])
def test_sm_time_that_cannot_be_read_is_unknown(tmp_path: Path, code: int) -> None:
    script, me = tmp_path / "script", os.getpid()
    gpu = Gpu(
        used=GIB,
        processes=(("compute", me, GIB),),
        samples=((me, 50, 0.1),),
        trouble=(f"fault nvmlDeviceGetProcessUtilization {code}",),
    )
    write_script(script, [gpu])
    with Agent(script) as agent:
        reading = agent.reading()
    assert (percents(reading), reading.gpus[0].error, reading.gpus[0].memory_used) == ([None], None, GIB)
    assert loads(reading)[me].host_memory


def test_samples_that_take_long_are_read_less_often(tmp_path: Path) -> None:
    """On an H200 they take 2 ms of CPU a GPU: most of a reading."""
    script, me = tmp_path / "script", os.getpid()
    slow = ("slow nvmlDeviceGetProcessUtilization 50",)  # ms: by its share the next would be due after 10 s
    gpu = Gpu(processes=(("compute", me, GIB),), samples=((me, 80, 0.1),), trouble=slow)
    write_script(script, [gpu])
    with Agent(script, interval_s=0.5) as agent:
        first = agent.reading()
        write_script(script, [msgspec.structs.replace(gpu, used=GIB, samples=((me, 60, 0.1),))])
        later = agent.reading(when=lambda reading: reading.gpus[0].memory_used == GIB)
        agent.reading(when=lambda reading: percents(reading) == [60])
    assert percents(first) == [80]
    assert percents(later) == [80] or later.at - first.at >= 5, "read again after 5 s"
