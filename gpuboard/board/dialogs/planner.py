"""What the policy says to what somebody types, live: one question at a time, and with rests on large clusters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.text import Text

from gpuboard.board.dialogs.request_form import plain, refusal_words
from gpuboard.model.request import Choice, Refusal, Request

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp
    from gpuboard.board.theme.styles import Look

Answer = Choice | Refusal | str  # words: what is wrong with the request itself
REST = 9  # times as long as a look takes there is none for a new scene alone: Python's other threads wait meanwhile


class Planner:
    """Asks the policy beside the UI. ``told`` gets each answer with its request, in the UI's thread."""

    def __init__(self, board: BoardApp, told: Callable[[Request, Answer], None]) -> None:
        self._board = board
        self._told = told
        self._next: Request | None = None
        self._asking = False
        self._rest_until = 0.0  # monotonic

    def look(self, request: Request | None) -> None:
        """Ask this, as soon as what is being asked is answered, in place of all that still waits; None: nothing."""
        self._next = request
        if not self._asking:
            self._ask()

    def look_again(self, request: Request | None) -> None:
        """Ask this if there was rest enough: nothing new was typed, but what is free may have changed."""
        if time.monotonic() >= self._rest_until and not self._asking:
            self.look(request)

    def _ask(self) -> None:
        request, scene = self._next, self._board.scene
        self._next = None
        if request is None or scene is None:
            return
        self._asking = True
        began = time.monotonic()

        def answered(answer: Answer) -> None:
            self._asking = False
            now = time.monotonic()
            self._rest_until = now + REST * (now - began)
            self._told(request, answer)
            if not self._asking:
                self._ask()

        operations = self._board.core.operations
        self._board.ask(
            lambda: operations.plan(request, scene.snapshot), answered, lambda error: answered(plain(str(error)))
        )


def refused(answer: Refusal | str, look: Look) -> Text:
    """Return why not, and what would work."""
    if isinstance(answer, str):
        return Text(answer, look.style("bad"))
    message, nearest = refusal_words(answer)
    found = Text.assemble(("Not now: " if answer.code == 4 else "Never here: ", look.style("warn")), message)
    return found.append(f"\nNearest: {nearest}", look.style("good")) if nearest else found
