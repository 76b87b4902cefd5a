"""The header: free GPUs by model; unreachable and stale nodes; the age of the oldest reading (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rich.style import Style

from gpuboard.board.sums import Count, Sums
from gpuboard.board.text.cells import width
from gpuboard.board.text.format import UNKNOWN, age, shortest_model
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
_WIDE = 100  # columns from which the header takes two lines
_SEPARATOR = " · "


def header(scene: Scene, columns: int, *, tall: bool) -> list[Runs]:
    """Return the header, where ``tall`` and wide of two lines: free counts always fit, words where space is left."""
    facts = scene.sums
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


def _models(facts: Sums) -> Iterator[Runs]:
    """Make texts from the longest to the shortest: each model in detail, at last the free total alone."""
    if not facts.models:
        yield (("no GPU seen", "unknown"),)
        return
    for words in (4, 3, 2, 1, 0):
        counts = _join([_count(count, words) for count in facts.models])
        yield counts if words > 1 else (("free  ", "free"), *counts)
    free = [count for count in facts.models if count.states["free"]]
    free.sort(key=lambda count: -count.states["free"])
    for most in range(len(free), 0, -1):
        yield _only_free(facts, free[:most], cut=most < len(free))
    yield _total(facts)


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
        gap = "  "
        for word, letter, states in _REST:
            if number := sum(count.states[state] for state in states):
                # the gap is apart: a theme may underline
                runs += [(gap, ""), (f"{number} {word}" if words == 4 else f"{number}{letter}", word)]
                gap = "  " if words == 4 else " "
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
    total = sum(count.total for count in facts.models)
    return ((f"{facts.free} free", "free" if facts.free else "dim"), (f" of {total}", "dim"))


def _about(facts: Sums, *, words: bool) -> list[Runs]:
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
    return (*left, (" " * max(2, columns - _width(left) - _width(right) - 1), ""), *right)
