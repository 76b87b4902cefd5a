"""The seam between gpuboard and a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gpuboard.model.schedule import Seen


class Scheduler(Protocol):
    """Knows what a scheduler holds. Asks rarely, shares the answers between all processes of a user, never raises."""

    @property
    def seen(self) -> Seen:
        """What is known now; from any thread, without waiting."""

    def start(self, changed: Callable[[], None]) -> None:
        """Keep asking, from a thread, until closed; ``changed`` is called after each answer or error."""

    def look(self, timeout_s: float) -> Seen:
        """Ask once where the newest shared answer is too old, waiting at most so long; return what is known then."""

    def close(self) -> None:
        """Stop asking, at once; a command that hangs is left behind."""
