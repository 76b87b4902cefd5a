"""What ends next: leases and the scheduler's jobs with a time limit (pure, with a memo per node)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpuboard.board.scene import Scene
from gpuboard.model.request import slots
from gpuboard.model.snapshot import GpuView, JobView, judged
from gpuboard.model.units import seconds_of

_UNLIMITED_S = 366 * 86400.0  # a job without a limit is shown as a lease that ends in a year or later


_Slot = tuple[int, int | None]  # a GPU's index, and the number of a MIG device on it


class UpcomingEnd(msgspec.Struct, frozen=True, gc=False):
    """A lease or a job, and when it ends."""

    until: float  # epoch seconds
    user: str
    name: str  # "k3f0"; "job 123"
    gpus: int
    place: str  # "gpu01:0-3", "gpu01:0-7 +1": the first node, and how many more
    mine: bool = False


class _Job(msgspec.Struct, gc=False):
    """A job on one node."""

    job: JobView
    slots: list[_Slot]


class Upcoming:
    """Finds what ends next; only nodes that were judged again are searched again for jobs."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[Sequence[GpuView], dict[str, _Job]]] = {}

    def of(self, scene: Scene, now: float) -> list[UpcomingEnd]:
        """Return what ends, the first one first. ``now``: epoch seconds."""
        found = []
        leased = set()
        for lease in scene.leases.leases:
            if lease.job is not None:
                leased.add(lease.job)
            until = seconds_of(lease.until)
            if until - now < _UNLIMITED_S:
                nodes: dict[str, list[_Slot]] = {}
                for gpu in lease.gpus:
                    nodes.setdefault(gpu.node, []).extend([] if gpu.index is None else [(gpu.index, gpu.mig)])
                place = _place(nodes)
                found.append(UpcomingEnd(until, lease.owner, lease.id, len(lease.gpus), place, lease.mine))
        on: dict[str, dict[str, list[_Slot]]] = {}
        views: dict[str, JobView] = {}
        kept = {}
        for node in scene.snapshot.nodes:
            memo = self._jobs.get(node.name)
            gpus = judged(node)
            if memo is None or memo[0] is not gpus:
                memo = (gpus, _jobs_on(gpus))
            kept[node.name] = memo
            for name, job in memo[1].items():
                views.setdefault(name, job.job)
                on.setdefault(name, {})[node.name] = job.slots
        self._jobs = kept
        for name, job_view in views.items():
            if name not in leased and job_view.until is not None:
                places = on[name]
                count = sum(len(found) for found in places.values())
                end = seconds_of(job_view.until)
                found.append(UpcomingEnd(end, job_view.user, f"job {name}", count, _place(places)))
        return sorted(found, key=lambda one: (one.until, one.name))


def _jobs_on(gpus: Sequence[GpuView]) -> dict[str, _Job]:
    jobs: dict[str, _Job] = {}
    for gpu in gpus:
        for number, unit in enumerate(gpu.mig) if gpu.mig else [(None, gpu)]:
            for job in unit.jobs:
                jobs.setdefault(job.id, _Job(job, [])).slots.append((gpu.index, number))
    return jobs


def _place(nodes: dict[str, list[_Slot]]) -> str:
    """Return ``gpu01:0-3``, ``gpu01:0:5`` for a MIG device; of several nodes the first one and how many more."""
    first = next(iter(nodes), "")
    more = f" +{len(nodes) - 1}" if len(nodes) > 1 else ""
    words = slots(nodes[first]) if nodes else ""
    return f"{first}{':' * bool(words)}{words}{more}"
