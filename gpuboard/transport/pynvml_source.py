"""The part of pynvml that the agent uses: a quarter of it.

Compiling all of it takes a node 60 ms of CPU, a third of an agent's start, and 18 MB (5 MB for this part).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

# pynvml is a list of some 600 functions and structures at top level, each named after one of NVML's, and of constants.
_DEFINITION = re.compile(r"^(?=(?:def|class) (?:c_)?nvml)", re.MULTILINE)
_NAME = re.compile(r"nvml\w+")  # without c_ of the structures: a pattern that begins with a letter is found faster
_NEXT = re.compile(r"^(?=\S)", re.MULTILINE)
_STATEMENT = re.compile(r"[A-Za-z_@#]|$")
# pynvml finds its errors by their prefix.
_NUMBER = re.compile(r"^(NVML_(?!ERROR_)\w+)[ \t]*=[ \t]*(?:0x)?[0-9A-Fa-f]+[ \t]*(?:#.*)?\n", re.MULTILINE)
_CONSTANT = re.compile(r"NVML_\w+")
_USED = re.compile(r"pynvml\.(\w+)")


def pynvml_source(users: Iterable[str]) -> str:
    """Return pynvml's source for modules with the sources ``users``, without what they do not use.

    Raises FileNotFoundError where pynvml is not installed.
    """
    spec = importlib.util.find_spec("pynvml")  # finds it without importing it
    if spec is None or spec.origin is None:
        raise FileNotFoundError("pynvml is not installed here; install nvidia-ml-py")
    used = {name for text in users for name in _USED.findall(text)}
    return reduced(Path(spec.origin).read_text(encoding="utf-8"), used)


def reduced(source: str, used: Iterable[str]) -> str:
    """Return ``source`` without the definitions and numbers that neither ``used`` nor the rest of it names.

    A definition is kept in any case if it is decorated or has a string of several lines: its end is not certain.
    """
    used = set(used)
    first, *found = _DEFINITION.split(source)
    parts = [first]  # in the order of the source; every second one is the name of a definition
    texts: dict[str, str] = {}
    for text in found:
        end = after.start() if (after := _NEXT.search(text, 1)) else len(text)
        name = _NAME.findall(text, 0, end)[0]
        decorated = parts[-1].rstrip().rpartition("\n")[2].startswith("@")
        if decorated or '"""' in text[:end] or "'''" in text[:end] or name in texts or not _STATEMENT.match(text, end):
            parts[-1] += text
        else:
            texts[name] = text[:end]
            parts += [name, text[end:]]
    kept: dict[str, str] = {}
    names = [*(name.removeprefix("c_") for name in used), *_NAME.findall("".join(parts[::2]))]
    while names:
        if text := texts.pop(name := names.pop(), ""):
            kept[name] = text
            names += _NAME.findall(text)
    whole = "".join(kept.get(part, "") if at % 2 else part for at, part in enumerate(parts))
    constants = used.union(_CONSTANT.findall(_NUMBER.sub("", whole)))
    return _NUMBER.sub(lambda number: number[0] if number[1] in constants else "", whole)
