"""Changes between two trees of plain values (dicts, lists, numbers, strings, None), as a tree (pure).

A dict in a change has the changes of the members of a dict (by key) or of a list (by index); a list of one element
replaces a value.

>>> change = difference({"a": 1, "b": [{"c": 2}, {"c": 3}]}, {"a": 1, "b": [{"c": 2}, {"c": 4}]})
>>> change
{'b': {'1': {'c': [4]}}}
>>> applied({"a": 1, "b": [{"c": 2}, {"c": 3}]}, change)
{'a': 1, 'b': [{'c': 2}, {'c': 4}]}
"""

from __future__ import annotations

from typing import Any

Tree = Any  # dict[str, Tree] | list[Tree] | str | int | float | bool | None
Change = Any  # dict[str, Change] | list[Tree]


def difference(old: Tree, new: Tree) -> Change:
    """Return the change from ``old`` to ``new``: {} when they are equal and dicts or lists of one length."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        members = [(key, old[key], new[key]) for key in new]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and _of_dicts(old) and _of_dicts(new):
        members = [(str(index), *pair) for index, pair in enumerate(zip(old, new, strict=True))]
    else:
        return [new]
    return {key: difference(was, now) for key, was, now in members if was is not now and not _same(was, now)}


def applied(tree: Tree, change: Change) -> Tree:
    """Return ``tree`` after ``change``, with its unchanged members. Raises ValueError where it does not fit."""
    if isinstance(change, list):
        if len(change) != 1:
            raise ValueError("a change replaces a value by one value")
        return change[0]
    if not isinstance(change, dict) or not isinstance(tree, dict | list):
        raise ValueError("a change does not fit")
    new: Tree = tree.copy()
    for key, one in change.items():
        place: Any = key
        if isinstance(tree, list):
            place = int(key) if key.isdecimal() and key.isascii() else -1
            if not 0 <= place < len(tree):
                raise ValueError("a change does not fit")
        elif key not in tree:
            raise ValueError("a change does not fit")
        new[place] = applied(tree[place], one)
    return new


def _of_dicts(values: list[Tree]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def _same(was: Tree, now: Tree) -> bool:
    """Return whether two trees are equal, and of one type: 1 == 1.0 == True in Python."""
    return type(was) is type(now) and bool(was == now)
