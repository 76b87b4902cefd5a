"""Batch jobs whose scripts call gpuboard, on the test nodes' Slurm, while no node lets anybody in over ssh."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.hosts import USERS, Host, NodeProcess, processes_of
from tests.integration.launch_lab import write_torch
from tests.nvml import Gpu
from tests.slurm import SlurmCluster
from tests.waiting import until

HOME = "/srv/home/alice"
NODES = ("gpu01", "gpu02", "gpu03")
FAKE = f"--device cpu --env PYTHONPATH={HOME}/fake"  # options of a launch: gloo, and a stand-in for torch
ON_GPUS = f"--env PYTHONPATH={HOME}/fake"  # with the fake torch, and all preflight checks of GPUs
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


class Lab:
    """Alice's home, her jobs, and what they leave. ``slurm``: the cluster, for all else."""

    def __init__(self, slurm: SlurmCluster) -> None:
        self.slurm = slurm
        self.login = slurm.nodes["login1"]
        self._count = 0

    def host(self, name: str) -> Host:
        """Return a host of the cluster."""
        return self.slurm.nodes[name]

    def put(self, name: str, text: str) -> None:
        """Write a file of alice's, relative to her home; one that begins with ``#!`` can be run."""
        path = self.slurm.nodes.home("alice") / name
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)
        os.chown(path, USERS["alice"], USERS["alice"])

    def text(self, name: str) -> str:
        """Return a file in alice's home, "" when there is none."""
        path = self.login.path(f"{HOME}/{name}")
        return path.read_text(errors="replace") if path.exists() else ""

    def submit(self, script: str, *options: str) -> Job:
        """Submit a batch script with these options of sbatch."""
        self._count += 1
        name = f"job{self._count}"
        self.put(f"{name}.sh", f"#!/bin/bash\n{script}\n")
        output = [f"--output={HOME}/{name}.out", f"--error={HOME}/{name}.err"]
        return Job(self, self.slurm.submit([*options, *output, f"{name}.sh"]), name)

    def run(self, script: str, *options: str, timeout_s: float = 60.0) -> Job:
        """Submit a batch script and wait for the end of its job."""
        job = self.submit(script, *options)
        job.wait(timeout_s)
        return job

    def processes(self, names: Sequence[str] = NODES) -> list[NodeProcess]:
        """Return what runs as alice on these nodes."""
        found = processes_of([self.host(name) for name in names])
        return [process for name in names for process in found[name] if process.uid == USERS["alice"]]

    def kill_all(self, name: str) -> None:
        """Kill whatever runs as alice on a node at one stroke: nobody there sees anybody else end."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in self.processes([name]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def claims(self) -> list[str]:
        """Return the names of all claims on the nodes."""
        return sorted(p.name for name in NODES for p in self.host(name).path("/var/tmp").glob("gpuboard.GPU-*"))


class Job:
    """One batch job."""

    def __init__(self, lab: Lab, number: int, name: str) -> None:
        self.lab = lab
        self.number = number
        self._name = name

    @property
    def out(self) -> str:
        """What its script has printed so far."""
        return self.lab.text(f"{self._name}.out")

    @property
    def err(self) -> str:
        """What its script has printed on stderr so far."""
        return self.lab.text(f"{self._name}.err")

    @property
    def state(self) -> str:
        """Slurm's word for what it does."""
        return self.lab.slurm.job(self.number)["JobState"]

    @property
    def code(self) -> int:
        """The exit code of its script."""
        return int(self.lab.slurm.job(self.number)["ExitCode"].partition(":")[0])

    def wait(self, timeout_s: float = 60.0) -> None:
        """Wait for its end."""
        try:
            until(lambda: self.state in _OVER, f"job {self.number} ends", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; out: {self.out} err: {self.err}") from None

    def wait_out(self, words: str, times: int = 1, timeout_s: float = 60.0) -> None:
        """Wait until its script has printed ``words`` so often."""
        try:
            until(lambda: self.out.count(words) >= times or self.state in _OVER, f"{words!r} is printed", timeout_s)
            assert self.out.count(words) >= times, f"it has ended without {words!r}"
        except AssertionError as error:
            raise AssertionError(f"{error}; out: {self.out} err: {self.err}") from None

    def cancel(self, *options: str) -> None:
        """Cancel it, or send it what the options of scancel say."""
        self.lab.slurm.run(["scancel", *options, str(self.number)], check=True)


@contextmanager
def opened(slurm: SlurmCluster) -> Iterator[Lab]:
    """Yield a lab: eight GPUs a node, the stand-in for torch in alice's home, and every sshd of the nodes stopped."""
    for name in NODES:
        slurm.nodes[name].script([Gpu() for _ in range(8)])
        slurm.nodes[name].pause_sshd()
    lab = Lab(slurm)
    fake = write_torch(slurm.nodes.home("alice") / "fake")
    for path in (fake, *fake.rglob("*")):
        os.chown(path, USERS["alice"], USERS["alice"])
    yield lab
    for name in NODES:
        slurm.nodes[name].resume_sshd()
