"""On a machine with NVIDIA GPUs and a torch with CUDA: programs at work, and launches with NCCL and gloo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent import Agent
from tests.gpu.test_real_gpu import MIB, environ, gpuboard, smi
from tests.waiting import read_line, until


def _has_cuda() -> bool:
    if not Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is None:
        return False
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0


pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not _has_cuda(), reason="no NVIDIA GPU, or no torch with CUDA, on this machine"),
]

HELD = 2 * 2**30  # bytes of one tensor of the worker
WORK = f"""
import sys, threading, torch
held = torch.empty({HELD}, dtype=torch.uint8, device="cuda")
one = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
two = one @ one  # the library's own memory is there from here on
torch.cuda.synchronize()
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
print("ready", flush=True)
while True:
    for _ in range(50):
        two = one @ one
    torch.cuda.synchronize()
"""


@contextmanager
def working() -> Iterator[int]:
    """Run a program that holds memory of the first GPU and multiplies matrices there; its pid."""
    command = [sys.executable, "-c", WORK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert read_line(process) == "ready\n"
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_program_is_found_with_its_memory_and_its_load(tmp_path: Path) -> None:
    with working() as pid:
        command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        said = {int(line.split(",")[0]): float(line.split(",")[1]) for line in text.splitlines()}
        [found] = [one for one in gpuboard(tmp_path, "ps", "--json")["processes"] if one["pid"] == pid]
        assert (found["uid"], found["gpus"][0]["index"]) == (os.getuid(), 0)
        assert found["memory"] / MIB == pytest.approx(said[pid], abs=1)
        assert found["memory"] > HELD
        with Agent(None, interval_s=1.0) as agent:
            gpu = agent.reading(when=lambda reading: (reading.gpus[0].utilization or 0) > 50).gpus[0]
            assert gpu.sensors is not None
        node = gpuboard(tmp_path, "status", "--json")["nodes"][0]
        assert node["gpus"][0]["state"] == "busy"
        asked = [sys.executable, "-m", "gpuboard", "allocate", "--gpus", f"{node['name']}:0"]
        refused = subprocess.run(asked, env=environ(tmp_path), capture_output=True, text=True, timeout=90)
        assert refused.returncode == 4, refused.stderr


def test_activity_of_a_program_is_measured() -> None:
    with working(), Agent(None, interval_s=1.0) as agent:
        if agent.reading(when=lambda reading: reading.seq >= 4).gpus[0].sensors.sm_activity is None:  # type: ignore[union-attr]
            pytest.skip("the GPU has no GPM")
        gpu = agent.reading(when=lambda reading: (reading.gpus[0].sensors.tensor_activity or 0) > 20).gpus[0]  # type: ignore[union-attr]
        assert gpu.sensors is not None
        assert (gpu.sensors.sm_activity or 0) > 50


def launch(home: Path, *args: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run `gpuboard launch --json` on one GPU; return the outcome and what the ranks and gpuboard wrote."""
    env = environ(home)
    command = [sys.executable, "-m", "gpuboard", "launch", "--python", sys.executable, "--json", "--n", "1", *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout), done.stderr


def script(folder: Path, text: str) -> str:
    path = folder / "target.py"
    path.write_text(text)
    return str(path)


def test_a_function_runs_in_an_nccl_process_group(tmp_path: Path) -> None:
    outcome, said = launch(tmp_path, "examples.function_target:main")
    assert outcome["run"]["state"] == "done"
    assert "1 ranks, the sum of their numbers is 0" in said


def test_a_model_is_trained_with_nccl(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples/train_ddp.py"
    _, said = launch(tmp_path, str(example), "--epochs", "3")
    assert said.count("loss") >= 3


GLOO = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1 << 20, device="cuda")
dist.all_reduce(tensor)
dist.broadcast(tensor, 0)
print(dist.get_backend(), tensor.device, int(tensor.sum()), flush=True)
dist.destroy_process_group()
"""


def test_gloo_takes_tensors_of_a_gpu(tmp_path: Path) -> None:
    _, said = launch(tmp_path, script(tmp_path, GLOO))
    assert "gloo cuda:0 1048576" in said


TOO_MUCH = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
held = torch.empty(2**30, device="cuda")
torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
"""
ASSERTION = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
index = torch.tensor([10], device="cuda")
print(torch.zeros(4, device="cuda")[index].cpu())
"""


def test_memory_that_does_not_suffice_is_explained(tmp_path: Path) -> None:
    outcome, said = launch(tmp_path, script(tmp_path, TOO_MUCH), code=1)
    [cause] = [one for one in outcome["run"]["verdicts"] if one["kind"] == "raised"]
    assert cause["rank"] == 0
    assert "CUDA out of memory on cuda:0: asked for" in cause["text"], said
    assert "target.py:6" in cause["text"] + cause["evidence"]
    assert ", this rank 5." in cause["text"]


def test_an_assertion_on_the_gpu_is_explained(tmp_path: Path) -> None:
    outcome, said = launch(tmp_path, script(tmp_path, ASSERTION), code=1)
    [cause] = [one for one in outcome["run"]["verdicts"] if one["kind"] == "raised"]
    assert "device-side assert triggered" in cause["text"], said
    # the GPU itself is in order: nothing of it remains
    until(lambda: smi("utilization.gpu") is not None, "nvidia-smi answers")
    assert gpuboard(tmp_path, "status", "--json")["nodes"][0]["gpus"][0]["state"] == "free"
