"""Background work of a screen that repeats: one piece at a time, beside the UI."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from gpuboard.board.terminal.textual_compat import is_open
from gpuboard.errors import GpuboardError

if TYPE_CHECKING:
    from textual.dom import DOMNode

    from gpuboard.board.app import BoardApp

T = TypeVar("T")
REST = 9  # pause after work whose thread competes with the UI for Python's lock, as a multiple of its duration


class Background(Generic[T]):
    """Runs ``work`` in a thread, one piece at a time. All methods and callbacks run in the UI's thread.

    Once the owner has been closed, no callback is called.
    """

    def __init__(self, owner: DOMNode, *, rest: float = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """``owner``: the app or one of its widgets. ``rest``: length of the pause after work, as a multiple of it."""
        self._owner = owner
        self._rest = rest
        self._clock = clock
        self._rest_until = 0.0  # monotonic
        self._again: Callable[[], object] | None = None
        self.busy = False

    @property
    def rested(self) -> bool:
        """Whether nothing runs and the pause after the last work is over."""
        return not self.busy and self._clock() >= self._rest_until

    def ask(
        self,
        work: Callable[[], T],
        then: Callable[[T], object],
        failed: Callable[[GpuboardError], object] | None = None,
        *,
        again: Callable[[], object] | None = None,
    ) -> None:
        """Start ``work``; call ``then`` with its value, or ``failed`` with its error (default: one toast per error).

        While other work runs, this does nothing; ``again`` is then called once that work and its callback are done.
        """
        if self.busy:
            self._again = again or self._again
            return
        self.busy, self._again = True, None
        began = self._clock()

        def done(callback: Callable[[], object]) -> None:
            now = self._clock()
            self._rest_until = now + self._rest * (now - began)
            self.busy = False
            if not is_open(self._owner):
                return
            callback()
            if not self.busy and (waiting := self._again) is not None:
                self._again = None
                waiting()

        board = cast("BoardApp", self._owner.app)
        report = failed or board.show_error_once
        board.ask(work, lambda value: done(lambda: then(value)), lambda error: done(lambda: report(error)))
