"""The seam between gpuboard and a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gpuboard.model.schedule import Seen

QUERY_S = 15.0  # default timeout of one query: commands give up after 10 s when the controller is unreachable


class Scheduler(Protocol):
    """Knows what a scheduler holds. Queries rarely, shares answers between all processes of a user, never raises."""

    @property
    def seen(self) -> Seen:
        """What is known now; from any thread, without waiting."""

    def start(self, changed: Callable[[], None]) -> None:
        """Query from a thread until closed; ``changed`` is called after each answer or error."""

    def look(self, timeout_s: float = QUERY_S, *, retry: bool = False) -> Seen:
        """Query once if the newest shared answer is too old, waiting at most ``timeout_s``; return what is known.

        ``retry``: also if there is only an error from before this call.
        """

    def close(self) -> None:
        """Stop querying at once; does not wait for a command that hangs."""
