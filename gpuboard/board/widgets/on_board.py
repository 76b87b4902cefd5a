"""The app, typed, for the screens and widgets of the board."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from textual.message_pump import MessagePump

    from gpuboard.board.app import BoardApp


class OnBoard:
    """A screen or widget of the board."""

    @property
    def board(self) -> BoardApp:
        return cast("BoardApp", cast("MessagePump", self).app)
