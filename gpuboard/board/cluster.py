"""The cluster view: what is free, every node and GPU."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import Footer, Static

from gpuboard.board.look import LETTERS
from gpuboard.board.scene import Scene
from gpuboard.board.screen import BoardScreen


class ClusterScreen(BoardScreen):
    """The first screen."""

    TITLE_WORDS = "Cluster"

    def compose(self) -> ComposeResult:
        """Header, picture, footer."""
        yield Static(id="picture", markup=False)
        yield Footer()

    def show(self, scene: Scene) -> None:
        """Draw ``scene``."""
        lines = []
        for node in scene.snapshot.nodes:
            line = Text(f"{node.name:<16}")
            for gpu in node.gpus:
                line.append(LETTERS[gpu.state], self.board.look.style(gpu.state))
            lines.append(line)
        self.query_one("#picture", Static).update(Text("\n").join(lines))
