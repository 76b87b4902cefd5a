"""The app, typed, for the screens and widgets of the board."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gpuboard.board.terminal.textual_compat import is_open

if TYPE_CHECKING:
    from textual.dom import DOMNode

    from gpuboard.board.app import BoardApp


class OnBoard:
    """A screen or widget of the board."""

    @property
    def board(self) -> BoardApp:
        return cast("BoardApp", cast("DOMNode", self).app)

    @property
    def is_open(self) -> bool:
        """Whether it has its widgets and is not being closed. Check it before an answer to ``ask`` is shown."""
        return is_open(cast("DOMNode", self))
