"""Agents in the user's Slurm job: each is a step of the job on its node, started by `srun`, without ssh.

Observed with Slurm 22.05, in part documented in srun(1):

* A step gets the job's GPUs on its node only with exactly that number as ``--gpus``. Without a number it inherits the
  job's request: with ``--gpus=4`` a step on one node cannot satisfy it, with ``--gpus-per-task`` it is one GPU.
  ``--gres=gpu:3`` is refused where the nodes of the job have different numbers.
* ``--unbuffered`` would give the agent a terminal, which changes bytes. Without it whole lines pass unchanged.
* When srun ends, for any reason, the step's stdin ends, and so the agent; when the agent ends, so does srun.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from gpuboard.model.units import parse_duration
from gpuboard.nodesets import listed
from gpuboard.transport import bundle
from gpuboard.transport.base import Handler, TransportError
from gpuboard.transport.command import run
from gpuboard.transport.process import ChildChannel, Exit
from gpuboard.transport.slurm.srun_errors import (
    ending,
    explain_end,
    explain_no_nodes,
    explain_over,
    explain_refusal,
    gpus_by_nodes,
)
from gpuboard.transport.spawn import SLURM_SETUP, spawn

if TYPE_CHECKING:
    from gpuboard.config import Settings

# srun takes a step's size from the variables of another step (SLURM_GPUS, SLURM_NTASKS, …), and Slurm refuses it: they
# are removed. Variables for configuration and authentication stay, and the restart count, which srun does not set.
_SLURM_VARIABLES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_")
_SLURM_KEPT = SLURM_SETUP | {"SLURM_RESTART_COUNT"}
_FAILED_S = 2.0  # Slurm's last refusal counts this long for all nodes of a job


class SrunTransport:
    """Opens agents in one job: ``123``, or ``123+1`` for a component of a heterogeneous one."""

    def __init__(self, settings: Settings, job: str) -> None:
        self._python = settings.python
        self._connect_s = parse_duration(settings.connect_timeout)
        self._job = job
        self._lock = threading.Lock()
        self._querying = threading.Lock()  # held during a query to Slurm: open and close must not wait for it
        self._gpus: dict[str, int] | None = None  # how many the job has on each of its nodes; None: to be queried
        self._failed: tuple[float, TransportError] | None = None  # time and error of the last failed query
        self._channels: list[ChildChannel] = []

    def open(self, host: str, role: str, handler: Handler, command: str | None = None) -> ChildChannel:
        """Start an agent, or ``command``, on ``host``, a node of the job under its name for Slurm."""
        # One timeout for the step's start and its agent's first output: twice that of a connection.
        channel = ChildChannel(handler, partial(self._explain, host), first_byte_s=2 * self._connect_s)
        with self._lock:
            self._channels = [c for c in self._channels if not c.over] + [channel]
        if command is None:
            channel.write(bundle.bundle(role))
        line = command or bundle.command_line(self._python)
        if role == "node":  # `scancel --signal` is for what runs in the job, and goes to all processes of all steps
            line = f"trap '' USR1 USR2; {line}"
        threading.Thread(target=self._start, args=(host, channel, line), name=f"srun-{host}", daemon=True).start()
        return channel

    def close(self) -> None:
        """End every step at once."""
        with self._lock:
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def _start(self, host: str, channel: ChildChannel, line: str) -> None:
        try:
            before = step(self._job, host, self._count(host), self._connect_s)
            if not channel.over:
                channel.start(spawn([*before, "sh", "-c", line], slurm_environ(os.environ)))
        except TransportError as error:
            channel.fail(error)
        except OSError as error:
            channel.fail(TransportError("exited", f"srun cannot be started: {error}"))

    def _count(self, host: str) -> int:
        """Return how many GPUs the job has on ``host``, as queried for all its nodes. Raises TransportError."""
        with self._querying:
            if self._failed and time.monotonic() - self._failed[0] < _FAILED_S:
                raise self._failed[1]
            gpus = self._gpus
            if gpus is None or host not in gpus:
                try:
                    self._gpus = gpus = counted(self._job, self._connect_s)
                except TransportError as error:
                    self._failed = (time.monotonic(), error)
                    raise
            if host not in gpus:
                has = ", ".join(gpus)
                raise TransportError("no-job", f"{host} is not a node of Slurm job {self._job}", f"its nodes: {has}")
            return gpus[host]

    def _explain(self, host: str, how: Exit) -> TransportError:
        self._gpus = None  # a requeued job may have other nodes and GPUs
        error = explain_end(how, self._job, host, self._python)
        if error.kind == "exited" and self._over():
            # Slurm's message about the step is missing when its processes have ended before.
            return explain_over(self._job, host)
        return error

    def _over(self) -> bool:
        try:
            return ending(show_job(self._job.partition("+")[0], self._connect_s))
        except TransportError as error:
            return error.kind == "no-job"


def counted(job: str, timeout_s: float) -> dict[str, int]:
    """Return how many GPUs a job (``123``, ``123+1``) has on each of its nodes. Raises TransportError."""
    number, _, component = job.partition("+")
    text = show_job(number, timeout_s)
    found = gpus_by_nodes(text, number, component)
    if not found:
        raise explain_no_nodes(text, job)
    try:
        return {name: count for nodes, count in found for name in listed(nodes)}
    except ValueError as error:
        raise TransportError("exited", f"scontrol: {error}") from None


def step(job: str, host: str, gpus: int, timeout_s: float, *, binds: bool = True) -> list[str]:
    """Return the start of a command line that runs the rest in a step of ``job`` on ``host``, which has ``gpus`` GPUs.

    srun fails after ``timeout_s`` where Slurm cannot start a step. ``binds``: see :func:`binds_tasks`.
    Raises TransportError where there is no srun.
    """
    number, _, component = job.partition("+")
    return [
        program("srun"),
        f"--jobid={number}",
        *([f"--het-group={component}"] if component else []),
        "--overlap",  # other steps of the job use its resources
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        f"--gpus={gpus}" if gpus else "--gres=none",
        "--mem=0",  # all of the job's memory on the node
        *(["--cpu-bind=none"] if binds else []),  # else all ranks would share the one core of the step's task
        "--mpi=none",
        "--chdir=/",  # the program changes to its own folder
        "--kill-on-bad-exit=0",
        f"--immediate={max(1, round(timeout_s))}",  # else srun retries forever in a suspended job
        "--job-name=gpuboard",
    ]


def binds_tasks(timeout_s: float) -> bool:
    """Return whether Slurm binds tasks to cores; True where that is unknown. Raises TransportError without scontrol.

    Where it does not, srun warns about --cpu-bind even with --quiet (slurm_verify_cpu_bind, which searches TaskPlugin
    for "affinity").
    """
    ran = run([program("scontrol"), "show", "config"], slurm_environ(os.environ), timeout_s)
    found = re.search(r"^TaskPlugin\s*= (\S+)", ran.out, re.MULTILINE)
    return found is None or "affinity" in found[1]


def show_job(job: str, timeout_s: float) -> str:
    """Return the output of `scontrol show job -d` for a job. Raises TransportError."""
    ran = run([program("scontrol"), "show", "job", "-d", job], slurm_environ(os.environ), timeout_s)
    if ran.ok:
        return ran.out
    error = explain_refusal(ran.err.encode(), job)
    if ran.ended or error.kind != "exited":
        raise error
    words = f"Slurm's controller did not respond within {timeout_s:.0f} s"
    raise TransportError("unreachable", words, "see `scontrol ping`")


def program(name: str) -> str:
    """Return the path of a Slurm command. Raises TransportError where it is not installed."""
    import shutil  # 5 ms: only here

    path = shutil.which(name)
    if path is None:
        raise TransportError("exited", f"`{name}` is not on PATH here", "load the site's Slurm module, or set PATH")
    return path


def slurm_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables that describe a job or a step."""
    return {k: v for k, v in environ.items() if not k.startswith(_SLURM_VARIABLES) or k in _SLURM_KEPT}
