"""Logging in again where a server drops newcomers, and one at a time where many need the same jump host."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from gpuboard.transport.base import TransportError

AGAIN_S = (0.2, 0.5, 1.0, 2.0, 2.0, 2.0)  # seconds before each further attempt, jittered
T = TypeVar("T")


class Dropped(TransportError):
    """The server ended the connection before anybody was logged in: a busy one (MaxStartups) may take it next time."""


def again(attempt: Callable[[], T], timeout_s: float, closed: threading.Event) -> T:
    """Return what ``attempt`` returns, tried again after :class:`Dropped` until ``timeout_s`` is over or ``closed``.

    Raises what it raises.
    """
    until = time.monotonic() + timeout_s
    waits = iter(AGAIN_S)
    while True:
        try:
            return attempt()
        except Dropped:
            wait_s = next(waits, None)
            if wait_s is None or time.monotonic() + wait_s > until:
                raise
            if closed.wait(random.uniform(0.5, 1.0) * wait_s):
                raise


class _Gate:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended = 0  # how many tries have
        self.error: TransportError | None = None


class Gates:
    """Doors by name, each opened by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[object, _Gate] = {}

    def enter(self, name: object, there: Callable[[], T | None], make: Callable[[], T]) -> T:
        """Return what is ``there``, else what ``make`` makes. Raises what it raised, also for those who waited for it.

        So a jump host that hangs costs the many nodes behind it one time-out, and not one each after the other.
        """
        with self._lock:
            gate = self._gates.setdefault(name, _Gate())
        seen = gate.ended
        with gate.lock:
            found = there()
            if found is not None:
                return found
            if gate.ended != seen and gate.error is not None:
                raise gate.error
            gate.error = None
            try:
                return make()
            except TransportError as error:
                gate.error = error
                raise
            finally:
                gate.ended += 1
