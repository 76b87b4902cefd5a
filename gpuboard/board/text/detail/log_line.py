"""A line of a log as displayed: colours kept, every other escape and control removed, tabs expanded (pure)."""

from __future__ import annotations

import re

from rich.cells import cell_len, get_character_cell_size
from rich.text import Text

from gpuboard.board.text.cells import inert

_TAB = 8

# ECMA-48: control strings with their content, control sequences, other escapes. SGR (colours) matches separately.
_SGR = re.compile(r"(\x1b\[[0-9;:]*m)")
_ESCAPE = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$)"
    r"|\x1b\[[0-9;:]*m"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]?"
)


def visible(line: str) -> str:
    """Return the part of a line that a terminal still shows: a carriage return overwrites what is before it."""
    return line.removesuffix("\n").rstrip("\r").rpartition("\r")[2]


def plain(line: str) -> str:
    """Return a line without escapes."""
    return _ESCAPE.sub("", line)


def matches(line: str, words: str) -> bool:
    """Return whether a line contains ``words``."""
    return bool(spans(plain(line), words))


def spans(text: str, words: str) -> list[tuple[int, int]]:
    """Return the spans of ``words`` in ``text``; case matters only if ``words`` has capitals."""
    if not words:
        return []
    pattern = re.compile(re.escape(words), 0 if words != words.lower() else re.IGNORECASE)
    return [match.span() for match in pattern.finditer(text)]


def drawn(line: str, width: int | None, most: int) -> list[Text]:
    """Return a line as rows of ``width`` cells, at least one; None: one row of any length.

    The caller needs only the first ``most`` cells of it.
    """
    if width is None and len(line) > 2 * most + 4096:  # 4096: escapes and combining marks take no cells
        line = line[: 2 * most + 4096]
    text = Text(line) if line.isascii() and line.isprintable() else _coloured(line)
    if width is None:
        return [text]
    cuts = _cuts(text.plain, width)
    return list(text.divide(cuts)) if cuts else [text]


def bytes_words(size: int) -> str:
    """Return a size as ``812 B``, ``3.4 MB``, ``120 GB``."""
    amount, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.1f} {unit}" if amount < 10 and unit != "B" else f"{amount:.0f} {unit}"


def _coloured(line: str) -> Text:
    """Return a line with escapes and controls gone, tabs as blanks and its colours as styles."""
    line = _ESCAPE.sub(lambda match: match.group() if _SGR.fullmatch(match.group()) else "", line)
    column = 0
    parts: list[str] = []
    for at, piece in enumerate(_SGR.split(line)):
        if at % 2:
            parts.append(piece)
            continue
        for tab, text in enumerate(piece.split("\t")):
            if tab:
                blanks = _TAB - column % _TAB
                parts.append(" " * blanks)
                column += blanks
            clean = inert(text)
            parts.append(clean)
            column += cell_len(clean)
    clean = "".join(parts)
    return Text.from_ansi(clean) if "\x1b" in clean else Text(clean)


def _cuts(text: str, width: int) -> list[int]:
    """Return where to cut ``text`` into parts of at most ``width`` cells."""
    if text.isascii():
        return list(range(width, len(text), width))
    cuts, used = [], 0
    for at, char in enumerate(text):
        wide = get_character_cell_size(char)
        if used + wide > width:
            cuts.append(at)
            used = 0
        used += wide
    return cuts
