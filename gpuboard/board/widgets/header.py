"""The header: free GPUs by model; unreachable and stale nodes; the age of the oldest reading (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from rich.style import Style

from gpuboard.board.text.cells import width
from gpuboard.board.text.format import UNKNOWN, age, short_model, shortest_model
from gpuboard.board.text.rows import Runs

if TYPE_CHECKING:
    from gpuboard.board.scene import Scene

# What is counted beside free: its word, its letter where space is short, and its states
_REST = (
    ("reserved", "R", ("reserved",)),
    ("allocated", "A", ("allocated",)),
    ("busy", "B", ("busy", "occupied")),
    ("mig", "M", ("mig",)),
    ("broken", "X", ("broken",)),
    ("unknown", "?", ("unknown",)),
)
_STATES = {"free": ("free",), **{word: states for word, _, states in _REST}}
_NODE_STATES = frozenset({"unreachable", "connecting", "stale"})
_MODEL_AND_STATE = attrgetter(
    "name", "state"
)  # for Counter, which counts in C: 8,000 GPUs per second, most of them equal
_WIDE = 100  # columns from which the header takes two lines
_SEPARATOR = " · "


class Count(NamedTuple):
    """How many GPUs of a model there are in each state."""

    model: str
    total: int
    states: Counter[str]


class Sums(NamedTuple):
    """The numbers that the header shows."""

    models: list[Count]  # most GPUs first
    nodes: int
    unreachable: int
    connecting: int  # no reading and no failure yet
    stale: int
    oldest_s: float | None  # age of the oldest reading, stale and unreachable nodes included; None: no reading


def sums(scene: Scene) -> Sums:
    """Count the GPUs of a scene. A GPU in MIG mode counts as its devices, which are models of their own."""
    every = list(chain.from_iterable(node.gpus for node in scene.snapshot.nodes))
    pairs: Counter[tuple[str, str]] = Counter(map(_MODEL_AND_STATE, every))
    for gpu in [gpu for gpu in every if gpu.mig]:
        pairs[gpu.name, gpu.state] -= 1
        for device in gpu.mig:
            pairs[f"{short_model(gpu.name)} {device.profile}", device.state] += 1
    states: Counter[str] = Counter()
    oldest_s: float | None = None
    for node in scene.snapshot.nodes:
        states["connecting" if node.connecting else node.state] += 1
        if node.age_s is not None and (oldest_s is None or node.age_s > oldest_s):
            oldest_s = node.age_s
    models: dict[str, Counter[str]] = {}
    for (name, state), count in (+pairs).items():
        models.setdefault(short_model(name), Counter())[state] += count
    counts = [Count(model, states.total(), states) for model, states in models.items()]
    counts.sort(key=lambda count: (-count.total, count.model))
    nodes = len(scene.snapshot.nodes)
    return Sums(counts, nodes, states["unreachable"], states["connecting"], states["stale"], oldest_s)


def header(scene: Scene, columns: int, *, tall: bool) -> list[Runs]:
    """Return the header for a terminal of ``columns``: free counts always fit, words only where space is left.

    Two lines where it is ``tall`` and wide, else one.
    """
    facts = sums(scene)
    clock = datetime.fromisoformat(scene.snapshot.at).astimezone().strftime("%H:%M:%S")
    label: Runs = ((f" {scene.label} ", "warn"),) if scene.label else ()
    if tall and columns >= _WIDE:
        name = scene.snapshot.cluster or "gpuboard"
        left: Runs = ((f" {name} ", "title"), *label)
        right = _join([*_about(facts, words=True), ((clock, "dim"),)])
        fitting = ((k, runs) for k, runs in enumerate(_models(facts)) if _width(runs) <= columns - 1)
        number, counts = next(fitting, (0, _total(facts)))
        others = _others(facts)
        if number > 1 and _width(left) + _width(others) + 4 + _width(right) <= columns:
            left = (*left, ("  ", ""), *others)  # no room for them beside each model
        return [_apart(left, right, columns), ((" ", ""), *counts)]
    rights = [
        (*_join([*_about(facts, words=True), ((clock, "dim"),)]), *label),
        (*_join(_about(facts, words=True)), *label),
        (*_join(_about(facts, words=False)), *label),
    ]
    for number, counts in enumerate(_models(facts)):
        for right in rights if number < 3 else rights[2:]:
            if 1 + _width(counts) + 2 + _width(right) <= columns:
                return [_apart(((" ", ""), *counts), right, columns)]
    return [_apart(((" ", ""), *_total(facts)), label, columns)]


def picked(runs: Runs, x: int) -> str | None:
    """Return the filter for what a line of the header counts at ``x``; None: it counts nothing there."""
    for text, role in runs:
        x -= width(text)
        if x < 0:
            word = text.split()[-1] if text.strip() else ""
            if word in _NODE_STATES:
                return f"state:{word}"
            states = _STATES.get(str(role)) if any(char.isdigit() for char in text) or word == "free" else None
            return f"state:{','.join(states)}" if states else None
    return None


def _models(facts: Sums) -> list[Runs]:
    """Return texts from the longest to the shortest: each model in detail, at last the free total alone."""
    if not facts.models:
        return [(("no GPU seen", "unknown"),)]
    free = [count for count in facts.models if count.states["free"]]
    free.sort(key=lambda count: -count.states["free"])
    return [
        *(_join([_count(count, words) for count in facts.models]) for words in (4, 3, 2)),
        *((("free  ", "free"), *_join([_count(count, words) for count in facts.models])) for words in (1, 0)),
        *(_only_free(facts, free[:most], cut=most < len(free)) for most in range(len(free), 0, -1)),
        _total(facts),
    ]


def _count(count: Count, words: int) -> Runs:
    free = f"{count.states['free']:>{len(str(count.total))}}"
    style = "free" if count.states["free"] else "dim"
    runs: list[tuple[str, str | Style]] = [
        (f"{count.model if words else shortest_model(count.model)} ", "title"),
        (free, style),
    ]
    if words < 2:
        return (*runs, (f"/{count.total}", "dim"))
    runs += [(" free", style), (f" of {count.total}", "dim")]
    if words > 2:
        space = "  "
        for word, letter, states in _REST:
            if number := sum(count.states[state] for state in states):
                runs.append((f"  {number} {word}" if words == 4 else f"{space}{number}{letter}", word))
                space = " "
    return tuple(runs)


def _others(facts: Sums) -> Runs:
    """Return how many GPUs of all models are not free, by state."""
    found: list[Runs] = []
    for word, _, states in _REST:
        if number := sum(count.states[state] for count in facts.models for state in states):
            found.append(((f"{number} {word}", word),))
    return _join(found)


def _only_free(facts: Sums, counts: Sequence[Count], *, cut: bool) -> Runs:
    runs: list[tuple[str, str | Style]] = [*_total(facts), (":", "dim")]
    for count in counts:
        runs += [(f"  {shortest_model(count.model)} ", "title"), (str(count.states["free"]), "free")]
    return (*runs, ("  …", "dim")) if cut else tuple(runs)


def _total(facts: Sums) -> Runs:
    free = sum(count.states["free"] for count in facts.models)
    return ((f"{free} free", "free" if free else "dim"), (f" of {sum(count.total for count in facts.models)}", "dim"))


def _about(facts: Sums, *, words: bool) -> list[Runs]:
    """Return the part about nodes."""
    parts: list[Runs] = []
    if words:
        parts.append(((f"{facts.nodes} nodes" if facts.nodes != 1 else "1 node", "dim"),))
    if facts.unreachable:
        parts.append(((f"{facts.unreachable} unreachable", "bad"),))
    if facts.connecting:
        parts.append(((f"{facts.connecting} connecting", "unknown"),))
    if facts.stale:
        parts.append(((f"{facts.stale} stale", "warn"),))
    oldest = age(facts.oldest_s)
    style = "unknown" if oldest == UNKNOWN else "warn" if facts.stale or facts.unreachable else "dim"
    parts.append((((f"oldest {oldest:>3}" if words else f"{oldest:>3}"), style),))
    return parts


def _join(parts: Sequence[Runs]) -> Runs:
    runs: list[tuple[str, str | Style]] = []
    for part in parts:
        if runs:
            runs.append((_SEPARATOR, "dim"))
        runs += part
    return tuple(runs)


def _width(runs: Runs) -> int:
    return sum(width(text) for text, _ in runs)


def _apart(left: Runs, right: Runs, columns: int) -> Runs:
    """Put ``right`` at the right edge."""
    return (*left, (" " * max(2, columns - _width(left) - _width(right) - 1), ""), *right)
