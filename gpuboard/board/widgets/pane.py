"""Widgets of text lines on the Line API: cut to their width, as high as needed, redrawn only where a line changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.style import Style
from textual import events
from textual.filter import LineFilter
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from gpuboard.board.terminal.textual_compat import draw_lines, lay_out
from gpuboard.board.text.cells import fit_runs
from gpuboard.board.text.lines import banner_lines
from gpuboard.board.text.rows import Cell, runs_of, strip
from gpuboard.board.widgets.header import header, picked
from gpuboard.board.widgets.on_board import OnBoard

if TYPE_CHECKING:
    from gpuboard.board.scene import Scene

Runs = Sequence[tuple[str, str | Style]]  # (text, role of Look or style)
Make = Callable[[int], Sequence[Runs]]  # width in cells → lines


class Pane(OnBoard, Widget):
    """Shows what ``make`` returns for its width."""

    DEFAULT_CSS = "Pane { height: auto; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._make: Make = lambda width: ()
        self._lines: Sequence[Runs] = ()
        self._width = 0

    @property
    def count(self) -> int:
        """How many lines it shows."""
        return len(self._lines)

    def show(self, make: Make) -> None:
        """Show something else; lines that stay the same are not drawn again."""
        self._make = make
        old, self._lines = self._lines, make(self._width)
        if len(old) != len(self._lines):
            lay_out(self)
            return
        if changed := [y for y, (before, after) in enumerate(zip(old, self._lines, strict=True)) if before != after]:
            draw_lines(self, changed)

    def get_line_filters(self) -> Sequence[LineFilter]:
        return self.board.own_line_filters()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        self._take(width)
        return len(self._lines)

    def render_line(self, y: int) -> Strip:
        self._take(self.content_size.width)
        base = self.visual_style.rich_style
        look = self.board.look
        runs = runs_of(Cell(tuple(self._lines[y])), base, look) if y < len(self._lines) else []
        return strip(fit_runs(runs, self._width, base, ellipsis=look.glyphs.ellipsis), base, self._width)

    def _take(self, width: int) -> None:
        if width != self._width:
            self._width = width
            self._lines = self._make(width)


class Lines(Pane):
    """Lines that do not depend on the width; takes no room without any."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.display = False

    def set_lines(self, lines: Sequence[Runs]) -> None:
        self.display = bool(lines)
        super().show(lambda _: lines)


class Summary(Lines):
    """The header of a screen that shows scenes; a click on a count offers the filter for it."""

    class Picked(Message):
        """A count was clicked."""

        def __init__(self, query: str) -> None:
            super().__init__()
            self.query = query

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._scene: Scene | None = None

    @property
    def _tall(self) -> bool:
        return self.app.size.height >= 24

    def show_scene(self, scene: Scene) -> None:
        self._scene = scene
        self.set_lines(header(scene, self.app.size.width, tall=self._tall))

    def on_click(self, event: events.Click) -> None:
        """Offer the filter for the count that was clicked."""
        at, scene = event.get_content_offset(self), self._scene
        if at is None or scene is None:
            return
        if query := picked(scene, self.app.size.width, at.x, at.y, tall=self._tall):
            self.post_message(self.Picked(query))


class Banners(Lines):
    """What is wrong with the cluster as a whole."""

    def show_scene(self, scene: Scene) -> None:
        self.set_lines(banner_lines(scene, self.app.size.width))
