"""A widget of text lines on the Line API: cut to its width, as high as it needs, drawn again only where it changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from rich.segment import Segment
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from gpuboard.board.text.cells import fit_runs
from gpuboard.board.text.lines import Runs

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp

Make = Callable[[int], Sequence[Runs]]  # width in cells → lines


class Pane(Widget):
    """Shows what ``make`` returns for its width."""

    DEFAULT_CSS = "Pane { height: auto; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._make: Make = lambda width: ()
        self._lines: Sequence[Runs] = ()
        self._width = 0

    def show(self, make: Make) -> None:
        """Show something else; lines that stay the same are not drawn again."""
        self._make = make
        old, self._lines = self._lines, make(self._width)
        if len(old) != len(self._lines):
            self.refresh(layout=True)
            return
        for y, (before, after) in enumerate(zip(old, self._lines, strict=True)):
            if before != after:
                self.refresh(Region(0, y, self.size.width, 1))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return how many lines there are at ``width``."""
        self._take(width)
        return len(self._lines)

    def render_line(self, y: int) -> Strip:
        """Return one line of the widget."""
        self._take(self.content_size.width)
        base = self.visual_style.rich_style
        line = self._lines[y] if 0 <= y < len(self._lines) else []
        look = cast("BoardApp", self.app).look
        runs = [(text, base + look.style(role) if role else base) for text, role in line]
        fitted = fit_runs(runs, self._width, base, ellipsis=look.glyphs.ellipsis)
        return Strip([Segment(text, style) for text, style in fitted]).adjust_cell_length(self._width, base)

    def _take(self, width: int) -> None:
        if width != self._width:
            self._width = width
            self._lines = self._make(width)
