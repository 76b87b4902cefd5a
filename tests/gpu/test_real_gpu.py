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


def gpuboard(home: Path, *args: str) -> Any:
    """Run gpuboard with a home of its own; return the JSON it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GPUBOARD_", "XDG_"))} | {"HOME": str(home)}
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
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GPUBOARD_", "XDG_"))} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-m", "gpuboard", "status", "--watch", "1", "--json"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as watch:
        last = [json.loads(read_line(watch)) for _ in range(4)][-1]
        watch.terminate()
    [node] = last["nodes"]
    assert [(gpu["error"], gpu["delay_s"] < 2, gpu["memory_used"] is None) for gpu in node["gpus"]] == [
        (None, True, False) for _ in node["gpus"]
    ]
    assert all(xid["code"] > 0 for gpu in node["gpus"] for xid in gpu["xids"] or ())


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
