"""The standard input of a rank: a pipe that is filled with what the head sends, one piece at a time."""

import os

from gpuboard.agent.event_loop import OUT, Loop

MYPY = False
if MYPY:
    from typing import Callable, Optional


class Stdin:
    """The writing end of the pipe."""

    def __init__(self, loop: Loop, fd: int) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._data = b""
        self._end = False  # close it after the data
        self._done: "Optional[Callable[[bool], None]]" = None
        self.closed = False

    def write(self, data: bytes, end: bool, done: "Callable[[bool], None]") -> None:
        """Write ``data``, then close if ``end``; then call ``done`` with whether the pipe is still open."""
        assert self._done is None
        self._data, self._end, self._done = data, end, done
        self._flush()

    def close(self) -> None:
        """Close the pipe; what is not written yet is lost."""
        if not self.closed:
            self.closed = True
            self._loop.unwatch(self._fd)
            os.close(self._fd)
        self._settle()

    def _flush(self) -> None:
        try:
            while self._data:
                self._data = self._data[os.write(self._fd, self._data) :]
        except BlockingIOError:
            self._loop.watch(self._fd, OUT, self._flush)
            return
        except OSError:  # the rank has closed it, or has ended
            self.close()
            return
        self._loop.unwatch(self._fd)
        if self._end:
            self.close()
        self._settle()

    def _settle(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(not self.closed)
