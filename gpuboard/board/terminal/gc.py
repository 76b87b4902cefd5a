"""Passes of Python's cycle collector while the board runs: rare, because its own values have no cycles; between keys.

With 1,000 nodes of 8 GPUs, some 30,000 lists are created and freed by reference count every second. With Python's
default thresholds (700, 10, 10) each wave starts passes over all objects: a fifth of the board's time, and pauses of
40 ms that delay keys. textual's lines refer to themselves, some 500 objects a second, and wait for a pass. A pass over
100,000 new objects takes 20 to 70 ms: it is made while no key is pressed. The thresholds are reached only where keys
are pressed for minutes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

_LEAST = 200_000  # new objects before a pass over the youngest generation that waits for nothing
_PER_NODE = 1_800  # sixty times the lists that a reading of a node of 8 GPUs creates
_EVERY_S = 10.0  # between two passes
_QUIET_S = 2.0  # without a key before a pass
_OLDER = 5  # passes over a generation before one over the next older one, too


def calm(nodes: int) -> None:
    """Exclude all current objects (modules, classes) from passes, and make passes rare. Call once, before the app.

    ``nodes``: how many the board shows.
    """
    gc.enable()  # disabled since the start of the process
    gc.freeze()
    gc.set_threshold(_LEAST + _PER_NODE * nodes, _OLDER, _OLDER)


class Passes:
    """Passes of the collector at times when no key waits for them."""

    def __init__(
        self,
        quiet_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        collect: Callable[[int], object] = gc.collect,
        freeze: Callable[[], object] = gc.freeze,
    ) -> None:
        """``quiet_s``: returns the seconds since the last key."""
        self._quiet_s = quiet_s
        self._clock = clock
        self._collect = collect
        self._freeze = freeze
        self._made_at = clock()
        self._made = 0

    @property
    def is_due(self) -> bool:
        """Whether enough time has passed since the last pass, and since the last key."""
        return self._clock() - self._made_at >= _EVERY_S and self._quiet_s() >= _QUIET_S

    def make(self) -> None:
        """Make a pass if one is due. Call it again and again."""
        if not self.is_due:
            return
        self._made += 1
        self._collect(2 if self._made % _OLDER**2 == 0 else 1 if self._made % _OLDER == 0 else 0)
        if self._made == 1:
            self._freeze()  # the first screen's widgets, which stay: later passes over older objects took 14 ms, now 2
        self._made_at = self._clock()
