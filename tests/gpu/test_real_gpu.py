"""On a machine with NVIDIA GPUs: what gpuboard says against what nvidia-smi says, and a lease on a real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agent import Agent
from tests.waiting import read_line

pytestmark = pytest.mark.skipif(
    not Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU on this machine"
)
MIB = 2**20


def smi(fields: str) -> list[list[str]]:
    """Return what nvidia-smi says of each GPU."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [[word.strip() for word in line.split(",")] for line in text.splitlines()]


def environ(home: Path) -> dict[str, str]:
    """Return the variables of a user with this home."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("GPUBOARD_", "XDG_"))} | {"HOME": str(home)}


def gpuboard(home: Path, *args: str) -> Any:
    """Run gpuboard with a home of its own; return the JSON it printed."""
    env = environ(home)
    done = subprocess.run(
        [sys.executable, "-m", "gpuboard", *args], env=env, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_static_facts_are_those_of_nvidia_smi(tmp_path: Path) -> None:
    [node] = gpuboard(tmp_path, "status", "--json")["nodes"]
    assert node["error"] is None
    said = smi("index,uuid,name,pci.bus_id,memory.total,driver_version")
    assert [
        [str(g["index"]), g["uuid"], g["name"], g["pci_bus_id"], str(g["memory_total"] // MIB), node["driver"]]
        for g in node["gpus"]
    ] == said


def test_readings_are_near_those_of_nvidia_smi(tmp_path: Path) -> None:
    [node] = gpuboard(tmp_path, "status", "--json")["nodes"]
    for gpu, (used, temperature, power) in zip(
        node["gpus"], smi("memory.used,temperature.gpu,power.draw"), strict=True
    ):
        assert abs(gpu["memory_used"] / MIB - float(used)) < 1024  # without reserved memory; others may be at work
        assert abs(gpu["temperature"] - float(temperature)) <= 10
        assert gpu["power"] is None or abs(gpu["power"] - float(power)) < 300


def test_listening_for_xid_errors_disturbs_no_reading(tmp_path: Path) -> None:
    env = environ(tmp_path)
    command = [sys.executable, "-m", "gpuboard", "status", "--watch", "1", "--json"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as watch:
        last = [json.loads(read_line(watch)) for _ in range(4)][-1]
        watch.terminate()
    [node] = last["nodes"]
    assert [(gpu["error"], gpu["delay_s"] < 2, gpu["memory_used"] is None) for gpu in node["gpus"]] == [
        (None, True, False) for _ in node["gpus"]
    ]
    assert all(xid["code"] > 0 for gpu in node["gpus"] for xid in gpu["xids"] or ())


# What nvidia-ml-py itself finds of each GPU: whether GPM and PCIe throughput are supported, and its active NVLinks.
SUPPORTED = """
import json
import pynvml as n
n.nvmlInit()
def answer(call, *args):
    try:
        return call(*args)
    except n.NVMLError:
        return None
found = []
for k in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(k)
    mig = (answer(n.nvmlDeviceGetMigMode, h) or [0])[0] == 1
    gpm = answer(n.nvmlGpmQueryDeviceSupport, h)
    sample = answer(lambda: n.nvmlGpmSampleGet(h, n.nvmlGpmSampleAlloc()))
    links = [link for link in range(n.NVML_NVLINK_MAX_LINKS) if answer(n.nvmlDeviceGetNvLinkState, h, link)]
    found.append({
        "gpm": not mig and gpm is not None and bool(gpm.isSupportedDevice) and sample is not None,
        "pcie": not mig and answer(n.nvmlDeviceGetPcieThroughput, h, 0) is not None,
        "links": [] if mig else links,
    })
print(json.dumps(found))
"""


def supported() -> list[dict[str, Any]]:
    command = [sys.executable, "-c", SUPPORTED]
    found: list[dict[str, Any]] = json.loads(
        subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    )
    return found


def test_activity_is_measured_of_exactly_the_gpus_with_gpm() -> None:
    with Agent(None, interval_s=1.0) as agent:
        agent.reading(when=lambda reading: reading.seq >= 4)
        reading = agent.reading()
    for gpu, real in zip(reading.gpus, supported(), strict=True):
        assert gpu.error is None and gpu.sensors is not None
        percents = (gpu.sensors.sm_activity, gpu.sensors.sm_occupancy, gpu.sensors.tensor_activity)
        assert [value is not None for value in percents] == [real["gpm"]] * 3
        assert all(0 <= value <= 100 for value in percents if value is not None)
        assert gpu.delay_s < 2


def test_throughput_of_the_gpu_looked_at_is_within_its_links() -> None:
    for k, real in enumerate(supported()):
        with Agent(None, interval_s=1.0) as agent:
            agent.reading()
            assert agent.static is not None
            fact = agent.static.gpus[k]
            assert agent.call("look", uuid=fact.uuid) == {}
            first = agent.reading().seq
            gpu = agent.reading(when=lambda reading, first=first: reading.seq >= first + 3).gpus[k]  # type: ignore[misc]
        read = gpu.sensors
        assert gpu.error is None and read is not None
        assert (read.pcie_sent is not None, read.pcie_received is not None) == (real["pcie"] or real["gpm"],) * 2
        lanes = 16e9 * (fact.pcie_width_max or 16)  # more than any generation carries
        assert all(value < lanes for value in (read.pcie_sent, read.pcie_received) if value is not None)
        assert (read.nvlink_sent is None) or (read.nvlink_sent <= (read.nvlink_max or 2**50))
        if real["links"]:
            assert read.nvlink_max is not None and read.nvlink_max >= 10**9 * len(real["links"])


def test_a_free_gpu_can_be_reserved_and_released(tmp_path: Path) -> None:
    [node] = gpuboard(tmp_path, "status", "--json")["nodes"]
    if not any(gpu["state"] == "free" for gpu in node["gpus"]):
        pytest.skip("no GPU is free")
    asked = ("allocate", "--n", "1", "--detach", "--for", "2m", "--format", "json")
    lease = gpuboard(tmp_path, *asked)["lease"]
    try:
        [node] = gpuboard(tmp_path, "status", "--json")["nodes"]
        [held] = [gpu for gpu in node["gpus"] if lease["id"] in gpu["leases"]]
        assert (held["state"], held["uuid"]) == ("reserved", lease["gpus"][0]["uuid"])
    finally:
        subprocess.run([sys.executable, "-m", "gpuboard", "release", lease["id"]], check=True, timeout=90)
