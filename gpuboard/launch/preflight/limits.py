"""Preflight checks of a node's limits (pure): shared memory, open files, processes, locked memory."""

from __future__ import annotations

from collections.abc import Mapping

from gpuboard.launch.plan import Device
from gpuboard.launch.preflight.check import Check, CheckStatus
from gpuboard.model.rankmap import RankMap
from gpuboard.model.replies import LaunchFacts, TaskLimit
from gpuboard.model.text import clean
from gpuboard.model.units import format_size

_MIB = 2**20
SHM_PER_RANK = 32 * _MIB  # for NCCL's shared-memory transport (docs.nvidia.com/deeplearning/nccl, troubleshooting)
SHM_COMFORT = 1024 * _MIB  # with less, DataLoader workers that share large tensors die of SIGBUS
NOFILE_MIN = 256
MORE_FILES = "raise the limit before launch: ulimit -n 4096, or for good in /etc/security/limits.conf on that node"
NOFILE_COMFORT = 1024
MEMLOCK = 64 * _MIB  # what InfiniBand registers for the buffers of a rank
TASKS_PER_RANK = 8  # a rank in DDP on gloo has 13 threads on two cores (measured), some of them before this check
TASKS_COMFORT = 128  # with 8 DataLoader workers and their threads


def limit_checks(rank_map: RankMap, facts: Mapping[str, LaunchFacts], device: Device) -> list[Check]:
    """Return the check of each known limit of each node."""
    checks = []
    ranks = {node.name: node.local_world_size for node in rank_map.nodes}
    for node, seen in facts.items():
        if seen.shm_free is not None:
            checks.append(shm_check(node, seen.shm_free, ranks[node], device))
        if seen.nofile is None or seen.nofile < 0 or seen.nofile >= NOFILE_COMFORT:
            limit = "unlimited" if seen.nofile is None or seen.nofile < 0 else seen.nofile
            checks.append(Check("open files", node, "ok", f"limit {limit}"))
        else:
            status: CheckStatus = "fail" if seen.nofile < NOFILE_MIN else "warn"
            words, cause = f"limit {seen.nofile} (ulimit -n)", "sockets and DataLoader workers need more"
            checks.append(Check("open files", node, status, words, cause, MORE_FILES))
        checks.append(_processes(node, seen.tasks, ranks[node]))
        fabric = any(interface.startswith("ib") for interface in seen.addresses)  # other networks register no memory
        if fabric and len(ranks) > 1:
            checks.append(_memlock(node, seen.memlock))
    return checks


def shm_check(node: str, free: int, ranks: int, device: Device) -> Check:
    """Return whether /dev/shm has room for NCCL and DataLoader workers."""
    words = f"/dev/shm has {format_size(free) if free >= 2**30 else f'{free / _MIB:.1f} MiB'} free"
    remedy = "delete files there, or start the container with a larger --shm-size"
    if device == "cuda" and free < SHM_PER_RANK * ranks:
        return Check("/dev/shm", node, "fail", words, f"NCCL needs {SHM_PER_RANK // _MIB} MiB per rank", remedy)
    if free < SHM_COMFORT:
        return Check("/dev/shm", node, "warn", words, "DataLoader workers may die of SIGBUS", remedy)
    return Check("/dev/shm", node, "ok", words)


def _processes(node: str, tasks: TaskLimit | None, ranks: int) -> Check:
    if tasks is None:
        return Check("processes", node, "ok", "no limit that ranks could reach")
    words = f"{tasks.free} of {tasks.limit} processes and threads left ({clean(tasks.source)})"
    if tasks.free >= TASKS_COMFORT * ranks:
        return Check("processes", node, "ok", words)
    status: CheckStatus = "fail" if tasks.free < TASKS_PER_RANK * ranks else "warn"
    cause = f"{ranks} ranks and their DataLoader workers start about {TASKS_COMFORT} each"
    return Check("processes", node, status, words, cause, _more_tasks(tasks.source))


def _memlock(node: str, limit: int | None) -> Check:
    if limit is None or not 0 <= limit < MEMLOCK:
        return Check("locked memory", node, "ok", "unlimited" if limit is None or limit < 0 else format_size(limit))
    remedy = "raise the limit: ulimit -l unlimited, or /etc/security/limits.conf"
    words = f"limit {limit // 1024} KiB"
    return Check("locked memory", node, "warn", words, "InfiniBand cannot register buffers", remedy)


def _more_tasks(source: str) -> str:
    if source == "ulimit -u":
        return "raise the limit before launch: ulimit -u 16384, or for good in /etc/security/limits.conf on that node"
    return "start the container or the job with a higher limit of processes (--pids-limit)"
