"""Text into cells of a fixed width: cut, padded and aligned, whatever it is made of. Pure; knows no colours.

Terminals disagree on what sequences of characters take: flags, joined emoji, emoji with a skin tone or a variation
selector, piled-up combining marks. Such sequences are taken apart into characters that all terminals draw equally wide.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import TypeVar

from rich.cells import cell_len, get_character_cell_size

S = TypeVar("S")

_MARKS_KEPT = 2  # combining marks on one character; more is a pile that runs over neighbouring lines
_REGIONAL = range(0x1F1E6, 0x1F200)  # letters of flags: two of them are one flag here and two there
_SKIN_TONES = range(0x1F3FB, 0x1F400)
_LEFT_TO_RIGHT = "\u200e"  # ends what a terminal that reorders right-to-left text would move into the next column


def inert(text: str) -> str:
    """Return ``text`` in characters whose widths all terminals agree on; printable ASCII is returned as it is."""
    if text.isascii() and text.isprintable():
        return text
    kept: list[str] = []
    marks = _MARKS_KEPT  # none is kept where there is no character to sit on
    for char in unicodedata.normalize("NFC", text):
        code = ord(char)
        category = unicodedata.category(char)
        if category in {"Cc", "Zl", "Zp"}:
            kept.append(" ")
            marks = _MARKS_KEPT
        elif category in {"Cf", "Cs", "Co", "Cn"} or code in _SKIN_TONES:
            continue
        elif code in _REGIONAL:
            kept.append(chr(code - _REGIONAL.start + ord("A")))
            marks = 0
        elif get_character_cell_size(char) > 0:
            kept.append(char)
            marks = 0
        elif category == "Mn" and marks < _MARKS_KEPT and not 0xFE00 <= code <= 0xFE0F and code < 0xE0000:
            kept.append(char)
            marks += 1
    return "".join(kept)


def width(text: str) -> int:
    """Return how many terminal cells ``text``, made inert, takes."""
    text = inert(text)
    return len(text) if text.isascii() else cell_len(text)


def fit(text: str, size: int, *, right: bool = False, ellipsis: str = "…") -> str:
    """Return ``text`` in exactly ``size`` terminal cells; what does not fit is cut and ends in ``ellipsis``."""
    if text.isascii() and text.isprintable() and len(text) <= size:
        return text.rjust(size) if right else text.ljust(size)
    return "".join(part for part, _ in fit_runs([(text, None)], size, None, right=right, ellipsis=ellipsis))


def fit_runs(
    runs: Iterable[tuple[str, S]], size: int, pad: S, *, right: bool = False, ellipsis: str = "…"
) -> list[tuple[str, S]]:
    """Return runs of (text, style) that take exactly ``size`` terminal cells; ``pad`` is the style of what is added."""
    fitted: list[tuple[str, S]] = []
    left = size
    for text, style in runs:
        # A character takes one cell at least, with its marks it is three long: enough of a 10 kB title to cut it.
        clean = inert(text[: 4 * left + 8])
        used = len(clean) if clean.isascii() else cell_len(clean)
        if used > left:
            if left <= 0 and fitted:  # full to the last cell, and more was to come: make room for the sign
                clean, last = fitted.pop()
                left = cell_len(clean)
            else:
                last = style
            fitted.extend((part, last) for part in _cut(clean, left, ellipsis) if part)
            left = 0
            break
        if clean:
            fitted.append((clean, style))
            left -= used
    if any(_reorders(text) for text, _ in fitted):
        fitted.append((_LEFT_TO_RIGHT, pad))
    if left > 0:
        fitted.insert(0 if right else len(fitted), (" " * left, pad))
    return fitted


def _cut(text: str, size: int, ellipsis: str) -> Iterable[str]:
    """Cut ``text`` to ``size`` cells, the last of them the sign that it was cut (one cell, or none)."""
    if size <= 0:
        return
    room = size - len(ellipsis)
    end = 0
    for char in text:
        wide = get_character_cell_size(char)
        if wide > room:
            break
        room -= wide
        end += 1
    yield text[:end] + ellipsis + " " * room


def _reorders(text: str) -> bool:
    return not text.isascii() and any(unicodedata.bidirectional(char) in {"R", "AL", "AN"} for char in text)
