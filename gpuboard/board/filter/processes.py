"""The keys of the filter of processes (pure). Rows are a process and the caller's uid on its node, None: not known."""

from __future__ import annotations

from collections.abc import Iterable

from gpuboard.board.filter.language import Key, Language
from gpuboard.board.filter.matchers import ME, nodes, number, one_of, text
from gpuboard.cluster.snapshot.processes import Running
from gpuboard.model.units import parse_duration, parse_number, parse_size

Uid = int | None


def _user(one: Running, uid: Uid) -> tuple[str | None]:
    return (one.user,)


def _node(one: Running, uid: Uid) -> tuple[str]:
    return (one.node,)


def _job(one: Running, uid: Uid) -> tuple[str | None]:
    return (one.job,)


def _lease(one: Running, uid: Uid) -> tuple[str | None]:
    return (one.lease,)


def _container(one: Running, uid: Uid) -> tuple[str | None]:
    return (one.container,)


def _flags(one: Running, uid: Uid) -> tuple[str, ...]:
    return ("rogue",) if one.rogue else ()


def is_mine(one: Running, uid: Uid) -> bool:
    """Return whether a process is the caller's."""
    return one.uid is not None and one.uid == uid


def _texts(one: Running, uid: Uid) -> Iterable[str | None]:
    return (one.user, one.node, str(one.pid), one.command, one.job, one.lease, one.container, *_flags(one, uid))


PROCESSES = Language(
    {
        "user": Key("a person, user:alice; user:me is you", 1, text(_user, begins=True, mine=is_mine), words=(ME,),
                    offers=_user),
        "node": Key("a node or nodeset, node:gpu[01-04]", 2, nodes(_node), offers=_node),
        "pid": Key("a process id, pid:4711", 1, number(lambda one, uid: one.pid, parse_number, "pid:4711")),
        "mem": Key("GPU memory, mem>40G", 1, number(lambda one, uid: one.memory, parse_size, "mem>40G"), sign=">"),
        "sm": Key("SM time in percent, sm<10", 1, number(lambda one, uid: one.sm_percent, parse_number, "sm<10"),
                  sign="<"),
        "cpu": Key("percent of one CPU, cpu>100", 1,
                   number(lambda one, uid: one.cpu_percent, parse_number, "cpu>100"), sign=">"),
        "host": Key("host memory, host>100G", 1,
                    number(lambda one, uid: one.host_memory, parse_size, "host>100G"), sign=">"),
        "time": Key("how long it has been running, time>8h", 1,
                    number(lambda one, uid: one.runtime_s, parse_duration, "time>8h"), sign=">"),
        "job": Key("a job's id, job:123", 1, text(_job, begins=True), offers=_job),
        "lease": Key("a lease's id, lease:k3f9", 1, text(_lease, begins=True), offers=_lease),
        "container": Key("a part of its name, container:pytorch", 2, text(_container), offers=_container),
        "flag": Key("rogue", 1, one_of(("rogue",), _flags), words=("rogue",)),
        "command": Key("a part of it, command:train.py", 3, text(lambda one, uid: (one.command,))),
    },
    _texts,
    {"owner": "user", "who": "user", "nodes": "node", "memory": "mem", "note": "flag", "cmd": "command"},
)  # fmt: skip
