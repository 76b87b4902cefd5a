"""The policy's live answer to what is typed in a dialog: one request at a time, with pauses on large clusters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rich.text import Text

from gpuboard.board.background import REST, Background
from gpuboard.board.dialogs.base import Dialog, Field
from gpuboard.board.dialogs.request_form import gpus_words, plain, refusal_words
from gpuboard.model.request import Choice, Refusal, Request

if TYPE_CHECKING:
    from gpuboard.board.scene import Scene
    from gpuboard.board.theme.styles import Look
    from gpuboard.model.snapshot import Snapshot

T = TypeVar("T")
Answer = Choice | Refusal | str  # str: what is wrong with the request itself


class Planner:
    """Asks the policy beside the UI. ``answered`` gets each answer with its request, in the UI's thread."""

    def __init__(
        self,
        dialog: Dialog[Any],
        answered: Callable[[Request, Answer], None],
        plan: Callable[[Request, Snapshot], Choice | Refusal] | None = None,
    ) -> None:
        """``plan``: answers in place of the ledger."""
        self._board = dialog.board
        self._answered = answered
        self._plan = plan or self._board.core.operations.plan
        self._newest: Request | None = None
        self._background: Background[Answer] = Background(dialog, rest=REST)

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


class PlannedDialog(Dialog[T]):
    """A dialog about a request that the policy answers while it is typed."""

    def __init__(
        self,
        title: str,
        fields: Sequence[Field],
        *,
        verb: str,
        plan: Callable[[Request, Snapshot], Choice | Refusal] | None = None,
    ) -> None:
        """``plan``: answers in place of the ledger."""
        super().__init__(title, fields, verb=verb)
        self._planner = Planner(self, self._answered, plan)
        self._seen: tuple[Request, Answer] | None = None  # the newest answer and its request
        self._wanted: Request | None = None  # to commit as soon as its answer arrives

    @abstractmethod
    def request(self) -> Request | None:
        """Return the request of the fields; None where they are invalid, or about something else."""

    @abstractmethod
    def show_answer(self, answer: Answer) -> bool:
        """Show an answer, and return whether the dialog can be committed with it."""

    def show(self, scene: Scene) -> None:
        """Ask again: free GPUs may have changed."""
        if self.is_mounted and not self.busy:
            self._planner.look_again(self.request())

    def changed(self) -> None:
        self.look()

    def look(self) -> None:
        """Ask the policy about the fields."""
        request = self.request()
        if request is None:
            self.refused = False
            self._checked()
        self._planner.look(request)

    def answer_to(self, request: Request) -> Answer | None:
        """Return the answer to a request; before it has arrived None, and its arrival commits the dialog."""
        if self._seen is not None and self._seen[0] == request:
            return self._seen[1]
        self._wanted = request
        self.look()
        return None

    def _answered(self, request: Request, answer: Answer) -> None:
        if self.busy or request != self.request():
            return
        self._seen = request, answer
        self.refused = not self.show_answer(answer)
        self._checked()
        wanted, self._wanted = self._wanted, None
        if wanted == request:
            self.action_commit()


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
