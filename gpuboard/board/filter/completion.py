"""What can be typed next in a filter: keys, and values from the rows that are shown (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpuboard.board.arrange import natural
from gpuboard.board.filter.language import START, Key, Language, P

_QUOTED = frozenset(" \t,\"'[]*?")  # characters that mean something else outside quotes


class Completion(NamedTuple):
    """How a filter can go on at its end."""

    texts: tuple[str, ...] = ()  # the whole filter with each candidate taken; none before a key's first letter
    names: tuple[str, ...] = ()  # the candidates
    hint: str = ""  # the values of the key that is typed
    word: int | None = None  # where the word begins that may become a key; None: no such word


class _End(NamedTuple):
    """The part of a filter that is being typed."""

    at: int  # where the word or value begins
    key: str  # as typed; "": a word, or the beginning of a key
    quote: str  # the quote that is open
    typed: str


def complete(text: str, language: Language[P], values: Callable[[Key[P]], Iterable[str]]) -> Completion:
    """Return how ``text`` can go on. ``values``: those that the rows have for a key."""
    end = _end(text)
    if not end.key:
        names = tuple(name + key.sign for name, key in language.keys.items() if _begins(name, end.typed))
        if not end.typed:
            return Completion(names=names)
        return Completion(tuple(text[: end.at] + name for name in names), names, word=end.at if names else None)
    name = end.key.lower()
    key = language.keys.get(language.aliases.get(name, name))
    if key is None:
        return Completion()
    known = sorted({value for value in values(key) if value and not {"'", '"'} <= {*value}}, key=natural)
    found = [value for value in dict.fromkeys((*key.words, *known)) if _begins(value, end.typed) and value != end.typed]
    return Completion(tuple(text[: end.at] + written(value, end.quote) for value in found), tuple(found), key.hint)


def _begins(value: str, typed: str) -> bool:
    return value[: len(typed)].casefold() == typed.casefold()


def written(value: str, quote: str = "") -> str:
    """Return a value as it is typed: in quotes where it needs them, or where one is open."""
    if quote or not _QUOTED.isdisjoint(value):
        sign = "'" if '"' in value else '"'
        return f"{sign}{value}{sign}"
    return value


def _end(text: str) -> _End:
    """Return what is being typed at the end of ``text``, as language.py reads it."""
    begin = at = 0
    key, depth = "", 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            begin, key, depth = at, "", 0
            continue
        if at == begin and not key and (start := START.match(text, at)):
            begin = at = start.end()
            key = start[2]
            continue
        if at == begin and not key and text[at] == "-":
            at += 1
            begin = at
            continue
        if text[at] in "\"'" and (close := text.find(text[at], at + 1)) >= 0:
            at = close + 1
            continue
        if text[at] == '"' and key:
            return _End(begin, key, '"', text[begin:at] + text[at + 1 :])
        depth += (text[at] == "[") - (text[at] == "]" and depth > 0)
        if text[at] == "," and key and not depth:
            begin = at + 1
        at += 1
    return _End(begin, key, "", text[begin:])
