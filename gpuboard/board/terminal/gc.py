"""Thresholds of Python's cycle collector while the board runs: high, because its own values have no cycles.

With 1,000 nodes of 8 GPUs, some 30,000 lists are created and freed by reference count every second. With Python's
default thresholds (700, 10, 10) each wave starts passes over all objects: a fifth of the board's time, and pauses of
40 ms that delay keys. textual's lines refer to themselves, some 500 objects a second, and wait for a pass: of 100,000
objects in about 10 ms, of 10,000 in 1 ms.
"""

from __future__ import annotations

import gc

_LEAST = 10_000  # new objects before a pass over the youngest generation
_PER_NODE = 90  # three times the lists that a reading of a node of 8 GPUs creates


def calm(nodes: int) -> None:
    """Exclude all current objects (modules, classes) from passes, and make passes rare. Call once, before the app.

    ``nodes``: how many the board shows.
    """
    gc.enable()  # disabled since the start of the process
    gc.freeze()
    gc.set_threshold(_LEAST + _PER_NODE * nodes, 5, 5)
