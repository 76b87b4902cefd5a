"""A transport through a job that is requeued, with programs in the place of scontrol and srun."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuboard.config import Settings
from gpuboard.transport.base import TransportError
from gpuboard.transport.slurm.srun import SrunTransport

JOB = """JobId=123 JobName=x
   JobState=RUNNING Reason=None
     Nodes={node} CPU_IDs=0-1 Mem=0 GRES=gpu:h100:{count}(IDX:0-{last})
"""
Requeue = Callable[[str, int], None]


class Ended:
    """Keeps the errors of channels."""

    def __init__(self) -> None:
        self.errors: queue.SimpleQueue[TransportError] = queue.SimpleQueue()

    def connected(self) -> None:
        """Nothing to do."""

    def received(self, data: bytes) -> None:
        """Ignore output."""

    def ended(self, error: TransportError) -> None:
        self.errors.put(error)


@pytest.fixture
def requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Requeue:
    """Set the node and the number of GPUs of job 123; each step fails with its own command line as the message."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, line in (("scontrol", f"cat {tmp_path}/job"), ("srun", 'echo "srun: error: $3 $4 $5 $6" >&2; exit 1')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)

    def run(node: str, count: int) -> None:
        (tmp_path / "job").write_text(JOB.format(node=node, count=count, last=count - 1))

    return run


def test_steps_are_addressed_with_the_nodes_and_gpus_of_a_requeued_job(requeue: Requeue) -> None:
    transport, handler = SrunTransport(Settings(), "123"), Ended()

    def step(node: str) -> str:
        transport.open(node, "node", handler)
        return str(handler.errors.get(timeout=60))

    requeue("gpu01", 8)
    assert "--nodelist=gpu01 --gpus=8" in step("gpu01")
    requeue("gpu01", 4)
    assert "--nodelist=gpu01 --gpus=4" in step("gpu01")
    assert "its nodes: gpu01" in step("gpu05")
    requeue("gpu05", 2)
    assert "--nodelist=gpu05 --gpus=2" in step("gpu05")
