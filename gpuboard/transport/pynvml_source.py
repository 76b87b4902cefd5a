"""pynvml's source without what the agent does not use."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

# pynvml is a list of some 600 functions and structures at top level, each named after one of NVML's, and of constants.
_DEFINITION = re.compile(r"^(?:@.*\n(?:#.*\n)*)*(?:def|class) (?:c_)?(nvml\w+)", re.MULTILINE)
_NAME = re.compile(r"nvml\w+")  # without c_ of the structures: a pattern that begins with a letter is found faster
_NEXT = re.compile(r"^(?=\S)", re.MULTILINE)
_STATEMENT = re.compile(r"[A-Za-z_@#]|$")
_OPEN_DECORATOR = re.compile(r"^@.*(?:\n(?:[\s)#].*)?)*\Z", re.MULTILINE)  # of the definition that follows
_COMMENT = re.compile(r"^#.*", re.MULTILINE)
_IMPORT = re.compile(r"^from [\w.]+ import (\w+)\n", re.MULTILINE)
# pynvml finds its errors by their prefix.
_NUMBER = re.compile(r"^(NVML_(?!ERROR_)\w+)[ \t]*=[ \t]*(?:0x)?[0-9A-Fa-f]+[ \t]*(?:#.*)?\n", re.MULTILINE)
_CONSTANT = re.compile(r"NVML_\w+")
_USED = re.compile(r"pynvml\.(\w+)")
# What pynvml takes from modules whose import costs a node 7 ms: (module, name in it, another, in place of the import)
_SPARED = (
    ("threading", "threading.Lock", "_thread.allocate_lock", "import _thread\n"),
    ("string", "string.capwords", "_capwords",
     "def _capwords(text, mark):\n    return mark.join(word.capitalize() for word in text.split(mark))\n"),
)  # fmt: skip


def used_part(source: str, users: Iterable[str]) -> str:
    """Return the part of ``source`` that modules with the sources ``users`` need: a fifth of it.

    Compiling all of it takes a node 60 ms of CPU, a third of an agent's start, and 18 MB (5 MB for this part).
    """
    return reduced(source, {name for text in users for name in _USED.findall(text)})


def reduced(source: str, used: Iterable[str]) -> str:
    """Return ``source`` without the definitions, numbers and imports that neither ``used`` nor the rest of it needs.

    A definition is kept in any case if its end is not certain, as after a single mark of a string of several lines.
    """
    used = set(used)
    found = list(_DEFINITION.finditer(source))
    starts = [*(match.start() for match in found), len(source)]
    parts = [source[: starts[0]]]  # in the order of the source; every second one is a definition
    places: defaultdict[str, list[int]] = defaultdict(list)  # name -> its definitions in parts
    for match, after in zip(found, starts[1:], strict=True):
        text = source[match.start() : after]
        following = _NEXT.search(text, match.end() - match.start())
        end = following.start() if following else len(text)
        certain = _STATEMENT.match(text, end) and not any(text.count(mark, 0, end) % 2 for mark in ('"""', "'''"))
        if not certain or _OPEN_DECORATOR.search(parts[-1]):
            parts[-1] += text
        else:
            places[match[1]].append(len(parts))
            parts += [text[:end], text[end:]]
    kept: set[int] = set()
    between = _COMMENT.sub("", "".join(parts[::2]))
    names = [*(name.removeprefix("c_") for name in used), *_NAME.findall(between)]
    while names:
        for place in places.pop(names.pop(), ()):
            kept.add(place)
            names += _NAME.findall(parts[place])
    whole = "".join(part for at, part in enumerate(parts) if at % 2 == 0 or at in kept)
    constants = used.union(_CONSTANT.findall(_NUMBER.sub("", whole)))
    whole = _NUMBER.sub(lambda number: number[0] if number[1] in constants else "", whole)
    whole = _IMPORT.sub(lambda line: line[0] if line[1] in used or whole.count(line[1]) > 1 else "", whole)
    for module, name, spared, instead in _SPARED:
        line = f"\nimport {module}\n"
        if line in whole and set(re.findall(rf"\b{module}\.\w+", whole)) == {name}:
            whole = whole.replace(line, f"\n{instead}").replace(name, spared)
    return whole
