"""Keys by the kind of their values: text, numbers, sizes, nodes, people, words of a closed vocabulary (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from gpuboard.board.filter.language import Key, P, QueryError, Term, is_nodeset, maybe_not
from gpuboard.errors import UsageError
from gpuboard.model.text import quoted, shown
from gpuboard.model.units import parse_number, parse_size

_NODES_MAX = 4096  # nodes in one nodeset of a filter

ME = "me"  # as a user: oneself


def text(
    values: Callable[P, Iterable[str | None]], *, begins: bool = False, mine: Callable[P, bool] | None = None
) -> Callable[[Term], Callable[P, bool]]:
    """Compile a key with text: a part of it (``begins``: its beginning); with * ? or [ a pattern; with = all of it.

    ``mine``: whether a row is the caller's own, for the value ``me``.
    """

    def compiled(term: Term) -> Callable[P, bool]:
        wanted = [value.casefold() for value in _only_equal(term)]
        own = mine if term.operator == ":" and ME in wanted else None
        tests = [_text_test(value, term.operator, begins) for value in wanted if own is None or value != ME]

        def holds(*row: P.args, **named: P.kwargs) -> bool:
            if own is not None and own(*row, **named):
                return True
            texts = [text.casefold() for text in values(*row, **named) if text]
            return any(test(texts) for test in tests)

        return maybe_not(holds, term.negative)

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


_COMPARE: Mapping[str, Callable[[float, float, float], bool]] = {  # a number; the first and the last of a range
    **dict.fromkeys(":=", lambda number, first, last: first <= number <= last),
    "<": lambda number, first, _: number < first,
    ">": lambda number, first, _: number > first,
    "<=": lambda number, first, _: number <= first,
    ">=": lambda number, first, _: number >= first,
}


def number(
    value_of: Callable[P, float | None], read: Callable[[str], float], example: str
) -> Callable[[Term], Callable[P, bool]]:
    """Compile a key with a number, as ``numbers`` does."""

    def values_of(*row: P.args, **named: P.kwargs) -> Collection[float]:
        value = value_of(*row, **named)
        return () if value is None else (value,)

    return numbers(values_of, read, example)


def numbers(
    values_of: Callable[P, Collection[float]], read: Callable[[str], float], example: str
) -> Callable[[Term], Callable[P, bool]]:
    """Compile a key with numbers, of which one suffices; after : and = a range is wanted, too, such as ``0-3``.

    ``read`` raises ValueError for bad text. Unknown, which is no number, matches no comparison.
    """

    def compiled(term: Term) -> Callable[P, bool]:
        compare = _COMPARE[term.operator]
        wanted: list[tuple[float, float]] = []
        unknown = False
        for value in term.values:
            if value in {"?", "unknown"} and term.operator in ":=":
                unknown = True
                continue
            try:
                wanted.append(_range(value, read) if term.operator in ":=" else (read(value), 0.0))
            except ValueError:
                raise QueryError(f"{term.key}{term.operator}{shown(value)}: write {example}", term.position) from None

        def holds(*row: P.args, **named: P.kwargs) -> bool:
            values = values_of(*row, **named)
            if not values:
                return unknown and not term.negative
            return any(compare(value, *limits) for value in values for limits in wanted) is not term.negative

        return holds

    return compiled


def _range(text: str, read: Callable[[str], float]) -> tuple[float, float]:
    """Return the first and the last number of a range; of a number itself. Raises ValueError."""
    dash = text.find("-", 1)  # a number may begin with a sign
    first, last = read(text if dash < 0 else text[:dash]), read(text[dash + 1 :])
    if first > last:
        raise ValueError
    return first, last


def size(
    value_of: Callable[P, float | None], total_of: Callable[P, float | None], name: str
) -> Callable[[Term], Callable[P, bool]]:
    """Compile a key with a size in bytes, or with a part of the total in percent."""

    def part_of(*row: P.args, **named: P.kwargs) -> float | None:
        value, total = value_of(*row, **named), total_of(*row, **named)
        return None if value is None or not total else 100 * value / total

    sizes = number(value_of, parse_size, f"a size or a part, {name}>40GiB or {name}>50%")
    parts = number(part_of, percent, f"{name}>50%")
    return lambda term: (parts if all(value.endswith("%") for value in term.values) else sizes)(term)


def with_unit(*endings: str) -> Callable[[str], float]:
    """Return a function that reads a number with or without these endings, in any case. It raises ValueError."""

    def read(text: str) -> float:
        text = text.lower()
        for ending in endings:
            text = text.removesuffix(ending)
        return parse_number(text)

    return read


percent = with_unit("%")


def nodes(names_of: Callable[P, Iterable[str]]) -> Callable[[Term], Callable[P, bool]]:
    """Compile a key with node names: a part of the name, a pattern, or a nodeset; any of a row's nodes suffices."""

    def compiled(term: Term) -> Callable[P, bool]:
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

        def is_wanted(node: str) -> bool:
            known = asked.get(node)
            if known is None:
                names = {node.casefold(), node.casefold().split(".")[0]}
                known = asked[node] = any(test(name) for test in tests for name in names)
            return known

        def holds(*row: P.args, **named: P.kwargs) -> bool:
            return any(is_wanted(name) for name in names_of(*row, **named))

        return maybe_not(holds, term.negative)

    return compiled


def one_of(words: tuple[str, ...], values: Callable[P, Iterable[str]]) -> Callable[[Term], Callable[P, bool]]:
    """Compile a key with fixed values; a prefix suffices."""

    def compiled(term: Term) -> Callable[P, bool]:
        wanted: set[str] = set()
        for value in _only_equal(term):
            found = {word for word in words if word.startswith(value.casefold())}
            if not found:
                raise QueryError(
                    f"no {term.key} begins with {quoted(value)}; there are {', '.join(words)}", term.position
                )
            wanted |= {value.casefold()} & found or found

        def holds(*row: P.args, **named: P.kwargs) -> bool:
            return not wanted.isdisjoint(values(*row, **named))

        return maybe_not(holds, term.negative)

    return compiled


def named(
    hint: str, values: Callable[P, Iterable[str | None]], *, cost: int = 1, begins: bool = True, offered: bool = True
) -> Key[P]:
    """Return a key with text. ``offered``: the values of the rows are offered while one is typed."""
    return Key(hint, cost, text(values, begins=begins), offers=values if offered else None)


def exactly(hint: str, values: Callable[P, Iterable[str | None]], cost: int) -> Key[P]:
    """Return a key with text that ``:`` matches as a whole, as ``=`` does; with * ? or [ a pattern."""
    found = text(values, begins=True)
    plain = text(values)

    def compiled(term: Term) -> Callable[P, bool]:
        patterns = any(c in value for value in term.values for c in "*?[")
        return found(term) if patterns or term.operator != ":" else plain(term._replace(operator="="))

    return Key(hint, cost, compiled)


def person(users: Callable[P, Iterable[str | None]], mine: Callable[P, bool], *, cost: int = 1) -> Key[P]:
    """Return a key with users. ``mine``: whether a row is the caller's own."""
    compiled = text(users, begins=True, mine=mine)
    return Key("a person, user:alice; user:me is you", cost, compiled, words=(ME,), offers=users)


def place(names: Callable[P, Iterable[str]], hint: str = "a node or nodeset, node:gpu[01-04]") -> Key[P]:
    """Return a key with nodes."""
    return Key(hint, 2, nodes(names), offers=names)


def word(words: tuple[str, ...], values: Callable[P, Iterable[str]], *, hint: str = "", cost: int = 1) -> Key[P]:
    """Return a key with fixed values."""
    return Key(hint or f"one of {', '.join(words)}", cost, one_of(words, values), words=words)


def quantity(
    what: str,
    value_of: Callable[P, float | None],
    read: Callable[[str], float],
    example: str,
    *,
    sign: str = ":",
    cost: int = 1,
) -> Key[P]:
    """Return a key with a number."""
    return Key(f"{what}, {example}", cost, number(value_of, read, example), sign=sign)


def gpu_index(indexes: Callable[P, Collection[int]]) -> Key[P]:
    """Return a key with the indexes of a row's GPUs on its node."""
    example = "gpu:0,3 or gpu:0-3"
    return Key(f"a GPU's index, {example}", 1, numbers(indexes, parse_number, example))
