"""The processes on the GPUs of a whole snapshot, each once, as ``ps --json`` prints them; order and groups (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from gpuboard.cluster.snapshot.views import hides_gpus
from gpuboard.model.request import slots
from gpuboard.model.snapshot import GpuView, NodeView, ProcessView, Snapshot


class OnGpu(msgspec.Struct, frozen=True, gc=False):
    """What a process uses of one GPU."""

    index: int
    uuid: str
    memory: int | None  # bytes
    sm_percent: int | None


class Running(ProcessView, frozen=True, gc=False, kw_only=True):
    """A process with its node and GPUs. ``memory`` is that of all its GPUs, ``sm_percent`` their mean."""

    node: str
    gpus: list[OnGpu]

    @property
    def key(self) -> str:
        """Its identity in the cluster: pids are reused."""
        return f"{self.node}:{self.pid}:{self.started}"


class ProcessList(msgspec.Struct, frozen=True):
    """What ``ps --json`` prints."""

    schema: int
    at: str
    cluster: str
    processes: list[Running]
    unread: list[str] = []  # nodes (``gpu01``) and GPUs (``gpu01:3``) whose processes could not be read


class JobProcesses(NamedTuple):
    """The processes of one run, job or lease."""

    title: str
    processes: list[Running]


def running(nodes: Iterable[NodeView]) -> list[Running]:
    """Return the processes on all GPUs of nodes, as ``on_gpus`` does."""
    return on_gpus((node.name, gpu) for node in nodes for gpu in node.gpus)


def on_gpus(places: Iterable[tuple[str, GpuView]]) -> list[Running]:
    """Return the processes on GPUs with the names of their nodes; by node, GPU and memory."""
    parts: dict[tuple[str, int, float | None], list[tuple[OnGpu, ProcessView]]] = {}
    for node, gpu in places:
        for process in gpu.processes or ():
            part = OnGpu(gpu.index, gpu.uuid, process.memory, process.sm_percent)
            parts.setdefault((node, process.pid, process.started), []).append((part, process))
    found = [_joined(node, used) for (node, _, _), used in parts.items()]
    return sorted(found, key=lambda one: (one.node, one.gpus[0].index, -(one.memory or 0), one.pid))


def _joined(node: str, parts: Sequence[tuple[OnGpu, ProcessView]]) -> Running:
    gpus = [part for part, _ in parts]
    whole = parts[0][1]
    if len(gpus) > 1:
        memory = [gpu.memory for gpu in gpus if gpu.memory is not None]
        percents = [gpu.sm_percent for gpu in gpus if gpu.sm_percent is not None]
        whole = msgspec.structs.replace(
            whole,
            memory=sum(memory) if len(memory) == len(gpus) else None,
            sm_percent=round(sum(percents) / len(percents)) if percents else None,
            rogue=any(process.rogue for _, process in parts),
        )
    return Running(*msgspec.structs.astuple(whole), node=node, gpus=gpus)


def process_key(process: ProcessView) -> str:
    """Return a process's identity on its node: pids are reused."""
    return f"{process.pid}:{process.started}"


def device_numbers(gpu: GpuView) -> dict[str, int]:
    """Return the number of the MIG device of each process that is on one device only, by ``process_key``."""
    found: dict[str, list[int]] = {}
    for number, device in enumerate(gpu.mig):
        for process in device.processes or ():
            found.setdefault(process_key(process), []).append(number)
    return {key: numbers[0] for key, numbers in found.items() if len(numbers) == 1}


def gpus_of(one: Running, nodes: Mapping[str, NodeView]) -> str:
    """Return the GPUs of a process as ``status`` names them: ``0-3,7``; its MIG device: ``2:1``. ``nodes``: by name."""
    node, key = nodes.get(one.node), process_key(one)
    devices = {gpu.uuid: device_numbers(gpu).get(key) for gpu in node.gpus if gpu.mig} if node else {}
    return slots([(gpu.index, devices.get(gpu.uuid)) for gpu in one.gpus])


def ended_leases(nodes: Sequence[NodeView]) -> frozenset[str]:
    """Return the leases that have ended while their owners' processes still run on GPUs that are ``overdue``."""
    late = [gpu for node in nodes for gpu in node.gpus if "overdue" in gpu.flags]
    found = {process.lease for gpu in late for process in gpu.processes or () if process.lease}
    if not found:
        return frozenset()
    return frozenset(found.difference(lease for node in nodes for gpu in node.gpus for lease in _leases_on(gpu)))


def _leases_on(gpu: GpuView) -> Iterable[str]:
    return chain(gpu.leases, *(device.leases for device in gpu.mig))


def note(process: ProcessView, ended: Collection[str]) -> str:
    """Return what is unusual about a process. ``ended``: the ``ended_leases``."""
    if process.rogue:
        return "rogue"
    return "overdue" if process.lease in ended else process.type if process.type != "compute" else ""


def unread(snapshot: Snapshot) -> list[str]:
    """Return the nodes and GPUs whose processes are not in the snapshot."""
    found = []
    for node in snapshot.nodes:
        hidden = [f"{node.name}:{gpu.index}" for gpu in node.gpus if gpu.processes is None]
        whole = hides_gpus(node) or (hidden and len(hidden) == len(node.gpus))
        found += [node.name] if whole else hidden
    return found


class Sort(NamedTuple):
    """An order: what it compares, and whether the largest values come first. Unknown values come last."""

    value: Callable[[Running], Any]
    descending: bool = False


SORTS = {
    "node": Sort(lambda one: (one.node, one.gpus[0].index)),
    "user": Sort(lambda one: one.user),
    "pid": Sort(lambda one: one.pid),
    "memory": Sort(lambda one: one.memory, True),
    "sm": Sort(lambda one: one.sm_percent, True),
    "cpu": Sort(lambda one: one.cpu_percent, True),
    "host": Sort(lambda one: one.host_memory, True),
    "time": Sort(lambda one: one.runtime_s, True),
    "job": Sort(lambda one: one.job),
    "lease": Sort(lambda one: one.lease),
    "container": Sort(lambda one: one.container),
    "command": Sort(lambda one: one.command),
}


def in_order(found: Sequence[Running], key: str, *, reverse: bool = False) -> list[Running]:
    """Return processes in the order ``key`` of ``SORTS``; equal ones stay as they are."""
    value, descending = SORTS[key]
    known = [one for one in found if value(one) is not None]
    missing = [one for one in found if value(one) is None]
    return sorted(known, key=value, reverse=descending != reverse) + missing


def grouped(found: Sequence[Running], runs: Mapping[str, str], ended: Collection[str]) -> list[JobProcesses]:
    """Return processes by run, job or lease, groups in the order of their first process; those of none come last.

    ``runs``: the ids of the caller's own runs by lease; the runs of other users cannot be read.
    ``ended``: the ``ended_leases``.
    """
    groups: dict[str, JobProcesses] = {}
    for one in found:
        title = "no run, job or lease"
        if one.lease is not None and one.lease in runs:
            title = f"run {runs[one.lease]}"
        elif one.job:
            title = f"job {one.job}"
        elif one.lease:  # two users can have leases with the same id
            lease = f"{'ended ' * (one.lease in ended)}lease {one.lease}"
            title = f"{lease} of {one.user or 'a hidden user'}"
        groups.setdefault(title, JobProcesses(title, [])).processes.append(one)
    return sorted(groups.values(), key=lambda group: group.title.startswith("no "))


def sums(found: Sequence[Running]) -> str:
    """Return the number of processes and of their GPUs and nodes: ``3 processes on 2 GPUs of 1 node``."""
    gpus, nodes = {(one.node, gpu.uuid) for one in found for gpu in one.gpus}, {one.node for one in found}
    counts = ((len(found), "process", "es"), (len(gpus), "GPU", "s"), (len(nodes), "node", "s"))
    processes, on, of = (f"{count} {word}{ending * (count != 1)}" for count, word, ending in counts)
    return f"{processes} on {on} of {of}"


def totals(found: Sequence[Running]) -> str:
    """Return the ``sums`` of all processes with the number of their users, if several: ``…, 3 users``.

    An owner that is hidden is not counted: it may be one of the others.
    """
    users = len({one.user for one in found if one.user is not None})
    return sums(found) + (f", {users} users" if users > 1 else "")
