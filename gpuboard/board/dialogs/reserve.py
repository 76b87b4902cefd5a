"""The dialog that reserves: these GPUs or the best n, live with what would be taken and why; all of it or nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING

from rich.text import Text
from textual.app import ComposeResult

from gpuboard.board.dialogs import request_form
from gpuboard.board.dialogs.base import Dialog, Field, duration, number, size
from gpuboard.board.dialogs.planner import Answer, Planner, refused
from gpuboard.board.operations import Attempt
from gpuboard.board.scene import Scene
from gpuboard.errors import GpuboardError, Refused
from gpuboard.leases.output.formats import Allocation
from gpuboard.model.request import Choice, Pick, Refusal, Request
from gpuboard.model.units import is_whole, parse_duration

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp

_USUAL_S = 8 * 3600.0  # how long is offered first, where the site allows it


def open_reserve(board: BoardApp, uuids: Sequence[str]) -> None:
    """Open the dialog for these GPUs; without any for the best one."""
    if board.scene is None:
        board.notify("nothing is known of the GPUs yet", markup=False)
        return
    words, picks = request_form.picks_of(uuids, board.scene)
    if not board.core.operations.names_gpus(Request(picks=picks)):  # as many as were selected then
        words, picks = str(len(picks) or 1), ()
    board.push_screen(ReserveDialog(words, picks, parse_duration(board.core.settings.max_lease)))


class ReserveDialog(Dialog[Allocation]):
    """Asks for GPUs, how long and what for. What it shows is what it takes, or it says who was quicker."""

    def __init__(self, words: str, picks: Sequence[Pick], most_s: float) -> None:
        """``words`` and ``picks``: the same GPUs, for people and by UUID; none: the policy picks one."""
        usual = request_form.lasting(min(_USUAL_S, most_s))
        super().__init__(
            "Reserve",
            [
                Field("gpus", "GPUs", words or "1", "a number, or gpu01:0,3", request_form.which),
                Field("model", "Model", "", "any; a part of its name: H100"),
                Field("memory", "Free memory", "", "any; of each: 40GiB", size),
                Field("nodes", "Nodes", "", "the fewest; at most 1, 2, …", number(1, 4096, needed=False)),
                Field("for", "For", usual, f"at most {request_form.lasting(most_s)}", duration(most_s)),
                Field("purpose", "Purpose", "", "shown to others"),
            ],
            verb="Reserve",
        )
        self._marked: dict[str, Sequence[Pick]] = {words: picks} if picks else {}
        self._seen: tuple[Request, Answer] | None = None  # the newest answer, and to what
        self._wanted = False  # commit as soon as the answer is there
        self._before = Text()  # what went wrong before, as long as nothing else is typed
        self._attempt = Attempt()

    def compose(self) -> ComposeResult:
        """The fields; what is typed into them is looked at from the first message on."""
        self._planner = Planner(self.board, self._answered)
        yield from super().compose()

    def changed(self) -> None:
        """Look at what is typed now."""
        self._before = Text()
        self._look()

    def show(self, scene: Scene) -> None:
        """Look again: what is free has changed."""
        if self.is_mounted and not self.busy:
            self._planner.look_again(self._request())

    def _request(self) -> Request | None:
        return None if self.wrong() else request_form.request_of(self.values, self._marked)

    def _look(self) -> None:
        request = self._request()
        if request is None:
            self.say(self._before)
        self._planner.look(request)

    def _answered(self, request: Request, answer: Answer) -> None:
        if not self.is_attached or self.busy or request != self._request():
            return
        self._seen = request, answer
        self.say(self._before + self._words(answer))
        if self._wanted:
            self._wanted = False
            self.action_commit()

    def _words(self, answer: Answer) -> Text:
        look = self.board.look
        if isinstance(answer, Choice):
            takes = (
                f"Takes {request_form.places_words(answer.gpus)}"
                if answer.gpus
                else "Asks Slurm, which chooses the GPUs"
            )
            found = Text.assemble((takes, look.style("good")), "\n")
            return found.append(answer.why, look.style("dim"))
        return refused(answer, look)

    def commit(self, values: dict[str, str]) -> None:
        """Take exactly what is shown; where Slurm chooses, have it choose."""
        request = self._request()
        if request is None or self._seen is None or self._seen[0] != request:
            self._wanted = True
            self._look()
            return
        choice = self._seen[1]
        if not isinstance(choice, Choice):
            return  # why not is on the screen
        wanted = Request(picks=tuple(Pick(gpu.node, None, gpu.uuid) for gpu in choice.gpus)) if choice.gpus else request
        for_s, purpose, attempt = parse_duration(values["for"]), values["purpose"], self._attempt
        self.busy = True
        places = request_form.places_words(choice.gpus)
        self.say(f"Reserving {places} …" if places else "Waiting for Slurm; escape gives up …")
        board = self.board
        board.ask(
            lambda: board.core.operations.reserve(wanted, for_s, purpose, attempt),
            lambda allocation: self._taken(board, allocation),
            lambda error: self._refused(board, error, choice),
        )

    def _taken(self, board: BoardApp, allocation: Allocation) -> None:
        board.core.operations.published(allocation)
        if self._attempt.given_up:  # a moment before we were told: it is being given back
            return
        board.notify(taken_words(allocation), title=f"Reserved: {allocation.lease.id}", timeout=15, markup=False)
        self.dismiss(allocation)

    def _refused(self, board: BoardApp, error: GpuboardError, choice: Choice) -> None:
        """Say what came between, and look for the next best set of the same size."""
        if self._attempt.given_up:
            return
        words = request_form.refusal_words(error.refusal)[0] if isinstance(error, Refused) else str(error)
        if choice.gpus and (self.values["gpus"] in self._marked or not is_whole(self.values["gpus"])):
            self._offer(board, words, choice)
        else:
            self._again(words)

    def _offer(self, board: BoardApp, words: str, choice: Choice) -> None:
        """Put the next best set in place of the one that was named: as many, of the same model."""
        assert board.scene is not None
        names = {board.scene.places[gpu.uuid].gpu.name for gpu in choice.gpus if gpu.uuid in board.scene.places}
        instead = Request(n=len(choice.gpus), model=names.pop() if len(names) == 1 else None)

        def found(answer: Choice | Refusal) -> None:
            if isinstance(answer, Choice) and self.is_attached:
                text = request_form.places_words(answer.gpus)
                self._marked[text] = tuple(Pick(gpu.node, None, gpu.uuid) for gpu in answer.gpus)
                self.put("gpus", text)
            self._again(words)

        board.ask(lambda: board.core.operations.plan(instead), found, lambda _: self._again(words))

    def _again(self, words: str) -> None:
        if not self.is_attached:
            return
        look = self.board.look
        self._before = Text.assemble(("Not reserved: ", look.style("bad")), words, "\n")
        self._seen = None
        self.busy = False
        self._look()

    def action_cancel(self) -> None:
        """Close. What is being taken is given back."""
        if self.busy:
            self._attempt.give_up()
            self.board.notify("Given up: nothing is reserved", markup=False)
        self.dismiss(None)


def taken_words(allocation: Allocation) -> str:
    """Return what the toast says: which GPUs, until when, and the line for a shell."""
    lease, now = allocation.lease, time.time()
    until = request_form.local(now + lease.remaining_s, now)
    return f"{request_form.places_words(lease.gpus)} until {until}\n{lines(lease.id, [g.node for g in lease.gpus])[0]}"


def lines(lease: str, nodes: Sequence[str]) -> list[str]:
    """Return the line that takes a lease's variables into a shell, one for each of its nodes."""
    return [f'eval "$(gpuboard env {quote(lease)} --node {quote(node)})"' for node in dict.fromkeys(nodes)]
