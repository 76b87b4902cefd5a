"""The filter's keys: for each a hint and how its values are compiled to a predicate (pure)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from gpuboard.board.arrange import age_of
from gpuboard.board.scene import Scene
from gpuboard.errors import UsageError
from gpuboard.model.snapshot import GpuView, NodeView
from gpuboard.model.state import STATES
from gpuboard.model.text import quoted, shown
from gpuboard.model.units import parse_duration, parse_number, parse_size

Predicate = Callable[[NodeView, GpuView | None, Scene], bool]
_NODES_MAX = 4096  # nodes in one nodeset of a filter
NODE_STATES = ("up", "stale", "connecting", "unreachable")
FLAGS = ("rogue", "idle", "overdue", "disputed", "sick", "mig")


class QueryError(UsageError):
    """An invalid or incomplete query: the message, and where the term in question begins."""

    def __init__(self, words: str, position: int) -> None:
        super().__init__(words)
        self.words = words
        self.position = position


class Term(NamedTuple):
    position: int
    negative: bool
    key: str  # "": a plain word
    operator: str
    values: tuple[str, ...]


class Key(NamedTuple):
    hint: str  # its values, with an example
    cost: int
    compile: Callable[[Term], Predicate]


def compile_term(term: Term) -> tuple[int, Predicate]:
    if not term.key:
        return 9, _maybe_not(_word(term.values[0].casefold()), term.negative)
    key = KEYS[term.key]
    return key.cost, key.compile(term)


def _maybe_not(predicate: Predicate, negative: bool) -> Predicate:
    return (lambda node, gpu, scene: not predicate(node, gpu, scene)) if negative else predicate


def _word(word: str) -> Predicate:
    def holds(node: NodeView, gpu: GpuView | None, scene: Scene) -> bool:
        if gpu is None:
            return word in f"{node.name}\0{node.error}\0{node.state}\0{node.driver}".casefold()
        parts = [node.name, gpu.name, gpu.uuid, gpu.state, gpu.reason, *gpu.flags, *gpu.leases]
        for process in gpu.processes or ():
            parts += process.user or "", process.command
        for job in gpu.jobs:
            parts += job.id, job.user
        for lease in scene.leases_on(gpu.uuid):
            parts += lease.owner, lease.purpose
        return word in "\0".join(parts).casefold()

    return holds


def _text(
    values: Callable[[NodeView, GpuView, Scene], Iterable[str | None]], *, begins: bool = False
) -> Callable[[Term], Predicate]:
    """Compile a key with text: a part of it (``begins``: its beginning); with * ? or [ a pattern; with = all of it."""

    def compiled(term: Term) -> Predicate:
        tests = [_text_test(value.casefold(), term.operator, begins) for value in _only_equal(term)]

        def holds(node: NodeView, gpu: GpuView | None, scene: Scene) -> bool:
            texts = [] if gpu is None else [text.casefold() for text in values(node, gpu, scene) if text]
            return any(test(texts) for test in tests)

        return _maybe_not(holds, term.negative)

    return compiled


def _text_test(wanted: str, sign: str, begins: bool) -> Callable[[list[str]], bool]:
    if wanted == "?":
        return lambda texts: not texts
    if sign == "=":
        return lambda texts: wanted in texts
    if any(c in wanted for c in "*?["):
        pattern = wanted if begins else f"*{wanted}*"
        return lambda texts: any(fnmatchcase(text, pattern) for text in texts)
    if begins:
        return lambda texts: any(text.startswith(wanted) for text in texts)
    return lambda texts: any(wanted in text for text in texts)


def _only_equal(term: Term) -> tuple[str, ...]:
    if term.operator not in ":=":
        raise QueryError(f"{term.key} is not a number; write {term.key}:{shown(term.values[0])}", term.position)
    return term.values


_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ":": operator.eq, "=": operator.eq, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip


def _number(
    value_of: Callable[[NodeView, GpuView], float | None], read: Callable[[str], float], example: str
) -> Callable[[Term], Predicate]:
    """Compile a key with a number; ``read`` raises ValueError for bad text. Unknown matches no comparison."""

    def compiled(term: Term) -> Predicate:
        compare = _COMPARE[term.operator]
        wanted: list[float] = []
        unknown = False
        for value in term.values:
            if value in {"?", "unknown"} and term.operator in ":=":
                unknown = True
                continue
            try:
                wanted.append(read(value))
            except ValueError:
                raise QueryError(f"{term.key}{term.operator}{shown(value)}: write {example}", term.position) from None

        def holds(node: NodeView, gpu: GpuView | None, scene: Scene) -> bool:
            value = None if gpu is None else value_of(node, gpu)
            if value is None:
                return unknown and not term.negative
            return any(compare(value, limit) for limit in wanted) is not term.negative

        return holds

    return compiled


def _memory(value_of: Callable[[GpuView], float | None], name: str) -> Callable[[Term], Predicate]:
    """Compile a key with a size, or with a part of the GPU's memory in percent."""

    def percent_of(node: NodeView, gpu: GpuView) -> float | None:
        value = value_of(gpu)
        return None if value is None or not gpu.memory_total else 100 * value / gpu.memory_total

    sizes = _number(lambda node, gpu: value_of(gpu), parse_size, f"a size or a part, {name}>40GiB or {name}>50%")
    parts = _number(percent_of, _percent, f"{name}>50%")
    return lambda term: (parts if all(value.endswith("%") for value in term.values) else sizes)(term)


def _free_memory(gpu: GpuView) -> float | None:
    if gpu.memory_total is None or gpu.memory_used is None:
        return None
    return gpu.memory_total - gpu.memory_used - (gpu.memory_reserved or 0)


def is_nodeset(value: str) -> bool:
    """Return whether a node value is a nodeset."""
    return "@" in value or "[" in value


def _node(term: Term) -> Predicate:
    tests: list[Callable[[str], bool]] = []
    for value in _only_equal(term):
        if is_nodeset(value):
            from gpuboard.nodesets import expand  # 30 ms: only for nodesets

            try:
                names = frozenset(name.casefold() for name in expand(value, _NODES_MAX))
            except UsageError as error:
                raise QueryError(str(error), term.position) from None
            tests.append(lambda name, names=names: name in names)  # type: ignore[misc]
        else:
            test = _text_test(value.casefold(), term.operator, begins=False)
            tests.append(lambda name, test=test: test([name]))  # type: ignore[misc]
    asked: dict[str, bool] = {}

    def holds(node: NodeView, gpu: GpuView | None, scene: Scene) -> bool:
        known = asked.get(node.name)
        if known is None:
            names = {node.name.casefold(), node.name.casefold().split(".")[0]}
            known = asked[node.name] = any(test(name) for test in tests for name in names)
        return known

    return _maybe_not(holds, term.negative)


def _one_of(
    words: tuple[str, ...], values: Callable[[NodeView, GpuView | None], Iterable[str]]
) -> Callable[[Term], Predicate]:
    """Compile a key with fixed values; a prefix suffices."""

    def compiled(term: Term) -> Predicate:
        wanted: set[str] = set()
        for value in _only_equal(term):
            found = {word for word in words if word.startswith(value.casefold())}
            if not found:
                raise QueryError(
                    f"no {term.key} begins with {quoted(value)}; there are {', '.join(words)}", term.position
                )
            wanted |= {value.casefold()} & found or found

        def holds(node: NodeView, gpu: GpuView | None, scene: Scene) -> bool:
            return not wanted.isdisjoint(values(node, gpu))

        return _maybe_not(holds, term.negative)

    return compiled


def _states(gpu: GpuView | None) -> tuple[str, ...]:
    """Return the states of a GPU and of its MIG devices."""
    return ("unknown",) if gpu is None else (gpu.state, *(device.state for device in gpu.mig))


def _models(gpu: GpuView) -> tuple[str, ...]:
    return (gpu.name, *(f"{gpu.name} {device.profile}" for device in gpu.mig))


def _uuids(gpu: GpuView) -> tuple[str, ...]:
    return (gpu.uuid, *(device.uuid for device in gpu.mig))


def _leases(gpu: GpuView) -> list[str]:
    return [*gpu.leases, *(lease for device in gpu.mig for lease in device.leases)]


def _people(gpu: GpuView, scene: Scene) -> list[str | None]:
    """Return the same names as ``users_of``, unordered: that takes half the time."""
    owners: list[str | None] = [lease.owner for uuid in _uuids(gpu) for lease in scene.leases_on(uuid)]
    if gpu.jobs:
        owners += [job.user for job in gpu.jobs]
    if gpu.processes:
        owners += [process.user for process in gpu.processes]
    return owners


def _process_words(gpu: GpuView) -> Iterable[str]:
    return (process.command for process in gpu.processes or ())


def _purposes(gpu: GpuView, scene: Scene) -> Iterable[str]:
    return (lease.purpose for uuid in _uuids(gpu) for lease in scene.leases_on(uuid))


def _jobs(gpu: GpuView) -> list[str | None]:
    return [*(job.id for job in gpu.jobs), *(process.job for process in gpu.processes or ())]


def _watts(text: str) -> float:
    return parse_number(text.lower().removesuffix("w"))


def _percent(text: str) -> float:
    return parse_number(text.removesuffix("%"))


KEYS: Mapping[str, Key] = {
    "state": Key(
        f"one of {', '.join(STATES)}", 1,
        _one_of((*STATES, *NODE_STATES), lambda node, gpu: (
            *_states(gpu), "connecting" if node.connecting else node.state,
        )),
    ),
    "user": Key("a person, user:alice", 5, _text(lambda node, gpu, scene: _people(gpu, scene), begins=True)),
    "node": Key("a node or nodeset, node:gpu[01-04]", 2, _node),
    "gpu": Key("a GPU's index, gpu:0,3", 1, _number(lambda node, gpu: gpu.index, parse_number, "gpu:0,3")),
    "model": Key("a part of the name, model:H100, model:1g.10gb", 3, _text(lambda node, gpu, scene: _models(gpu))),
    "mem": Key("the memory in use, mem>40GiB or mem>50%", 1, _memory(lambda gpu: gpu.memory_used, "mem")),
    "free": Key("the memory free, free>40GiB", 1, _memory(_free_memory, "free")),
    "total": Key("the total memory, total>40GiB", 1, _memory(lambda gpu: gpu.memory_total, "total")),
    "util": Key("a percentage, util<10", 1, _number(lambda node, gpu: gpu.utilization, _percent, "util<10")),
    "temp": Key("degrees Celsius, temp>80", 1, _number(lambda node, gpu: gpu.temperature, parse_number, "temp>80")),
    "power": Key("watts, power>300", 1, _number(lambda node, gpu: gpu.power, _watts, "power>300")),
    "age": Key("how old the reading is, age>5s", 1, _number(age_of, parse_duration, "age>5s")),
    "flag": Key(f"one of {', '.join(FLAGS)}", 1, _one_of(FLAGS, lambda node, gpu: () if gpu is None else gpu.flags)),
    "lease": Key("a lease's id, lease:k3f9", 3, _text(lambda node, gpu, scene: _leases(gpu), begins=True)),
    "job": Key("a job's id, job:123", 3, _text(lambda node, gpu, scene: _jobs(gpu), begins=True)),
    "purpose": Key("a part of it, purpose:nightly", 5, _text(lambda node, gpu, scene: _purposes(gpu, scene))),
    "command": Key("a part of it, command:train.py", 6, _text(lambda node, gpu, scene: _process_words(gpu))),
    "pid": Key("a process id, pid:4242", 6, _text(lambda node, gpu, scene: (str(p.pid) for p in gpu.processes or ()))),
    "uuid": Key("a part of it, uuid:GPU-3f", 3, _text(lambda node, gpu, scene: _uuids(gpu))),
    "reason": Key("a part of it, reason:busy", 4, _text(lambda node, gpu, scene: (gpu.reason,))),
}  # fmt: skip
ALIASES = {
    "index": "gpu", "memory": "mem", "utilization": "util", "temperature": "temp", "owner": "user", "who": "user",
    "name": "model", "cmd": "command", "process": "command", "nodes": "node", "flags": "flag", "host": "node",
}  # fmt: skip
