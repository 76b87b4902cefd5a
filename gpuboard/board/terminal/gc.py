"""Thresholds of Python's cycle collector while the board runs: high, because its values have no cycles.

With 1,000 nodes of 8 GPUs, some 30,000 lists are created and freed by reference count every second. With Python's
default thresholds (700, 10, 10) each wave starts passes over all objects: a fifth of the board's time, and pauses of
40 ms that delay keys. textual's few cycles are found after 100,000 more objects, in a pass of about 10 ms.
"""

from __future__ import annotations

import gc

_MORE = 100_000  # new objects before a pass over the youngest generation


def calm() -> None:
    """Exclude all current objects (modules, classes) from passes, and make passes rare. Call once, before the app."""
    gc.enable()  # disabled since the start of the process
    gc.freeze()
    gc.set_threshold(_MORE, 5, 5)
