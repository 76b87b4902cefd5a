"""The keys of the filter of processes (pure). Rows are a process and the caller's uid on its node, None: not known."""

from __future__ import annotations

from gpuboard.board.filter.language import Language
from gpuboard.board.filter.matchers import named, person, place, quantity, word
from gpuboard.cluster.snapshot.processes import Running
from gpuboard.model.units import parse_duration, parse_number, parse_size

Uid = int | None


def is_mine(one: Running, uid: Uid) -> bool:
    """Return whether a process is the caller's."""
    return one.uid is not None and one.uid == uid


def _flags(one: Running, uid: Uid) -> tuple[str, ...]:
    return ("rogue",) if one.rogue else ()


PROCESSES: Language[[Running, Uid]] = Language(
    {
        "user": person(lambda one, uid: (one.user,), is_mine),
        "node": place(lambda one, uid: (one.node,)),
        "pid": quantity("a process id", lambda one, uid: one.pid, parse_number, "pid:4711"),
        "mem": quantity("GPU memory", lambda one, uid: one.memory, parse_size, "mem>40G", sign=">"),
        "sm": quantity("SM time in percent", lambda one, uid: one.sm_percent, parse_number, "sm<10", sign="<"),
        "cpu": quantity("percent of one CPU", lambda one, uid: one.cpu_percent, parse_number, "cpu>100", sign=">"),
        "host": quantity("host memory", lambda one, uid: one.host_memory, parse_size, "host>100G", sign=">"),
        "time": quantity("how long it has been running", lambda one, uid: one.runtime_s, parse_duration, "time>8h",
                         sign=">"),
        "job": named("a job's id, job:123", lambda one, uid: (one.job,)),
        "lease": named("a lease's id, lease:k3f9", lambda one, uid: (one.lease,)),
        "container": named("a part of its name, container:pytorch", lambda one, uid: (one.container,), cost=2,
                           begins=False),
        "flag": word(("rogue",), _flags, hint="rogue"),
        "command": named("a part of it, command:train.py", lambda one, uid: (one.command,), cost=3, begins=False,
                         offered=False),
    },
    lambda one, uid: (one.user, one.node, str(one.pid), one.command, one.job, one.lease, one.container,
                      *_flags(one, uid)),
    {"owner": "user", "who": "user", "nodes": "node", "memory": "mem", "note": "flag", "cmd": "command"},
)  # fmt: skip
