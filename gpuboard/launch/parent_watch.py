"""A life line: a descriptor whose end of file says that whoever started us, and holds its other end, is gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class LifeLine:
    """Watches ``fd`` in a thread of its own and calls, once, what is to be done when it ends.

    The kernel closes the other end however its process ends, by SIGKILL too.
    """

    def __init__(self, fd: int, act: Callable[[], None]) -> None:
        """``act`` is called in the thread. Raises OSError when ``fd`` is not open."""
        os.set_inheritable(fd, False)  # whoever asked for it passed it on to us alone
        self._fd = fd
        self._act = act
        self._gone = False
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="life line", daemon=True).start()

    def then(self, act: Callable[[], None]) -> None:
        """From now on do this; at once, should the line have ended already."""
        with self._lock:
            self._act = act
            if self._gone:
                act()

    def _watch(self) -> None:
        try:
            while os.read(self._fd, 64):
                continue
        except OSError:
            pass  # not readable: as good as gone
        with self._lock:
            self._gone = True
            self._act()
