"""Lines of text above and below the rows: the header, the banners, a status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from gpuboard.board.text.cells import fit_runs
from gpuboard.board.text.rows import Cell, Runs, runs_of, strip
from gpuboard.board.widgets.header import header

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp
    from gpuboard.board.scene import Scene
    from gpuboard.board.theme.styles import Look


class Lines(Widget):
    """A few lines of text in styles of Look; only those that have changed are drawn again."""

    DEFAULT_CSS = "Lines { height: auto; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: Sequence[Runs] = ()
        self.display = False

    def set_lines(self, lines: Sequence[Runs]) -> None:
        """Show ``lines``; without any the widget takes no room."""
        before, self._lines = self._lines, lines
        if len(before) != len(lines):
            self.display = bool(lines)
            self.styles.height = len(lines)
            self.refresh()
            return
        for y, (old, new) in enumerate(zip(before, lines, strict=True)):
            if old != new:
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        """Return one of the lines, cut where it is too long."""
        base = self.visual_style.rich_style
        look: Look = cast("BoardApp", self.app).look
        runs = runs_of(Cell(self._lines[y]), base, look) if y < len(self._lines) else []
        return strip(fit_runs(runs, self.size.width, base, ellipsis=look.glyphs.ellipsis), base, self.size.width)


class Summary(Lines):
    """The header of a screen that shows scenes."""

    def show(self, scene: Scene) -> None:
        """Say what is free in ``scene``."""
        self.set_lines(header(scene, self.app.size.width, tall=self.app.size.height >= 24))


class Banners(Lines):
    """What is wrong as a whole."""

    def show(self, scene: Scene) -> None:
        """Show the banners of ``scene``."""
        self.set_lines([((f" {banner}", "bad"),) for banner in scene.banners])
