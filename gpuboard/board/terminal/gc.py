"""How often Python looks for cycles while the board runs: seldom. Values hold none; textual leaves a few behind.

With 1,000 nodes of 8 GPUs every second some 30,000 lists come and as many go, by their counts. Python's own thresholds
(700, 10, 10) take each such wave for growth and walk all that lives: a fifth of the board's time, and pauses of 40 ms
that a key has to wait for. What textual leaves behind is found after 100,000 more objects, by a pass of some 10 ms.
"""

from __future__ import annotations

import gc

_MORE = 100_000  # objects that may come before the young ones are walked


def calm() -> None:
    """Leave out of every pass what lives now (modules, classes), and make passes rare. Once, before the app runs."""
    gc.enable()  # off since the start
    gc.freeze()
    gc.set_threshold(_MORE, 5, 5)
