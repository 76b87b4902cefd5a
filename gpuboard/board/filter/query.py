"""The filter's language → a predicate (pure).

    user:alice state:free,busy mem>40G -model:L40S node:gpu[01-04] util<10 age>5s "python train"

All terms must match. A plain word matches any text shown of a GPU. ``key:value`` matches a part (or the beginning),
``key=value`` the whole value, and numbers also take ``< <= > >=``. A comma means or, a leading ``-`` means not, quotes
keep spaces, ``?`` as a value means unknown. An unknown number matches no comparison, also after ``-``. Case is ignored.
"""

from __future__ import annotations

import re

from gpuboard.board.filter.conditions import ALIASES, KEYS, Predicate, QueryError, Term, compile_term, is_nodeset
from gpuboard.board.scene import Scene
from gpuboard.model.snapshot import GpuView, NodeView
from gpuboard.model.text import shown

TEXT_MAX = 1000  # characters: every term is evaluated for every GPU in every scene
_SETS_MAX = 16  # each is expanded

__all__ = ["Query", "QueryError", "parse"]


class Query:
    """A compiled filter."""

    def __init__(self, text: str, predicates: tuple[Predicate, ...]) -> None:
        self.text = text
        self._predicates = predicates

    def __bool__(self) -> bool:
        """Whether the filter has any term."""
        return bool(self._predicates)

    def matches(self, node: NodeView, gpu: GpuView | None, scene: Scene) -> bool:
        """Return whether a GPU of ``node`` matches; with ``gpu`` None, a node without known GPUs."""
        return all(holds(node, gpu, scene) for holds in self._predicates)


def parse(text: str) -> Query:
    """Compile a query. Raises QueryError with what is missing or wrong."""
    if len(text) > TEXT_MAX:
        raise QueryError(f"longer than {TEXT_MAX} characters", TEXT_MAX)
    terms = _terms(text)
    sets = [term for term in terms if term.key == "node" for value in term.values if is_nodeset(value)]
    if len(sets) > _SETS_MAX:
        raise QueryError(f"more than {_SETS_MAX} nodesets; write several as one: gpu[1-4,7-9]", sets[-1].position)
    compiled = [compile_term(term) for term in terms]
    compiled.sort(key=lambda pair: pair[0])  # cheap tests first
    return Query(text, tuple(predicate for _, predicate in compiled))


_START = re.compile(r"(-?)([A-Za-z_]+)(<=|>=|!=|[:=<>])")


def _terms(text: str) -> list[Term]:
    found: list[Term] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        start = _START.match(text, at)
        begin = start.end() if start else at + (text[at] == "-")
        values, end = _values(text, begin, at, commas=start is not None)
        if start is None:
            if not any(values):
                raise QueryError("- needs a word or key:value to exclude", at)
            found.append(Term(at, text[at] == "-", "", ":", values))
        else:
            name = start[2].lower()
            key = ALIASES.get(name, name)
            if key not in KEYS:
                raise QueryError(f"{shown(start[2])} is not a key; the keys are: {', '.join(KEYS)}", at)
            negative = (start[1] == "-") != (start[3] == "!=")
            if not all(values):
                raise QueryError(f"{start[2]}{start[3]} needs a value: {KEYS[key].hint}", at)
            found.append(Term(at, negative, key, start[3].replace("!=", "="), values))
        at = end
    return found


def _values(text: str, at: int, term: int, *, commas: bool) -> tuple[tuple[str, ...], int]:
    """Return the values from ``at`` to the next blank, and its position. Commas in brackets and quotes are kept."""
    values, current, depth = [""], "", 0
    while at < len(text) and not text[at].isspace():
        character = text[at]
        if character in "\"'" and (end := text.find(character, at + 1)) >= 0:
            current, at = current + text[at + 1 : end], end + 1
            values[-1] = current
            continue
        if character == '"':
            raise QueryError("the quote is not closed", term)
        depth += (character == "[") - (character == "]" and depth > 0)
        if character == "," and commas and not depth:
            values.append("")
            current = ""
        else:
            current += character
            values[-1] = current
        at += 1
    if depth and commas:
        raise QueryError("the bracket is not closed", term)
    return tuple(values), at
