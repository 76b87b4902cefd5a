"""The actions on GPUs, shared by every screen that shows GPUs."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from textual.binding import Binding, BindingType

from gpuboard.board import clipboard
from gpuboard.board.dialogs import launch, reserve, signal
from gpuboard.board.history import SPANS, Span
from gpuboard.board.screens.base import BoardScreen


class ActingScreen(BoardScreen):
    """A screen with actions on GPUs; a subclass returns the GPUs concerned in ``targets``."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "reserve", "Reserve", id="gpus.reserve"),
        Binding("x", "launch", "Launch", id="gpus.launch"),
        Binding("K", "signal", "Signal", id="gpus.signal"),
        Binding("y", "copy", "Copy", id="gpus.copy"),
    ]

    @abstractmethod
    def targets(self) -> list[str]:
        """Return the UUIDs of the GPUs that an action applies to: the marked ones, else the cursor's."""

    def action_reserve(self) -> None:
        reserve.open_reserve(self.board, self.targets())

    def action_launch(self) -> None:
        launch.open_launch(self.board, self.targets())

    def action_signal(self) -> None:
        signal.open_signal(self.board, self.targets())

    def action_copy(self) -> None:
        clipboard.open_copy(self.board, self.targets())


class GraphScreen(BoardScreen):
    """A screen with graphs; their span is the same on all of them and kept between starts."""

    TITLE_WORDS = "Graphs"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("t", "span", "Time", id="graphs.span")]

    @property
    def span(self) -> Span:
        return self.board.preferences.graphs

    def action_span(self) -> None:
        """Show the next longer span, after the longest the shortest."""
        self.board.remember(span=SPANS[(SPANS.index(self.span) + 1) % len(SPANS)].name)
        self.redraw()
