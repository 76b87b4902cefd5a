"""Jobs that gpuboard did not start (torchrun, srun, by hand): their ranks on this node, and what they are doing."""

from __future__ import annotations

import os
import socket

from gpuboard.agent import proc
from gpuboard.agent.launch.watch import inspection
from gpuboard.errors import GpuboardError
from gpuboard.launch.stalls.evidence import Inspection
from gpuboard.launch.stalls.inspect import pyspy
from gpuboard.launch.stalls.verdict import Explanation, explain
from gpuboard.launch.stalls.waits import RankStatus
from gpuboard.model.replies import parse

_SAME_JOB = (b"MASTER_ADDR", b"MASTER_PORT", b"TORCHELASTIC_RUN_ID", b"SLURM_JOB_ID")
_RANK = (b"RANK", b"SLURM_PROCID", b"OMPI_COMM_WORLD_RANK")
_SIZE = (b"WORLD_SIZE", b"SLURM_NTASKS", b"OMPI_COMM_WORLD_SIZE")


def explain_process(pid: int) -> Explanation:
    """Return what the job of process ``pid`` is doing, as far as its ranks are on this node and are this user's.

    Raises GpuboardError if the process does not exist or its environment cannot be read.
    """
    import msgspec.json  # late: only here

    environ = _environ(pid)
    ranks = _ranks(pid, environ)
    program = pyspy()
    raw = inspection.inspect(
        [(rank, process, "") for rank, process in sorted(ranks.items())], str(program) if program else None
    )
    found = parse(msgspec.json.encode(raw), Inspection)
    host = socket.gethostname()
    statuses = [RankStatus(rank, host, rank, joined=True, quiet_s=0.0) for rank in sorted(ranks)]
    explained = explain(statuses, {one.rank: one for one in found.ranks})
    size = _first(environ, _SIZE)
    missing = list(explained.missing)
    if size is not None and size > len(ranks):
        missing.append(f"{size - len(ranks)} of {size} ranks are on other nodes, or are another user's: not inspected")
    if not (program and any(one.stack for one in found.ranks)):
        missing.append(_why_no_stacks())
    return msgspec.structs.replace(explained, missing=missing)


def _environ(pid: int) -> dict[bytes, bytes]:
    listed = proc.read_environ(pid)
    if listed is None:
        gone = proc.read_process(pid) is None
        why = "there is no such process" if gone else "it is another user's process: run this as that user or as root"
        raise GpuboardError(f"cannot inspect pid {pid}: {why}")
    pairs = (entry.partition(b"=") for entry in listed)
    return {name: value for name, _, value in pairs}


def _ranks(pid: int, environ: dict[bytes, bytes]) -> dict[int, int]:
    """Return rank → pid of all ranks of the same job on this node; processes below a rank have its variables too."""
    if _first(environ, _RANK) is None:
        return {0: pid}
    job = [environ.get(name) for name in _SAME_JOB]
    found: dict[int, int] = {}
    members: dict[int, int] = {}  # pid → rank
    for other in sorted(proc.own_pids() if os.geteuid() else proc.pids()):
        variables = proc.read_environ(other) or []
        listed = {name: value for name, _, value in (entry.partition(b"=") for entry in variables)}
        rank = _first(listed, _RANK)
        if rank is not None and [listed.get(name) for name in _SAME_JOB] == job:
            members[other] = rank
    for other, rank in members.items():
        process = proc.read_process(other)
        if process is not None and members.get(process.parent) != rank:
            found.setdefault(rank, other)
    return found


def _first(environ: dict[bytes, bytes], names: tuple[bytes, ...]) -> int | None:
    """Return the first of these variables that is a number."""
    return next((int(environ[name]) for name in names if environ.get(name, b"").isdigit()), None)


def _why_no_stacks() -> str:
    if pyspy() is None:
        return "stacks: py-spy is not installed; pip install py-spy"
    try:
        scope = proc.read("/proc/sys/kernel/yama/ptrace_scope", 16).decode("ascii", "replace").strip()
    except OSError:
        scope = "0"
    if scope != "0" and os.geteuid() != 0:
        return f"stacks: kernel.yama.ptrace_scope is {scope}; run this as root, or start the job with gpuboard launch"
    return "stacks: the processes are not Python, or a container hides them"
