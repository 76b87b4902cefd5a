"""The standard input of this process, passed on to one rank."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable

_PIECE = 32 * 1024  # bytes: half of what a pipe holds, so that a rank that does not read blocks nothing else
_POLL_S = 0.2


class StdinReader:
    """Reads ``fd`` in a thread of its own, until ``stop()``.

    ``send`` gets each piece, b"" at end-of-file, and blocks until the rank has room for more; it returns whether the
    rank still reads.
    """

    def __init__(self, fd: int, send: Callable[[bytes], bool]) -> None:
        self._fd = fd
        self._send = send
        self._over = threading.Event()
        threading.Thread(target=self._run, name="stdin", daemon=True).start()

    def stop(self) -> None:
        """Read nothing more: what is typed from now on is for the shell."""
        self._over.set()

    def _run(self) -> None:
        # In the background a terminal would stop this process, and the run with it; with SIGTTIN blocked read() fails.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
        terminal = os.isatty(self._fd)
        while not self._over.is_set():
            if not select.select([self._fd], [], [], _POLL_S)[0] or self._over.is_set():
                continue
            try:
                data = os.read(self._fd, _PIECE)
            except OSError:
                if not terminal:
                    data = b""
                else:
                    self._over.wait(_POLL_S)
                    continue
            if not self._send(data) or not data:
                return
