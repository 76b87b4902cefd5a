"""The overview below the cluster view, and on top of its own screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.containers import Vertical

from gpuboard.board.overview.facts import Gatherer
from gpuboard.board.scene import Scene
from gpuboard.board.text.overview import BOXES, LEAST, overview
from gpuboard.board.widgets.pane import Pane


class RowsAndOverview(Vertical):
    """Rows, and a panel over the lines that they leave at the bottom."""

    DEFAULT_CSS = """
    RowsAndOverview { width: 1fr; layers: default above; }
    RowsAndOverview OverviewPanel { layer: above; dock: bottom; }
    """

    def __init__(self, resized: Callable[[], None], *, id: str | None = None) -> None:
        """``resized``: called when there are more or fewer lines."""
        super().__init__(id=id)
        self._resized = resized

    def on_resize(self) -> None:
        self._resized()


class OverviewPanel(Pane):
    """Boxes of text that fill the lines it is given."""

    DEFAULT_CSS = "OverviewPanel { display: none; }"

    def __init__(self, gatherer: Gatherer, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.gatherer = gatherer
        self.lines = 0  # those that it fills; 0: hidden
        self._names: Sequence[str] = BOXES

    def take(self, lines: int, names: Sequence[str] = BOXES) -> None:
        """Fill ``lines`` lines with those boxes of ``names`` that fit; hidden where the lines are too few."""
        self._names = names
        self.lines = lines if lines >= LEAST else 0
        self.display = bool(self.lines)
        self.styles.height = self.lines

    def show_scene(self, scene: Scene) -> None:
        """Show the newest facts; nothing is counted while hidden."""
        if self.display:
            lines, names = self.lines, self._names
            facts = self.gatherer.facts(scene, self.board.preferences.graphs)
            glyphs = self.board.look.glyphs
            self.show(lambda width: overview(facts, width, lines, glyphs, names))
