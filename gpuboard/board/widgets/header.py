"""The header: free GPUs by model; unreachable and stale nodes; the age of the oldest reading (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from gpuboard.board.filter.completion import written
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
_FREE = "state:free"
_WIDE = 100  # columns from which the header takes two lines
_SEPARATOR = " · "


class Part(NamedTuple):
    """A piece of a line in one style; with ``query`` it counts what this filter shows."""

    text: str
    style: str  # a role of Look
    query: str = ""


Parts = tuple[Part, ...]
_MARGIN = Part(" ", "")


def header(scene: Scene, columns: int, *, tall: bool) -> list[Runs]:
    """Return the header, where ``tall`` and wide of two lines: free counts always fit, words where space is left."""
    return [tuple((text, style) for text, style, _ in line) for line in _lines(scene, columns, tall=tall)]


def picked(scene: Scene, columns: int, x: int, y: int, *, tall: bool) -> str:
    """Return the filter for what the header counts at ``x`` in its line ``y``; "": it counts nothing there."""
    for text, _, query in chain(*_lines(scene, columns, tall=tall)[y : y + 1]):
        x -= width(text)
        if x < 0:
            return query
    return ""


def _lines(scene: Scene, columns: int, *, tall: bool) -> list[Parts]:
    facts = scene.sums
    at = datetime.fromisoformat(scene.snapshot.at).astimezone()
    about = _about(facts)
    dated = [*about, (Part(f"{at:%H:%M:%S}", "dim"),)] if scene.live else about
    label: Parts = (Part(f" {scene.label} ", "warn"),) if scene.label else ()
    if tall and columns >= _WIDE:
        name = scene.snapshot.cluster or "gpuboard"
        left: Parts = (Part(f" {name} ", "title"), *label)
        right = _join(dated)
        fitting = ((k, parts) for k, parts in enumerate(_models(facts)) if _width(parts) <= columns - 1)
        number, counts = next(fitting, (0, _total(facts)))
        others = _others(facts)
        if number > 1 and _width(left) + _width(others) + 4 + _width(right) <= columns:
            left = (*left, Part("  ", ""), *others)  # no room for them beside each model
        return [_apart(left, right, columns), (_MARGIN, *counts)]
    troubles = _troubles(facts)
    rights = [(*_join(parts), *label) for parts in (dated, about, [*troubles, _oldest(facts, words=False)])]
    for number, counts in enumerate(_models(facts)):
        for right in rights if number < 3 else rights[2:]:
            if 1 + _width(counts) + 2 + _width(right) <= columns:
                return [_apart((_MARGIN, *counts), right, columns)]
    left, right = (_MARGIN, *_total(facts)), (*_join(troubles), *label)
    return [_apart(left, right if _width(left) + 2 + _width(right) <= columns else label, columns)]


def _models(facts: Sums) -> Iterator[Parts]:
    """Make texts from the longest to the shortest: each model in detail, at last the free total alone."""
    if not facts.models:
        yield (Part("no GPU seen", "unknown"),)
        return
    for words in (4, 3, 2, 1, 0):
        counts = _join([_count(count, words) for count in facts.models])
        yield counts if words > 1 else (Part("free  ", "free", _FREE), *counts)
    free = [count for count in facts.models if count.states["free"]]
    free.sort(key=lambda count: -count.states["free"])
    for most in range(len(free), 0, -1):
        yield _only_free(facts, free[:most], cut=most < len(free))
    yield _total(facts)


def _count(count: Count, words: int) -> Parts:
    model = _of(count)
    free = f"{model} {_FREE}"
    number = f"{count.states['free']:>{len(str(count.total))}}"
    style = "free" if count.states["free"] else "dim"
    name = count.model if words else shortest_model(count.model)
    parts = [Part(f"{name} ", "title", free), Part(number, style, free)]
    if words < 2:
        return (*parts, Part(f"/{count.total}", "dim", model))
    parts += [Part(" free", style, free), Part(f" of {count.total}", "dim", model)]
    if words > 2:
        gap = "  "
        for word, letter, states in _REST:
            if found := sum(count.states[state] for state in states):
                text = f"{found} {word}" if words == 4 else f"{found}{letter}"
                # the gap is apart: a theme may underline
                parts += [Part(gap, ""), Part(text, word, f"{model} {_in(states)}")]
                gap = "  " if words == 4 else " "
    return tuple(parts)


def _of(count: Count) -> str:
    return f"model={written(count.model)}"


def _in(states: Sequence[str]) -> str:
    return f"state:{','.join(states)}"


def _others(facts: Sums) -> Parts:
    """Return how many GPUs of all models are not free, by state."""
    found: list[Parts] = []
    for word, _, states in _REST:
        if number := sum(count.states[state] for count in facts.models for state in states):
            found.append((Part(f"{number} {word}", word, _in(states)),))
    return _join(found)


def _only_free(facts: Sums, counts: Sequence[Count], *, cut: bool) -> Parts:
    parts = [*_total(facts), Part(":", "dim")]
    for count in counts:
        query = f"{_of(count)} {_FREE}"
        parts += [Part("  ", "title"), Part(f"{shortest_model(count.model)} ", "title", query)]
        parts.append(Part(str(count.states["free"]), "free", query))
    return (*parts, Part("  …", "dim")) if cut else tuple(parts)


def _total(facts: Sums) -> Parts:
    total = sum(count.total for count in facts.models)
    return (Part(f"{facts.free} free", "free" if facts.free else "dim", _FREE), Part(f" of {total}", "dim"))


def _about(facts: Sums) -> list[Parts]:
    nodes = Part(f"{facts.nodes} nodes" if facts.nodes != 1 else "1 node", "dim")
    return [(nodes,), *_troubles(facts), _oldest(facts, words=True)]


def _troubles(facts: Sums) -> list[Parts]:
    """Return how many nodes have no current reading."""
    troubles = (
        (facts.unreachable, "unreachable", "bad"),
        (facts.connecting, "connecting", "unknown"),
        (facts.stale, "stale", "warn"),
    )
    return [(Part(f"{number} {word}", style, f"state:{word}"),) for number, word, style in troubles if number]


def _oldest(facts: Sums, *, words: bool) -> Parts:
    """Return the age of the oldest reading."""
    oldest = age(facts.oldest_s)
    style = "unknown" if oldest == UNKNOWN else "warn" if facts.stale or facts.unreachable else "dim"
    return (Part(f"oldest {oldest:>3}" if words else f"{oldest:>3}", style),)


def _join(found: Sequence[Parts]) -> Parts:
    joined: list[Part] = []
    for parts in found:
        if joined:
            joined.append(Part(_SEPARATOR, "dim"))
        joined += parts
    return tuple(joined)


def _width(parts: Parts) -> int:
    return sum(width(part.text) for part in parts)


def _apart(left: Parts, right: Parts, columns: int) -> Parts:
    return (*left, Part(" " * max(2, columns - _width(left) - _width(right) - 1), ""), *right)
