"""Filters for every drawn line, text from nodes included: no colour, or ASCII only, where the terminal requires it."""

from __future__ import annotations

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

from gpuboard.board.text.ascii import to_ascii


class AsciiFilter(LineFilter):
    """Draw in ASCII: frames as ``+ - |``, characters without an equivalent as ``?``; widths are kept."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [segment if segment.text.isascii() else self._ascii(segment) for segment in segments]

    @staticmethod
    def _ascii(segment: Segment) -> Segment:
        """Return a segment in ASCII; parts of a scroll bar become blanks, as they would look like data."""
        bar = segment.style is not None and "@mouse.down" in segment.style.meta
        text = " " * segment.cell_length if bar else to_ascii(segment.text)
        return Segment(text, segment.style, segment.control)


class ColorlessFilter(LineFilter):
    """Remove colour; keep bold, dim, underline and reverse."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(text, style and _colorless(style), control) for text, style, control in segments]


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
