"""Finds and inspects the jobs of this user on nodes, through agents of role ``runs`` (docs/launch-protocol.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError
from gpuboard.launch.runs.remote import NodeRuns, ask_all
from gpuboard.launch.stalls.evidence import Inspection
from gpuboard.launch.stalls.foreign import ForeignJob, NodeJobs, joined
from gpuboard.launch.stalls.inspect import pyspy_for
from gpuboard.model.replies import Done

if TYPE_CHECKING:
    from gpuboard.scheduler.base import Scheduler

_UPLOAD_S = 120.0  # of py-spy, 3.7 MB: also over a slow connection


class FoundJobs(msgspec.Struct, frozen=True):
    """The jobs on the nodes; ``unseen``: what could not be seen and why; ``failed``: by node, why it did not answer."""

    jobs: list[ForeignJob]
    unseen: list[str]
    failed: dict[str, str]


class _Look(msgspec.Struct, frozen=True):
    jobs: NodeJobs
    inspection: Inspection | None = None
    unseen: str = ""


def find_jobs(
    nodes: Sequence[Node], settings: Settings, new_scheduler: Callable[[], Scheduler | None], pid: int | None = None
) -> FoundJobs:
    """Return every distributed job of this user on ``nodes``; ``pid``: only that of this process on the first one.

    Raises GpuboardError for a process that does not exist or is another user's, and where no node answers.
    """
    wanted: dict[str, str] | None = None
    looks: dict[str, _Look] = {}
    failed: dict[str, GpuboardError] = {}
    rest = list(nodes)
    if pid is not None:
        first = rest.pop(0)
        looks, failed = ask_all([first], settings, new_scheduler(), lambda place: _look(place, pid, None))
        if failed:
            raise failed[first.name]
        wanted = looks[first.name].jobs.jobs[0].job
    if rest and wanted != {}:  # a process without any of the variables has no other ranks
        more, failed = ask_all(rest, settings, new_scheduler(), lambda place: _look(place, None, wanted))
        looks |= more
    if not looks:
        raise next(iter(failed.values()))
    inspections = {name: look.inspection for name, look in looks.items() if look.inspection is not None}
    words = {name: str(error).removeprefix(f"{name}: ") for name, error in failed.items()}
    unseen = [look.unseen for look in looks.values() if look.unseen]
    return FoundJobs(joined({name: look.jobs for name, look in looks.items()}, inspections), unseen, words)


def _look(place: NodeRuns, pid: int | None, wanted: dict[str, str] | None) -> _Look:
    found = place.call("jobs", {"pid": pid}, NodeJobs)
    if wanted is not None:
        found = msgspec.structs.replace(found, jobs=[job for job in found.jobs if job.job == wanted])
    pids = [process.pid for job in found.jobs for process in job.ranks]
    if not pids:
        return _Look(found)
    name = place.node.name
    try:
        if not found.pyspy and (program := pyspy_for(place.node)) is not None:
            place.call("py-spy", program, Done, _UPLOAD_S)
        inspection = place.call("inspect", {"ranks": list(enumerate(pids))}, Inspection)
    except GpuboardError as error:
        return _Look(found, None, f"{name}: its processes could not be inspected: {error}")
    return _Look(found, inspection, _why_no_stacks(name, found, inspection))


def _why_no_stacks(node: str, found: NodeJobs, inspection: Inspection) -> str:
    """Return why no stack of a node could be read, "" if any could."""
    if any(one.stack for one in inspection.ranks):
        return ""
    if found.ptrace_scope:
        return (
            f"{node}: stacks: kernel.yama.ptrace_scope is {found.ptrace_scope}; run this as root there, or start the "
            "job with gpuboard launch"
        )
    if inspection.error:
        return f"{node}: stacks: {inspection.error}"
    return f"{node}: stacks: the processes are not Python, a container hides them, or py-spy cannot run there"
