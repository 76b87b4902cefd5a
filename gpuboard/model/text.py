"""Hostile text made inert. Everything a node, a process title or a user says passes through here before it is shown."""

from __future__ import annotations

import re
import unicodedata

# Control (Cc), format (Cf: bidi marks, zero-width), surrogate (Cs), private use (Co), line and paragraph separators.
_DROPPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_BLANK = frozenset("\t\n\r\v\f")


def clean(text: str, limit: int = 512) -> str:
    """Return ``text`` without control, format and bidi characters, at most ``limit`` characters long.

    Tabs and line ends become one space; a cut is marked with an ellipsis.
    """
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text  # nearly all: a snapshot of 100 nodes cleans 20,000 strings
    text = text[: 4 * limit]  # a 10 MB title costs no more than a short one
    if not (text.isascii() and text.isprintable()):
        text = "".join(
            " " if c in _BLANK else c for c in text if c in _BLANK or unicodedata.category(c) not in _DROPPED
        )
    return text if len(text) <= limit else text[: limit - 1] + "…"


def lines(text: str, limit: int = 4096) -> str:
    """Return ``text`` with each of its lines clean and at most ``limit`` characters long.

    A byte that is no UTF-8, in an argument or a file's name, becomes an escape: ``\\udcff``.
    """
    return "\n".join(clean(line, limit) for line in text.encode("utf-8", "backslashreplace").decode().split("\n"))


def shown(name: object, limit: int = 200) -> str:
    """Return a name or path as a message shows it: on one line, without control characters, cut at ``limit``."""
    return clean(lines(str(name)), limit)


def quoted(text: str, limit: int = 80) -> str:
    """Return ``text`` in quotes and with escapes, as Python writes it, cut at ``limit``."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def like(text: str, pattern: str) -> bool:
    """Return whether a pattern of ssh's, with ``*`` and ``?``, fits ``text``: in time of both lengths, multiplied.

    A regular expression would try every way to share the text among the asterisks. What is longer than 1,024
    characters is no pattern for a name.
    """
    if "*" not in pattern and "?" not in pattern:
        return pattern == text
    if len(pattern) > 1024:
        return False
    at = position = 0
    asterisk, begun = -1, 0  # the last one in the pattern, and where in the text what follows it is tried
    while at < len(text):
        sign = pattern[position : position + 1]
        if sign == "*":
            asterisk, begun = position, at
            position += 1
        elif sign and sign in ("?", text[at]):
            at, position = at + 1, position + 1
        elif asterisk >= 0:
            begun += 1
            at, position = begun, asterisk + 1
        else:
            return False
    return not pattern[position:].strip("*")


def split_outside(text: str, signs: str) -> list[str]:
    """Return what stands between the ``signs`` that are outside brackets, each sign an entry of its own between them.

    ``a[1,2],b!c`` by ``,!`` is ``["a[1,2]", ",", "b", "!", "c"]``. A bracket that is not closed lasts to the end.
    """
    found = [""]
    for part in re.findall(rf"\[[^\]]*\]?|[{re.escape(signs)}]|[^\[{re.escape(signs)}]+", text):
        if part in signs:
            found += [part, ""]
        else:
            found[-1] += part
    return found
