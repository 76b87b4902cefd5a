"""A line of a log as a person sees it: colours kept, every other escape and control inert, tabs in columns (pure)."""

from __future__ import annotations

import re

from rich.cells import cell_len, get_character_cell_size
from rich.text import Text

from gpuboard.board.text.cells import inert

_TAB = 8

# ECMA-48: control strings with all that they carry, control sequences, other escapes. SGR (colours) is told apart.
_SGR = re.compile(r"(\x1b\[[0-9;:]*m)")
_ESCAPE = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$)"
    r"|\x1b\[[0-9;:]*m"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]?"
)


def visible(line: str) -> str:
    """Return what a terminal would still show of a line: nothing of what a carriage return let be written over."""
    return line.removesuffix("\n").rstrip("\r").rpartition("\r")[2]


def plain(line: str) -> str:
    """Return a line without any escape."""
    return _ESCAPE.sub("", line)


def matches(line: str, words: str) -> bool:
    """Return whether a line shows ``words``."""
    return bool(spans(plain(line), words))


def spans(text: str, words: str) -> list[tuple[int, int]]:
    """Return where ``words`` stand in ``text``; capitals count where ``words`` has some."""
    if not words:
        return []
    pattern = re.compile(re.escape(words), 0 if words != words.lower() else re.IGNORECASE)
    return [match.span() for match in pattern.finditer(text)]


def drawn(line: str, width: int | None, most: int) -> list[Text]:
    """Return a line as rows of ``width`` cells, one row at least; None: one row, however long.

    Of that no more than the first ``most`` cells are needed: what follows may be left out.
    """
    if width is None and len(line) > 2 * most + 4096:  # escapes and marks take no cell; 64 kB of them are no colours
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
    """Return where to cut ``text`` so that no part takes more than ``width`` cells."""
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
