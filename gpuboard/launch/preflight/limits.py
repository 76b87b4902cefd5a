"""Preflight checks of a node's limits (pure): shared memory, open files, processes, locked memory."""

from __future__ import annotations

from collections.abc import Mapping

from gpuboard.launch.plan import Device
from gpuboard.launch.preflight.check import Check, CheckStatus
from gpuboard.model.rankmap import RankMap
from gpuboard.model.replies import LaunchFacts
from gpuboard.model.text import clean
from gpuboard.model.units import format_size

_MIB = 2**20
SHM_PER_RANK = 32 * _MIB  # for NCCL's shared-memory transport (docs.nvidia.com/deeplearning/nccl, troubleshooting)
SHM_COMFORT = 1024 * _MIB  # with less, DataLoader workers that share large tensors die of SIGBUS
NOFILE_MIN = 256
MORE_FILES = "raise the limit before launch: ulimit -n 4096, or for good in /etc/security/limits.conf on that node"
NOFILE_COMFORT = 1024
TASKS_PER_RANK = 8  # a rank in DDP on gloo has 13 threads on two cores (measured), some of them before this check
TASKS_COMFORT = 128  # with 8 DataLoader workers and their threads


def limit_checks(rank_map: RankMap, facts: Mapping[str, LaunchFacts], device: Device) -> list[Check]:
    """Return the limits of each node that are too low for its ranks."""
    checks = []
    ranks = {node.name: node.local_world_size for node in rank_map.nodes}
    for node, seen in facts.items():
        shm, nofile = seen.shm_free, seen.nofile
        words = f"/dev/shm has {format_size(shm)} free"
        remedy = "delete files there, or start the container with a larger --shm-size"
        if shm is not None and device == "cuda" and shm < SHM_PER_RANK * ranks[node]:
            checks.append(
                Check("/dev/shm", node, "fail", words, f"NCCL needs {SHM_PER_RANK // _MIB} MiB per rank", remedy)
            )
        elif shm is not None and shm < SHM_COMFORT:
            checks.append(Check("/dev/shm", node, "warn", words, "DataLoader workers may die of SIGBUS", remedy))
        if nofile is not None and 0 <= nofile < NOFILE_COMFORT:
            status: CheckStatus = "fail" if nofile < NOFILE_MIN else "warn"
            words, cause = f"limit {nofile} (ulimit -n)", "sockets and DataLoader workers need more"
            checks.append(Check("open files", node, status, words, cause, MORE_FILES))
        if (tasks := seen.tasks) is not None and tasks.free < TASKS_COMFORT * ranks[node]:
            status = "fail" if tasks.free < TASKS_PER_RANK * ranks[node] else "warn"
            words = f"{tasks.free} of {tasks.limit} processes and threads left ({clean(tasks.source)})"
            cause = f"{ranks[node]} ranks and their DataLoader workers start about {TASKS_COMFORT} each"
            checks.append(Check("processes", node, status, words, cause, _more_tasks(tasks.source)))
        fabric = any(interface.startswith("ib") for interface in seen.addresses)  # other networks register no memory
        if seen.memlock is not None and 0 <= seen.memlock < 64 * _MIB and fabric and len(ranks) > 1:
            words = f"limit {seen.memlock // 1024} KiB"
            remedy = "raise the limit: ulimit -l unlimited, or /etc/security/limits.conf"
            checks.append(Check("locked memory", node, "warn", words, "InfiniBand cannot register buffers", remedy))
    return checks


def _more_tasks(source: str) -> str:
    if source == "ulimit -u":
        return "raise the limit before launch: ulimit -u 16384, or for good in /etc/security/limits.conf on that node"
    return "start the container or the job with a higher limit of processes (--pids-limit)"
