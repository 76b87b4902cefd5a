"""A lifeline: a pipe whose other end the parent process holds, so that end-of-file means the parent has ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Lifeline:
    """Calls ``act`` once, in a thread of its own, at end-of-file of ``fd``.

    The kernel closes the other end however the parent ends, SIGKILL included.
    """

    def __init__(self, fd: int, act: Callable[[], None], received: Callable[[bytes], None] = lambda _: None) -> None:
        """``received`` is called with what the parent writes. Raises OSError when ``fd`` is not open."""
        os.set_inheritable(fd, False)  # the lifeline is of this process alone
        self._fd = fd
        self._act = act
        self._received = received
        self._ended = False
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def then(self, act: Callable[[], None]) -> None:
        """Replace ``act``; call the new one at once if end-of-file has come already."""
        with self._lock:
            self._act = act
            if self._ended:
                act()

    def _watch(self) -> None:
        try:
            while data := os.read(self._fd, 4096):
                self._received(data)
        except OSError:
            pass  # not readable: taken as end-of-file
        with self._lock:
            self._ended = True
            self._act()
