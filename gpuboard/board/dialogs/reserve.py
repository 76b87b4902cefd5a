"""The reserve dialog: chosen GPUs or the best n, with a live preview; reserves all of them or none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING

from rich.text import Text

from gpuboard.board.dialogs import request_form
from gpuboard.board.dialogs.base import Field, lease_duration, number, size
from gpuboard.board.dialogs.planner import Answer, PlannedDialog, refused, taken
from gpuboard.board.operations import Attempt
from gpuboard.errors import GpuboardError, Refused
from gpuboard.leases.output.formats import Allocation
from gpuboard.model.request import Choice, Pick, Refusal, Request
from gpuboard.model.units import is_whole, parse_duration

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp


def open_reserve(board: BoardApp, uuids: Sequence[str]) -> None:
    """Open the dialog for these GPUs; without any for the best GPU."""
    if board.scene is None:
        board.notify("no reading yet; try again in a moment", markup=False)
        return
    words, picks = request_form.picks_of(uuids, board.scene)
    if not board.core.operations.names_gpus(Request(picks=picks)):  # Slurm chooses: ask for the same number
        words, picks = str(len(picks) or 1), ()
    board.open_dialog(ReserveDialog(words, picks, parse_duration(board.core.settings.max_lease)))


class ReserveDialog(PlannedDialog[Allocation]):
    """Asks for GPUs, duration and purpose. It reserves exactly what it shows, or shows who was faster."""

    PREVIEW = 3

    def __init__(self, words: str, picks: Sequence[Pick], most_s: float) -> None:
        """``words`` and ``picks``: the same GPUs, as text and by UUID; empty: the policy picks one."""
        super().__init__(
            "Reserve",
            [
                Field("gpus", "GPUs", words or "1", "a number, or gpu01:0,3", "gpu01:0,3", request_form.which),
                Field("model", "Model", "", "part of a name; empty: any", example="H100"),
                Field("memory", "Free memory", "", "per GPU; empty: any", "40GiB", size),
                Field("nodes", "Nodes", "", "at most; empty: the fewest", "1", number(1, 4096, needed=False)),
                lease_duration("For", most_s),
                Field("purpose", "Purpose", "", "shown to others", "ablation study"),
            ],
            verb="Reserve",
        )
        self._marked: dict[str, Sequence[Pick]] = {words: picks} if picks else {}
        self._before = Text()  # why the last attempt failed; until something is typed
        self._attempt = Attempt()

    def changed(self) -> None:
        self._before = Text()
        super().changed()

    def request(self) -> Request | None:
        return None if self.wrong() else request_form.request_of(self.values, self._marked)

    def look(self) -> None:
        if self.request() is None:
            self.show_message(self._before)
        super().look()

    def show_answer(self, answer: Answer) -> bool:
        self.show_message(self._before + self._words(answer))
        return isinstance(answer, Choice)

    def _words(self, answer: Answer) -> Text:
        look = self.board.look
        if isinstance(answer, Choice):
            found = Text.assemble((taken(answer), look.style("good")), "\n")
            return found.append(answer.why, look.style("dim"))
        return refused(answer, look)

    def commit(self, values: dict[str, str]) -> None:
        """Reserve exactly the GPUs shown; where Slurm chooses them, submit the request."""
        request = self.request()
        choice = None if request is None else self.answer_to(request)
        if request is None or not isinstance(choice, Choice):
            return  # a refusal is on the screen
        wanted = Request(picks=tuple(Pick(gpu.node, None, gpu.uuid) for gpu in choice.gpus)) if choice.gpus else request
        for_s, purpose, attempt = parse_duration(values["for"]), values["purpose"], self._attempt
        self.set_busy(True)
        places = request_form.places_words(choice.gpus)
        self.show_message(f"Reserving {places} …" if places else "Waiting for Slurm; escape cancels …")
        board = self.board
        board.ask(
            lambda: board.core.operations.reserve(wanted, for_s, purpose, attempt),
            lambda allocation: self._taken(board, allocation),
            lambda error: self._refused(board, error, choice),
        )

    def _taken(self, board: BoardApp, allocation: Allocation) -> None:
        """Close, and publish the lease beside the UI: Slurm's keeper may take seconds."""

        def shown(notes: list[str]) -> None:
            if not self._attempt.cancelled:  # cancelled before: the lease is being released
                text = reserved_text(allocation, notes)
                board.notify(text, title=f"Reserved: {allocation.lease.id}", timeout=15, markup=False)

        def failed(error: GpuboardError) -> None:
            board.show_error(GpuboardError(f"Not reserved: {error}"))

        board.ask(lambda: board.core.operations.published(allocation), shown, failed)
        self.dismiss(allocation)

    def _refused(self, board: BoardApp, error: GpuboardError, choice: Choice) -> None:
        """Show why it failed, and find the next best set of the same size."""
        if self._attempt.cancelled:
            return
        if not self.is_open:
            board.show_error(error)
            return
        words = request_form.refusal_words(error.refusal)[0] if isinstance(error, Refused) else str(error)
        if choice.gpus and (self.values["gpus"] in self._marked or not is_whole(self.values["gpus"])):
            self._offer(board, words, choice)
        else:
            self._retry(words)

    def _offer(self, board: BoardApp, words: str, choice: Choice) -> None:
        """Replace the named GPUs by the next best set: the same number and model."""
        assert board.scene is not None
        names = {board.scene.places[gpu.uuid].gpu.name for gpu in choice.gpus if gpu.uuid in board.scene.places}
        instead = Request(n=len(choice.gpus), model=names.pop() if len(names) == 1 else None)

        def found(answer: Choice | Refusal) -> None:
            if isinstance(answer, Choice) and self.is_open:
                text = request_form.places_words(answer.gpus)
                self._marked[text] = tuple(Pick(gpu.node, None, gpu.uuid) for gpu in answer.gpus)
                self.put("gpus", text)
            self._retry(words)

        board.ask(lambda: board.core.operations.plan(instead), found, lambda _: self._retry(words))

    def _retry(self, words: str) -> None:
        if not self.is_open:
            return
        look = self.board.look
        self._before = Text.assemble(("Not reserved: ", look.style("bad")), words, "\n")
        self._seen = None
        self.set_busy(False)
        self.look()

    def action_cancel(self) -> None:
        """Close; a reservation in progress is cancelled."""
        if self.busy:
            self._attempt.cancel()
            self.board.notify("Cancelled: nothing is reserved", markup=False)
        self.dismiss(None)


def reserved_text(allocation: Allocation, notes: Sequence[str]) -> str:
    """Return the toast's text: GPUs, end, the line for a shell, and the messages about the lease."""
    lease, now = allocation.lease, time.time()
    until = request_form.local(now + lease.remaining_s, now)
    command = lines(lease.id, [gpu.node for gpu in lease.gpus])[0]
    return "\n".join([f"{request_form.places_words(lease.gpus)} until {until}", command, *notes])


def lines(lease: str, nodes: Sequence[str]) -> list[str]:
    """Return the lines that set a lease's variables in a shell, one per node."""
    return [f'eval "$(gpuboard env {quote(lease)} --node {quote(node)})"' for node in dict.fromkeys(nodes)]
