"""Retry with back-off of a dropped login, and single-flight logins where many nodes need the same jump host."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from gpuboard.transport.base import TransportError

RETRY_S = (0.2, 0.5, 1.0, 2.0, 2.0, 2.0)  # seconds before each further attempt, jittered
T = TypeVar("T")


class Dropped(TransportError):
    """The server closed the connection before login: a busy one (MaxStartups) may accept the next attempt."""


def retry_dropped(attempt: Callable[[], T], timeout_s: float, closed: threading.Event) -> T:
    """Return what ``attempt`` returns; retried after :class:`Dropped` for ``timeout_s``, or until ``closed`` is set.

    Raises the last attempt's error.
    """
    until = time.monotonic() + timeout_s
    waits = iter(RETRY_S)
    while True:
        try:
            return attempt()
        except Dropped:
            wait_s = next(waits, None)
            if wait_s is None or time.monotonic() + wait_s > until:
                raise
            if closed.wait(random.uniform(0.5, 1.0) * wait_s):
                raise


class _Flight:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended = 0  # attempts that have ended
        self.error: TransportError | None = None


class SingleFlight:
    """Single-flight by key: one thread works, the others wait and share its failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[object, _Flight] = {}

    def run(self, key: object, find: Callable[[], T | None], make: Callable[[], T]) -> T:
        """Return what ``find`` finds, else what ``make`` returns. Raises its error in all threads that waited for it.

        A jump host that hangs then costs the nodes behind it one timeout together, not one each in sequence.
        """
        with self._lock:
            flight = self._flights.setdefault(key, _Flight())
        seen = flight.ended
        with flight.lock:
            found = find()
            if found is not None:
                return found
            if flight.ended != seen and flight.error is not None:
                raise flight.error
            flight.error = None
            try:
                return make()
            except TransportError as error:
                flight.error = error
                raise
            finally:
                flight.ended += 1
