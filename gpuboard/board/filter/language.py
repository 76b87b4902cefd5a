"""The grammar of filters, for rows of any kind: text → terms → a predicate (pure).

    user:alice state:free,busy mem>40G -model:L40S node:gpu[01-04] util<10 age>5s "python train"

All terms must match. A plain word matches any text shown of a GPU. ``key:value`` matches a part (or the beginning),
``key=value`` the whole value, numbers also a range (``gpu:0-3``) and ``< <= > >=``. A comma means or, a leading ``-``
means not, quotes keep spaces, ``?`` as a value means unknown. An unknown number matches no comparison, also after
``-``. Case is ignored.

A :class:`Language` declares the keys of one kind of row. ``P`` are the arguments of its predicates: ``(row,)`` for a
list, ``(node, gpu, scene)`` for GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, ParamSpec

from gpuboard.errors import UsageError
from gpuboard.model.text import shown

TEXT_MAX = 1000  # characters: every term is evaluated for every row in every scene
_SETS_MAX = 16  # nodesets in one filter: each is expanded

P = ParamSpec("P")


class QueryError(UsageError):
    """An invalid or incomplete query: the message, and where the term in question begins."""

    def __init__(self, words: str, position: int) -> None:
        super().__init__(words)
        self.words = words
        self.position = position


class Term(NamedTuple):
    """One condition as it was typed."""

    position: int
    negative: bool
    key: str  # "": a plain word
    operator: str
    values: tuple[str, ...]


class Key(Generic[P]):
    """A key: a description of its values, how they are compiled, and the values offered while one is typed."""

    def __init__(
        self,
        hint: str,
        cost: int,
        compile: Callable[[Term], Callable[P, bool]],
        *,
        words: tuple[str, ...] = (),
        offers: Callable[P, Iterable[str | None]] | None = None,
        sign: str = ":",
    ) -> None:
        """``hint``: its values, with an example. ``cost``: keys of low cost are tested first.

        ``words``: values offered in any cluster. ``offers``: the values that one row offers. ``sign``: after the key.
        """
        self.hint = hint
        self.cost = cost
        self.compile = compile
        self.words = words
        self.offers = offers
        self.sign = sign


class Query(Generic[P]):
    """A compiled filter. ``matches``: whether a row matches. ``keys``: those in it."""

    def __init__(self, text: str, predicates: tuple[Callable[P, bool], ...], keys: frozenset[str]) -> None:
        self.text = text
        self.keys = keys
        self._any = bool(predicates)
        self.matches: Callable[P, bool]
        if len(predicates) == 1:
            (self.matches,) = predicates
        else:
            self.matches = lambda *row, **named: all(holds(*row, **named) for holds in predicates)

    def __bool__(self) -> bool:
        """Whether the filter has any term."""
        return self._any


class Language(Generic[P]):
    """The keys of one kind of row. ``texts``: what a plain word is looked for in."""

    def __init__(
        self,
        keys: Mapping[str, Key[P]],
        texts: Callable[P, Iterable[str | None]],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.keys = keys
        self.aliases = aliases or {}
        self._texts = texts

    def parse(self, text: str) -> Query[P]:
        """Compile a query. Raises QueryError with what is missing or wrong."""
        if len(text) > TEXT_MAX:
            raise QueryError(f"longer than {TEXT_MAX} characters", TEXT_MAX)
        terms = self._terms(text)
        sets = [term for term in terms if term.key == "node" for value in term.values if is_nodeset(value)]
        if len(sets) > _SETS_MAX:
            raise QueryError(f"more than {_SETS_MAX} nodesets; write several as one: gpu[1-4,7-9]", sets[-1].position)
        compiled = [self._compile(term) for term in terms]
        compiled.sort(key=lambda pair: pair[0])  # cheap tests first
        return Query(text, tuple(predicate for _, predicate in compiled), frozenset(term.key for term in terms))

    def valid_part(self, text: str, error: QueryError) -> Query[P]:
        """Return the query of the terms before the first invalid one; ``error``: that of ``text``."""
        while True:
            text = text[: error.position]  # shorter each time: a term's error is at its beginning
            try:
                return self.parse(text.rstrip())
            except QueryError as earlier:
                error = earlier

    def _compile(self, term: Term) -> tuple[int, Callable[P, bool]]:
        if term.key:
            return self.keys[term.key].cost, self.keys[term.key].compile(term)
        word, texts = term.values[0].casefold(), self._texts

        def holds(*row: P.args, **named: P.kwargs) -> bool:
            return word in "\0".join(filter(None, texts(*row, **named))).casefold()

        return 9, maybe_not(holds, term.negative)

    def _terms(self, text: str) -> list[Term]:
        found: list[Term] = []
        at = 0
        while at < len(text):
            if text[at].isspace():
                at += 1
                continue
            start = START.match(text, at)
            begin = start.end() if start else at + (text[at] == "-")
            values, end = _values(text, begin, at, commas=start is not None)
            if start is None:
                if not any(values):
                    raise QueryError("- needs a word or key:value to exclude", at)
                found.append(Term(at, text[at] == "-", "", ":", values))
            else:
                name = start[2].lower()
                key = self.aliases.get(name, name)
                if key not in self.keys:
                    raise QueryError(f"{shown(start[2])} is not a key; the keys are: {', '.join(self.keys)}", at)
                negative = (start[1] == "-") != (start[3] == "!=")
                if not all(values):
                    raise QueryError(f"{start[2]}{start[3]} needs a value: {self.keys[key].hint}", at)
                found.append(Term(at, negative, key, start[3].replace("!=", "="), values))
            at = end
        return found


START = re.compile(r"(-?)([A-Za-z_]+)(<=|>=|!=|[:=<>])")


def is_nodeset(value: str) -> bool:
    return "@" in value or "[" in value


def names_groups(text: str) -> bool:
    """Return whether nodesets in a query may name ClusterShell's groups: parsing it can run commands of the site.

    A pattern beside a bracket is compared with the group of all nodes.
    """
    return "@" in text or ("[" in text and ("*" in text or "?" in text))


def maybe_not(predicate: Callable[P, bool], negative: bool) -> Callable[P, bool]:
    return (lambda *row, **named: not predicate(*row, **named)) if negative else predicate


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
