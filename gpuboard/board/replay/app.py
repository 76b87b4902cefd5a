"""The board that plays a recording: the board, and keys for its position and speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.actions import ActionParseResult
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.widgets import Input

from gpuboard.board.app import BoardApp
from gpuboard.board.replay.core import REFUSED, WHY_REFUSED, ReplayCore
from gpuboard.board.terminal.guard import Guard
from gpuboard.recording.player import Player

_SHORT_S, _LONG_S = 60.0, 3600.0


class ReplayApp(BoardApp):
    """The board on a recording."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("0", "pause", "Pause", id="replay.pause"),
        Binding("comma", f"jump({-_SHORT_S})", "Back 1 min", id="replay.back", show=False),
        Binding("full_stop", f"jump({_SHORT_S})", "Forward 1 min", id="replay.forward", show=False),
        Binding("less_than_sign", f"jump({-_LONG_S})", "Back 1 h", id="replay.back-hour", show=False),
        Binding("greater_than_sign", f"jump({_LONG_S})", "Forward 1 h", id="replay.forward-hour", show=False),
        Binding("plus", "faster", "Faster", id="replay.faster"),
        Binding("minus", "slower", "Slower", id="replay.slower"),
    ]

    REFUSED = REFUSED

    def __init__(self, core: ReplayCore, guard: Guard | None = None) -> None:
        super().__init__(core, guard)
        self._replay = core
        self._welcomed = True  # whether there are GPUs on this machine does not matter

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide ``+`` and ``-`` from the footer while text is typed: they are text then."""
        typing = isinstance(self.focused, Input)
        return not (action in {"faster", "slower"} and typing) and super().check_action(action, parameters)

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """Run an action; where a replay refuses it, show the reason."""
        if action in self.REFUSED:
            self.notify(WHY_REFUSED, severity="warning", markup=False)
            return True
        return await super().run_action(action, default_namespace, namespaces)

    def action_pause(self) -> None:
        self._replay.control(Player.pause)

    def action_jump(self, seconds: float) -> None:
        """Go forward in the recording by ``seconds``; back if negative."""
        self._replay.control(lambda player: player.seek(player.position + seconds))

    def action_faster(self) -> None:
        self._replay.control(Player.faster)

    def action_slower(self) -> None:
        self._replay.control(Player.slower)
