"""Cleaning of hostile text: all text from nodes, processes and users passes through here before it is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

# Control (Cc), format (Cf: bidi marks, zero-width), surrogate (Cs), private use (Co), line and paragraph separators.
_DROPPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_BLANK = frozenset("\t\n\r\v\f")


CLEAN_MOST = 512  # characters


def clean(text: str, limit: int = CLEAN_MOST) -> str:
    """Return ``text`` without control, format and bidi characters, at most ``limit`` characters long.

    Tabs and line ends become one space; a cut is marked with an ellipsis.
    """
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text  # the usual case: a snapshot of 100 nodes cleans 20,000 strings
    text = text[: 4 * limit]  # a 10 MB title costs no more than a short one
    if not (text.isascii() and text.isprintable()):
        import unicodedata  # late: most text is ASCII, and `allocate` starts quickly

        text = "".join(
            " " if c in _BLANK else c for c in text if c in _BLANK or unicodedata.category(c) not in _DROPPED
        )
    return text if len(text) <= limit else text[: limit - 1] + "…"


def program(command: str) -> str:
    """Return the program's name in a command line, without its folder: all else of it may hold secrets."""
    return os.path.basename(command.partition(" ")[0])


def same_user(one: str | None, other: str) -> bool:
    """Return whether two names of users are equal, in any case: as the board's filter compares them."""
    return one is not None and one.casefold() == other.casefold()


def lines(text: str) -> str:
    """Return ``text`` with each of its lines clean and at most 4,096 characters long.

    An invalid UTF-8 byte in an argument or a file name becomes an escape: ``\\udcff``.
    """
    return "\n".join(clean(line, 4096) for line in text.encode("utf-8", "backslashreplace").decode().split("\n"))


def shown(name: object, limit: int = 200) -> str:
    """Return a name or path for a message: on one line, without control characters, cut at ``limit``."""
    return clean(lines(str(name)), limit)


def quoted(text: str) -> str:
    """Return ``text`` quoted and escaped like a Python literal, cut at 80 characters."""
    return repr(text if len(text) <= 80 else text[:79] + "…")


def like(text: str, patterns: Iterable[str]) -> bool:
    """Return whether ``text`` matches patterns of ssh (ssh_config(5), PATTERNS): one, and none that begins with ``!``.

    A pattern with wildcards of more than 1,024 characters matches nothing.
    """
    fitting = [pattern for pattern in patterns if _fits(text, pattern.removeprefix("!"))]
    return bool(fitting) and not any(pattern.startswith("!") for pattern in fitting)


def _fits(text: str, pattern: str) -> bool:
    if "*" not in pattern and "?" not in pattern:
        return pattern == text
    from fnmatch import fnmatchcase  # late: `allocate` starts quickly

    return len(pattern) <= 1024 and fnmatchcase(text, pattern.replace("[", "[[]"))


def split_outside(text: str, signs: str) -> list[str]:
    """Split ``text`` at the ``signs`` outside brackets; each sign becomes an entry between the parts.

    ``a[1,2],b!c`` by ``,!`` is ``["a[1,2]", ",", "b", "!", "c"]``. An unclosed bracket extends to the end.
    """
    found = [""]
    for part in re.findall(rf"\[[^\]]*\]?|[{re.escape(signs)}]|[^\[{re.escape(signs)}]+", text):
        if part in signs:
            found += [part, ""]
        else:
            found[-1] += part
    return found
