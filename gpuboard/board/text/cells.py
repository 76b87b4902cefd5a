"""Text in cells of a fixed width: cut, padded and aligned, for any characters. Pure; knows no colours.

Terminals disagree on the width of some sequences: flags, joined emoji, emoji with a skin tone or a variation selector,
many combining marks. Such sequences are split into characters that have the same width in all terminals.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.cells import cell_len, get_character_cell_size

S = TypeVar("S")

_NAME_LEAST = 5  # cells of a cut name with a count behind it
_MARKS_KEPT = 2  # combining marks per character; more would overlap neighbouring lines
_REGIONAL = range(0x1F1E6, 0x1F200)  # letters of flags: a pair is one flag in some terminals, two letters in others
_SKIN_TONES = range(0x1F3FB, 0x1F400)
# Texts of characters that are one cell wide everywhere, nearly all that is drawn: ASCII, box drawing, blocks, braille.
_plain = re.compile(r"[ -~°·…\u2500-\u259f\u2800-\u28ff]*").fullmatch
_LEFT_TO_RIGHT = "\u200e"  # LEFT-TO-RIGHT MARK: right-to-left text ends before the next column


def inert(text: str) -> str:
    """Return ``text`` in characters of the same width in all terminals; printable ASCII is unchanged."""
    if _plain(text):
        return text
    kept: list[str] = []
    marks = _MARKS_KEPT  # drops marks without a base character
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
    """Return the width of ``inert(text)`` in terminal cells."""
    return len(text) if _plain(text) else cells_of(inert(text))


def fit(text: str, size: int) -> str:
    """Return ``text`` in exactly ``size`` terminal cells; text that is too long is cut and ends in an ellipsis."""
    if _plain(text) and len(text) <= size:
        return text.ljust(size)
    return "".join(part for part, _ in fit_runs([(text, None)], size, None))


def fit_names(names: Sequence[str], size: int) -> str:
    """Return names in exactly ``size`` terminal cells; those that do not fit are counted.

    >>> fit_names(["erin", "dave"], 10), fit_names(["erin", "dave"], 9)
    ('erin, dave', 'erin +1  ')
    """
    shown = ", ".join(names)
    for count in range(len(names) - 1, 0, -1):
        if width(shown) <= size:
            break
        shown = f"{', '.join(names[:count])} +{len(names) - count}"
    if len(names) > 1 and width(shown) > size:  # one name is too long
        more = f" +{len(names) - 1}"
        if size - len(more) >= _NAME_LEAST:
            return fit(names[0], size - len(more)) + more
    return fit(shown, size)


def fit_runs(
    runs: Iterable[tuple[str, S]], size: int, pad: S, *, right: bool = False, ellipsis: str = "…"
) -> list[tuple[str, S]]:
    """Return runs of (text, style) that take exactly ``size`` terminal cells; ``pad`` is the style of padding."""
    fitted: list[tuple[str, S]] = []
    left = size
    reordered = False
    for text, style in runs:
        if _plain(text):
            clean, used = text, len(text)
        else:
            # A cell takes at most three characters (two marks): avoids cleaning all of a 10 kB title.
            clean = inert(text[: 4 * left + 8])
            used = cells_of(clean)
            reordered = reordered or _reorders(clean)
        if used > left:
            if left <= 0 and fitted:  # full, and there is more text: make space for the ellipsis
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
    if reordered:
        fitted.append((_LEFT_TO_RIGHT, pad))
    if left > 0:
        fitted.insert(0 if right else len(fitted), (" " * left, pad))
    return fitted


def cells_of(clean: str) -> int:
    """Return the width of text from ``inert`` in terminal cells."""
    return len(clean) if _plain(clean) else cell_len(clean)


def _cut(text: str, size: int, ellipsis: str) -> Iterable[str]:
    """Cut ``text`` to ``size`` cells, the ellipsis (one cell, or none) included."""
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
    return any(unicodedata.bidirectional(char) in {"R", "AL", "AN"} for char in text)
