"""Text in ASCII for terminals without Unicode; every character keeps its width (pure)."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from rich.cells import cell_len

_LIKE = {
    "…": "~", "·": ".", "•": "*", "●": "*", "○": "o", "✓": "+", "✔": "+", "✗": "x", "✘": "x", "×": "x", "⚠": "!",
    "▲": "^", "▼": "v", "◀": "<", "▶": ">", "▸": ">", "▾": "v", "↑": "^", "↓": "v", "←": "<", "→": ">", "⏎": "<",
    "⌫": "<", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "°": "o", "\u00a0": " ", "␛": "^", "█": "#",
    "▀": "#", "▄": "#", "▌": "#", "▐": "#", "░": ".", "▒": ":", "▓": "#", "▔": "-", "▁": "_", "▎": "|", "▏": "|",
    "▊": "#", "▋": "#", "▉": "#", "▍": "|", "▕": "|", "⎺": "-", "⎽": "_", "■": "#", "□": "o", "⣀": ".",
}  # fmt: skip


@lru_cache(1024)
def to_ascii(text: str) -> str:
    """Return ``text`` in ASCII; its width in cells is unchanged."""
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
