"""What every line passes on its way to the terminal: without colour, or in ASCII, where the terminal asks for that.

One filter for all there is: borders, scroll bars, the footer, and the nodes' text alike.
"""

from __future__ import annotations

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

from gpuboard.board.text.ascii import to_ascii


class AsciiFilter(LineFilter):
    """Draw lines of ASCII: frames as ``+ - |``, what has no like as ``?``, every cell in its place."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments of one line, in ASCII."""
        return [segment if segment.text.isascii() else self._ascii(segment) for segment in segments]

    @staticmethod
    def _ascii(segment: Segment) -> Segment:
        """Return a segment in ASCII; the ends of a scroll bar, parts of a cell in height, would look like data."""
        bar = segment.style is not None and "@mouse.down" in segment.style.meta
        text = " " * segment.cell_length if bar else to_ascii(segment.text)
        return Segment(text, segment.style, segment.control)


class ColorlessFilter(LineFilter):
    """Leave letters, bold, dim, underline and reverse, and no colour."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments of one line, without colour."""
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
