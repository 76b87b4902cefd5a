"""The terminal around the board: what it can show, and leaving it as it was, in time, whatever happens. No textual."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

LEAVE_S = 0.45  # after that we leave without waiting for anything: DESIGN promises 0.5 s
_TAKES_S = 0.2  # a terminal that takes nothing for so long gets nothing more
_DUMB = {"", "dumb", "unknown", "network", "dialup"}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENTER = "\x1b[?1049h\x1b[?25l"  # into the alternate screen, cursor off
# Out of the alternate screen, cursor and line wrap on; mouse, focus, paste, resize and kitty key reports off.
_RESTORE = b"\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[<u" + (
    b"\x1b[?1049l\x1b[?25h\x1b[?1004l\x1b[0m"
)


def cannot_draw(env: Mapping[str, str]) -> str | None:
    """Return why the board cannot be drawn on this terminal, or None."""
    term = env.get("TERM", "")
    if term in _DUMB:
        return f"TERM is {term!r}: this terminal cannot place text" if term else "TERM is not set"
    if not sys.__stdin__ or not os.isatty(sys.__stdin__.fileno()):
        return "stdin is no terminal: there would be no keys"
    return None


def is_utf8(env: Mapping[str, str]) -> bool:
    """Tell whether the locale's characters are UTF-8: LC_ALL before LC_CTYPE before LANG; none set is ASCII.

    Python itself sets LC_CTYPE to C.UTF-8 in the C locale (PEP 538): that says nothing about the terminal.
    """
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = env.get(name)
        if value and not (name == "LC_CTYPE" and value == "C.UTF-8" and _coerced()):
            return "utf8" in value.lower().replace("-", "")
    return False


def _coerced() -> bool:
    """Tell whether LC_CTYPE was not in the environment that this process was started with."""
    try:
        with open("/proc/self/environ", "rb") as file:
            return all(not entry.startswith(b"LC_CTYPE=") for entry in file.read().split(b"\0"))
    except OSError:
        return False


class Guard:
    """Keeps the terminal's settings from before the board, and ends the process when leaving takes too long."""

    def __init__(self, leave_s: float = LEAVE_S) -> None:
        """``leave_s``: within how many seconds the process ends once it leaves."""
        self._leave_s = leave_s
        self._fd = sys.__stdin__.fileno() if sys.__stdin__ else 0
        self.attributes: list[Any] | None = None  # the terminal's settings, as of termios; None where there is none
        self._leaving = threading.Event()
        self._restored = False
        self._writing = threading.Lock()  # the first frame
        self._entered = False  # into the alternate screen, and textual does not have it yet
        with contextlib.suppress(termios.error, OSError):
            self.attributes = termios.tcgetattr(self._fd)

    def cover(self) -> None:
        """Until ``watch``, give the terminal back and end at SIGINT, SIGTERM or SIGHUP. In the main thread alone."""

        def received(number: int, _: FrameType | None) -> None:
            self.give_back()
            os._exit(128 + number)

        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's stays ignored
                signal.signal(number, received)

    def enter(self, frame: str) -> bool:
        """Write ``frame`` into the alternate screen, in any thread; return whether there is one.

        What is typed is not shown and waits for textual. ctrl-C still interrupts: textual may lie on a file system that
        hangs.
        """
        file = sys.__stderr__  # textual's choice
        if self.attributes is None or file is None or not file.isatty():
            return False
        iflag, oflag, cflag, lflag, ispeed, ospeed, cc = self.attributes
        iflag &= ~(termios.ICRNL | termios.IXON)
        lflag &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        cc = [*cc]
        cc[termios.VSUSP] = cc[termios.VQUIT] = b"\0"  # no key: ctrl-Z waits for textual, too
        cc[termios.VMIN], cc[termios.VTIME] = 1, 0
        self._entered = True
        with contextlib.suppress(OSError, termios.error):  # the terminal is gone: the board will notice, too
            termios.tcsetattr(self._fd, termios.TCSANOW, [iflag, oflag, cflag, lflag, ispeed, ospeed, cc])
            left = (_ENTER + frame).encode(file.encoding, "replace")
            with self._writing:
                while left:
                    left = left[os.write(file.fileno(), left) :]
        return True

    def hand_over(self) -> bool:
        """Say that textual has the terminal now; return whether it is in the alternate screen already."""
        entered, self._entered = self._entered, False
        return entered

    def give_back(self) -> None:
        """Restore the terminal if it was entered and never handed over."""
        if self.hand_over():
            self._writing.acquire(timeout=_TAKES_S)  # its frame is on its way; we end, so nobody waits for the lock
            self.restore(_TAKES_S)

    def watch(self, stop: Callable[[int], object]) -> None:
        """Call ``stop`` with an exit code when the terminal has hung up, or at SIGINT, SIGTERM or SIGHUP.

        A read from a terminal that is gone returns nothing at once, for ever, and textual would read on. ``stop`` is
        called in any thread, and in signal handlers.
        """

        def end(code: int) -> None:
            self.leave(code)
            with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile: nothing to stop
                stop(code)

        def hung_up() -> None:
            poll = select.poll()
            poll.register(self._fd, 0)  # hang-up and errors are always reported
            poll.poll()
            end(128 + signal.SIGHUP)

        def received(number: int, _: FrameType | None) -> None:
            end(128 + number)

        threading.Thread(target=hung_up, name="hang-up", daemon=True).start()
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's stays ignored
                signal.signal(number, received)

    def leave(self, code: int) -> None:
        """Begin to leave: from now on the process ends within ``leave_s``, with ``code`` where it has to be forced."""
        if not self._leaving.is_set():
            self._leaving.set()
            threading.Thread(target=self._force, args=(code,), name="leave", daemon=True).start()

    def restored(self, code: int = 0) -> None:
        """Say that the terminal is as it was: nothing must be written to it any more. What is left to do is short."""
        self._restored = True
        self.leave(code)

    def _force(self, code: int) -> None:
        time.sleep(self._leave_s)
        if not self._restored:
            self.restore()
        os._exit(code)

    def restore(self, wait_s: float = 0.0) -> None:
        """Put the terminal back as it was, waiting ``wait_s`` at most for one that takes nothing."""
        with contextlib.suppress(OSError, ValueError, termios.error):
            if self.attributes is None:
                return  # none was there: in a browser
            termios.tcsetattr(self._fd, termios.TCSANOW, self.attributes)
            fd = sys.__stderr__.fileno() if sys.__stderr__ else 2
            if select.select([], [fd], [], wait_s)[1]:
                os.write(fd, _RESTORE)
