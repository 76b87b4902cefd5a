"""The keys of the filter of processes (pure). Rows are a process and the scene that it is in."""

from __future__ import annotations

from gpuboard.board.filter.language import Key, Language
from gpuboard.board.filter.matchers import gpu_index, named, percent, person, place, quantity, size, word
from gpuboard.board.scene import Scene
from gpuboard.cluster.snapshot.processes import Running
from gpuboard.model.units import parse_duration, parse_number, parse_size


def is_mine(one: Running, uid: int | None) -> bool:
    """Return whether a process is the caller's. ``uid``: the caller's on its node, None: not known."""
    return one.uid is not None and one.uid == uid


def _total(one: Running, scene: Scene) -> int | None:
    """Return the memory of all GPUs of a process, in bytes."""
    places = [scene.places.get(gpu.uuid) for gpu in one.gpus]
    sizes = [place.gpu.memory_total for place in places if place is not None and place.gpu.memory_total is not None]
    return sum(sizes) if len(sizes) == len(places) else None


def _flags(one: Running, scene: Scene) -> tuple[str, ...]:
    marks = {"rogue": one.rogue, "overdue": one.lease in scene.ended_leases}
    return tuple(flag for flag, shown in marks.items() if shown)


PROCESSES: Language[[Running, Scene]] = Language(
    {
        "user": person(lambda one, scene: (one.user,), lambda one, scene: is_mine(one, scene.uids.get(one.node))),
        "node": place(lambda one, scene: (one.node,)),
        "gpu": gpu_index(lambda one, scene: [gpu.index for gpu in one.gpus]),
        "pid": quantity("a process id", lambda one, scene: one.pid, parse_number, "pid:4711"),
        "mem": Key("GPU memory, mem>40GiB or mem>50%", 1, size(lambda one, scene: one.memory, _total, "mem"), sign=">"),
        "sm": quantity("SM time in percent", lambda one, scene: one.sm_percent, percent, "sm<10", sign="<"),
        "cpu": quantity("percent of one CPU", lambda one, scene: one.cpu_percent, percent, "cpu>100", sign=">"),
        "host": quantity("host memory", lambda one, scene: one.host_memory, parse_size, "host>100G", sign=">"),
        "time": quantity("how long it has been running", lambda one, scene: one.runtime_s, parse_duration, "time>8h",
                         sign=">"),
        "job": named("a job's id, job:123", lambda one, scene: (one.job,)),
        "lease": named("a lease's id, lease:k3f9", lambda one, scene: (one.lease,)),
        "container": named("a part of its name, container:pytorch", lambda one, scene: (one.container,), cost=2,
                           begins=False),
        "flag": word(("rogue", "overdue"), _flags),
        "command": named("a part of it, command:train.py", lambda one, scene: (one.command,), cost=3, begins=False,
                         offered=False),
    },
    lambda one, scene: (one.user, one.node, str(one.pid), one.command, one.job, one.lease, one.container,
                        *_flags(one, scene)),
    {"owner": "user", "who": "user", "nodes": "node", "index": "gpu", "memory": "mem", "note": "flag",
     "cmd": "command"},
)  # fmt: skip
