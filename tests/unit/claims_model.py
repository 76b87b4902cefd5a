"""A model checker for the claim protocol: the real generators of claims_protocol over a folder in memory.

Processes run scripts of operations. In every state each of them may take its next step, die (a bounded number of
times), meet a full disk (bounded), or time may pass (a given list of jumps); all orders are explored, depth first,
each state once. A process is deterministic, so what it has been answered so far is its state; where it goes on from
there is computed by running the generator again, and cached.

Reductions, each of which omits only orders with identical effects:

* A step that no other process can see or influence is taken together with the one before: removing and touching one's
  temporary file, the lock when a hostile user holds it, reading and listing files whose only writer (a claim is
  written by its taker alone) is this process or has ended.
* A step that only the passing of time influences, looking at the clock or making a temporary file, is taken at once or
  put off until time has passed: when exactly between two jumps makes no difference. (Who waits for a jump
  that never comes is no way for things to end: the same story without the wait is explored as well.)
* A list holds the names that the protocol asks for and no others.
* Inode numbers read as 0: they are noted in claims for people to read, nothing is decided by them.
* What a taker was answered before it slept is forgotten: the protocol starts over with the attempt's number alone.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any, NamedTuple

from gpuboard.agent.claims import rules, wire

WALL = 1_700_000_000.0
BOOT = "boot"
OWN_LIFE_S = rules.LIFE_S - rules.MARGIN_S

File = tuple[int, float, float, bytes]  # uid, mtime, ctime, data
Files = tuple[tuple[str, File], ...]  # sorted by name


class Script(NamedTuple):
    """What one process does: ``ops`` are take, touch, renew, release. ``holds``: it starts with its lease taken."""

    lease: str
    gpus: tuple[str, ...]
    ops: tuple[str, ...]
    holds: bool = False


class World(NamedTuple):
    """One scenario."""

    scripts: tuple[Script, ...]
    ticks: tuple[float, ...] = ()  # seconds that pass, in this order, at any moment
    deaths: int = 0
    faults: int = 0  # steps that meet a full disk
    hostile_lock: bool = True  # a hostile user holds the lock forever
    attempts: int = 1  # of a taker
    patient: bool = False  # a taker that starts over does so when no other is at it: jitter is longer than an attempt


class Process(NamedTuple):
    """The state of a process. valid_until: its lease was reported as taken and expires then without a heartbeat."""

    node: int  # of Machine; -1: ended
    op: int
    valid_until: float | None
    dead: bool = False
    took: bool = False  # a take of it succeeded
    waits: bool = False  # its next step is put off until time has passed


class State(NamedTuple):
    """The whole world at one moment."""

    files: Files
    processes: tuple[Process, ...]
    passed: int  # ticks that have passed
    deaths: int  # left
    faults: int  # left
    lock: int  # process that holds it; -1: none


class Violation(AssertionError):
    """A property does not hold; the message has the way there."""


class _Node(NamedTuple):
    history: tuple[Any, ...]
    step: tuple[Any, ...] | None  # None: the operation is over
    result: Any
    refused: Any


_FAULT = ("disk full",)
_TIMED = frozenset({"clock", "create"})


class Machine:
    """What processes do next, given what they have been answered: the protocol's code, run and remembered."""

    def __init__(self, protocol: ModuleType, world: World) -> None:
        self._protocol = protocol
        self._world = world
        self.nodes: list[_Node] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._next: dict[tuple[int, Any], int] = {}
        self._of: list[tuple[int, str]] = []

    def start(self, who: int, kind: str) -> int:
        """Return the node at an operation's first step."""
        return self._enter(who, kind, ())

    def answer(self, node: int, value: Any) -> int:
        """Return the node after a step was answered with ``value``."""
        key = (node, value)
        if key not in self._next:
            who, kind = self._of[node]
            self._next[key] = self._enter(who, kind, (*self.nodes[node].history, value))
        return self._next[key]

    def _enter(self, who: int, kind: str, history: tuple[Any, ...]) -> int:
        step, result, refused, slept = self._run(who, kind, history)
        key = (who, kind, len(slept), history[slept[-1] + 1 :] if slept else history)
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(_Node(history, step, result, refused))
            self._of.append((who, kind))
        return self._known[key]

    def _run(self, who: int, kind: str, history: tuple[Any, ...]) -> tuple[Any, Any, Any, list[int]]:
        steps = self._generator(who, kind)
        slept: list[int] = []
        try:
            step = next(steps)
            for number, value in enumerate(history):
                if step[0] == "sleep":
                    slept.append(number)
                if value is _FAULT:
                    step = steps.throw(OSError(errno.ENOSPC, "disk full"))
                else:
                    step = steps.send(list(value) if step[0] == "list" else value)
        except StopIteration as end:
            return None, end.value, None, slept
        except self._protocol.Refuse as refused:
            return None, None, refused, slept
        return step, None, None, slept

    def _generator(self, who: int, kind: str) -> Generator[tuple[Any, ...], Any, Any]:
        script = self._world.scripts[who]
        calls: dict[str, Callable[[], Any]] = {
            "take": lambda: self._protocol.take(
                content(script), list(script.gpus), 9999.0, BOOT, lambda attempt: 1.0, attempts=self._world.attempts
            ),
            "touch": lambda: self._protocol.touch([script.lease], who + 1, BOOT),
            "renew": lambda: self._protocol.renew(script.lease, 9999.0, who + 1, BOOT),
            "release": lambda: self._protocol.release(script.lease, who + 1, BOOT),
            "sweep": lambda: self._protocol.sweep(who + 1, BOOT),
        }
        steps: Generator[tuple[Any, ...], Any, Any] = calls[kind]()
        return steps


def content(script: Script) -> dict[str, Any]:
    """Return what a script's claims say."""
    return {
        "lease": script.lease, "share": None, "holder": None, "nodes": [], "gpus": len(script.gpus), "purpose": "",
        "host": "",
    }  # fmt: skip


def names(script: Script) -> list[str]:
    """Return the names of a script's claims."""
    return [rules.file_name(gpu, script.lease) for gpu in script.gpus]


class Checker:
    """Explores one world."""

    def __init__(self, protocol: ModuleType, world: World) -> None:
        self.world = world
        self.machine = Machine(protocol, world)
        self.states = 0
        # Which takers had got what they wanted, for every way it can end without a death and a full disk.
        self.endings: set[tuple[bool, ...]] = set()
        self._writer = {name: who for who, script in enumerate(world.scripts) for name in names(script)}
        self._judged: dict[tuple[str, File, float], rules.Judged] = {}
        self._live: dict[tuple[Files, int], set[str]] = {}

    def run(self) -> int:
        """Explore everything; return the number of states. Raises Violation."""
        first = self._first()
        parents: dict[State, tuple[State | None, str]] = {first: (None, "")}
        stack = [first]
        at = first
        try:
            while stack:
                at = state = stack.pop()
                moves = self._moves(state)
                if not moves and self._undisturbed(state):
                    self.endings.add(tuple(process.took for process in state.processes))
                for label, successor in moves:
                    if successor not in parents:
                        parents[successor] = (state, label)
                        at = successor
                        self._check(successor)
                        stack.append(successor)
        except Violation as violation:
            raise Violation(f"{violation}\n" + _way(parents, at)) from None
        self.states = len(parents)
        return self.states

    def _undisturbed(self, state: State) -> bool:
        """Tell whether no process has died, met a full disk, or waits for time to pass."""
        whole = (state.deaths, state.faults) == (self.world.deaths, self.world.faults)
        return whole and not any(process.waits and process.node >= 0 for process in state.processes)

    def _first(self) -> State:
        files: dict[str, File] = {}
        processes = []
        for who, script in enumerate(self.world.scripts):
            if script.holds:
                for gpu, name in zip(script.gpus, names(script), strict=True):
                    claim = {**content(script), "uuid": gpu, "up": 0.0, "from": WALL, "until": WALL + 9999.0}
                    files[name] = (who + 1, WALL, WALL, rules.encode({**claim, "boot": BOOT, "took": []}))
            processes.append(Process(self.machine.start(who, script.ops[0]), 0, OWN_LIFE_S if script.holds else None))
        state = State(tuple(sorted(files.items())), tuple(processes), 0, self.world.deaths, self.world.faults, -1)
        for who in range(len(processes)):
            state = self._settle(state, who)
        return state

    def _now(self, state: State) -> float:
        return sum(self.world.ticks[: state.passed])

    def _moves(self, state: State) -> list[tuple[str, State]]:
        found: list[tuple[str, State]] = []
        for who, process in enumerate(state.processes):
            if process.node < 0:
                continue
            step = self.machine.nodes[process.node].step
            assert step is not None  # _settle has gone on to the next operation
            if step[0] in _TIMED and not process.waits:
                now_or_later = [(f"{who} {_words(step)}", self._settle(self._step(state, who, step), who))]
                if state.passed < len(self.world.ticks):
                    now_or_later.append((f"{who} waits", _with(state, who, process._replace(waits=True))))
                return now_or_later + self._failing(state, who, step)
        for who, process in enumerate(state.processes):
            if process.node < 0:
                continue
            step = self.machine.nodes[process.node].step
            assert step is not None
            if not process.waits and self._enabled(state, who, step):
                found.append((f"{who} {_words(step)}", self._settle(self._step(state, who, step), who)))
            found += self._failing(state, who, step)
            if state.deaths:
                dead = _with(state, who, process._replace(node=-1, valid_until=None, dead=True, waits=False))
                lock = -1 if state.lock == who else state.lock
                found.append((f"{who} dies", self._settle_all(dead._replace(deaths=state.deaths - 1, lock=lock))))
        if state.passed < len(self.world.ticks):
            awake = tuple(process._replace(waits=False) for process in state.processes)
            later = state._replace(passed=state.passed + 1, processes=awake)
            found.append((f"{self.world.ticks[state.passed]:g} s pass", self._settle_all(later)))
        return found

    def _failing(self, state: State, who: int, step: tuple[Any, ...]) -> list[tuple[str, State]]:
        if not state.faults or step[0] not in {"create", "link"} or state.processes[who].waits:
            return []
        failed = self._go_on(state, who, _FAULT)._replace(faults=state.faults - 1)
        return [(f"{who} {_words(step)}: disk full", self._settle(failed, who))]

    def _enabled(self, state: State, who: int, step: tuple[Any, ...]) -> bool:
        if step[0] == "lock":
            return self.world.hostile_lock or state.lock < 0
        if step[0] == "sleep" and self.world.patient:
            return not any(self._trying(other) for i, other in enumerate(state.processes) if i != who)
        return True

    def _trying(self, process: Process) -> bool:
        if process.node < 0:
            return False
        step = self.machine.nodes[process.node].step
        return step is not None and step[0] != "sleep" and not process.took

    def _settle_all(self, state: State) -> State:
        for who in range(len(state.processes)):
            state = self._settle(state, who)
        return state

    def _settle(self, state: State, who: int) -> State:
        """Take the steps of ``who`` that others cannot observe or influence; go on to its next operation."""
        while state.processes[who].node >= 0:
            step = self.machine.nodes[state.processes[who].node].step
            if step is None:
                state = self._ended(state, who)
            elif self._private(state, who, step):
                state = self._step(state, who, step)
            else:
                break
        return state

    def _private(self, state: State, who: int, step: tuple[Any, ...]) -> bool:
        kind = step[0]
        if kind in {"lock", "unlock"}:
            return self.world.hostile_lock
        if kind == "sleep":
            return not self.world.patient
        if kind in {"touch", "unlink"}:
            return bool(step[1].startswith("temporary"))
        if kind in _TIMED:
            return state.passed == len(self.world.ticks) and not (kind == "create" and state.faults)
        seen = {
            "read": step[1:2],
            "owner": step[1:],
            "list": [name for name in self._writer if kind == "list" and step[1](name)],
        }
        return kind in seen and all(
            self._writer[name] == who or state.processes[self._writer[name]].node < 0 for name in seen[kind]
        )

    def _step(self, state: State, who: int, step: tuple[Any, ...]) -> State:
        """Do one step and hand its answer to the process."""
        now = self._now(state)
        wall = WALL + now
        files = dict(state.files)
        answer: Any = None
        match step:
            case ("clock",):
                answer = rules.Clock(wall, now)
            case ("list", wanted):
                answer = tuple(name for name in files if name in self._writer and wanted(name))
            case ("owner", name):
                answer = files[name][0] if name in files else None
            case ("read", name, wanted):
                if name in files and wanted in (None, files[name][0]):
                    uid, mtime, ctime, data = files[name]
                    answer = rules.Entry(name, uid, 0, mtime, ctime, data, "")
            case ("create", data):
                answer = f"temporary{who}"
                files[answer] = (who + 1, wall, wall, data)
            case ("link", temporary, name):
                answer = name not in files
                if answer:
                    uid, mtime, _, data = files[temporary]
                    files[name] = (uid, mtime, wall, data)
            case ("rename", temporary, name):
                uid, mtime, _, data = files.pop(temporary)
                files[name] = (uid, mtime, wall, data)
            case ("unlink", name):
                answer = files.pop(name, None) is not None
                if self.world.scripts[who].ops[state.processes[who].op] == "release":
                    state = _with(state, who, state.processes[who]._replace(valid_until=None))
            case ("touch", name, mtime):
                answer = name in files
                if answer:
                    uid, _, _, data = files[name]
                    files[name] = (uid, mtime, wall, data)
            case ("lock", _):
                answer = not self.world.hostile_lock
                state = state._replace(lock=who if answer else state.lock)
            case ("unlock",):
                state = state._replace(lock=-1 if state.lock == who else state.lock)
        if step[0] not in {"clock", "list", "read", "owner", "lock", "unlock"}:
            state = State(tuple(sorted(files.items())), *state[1:])
        return self._go_on(state, who, answer)

    def _go_on(self, state: State, who: int, answer: Any) -> State:
        node, op, valid_until, dead, took, waits = state.processes[who]
        return _with(state, who, Process(self.machine.answer(node, answer), op, valid_until, dead, took, waits))

    def _ended(self, state: State, who: int) -> State:
        """Take note of an operation's result and start the next one of the script."""
        process, script = state.processes[who], self.world.scripts[who]
        node, kind = self.machine.nodes[process.node], script.ops[process.op]
        granted = kind in {"take", "renew"} and node.refused is None
        granted = granted or (kind == "touch" and node.result["alive"] == [script.lease])
        if kind == "take" and not granted:
            left = [name for name in names(script) if name in dict(state.files)]
            if left:
                raise Violation(f"process {who} has given up and leaves {left}")
            if not self.world.hostile_lock and node.refused.kind == "conflict":
                self._refusal_is_true(state, node.refused.detail)
        valid_until = self._last_heartbeat(state, who) + OWN_LIFE_S if granted else None
        if valid_until is not None and valid_until <= self._now(state) and self.world.hostile_lock:
            raise Violation(f"process {who} got a lease that has expired")  # (unlocking may take its time)
        more = process.op + 1 < len(script.ops) and (granted or kind == "sweep")
        took = process.took or (kind == "take" and granted)
        if not more:
            return _with(state, who, process._replace(node=-1, valid_until=valid_until, took=took))
        following = script.ops[process.op + 1]
        return _with(state, who, Process(self.machine.start(who, following), process.op + 1, valid_until, took=took))

    def _refusal_is_true(self, state: State, claims: list[Any]) -> None:
        """With the lock honoured, the owner of a conflicting claim has its lease (or died, or met a full disk)."""
        for claim in claims:
            holder = state.processes[self._writer[claim.entry.name]]
            if not (holder.took or holder.dead):
                raise Violation(f"refused because of {claim.entry.name}, which its taker did not get")

    def _last_heartbeat(self, state: State, who: int) -> float:
        """Return the time of the last heartbeat of the lease of ``who`` on all its GPUs, in seconds since boot."""
        files = dict(state.files)
        missing = [name for name in names(self.world.scripts[who]) if name not in files]
        if missing:
            raise Violation(f"process {who} got {missing}, which do not exist")
        return min(min(files[name][1], files[name][2]) for name in names(self.world.scripts[who])) - WALL

    def _check(self, state: State) -> None:
        """Raise Violation when two hold one GPU, a process lacks a GPU it was granted, or a dispute is hidden."""
        now = self._now(state)
        if (live := self._live.get((state.files, state.passed))) is None:
            live = self._live[state.files, state.passed] = self._living(state.files, now)
        holders: dict[str, int] = {}
        for who, process in enumerate(state.processes):
            if process.valid_until is None or now >= process.valid_until:
                continue
            script = self.world.scripts[who]
            lost = [name for name in names(script) if name not in live]
            if lost:
                raise Violation(f"process {who} has lost {lost}, which it was granted")
            for gpu in script.gpus:
                if gpu in holders:
                    raise Violation(f"{gpu} is held by processes {holders[gpu]} and {who}")
                holders[gpu] = who

    def _living(self, files: Files, now: float) -> set[str]:
        """Return the names of the live claims. Raises Violation when a dispute between them is hidden."""
        clock = rules.Clock(WALL + now, now)
        judged = [self._judge(name, file, clock) for name, file in files if name.startswith(rules.PREFIX)]
        live = {one.entry.name: one for one in judged if one.state == "live"}
        if len({one.content["uuid"] for one in live.values()}) < len(live):
            self._disputes_show(judged, clock)
        return set(live)

    def _disputes_show(self, judged: list[rules.Judged], clock: rules.Clock) -> None:
        for claim in wire.picture(judged, clock, str):
            rivals = {
                one.content["lease"]
                for one in judged
                if one.state == "live"
                and one.content["uuid"] == claim["uuid"]
                and one.content["lease"] != claim["lease"]
            }
            if claim["state"] == "live" and set(claim["disputed_with"]) != rivals:
                raise Violation(f"two live claims on {claim['uuid']} and {claim['lease']} does not show it")

    def _judge(self, name: str, file: File, clock: rules.Clock) -> rules.Judged:
        key = (name, file, clock.up)
        if key not in self._judged:
            uid, mtime, ctime, data = file
            self._judged[key] = rules.judge(rules.Entry(name, uid, 0, mtime, ctime, data, ""), clock, BOOT)
        return self._judged[key]


def _with(state: State, who: int, process: Process) -> State:
    files, processes, passed, deaths, faults, lock = state
    return State(files, (*processes[:who], process, *processes[who + 1 :]), passed, deaths, faults, lock)


def _words(step: tuple[Any, ...]) -> str:
    return " ".join(str(part) for part in step if isinstance(part, (str, float)))


def _way(parents: dict[State, tuple[State | None, str]], last: State) -> str:
    """Return the moves that led to ``last``, a line each."""
    lines: list[str] = []
    state: State | None = last
    while state is not None:
        state, label = parents[state]
        lines.append(label)
    return "\n".join(reversed(lines))
