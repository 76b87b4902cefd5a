"""The policy's live answer to what is typed in a dialog: one request at a time, with pauses on large clusters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.text import Text

from gpuboard.board.background import REST, Background
from gpuboard.board.dialogs.request_form import gpus_words, plain, refusal_words
from gpuboard.model.request import Choice, Refusal, Request

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp
    from gpuboard.board.theme.styles import Look
    from gpuboard.model.snapshot import Snapshot

Answer = Choice | Refusal | str  # str: what is wrong with the request itself


class Planner:
    """Asks the policy beside the UI. ``answered`` gets each answer with its request, in the UI's thread."""

    def __init__(
        self,
        board: BoardApp,
        answered: Callable[[Request, Answer], None],
        plan: Callable[[Request, Snapshot], Choice | Refusal] | None = None,
    ) -> None:
        """``plan``: answers in place of the ledger."""
        self._board = board
        self._answered = answered
        self._plan = plan or board.core.operations.plan
        self._newest: Request | None = None
        self._background: Background[Answer] = Background(board, rest=REST)

    def look(self, request: Request | None) -> None:
        """Ask for the newest request: it replaces one that still waits for its turn. None: ask for nothing."""
        self._newest = request
        board = self._board
        if request is None or (scene := board.scene) is None:
            return
        self._background.ask(
            lambda: self._plan(request, scene.snapshot),
            lambda answer: self._answered(request, answer),
            lambda error: self._answered(request, plain(str(error))),
            again=lambda: self.look(self._newest),
        )

    def look_again(self, request: Request | None) -> None:
        """Ask again because the cluster has changed, unless an answer is on its way or was given just now."""
        if self._background.rested:
            self.look(request)


def taken(answer: Choice) -> str:
    """Return which GPUs the request would get, in words."""
    words = gpus_words(answer.gpus)
    return f"Will reserve {words}" if words else "Slurm will choose the GPUs"


def refused(answer: Refusal | str, look: Look) -> Text:
    """Return why the request is refused and the nearest one that would work."""
    if isinstance(answer, str):
        return Text(answer, look.style("bad"))
    message, nearest = refusal_words(answer)
    found = Text.assemble(("No: " if answer.code == 4 else "Impossible here: ", look.style("warn")), message)
    return found.append(f"\nTry: {nearest}", look.style("good")) if nearest else found
