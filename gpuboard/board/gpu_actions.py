"""What can be done to GPUs, the same on every screen that shows some."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from gpuboard.board import clipboard
from gpuboard.board.dialogs import launch, reserve
from gpuboard.board.screens import processes
from gpuboard.board.screens.base import BoardScreen


class ActingScreen(BoardScreen):
    """A screen whose GPUs can be reserved, and so on. A subclass says which ones are meant."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "reserve", "Reserve", id="gpus.reserve"),
        Binding("x", "launch", "Launch", id="gpus.launch"),
        Binding("k", "signal", "Signal", id="gpus.signal"),
        Binding("y", "copy", "Copy", id="gpus.copy"),
    ]

    def targets(self) -> list[str]:
        """Return the UUIDs of the GPUs that an action is meant for: the marked ones, or the cursor's."""
        raise NotImplementedError

    def action_reserve(self) -> None:
        """Open the dialog that reserves them."""
        reserve.open_reserve(self.board, self.targets())

    def action_launch(self) -> None:
        """Open the dialog that launches on them."""
        launch.open_launch(self.board, self.targets())

    def action_signal(self) -> None:
        """Send a signal to a process on them."""
        processes.open_signal(self.board, self.targets())

    def action_copy(self) -> None:
        """Offer what can be copied of them."""
        clipboard.open_copy(self.board, self.targets())
