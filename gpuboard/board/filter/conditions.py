"""The keys of the filter of GPUs: for each a hint and how its values are compiled to a predicate (pure)."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TypeAlias

from gpuboard.board.arrange import age_of, sensor
from gpuboard.board.filter.language import Key, Language
from gpuboard.board.filter.matchers import (
    exactly,
    gpu_index,
    named,
    percent,
    person,
    place,
    quantity,
    size,
    text,
    with_unit,
    word,
)
from gpuboard.board.scene import Scene
from gpuboard.model.gpu import short_model
from gpuboard.model.snapshot import GpuView, JobView, NodeView, free_memory
from gpuboard.model.state import STATES
from gpuboard.model.units import parse_duration

Values: TypeAlias = Callable[[NodeView, GpuView | None, Scene], Iterable[str | None]]
Number: TypeAlias = Callable[[NodeView, GpuView | None, Scene], float | None]
GpuKey: TypeAlias = "Key[[NodeView, GpuView | None, Scene]]"
NODE_STATES = ("up", "stale", "connecting", "unreachable")
FLAGS = ("rogue", "idle", "overdue", "disputed", "sick", "mig")


def _of_gpu(values: Callable[[GpuView, Scene], Iterable[str | None]]) -> Values:
    """Return no values for a node without known GPUs."""
    return lambda node, gpu, scene: () if gpu is None else values(gpu, scene)


def _number_of(value: Callable[[NodeView, GpuView], float | None]) -> Number:
    return lambda node, gpu, scene: None if gpu is None else value(node, gpu)


def _texts(node: NodeView, gpu: GpuView | None, scene: Scene) -> list[str | None]:
    """Return the texts that a plain word is looked for in."""
    if gpu is None:
        return [node.name, node.error, node.state, node.driver]
    parts: list[str | None] = [node.name, gpu.name, gpu.uuid, gpu.state, gpu.reason, *gpu.flags, *_leases(gpu)]
    for process in gpu.processes or ():
        parts += process.user, process.command
    for device in gpu.mig:
        parts += device.profile, device.uuid, device.state, device.reason
    for uuid in _uuids(gpu):
        for lease in scene.leases_on(uuid):
            parts += lease.owner, lease.purpose
    return [*parts, *_jobs(gpu), *(job.user for job in _held_by(gpu))]


def _states(node: NodeView, gpu: GpuView | None, scene: Scene) -> tuple[str, ...]:
    """Return the states of the node, of a GPU and of its MIG devices."""
    of_node = "connecting" if node.connecting else node.state
    return ("unknown", of_node) if gpu is None else (gpu.state, of_node, *(device.state for device in gpu.mig))


def _uuids(gpu: GpuView) -> tuple[str, ...]:
    return (gpu.uuid, *(device.uuid for device in gpu.mig))


def _leases(gpu: GpuView) -> list[str]:
    return [*gpu.leases, *(lease for device in gpu.mig for lease in device.leases)]


def _held_by(gpu: GpuView) -> Iterable[JobView]:
    return [*gpu.jobs, *(job for device in gpu.mig for job in device.jobs)] if gpu.mig else gpu.jobs


def _people(gpu: GpuView, scene: Scene) -> list[str | None]:
    """Return the same names as ``users_of``, unordered, and those of MIG devices: that takes half the time."""
    owners: list[str | None] = [lease.owner for uuid in _uuids(gpu) for lease in scene.leases_on(uuid)]
    owners += [job.user for job in _held_by(gpu)]
    if gpu.processes:
        owners += [process.user for process in gpu.processes]
    return owners


def _is_mine(node: NodeView, gpu: GpuView | None, scene: Scene) -> bool:
    """Return whether a lease, a process or a job on the GPU or its MIG devices is the caller's own."""
    if gpu is None:
        return False
    uid = scene.uids.get(node.name)
    return (
        any(lease.mine for uuid in _uuids(gpu) for lease in scene.leases_on(uuid))
        or any(process.uid == uid for process in gpu.processes or () if uid is not None)
        or any(job.user == own_name() for job in _held_by(gpu))
    )


@lru_cache(maxsize=1)
def own_name() -> str:
    """Return the caller's login name on this machine; "" where the uid has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def _jobs(gpu: GpuView) -> list[str | None]:
    return [*(job.id for job in _held_by(gpu)), *(process.job for process in gpu.processes or ())]


def _memory(value: Callable[[GpuView], float | None], name: str, what: str) -> GpuKey:
    total_of = _number_of(lambda node, gpu: gpu.memory_total)
    return Key(what, 1, size(_number_of(lambda node, gpu: value(gpu)), total_of, name), sign=">")


def _quantity(
    what: str, value: Callable[[NodeView, GpuView], float | None], read: Callable[[str], float], example: str, sign: str
) -> GpuKey:
    return quantity(what, _number_of(value), read, example, sign=sign)


def _part(hint: str, cost: int, values: Callable[[GpuView, Scene], Iterable[str | None]]) -> GpuKey:
    return named(hint, _of_gpu(values), cost=cost, begins=False, offered=False)


def _models(gpu: GpuView, scene: Scene) -> list[str]:
    """Return the names by which a GPU, or in its place its MIG devices, can be found: in full and as they are shown."""
    names = [f"{gpu.name} {device.profile}" for device in gpu.mig] or [gpu.name]
    return [*names, *(short_model(name) for name in names if name)]


def _purposes(gpu: GpuView, scene: Scene) -> Iterable[str]:
    return (lease.purpose for uuid in _uuids(gpu) for lease in scene.leases_on(uuid))


KEYS: Mapping[str, GpuKey] = {
    "state": word((*STATES, *NODE_STATES), _states),
    "user": person(_of_gpu(_people), _is_mine, cost=5),
    "node": place(lambda node, gpu, scene: (node.name,)),
    "gpu": gpu_index(lambda node, gpu, scene: () if gpu is None else (gpu.index,)),
    "model": Key("a part of the name, model:H100, model:1g.10gb", 3, text(_of_gpu(_models)),
                 offers=_of_gpu(lambda gpu, scene: (short_model(gpu.name), *(mig.profile for mig in gpu.mig)))),
    "mem": _memory(lambda gpu: gpu.memory_used, "mem", "the memory in use, mem>40GiB or mem>50%"),
    "free": _memory(free_memory, "free", "the memory free, free>40GiB"),
    "total": _memory(lambda gpu: gpu.memory_total, "total", "the total memory, total>40GiB"),
    "util": _quantity("a percentage", lambda node, gpu: gpu.utilization, percent, "util<10", "<"),
    "sm": _quantity("SMs at work in percent", lambda node, gpu: sensor(gpu, "sm_activity"), percent, "sm<10", "<"),
    "tensor": _quantity("tensor cores at work in percent", lambda node, gpu: sensor(gpu, "tensor_activity"), percent,
                        "tensor<10", "<"),
    "temp": _quantity("degrees Celsius", lambda node, gpu: gpu.temperature, with_unit("°c", "c"), "temp>80", ">"),
    "power": _quantity("watts", lambda node, gpu: gpu.power, with_unit("w"), "power>300", ">"),
    "age": _quantity("how old the reading is", age_of, parse_duration, "age>5s", ">"),
    "flag": word(FLAGS, lambda node, gpu, scene: () if gpu is None else gpu.flags),
    "lease": named("a lease's id, lease:k3f9", _of_gpu(lambda gpu, scene: _leases(gpu)), cost=3),
    "job": named("a job's id, job:123", _of_gpu(lambda gpu, scene: _jobs(gpu)), cost=3),
    "purpose": _part("a part of it, purpose:nightly", 5, _purposes),
    "command": _part("a part of it, command:train.py", 6, lambda gpu, scene: (p.command for p in gpu.processes or ())),
    "pid": exactly("a process id, pid:4242", _of_gpu(lambda gpu, scene: [str(p.pid) for p in gpu.processes or ()]), 6),
    "uuid": _part("a part of it, uuid:GPU-3f", 3, lambda gpu, scene: _uuids(gpu)),
    "reason": _part("a part of it, reason:busy", 4,
                    lambda gpu, scene: (gpu.reason, *(mig.reason for mig in gpu.mig))),
}  # fmt: skip
ALIASES = {
    "index": "gpu", "memory": "mem", "utilization": "util", "temperature": "temp", "owner": "user", "who": "user",
    "name": "model", "cmd": "command", "process": "command", "nodes": "node", "flags": "flag", "host": "node",
}  # fmt: skip
GPUS = Language(KEYS, _texts, ALIASES)
