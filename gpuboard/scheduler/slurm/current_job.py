"""Finds the Slurm job that this process is in: its number, its nodes, and which of them is this one.

SLURM_JOB_ID alone proves nothing: a tmux server or a daemon that was started in a job keeps the variable after the job
has ended, and a shell of `salloc` inside another job has variables of both. Proof is the job's cgroup; where Slurm
makes none, slurmstepd among the ancestors. Without either (a shell of `salloc` on a login node) Slurm is queried once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping

import msgspec

from gpuboard.agent.proc import read_process
from gpuboard.errors import GpuboardError
from gpuboard.nodesets import listed
from gpuboard.scheduler.base import QUERY_S
from gpuboard.transport.base import TransportError

_LIVE = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING"})  # job states of squeue(1)
_ANCESTORS_MAX = 64


class JobNode(msgspec.Struct, frozen=True):
    """A node of a job, and the job as srun takes it: ``123``, or ``123+1`` in a heterogeneous one."""

    name: str
    job: str


class Inside(msgspec.Struct, frozen=True):
    """The job that this process is in."""

    job: str
    nodes: tuple[JobNode, ...]
    here: str | None  # this node, if one of the job's processes started this one; None: a shell elsewhere

    def __str__(self) -> str:
        return f"Slurm job {self.job}"


class Outside(msgspec.Struct, frozen=True):
    """No job; ``stale`` is a message where the environment names one."""

    stale: str = ""


def look(
    env: Mapping[str, str], ask: Callable[[str], str] | None = None, around: Callable[[], Iterable[str]] | None = None
) -> Inside | Outside:
    """Return the job that this process, with the variables ``env``, is in.

    ``ask`` returns the output of `scontrol show job` for a number, and raises TransportError; ``around`` returns this
    process's cgroups and ancestors (see :func:`surroundings`). Raises GpuboardError if only Slurm can decide and does
    not answer: otherwise all GPUs of a node would be taken for the job's.
    """
    number = env.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[0-9]{1,10}", number):
        return Outside()
    if is_child(number, (around or surroundings)()):
        here = env.get("SLURMD_NODENAME", "")
        found = Inside(number, _nodes_of_env(number, env), here)
        if any(node.name == here for node in found.nodes):
            return found
    try:
        text = (ask or _ask)(number)
    except TransportError as error:
        if error.kind == "no-job":
            return Outside(f"SLURM_JOB_ID={number} of this shell names a job that has ended; ignored")
        raise GpuboardError(
            f"SLURM_JOB_ID={number} is set, but Slurm does not confirm that this job is running: {error}; "
            "unset SLURM_JOB_ID to work outside the job"
        ) from None
    return judge(number, text, os.getuid())


def judge(number: str, text: str, uid: int) -> Inside | Outside:
    """Return job ``number`` from the output of `scontrol show job`, if it is running and belongs to ``uid``."""
    nodes: list[JobNode] = []
    for record in text.split("\n\n"):
        ident = re.search(r"^JobId=(\d+)(?: HetJobId=(\d+) HetJobOffset=(\d+))?", record)
        if ident is None or number not in ident.groups()[:2]:
            continue
        state = re.search(r"^ +JobState=(\w+)", record, re.MULTILINE)
        if state is None or state[1] not in _LIVE:
            return Outside(f"SLURM_JOB_ID={number} of this shell names a job that is not running; ignored")
        owner = re.search(r"^ +UserId=[^\n]*\((\d+)\)", record, re.MULTILINE)
        if uid and (owner is None or int(owner[1]) != uid):
            return Outside(f"SLURM_JOB_ID={number} of this shell names another user's job; ignored")
        names = re.search(r"^ +NodeList=(\S+)", record, re.MULTILINE)
        job = f"{ident[2]}+{ident[3]}" if ident[2] else number
        nodes += [JobNode(name, job) for name in _expand(names[1])] if names else []
    if not nodes:
        return Outside(f"SLURM_JOB_ID={number} of this shell names no job with nodes; ignored")
    return Inside(number, _each_once(nodes), None)


def is_child(number: str, around: Iterable[str]) -> bool:
    """Return whether job ``number`` has started this process, by its :func:`surroundings`."""
    mark = re.compile(rf"/job_{number}(/|$)|^slurmstepd: \[{number}(\+\d+)?\.")
    return any(mark.search(text) for text in around)


def surroundings() -> Iterable[str]:
    """Yield the cgroups of this process, then the command lines of its ancestors, the nearest first."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            yield from file.read().splitlines()
        pid = os.getppid()
        for _ in range(_ANCESTORS_MAX):
            with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
                yield file.read().split("\0")[0]
            process = read_process(pid)
            if process is None or process.parent <= 1:
                return
            pid = process.parent
    except OSError:
        return  # hidepid hides other users' processes


def _nodes_of_env(number: str, env: Mapping[str, str]) -> tuple[JobNode, ...]:
    nodes: list[JobNode] = []
    part = 0
    while names := env.get(f"SLURM_JOB_NODELIST_HET_GROUP_{part}"):
        nodes += [JobNode(name, f"{number}+{part}") for name in _expand(names)]
        part += 1
    return _each_once(nodes or [JobNode(name, number) for name in _expand(env.get("SLURM_JOB_NODELIST", ""))])


def _each_once(nodes: Iterable[JobNode]) -> tuple[JobNode, ...]:
    """Return each node once: of two components on one node the first counts, because a step cannot be in both."""
    found: dict[str, JobNode] = {}
    for node in nodes:
        found.setdefault(node.name, node)
    return tuple(found.values())


def _expand(nodes: str) -> list[str]:
    if not nodes or nodes == "(null)":
        return []
    try:
        return list(listed(nodes))
    except ValueError:
        return []  # not a job's variable


def _ask(number: str) -> str:
    from gpuboard.transport.slurm.srun import show_job  # late: the cgroup mostly suffices

    return show_job(number, QUERY_S)
