"""What every line passes on its way to the terminal: without colour, or in ASCII, where the terminal asks for that.

One filter for all there is: borders, scroll bars, the footer, and the nodes' text alike.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

_LIKE = {
    "…": "~", "·": ".", "•": "*", "●": "*", "○": "o", "✓": "+", "✔": "+", "✗": "x", "✘": "x", "×": "x", "⚠": "!",
    "▲": "^", "▼": "v", "◀": "<", "▶": ">", "▸": ">", "▾": "v", "↑": "^", "↓": "v", "←": "<", "→": ">", "⏎": "<",
    "⌫": "<", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "°": "o", "\u00a0": " ", "␛": "^", "█": "#",
    "▀": "#", "▄": "#", "▌": "#", "▐": "#", "░": ".", "▒": ":", "▓": "#", "▔": "-", "▁": "_", "▎": "|", "▏": "|",
    "▊": "#", "▋": "#", "▉": "#", "▍": "|", "▕": "|", "⎺": "-", "⎽": "_", "■": "#", "□": "o", "⣀": ".",
}  # fmt: skip


class AsciiFilter(LineFilter):
    """Draw lines of ASCII: frames as ``+ - |``, what has no like as ``?``, every cell in its place."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments of one line, in ASCII."""
        return [
            segment if segment.text.isascii() else Segment(to_ascii(segment.text), segment.style, segment.control)
            for segment in segments
        ]


class ColorlessFilter(LineFilter):
    """Leave letters, bold, dim, underline and reverse, and no colour."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments of one line, without colour."""
        return [Segment(text, style and _colorless(style), control) for text, style, control in segments]


@lru_cache(1024)
def to_ascii(text: str) -> str:
    """Return ``text`` in ASCII; it takes as many cells as before."""
    return "".join(character if character.isascii() else _alike(character) for character in text)


def _alike(character: str) -> str:
    if character in _LIKE:
        return _LIKE[character]
    width = cell_len(character)
    if width == 0:
        return ""
    code = ord(character)
    if 0x2500 <= code <= 0x257F:  # box drawing
        name = unicodedata.name(character)
        if "DIAGONAL" in name:
            return "/"
        upright = any(word in name for word in ("VERTICAL", "UP", "DOWN"))
        level = any(word in name for word in ("HORIZONTAL", "LEFT", "RIGHT"))
        return "+" if upright and level else "|" if upright else "-"
    if 0x2580 <= code <= 0x259F or 0x2800 <= code <= 0x28FF or 0x1FB00 <= code <= 0x1FBFF:  # blocks, braille, mosaics
        return "#" if code != 0x2800 else " "
    return "?" * width


@lru_cache(1024)
def _colorless(style: Style) -> Style:
    return Style(
        bold=style.bold,
        dim=style.dim,
        italic=style.italic,
        underline=style.underline,
        reverse=style.reverse,
        strike=style.strike,
        meta=style.meta or None,
    )
