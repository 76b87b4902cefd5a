"""Agents in a Slurm job of ours: each is a step of the job on its node, started by `srun`. No ssh is needed for that.

Found out with Slurm 22.05 (the pages of srun(1) say some of it):

* A step sees the job's GPUs on its node only when it asks for exactly that number with ``--gpus``: without a number it
  inherits the job's own request, which a step on one node of ``--gpus=4`` cannot meet and which under
  ``--gpus-per-task`` is one GPU; ``--gres=gpu:3`` is refused where the nodes of the job hold different numbers.
* ``--unbuffered`` would give the agent a terminal, which changes bytes. Without it whole lines pass as they are.
* srun's end, by whatever, is the end of the step's stdin, so of the agent; the agent's end is srun's.
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
from gpuboard.transport.process import ChildChannel, Ending
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

# A step that is asked for with the variables of another one takes its size over (SLURM_GPUS, SLURM_NTASKS, …) and is
# refused. Where Slurm's configuration lies, and who we are for it, must stay; steps are not told how often the job was
# restarted.
_SLURM_VARIABLES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_")
_SLURM_KEPT = SLURM_SETUP | {"SLURM_RESTART_COUNT"}
_FAILED_S = 2.0  # so long Slurm's last refusal is the answer for all nodes of a job


class SrunTransport:
    """Opens agents in one job: ``123``, or ``123+1`` for a component of a heterogeneous one."""

    def __init__(self, settings: Settings, job: str) -> None:
        self._python = settings.python
        self._connect_s = parse_duration(settings.connect_timeout)
        self._job = job
        self._lock = threading.Lock()
        self._asking = threading.Lock()  # held while Slurm is asked: not to be waited for by open and close
        self._gpus: dict[str, int] | None = None  # how many the job has on each of its nodes
        self._failed: tuple[float, TransportError] | None = None  # when and why Slurm did not say
        self._channels: list[ChildChannel] = []

    def open(self, host: str, role: str, handler: Handler, command: str | None = None) -> ChildChannel:
        """Start an agent, or ``command``, on ``host``, a node of the job under its name for Slurm."""
        # The step's start and the first words of its agent are one wait: twice the time of a connection.
        channel = ChildChannel(handler, partial(self._explain, host), patience_s=2 * self._connect_s)
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
        """Return how many GPUs the job has on ``host``; Slurm is asked once for all nodes. Raises TransportError."""
        with self._asking:
            if self._failed and time.monotonic() - self._failed[0] < _FAILED_S:
                raise self._failed[1]
            if self._gpus is None:
                try:
                    self._gpus = counted(self._job, self._connect_s)
                except TransportError as error:
                    self._failed = (time.monotonic(), error)
                    raise
            if host not in self._gpus:
                has = ", ".join(self._gpus)
                raise TransportError("no-job", f"{host} is not a node of Slurm job {self._job}", f"its nodes: {has}")
            return self._gpus[host]

    def _explain(self, host: str, how: Ending) -> TransportError:
        error = explain_end(how, self._job, host, self._python)
        if error.kind == "exited" and self._over():
            # Slurm's own word about a step is lost where its processes are gone first.
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
    """Return the command that runs in a step of ``job`` on ``host``, where it has ``gpus`` GPUs, what words follow it.

    It gives up after ``timeout_s`` where Slurm starts no step now. ``binds``: see :func:`binds_tasks`.
    Raises TransportError where there is no srun.
    """
    number, _, component = job.partition("+")
    return [
        program("srun"),
        f"--jobid={number}",
        *([f"--het-group={component}"] if component else []),
        "--overlap",  # what the job has is in use by others of its steps
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        f"--gpus={gpus}" if gpus else "--gres=none",
        "--mem=0",  # of the job's memory on the node, all
        *(["--cpu-bind=none"] if binds else []),  # else all ranks would share the one core of the step's task
        "--mpi=none",
        "--chdir=/",  # what is started goes where it is told
        "--kill-on-bad-exit=0",
        f"--immediate={max(1, round(timeout_s))}",  # else srun tries for ever in a suspended job
        "--job-name=gpuboard",
    ]


def binds_tasks(timeout_s: float) -> bool:
    """Return whether Slurm binds tasks to cores; True where it does not say. Raises TransportError without scontrol.

    srun tells a person, whatever --quiet is said, when it is given words about that in vain
    (slurm_verify_cpu_bind, which looks for "affinity" in TaskPlugin).
    """
    ran = run([program("scontrol"), "show", "config"], slurm_environ(os.environ), timeout_s)
    found = re.search(r"^TaskPlugin\s*= (\S+)", ran.out, re.MULTILINE)
    return found is None or "affinity" in found[1]


def show_job(job: str, timeout_s: float) -> str:
    """Return what `scontrol show job -d` prints of a job. Raises TransportError."""
    ran = run([program("scontrol"), "show", "job", "-d", job], slurm_environ(os.environ), timeout_s)
    if ran.ok:
        return ran.out
    said = explain_refusal(ran.err.encode(), job)
    if ran.ended or said.kind != "exited":
        raise said
    words = f"Slurm's controller has not answered for {timeout_s:.0f} s"
    raise TransportError("unreachable", words, "see `scontrol ping`")


def program(name: str) -> str:
    """Return the path of a Slurm command. Raises TransportError where it is not installed."""
    import shutil  # 5 ms: only here

    path = shutil.which(name)
    if path is None:
        raise TransportError("exited", f"`{name}` is not on PATH here", "load the site's Slurm module, or set PATH")
    return path


def slurm_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without what describes a job or a step."""
    return {k: v for k, v in environ.items() if not k.startswith(_SLURM_VARIABLES) or k in _SLURM_KEPT}
