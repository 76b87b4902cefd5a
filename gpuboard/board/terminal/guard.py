"""The terminal: what it can show, and restoring it in time however the board ends. No textual."""

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

LEAVE_S = 0.45  # then the process ends without waiting for anything: 0.5 s are promised
_WRITE_S = 0.2  # limit for writing to a terminal that may not read
_DUMB = {"", "dumb", "unknown", "network", "dialup"}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENTER = "\x1b[?1049h\x1b[?25l"  # alternate screen on, cursor off
# Alternate screen off, cursor and line wrap on; mouse, focus, paste, resize and kitty key reports off.
_RESTORE = b"\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[<u" + (
    b"\x1b[?1049l\x1b[?25h\x1b[?1004l\x1b[0m"
)


def cannot_draw(env: Mapping[str, str]) -> str | None:
    """Return why the board cannot be drawn on this terminal, or None."""
    term = env.get("TERM", "")
    if term in _DUMB:
        return f"TERM is {term!r}: this terminal cannot position text" if term else "TERM is not set"
    if not sys.__stdin__ or not os.isatty(sys.__stdin__.fileno()):
        return "stdin is not a terminal, so keys cannot be read"
    return None


def is_utf8(env: Mapping[str, str]) -> bool:
    """Return whether the locale is UTF-8: LC_ALL, else LC_CTYPE, else LANG; without any of them ASCII.

    Also ASCII on the Linux console, whose fonts of 512 characters have no braille and no thin bars.
    An LC_CTYPE of C.UTF-8 that Python has set itself (PEP 538) does not count: it is not from the terminal.
    """
    if env.get("TERM") == "linux":
        return False
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = env.get(name)
        if value and not (name == "LC_CTYPE" and value == "C.UTF-8" and _coerced()):
            return "utf8" in value.lower().replace("-", "")
    return False


def _coerced() -> bool:
    """Return whether LC_CTYPE was missing in this process's initial environment."""
    try:
        with open("/proc/self/environ", "rb") as file:
            return all(not entry.startswith(b"LC_CTYPE=") for entry in file.read().split(b"\0"))
    except OSError:
        return False


class Guard:
    """Saves the terminal's settings before the board starts, and ends the process when the exit takes too long."""

    def __init__(self, leave_s: float = LEAVE_S) -> None:
        """``leave_s``: deadline for the end of the process after ``leave``."""
        self._leave_s = leave_s
        self._fd = sys.__stdin__.fileno() if sys.__stdin__ else 0
        self.attributes: list[Any] | None = None  # the terminal's settings (termios); None without a terminal
        self._leaving = False  # no Event: a signal during its ``set`` would wait for that forever
        self._restored = False
        self._writing = threading.Lock()  # the first frame
        self._entered = False  # we are in the alternate screen and textual has not taken over
        with contextlib.suppress(termios.error, OSError):
            self.attributes = termios.tcgetattr(self._fd)

    def cover(self) -> None:
        """Until ``watch``, restore the terminal and exit at SIGINT, SIGTERM or SIGHUP. In the main thread only."""

        def received(number: int, _: FrameType | None) -> None:
            self.undo_enter()
            os._exit(128 + number)

        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup SIGHUP stays ignored
                signal.signal(number, received)

    def enter(self, frame: str) -> bool:
        """Write ``frame`` into the alternate screen, in any thread; return False without a terminal.

        Keys are not echoed and wait for textual. ctrl-C still interrupts: textual may be on a file system that hangs.
        """
        file = sys.__stderr__  # where textual writes
        if self.attributes is None or file is None or not file.isatty():
            return False
        iflag, oflag, cflag, lflag, ispeed, ospeed, cc = self.attributes
        iflag &= ~(termios.ICRNL | termios.IXON)
        lflag &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        cc = [*cc]
        cc[termios.VSUSP] = cc[termios.VQUIT] = b"\0"  # disabled: ctrl-Z waits for textual, too
        cc[termios.VMIN], cc[termios.VTIME] = 1, 0
        self._entered = True
        with contextlib.suppress(OSError, termios.error):  # the terminal is gone: the board will detect it, too
            termios.tcsetattr(self._fd, termios.TCSANOW, [iflag, oflag, cflag, lflag, ispeed, ospeed, cc])
            rest = (_ENTER + frame).encode(file.encoding, "replace")
            with self._writing:
                while rest:
                    rest = rest[os.write(file.fileno(), rest) :]
        return True

    def hand_over(self) -> bool:
        """Note that textual takes over the terminal; return whether it is in the alternate screen already."""
        entered, self._entered = self._entered, False
        return entered

    def undo_enter(self) -> None:
        """Restore the terminal if it was entered and not handed over."""
        if self.hand_over():
            self._writing.acquire(timeout=_WRITE_S)  # a frame may be half written; not released, as the process ends
            self.restore(_WRITE_S)

    def watch(self, stop: Callable[[int], object]) -> None:
        """Call ``stop`` with an exit code when the terminal hangs up, or at SIGINT, SIGTERM or SIGHUP.

        Reads from a terminal that is gone return b"" at once, and textual would read forever. ``stop`` is called from
        any thread and from signal handlers.
        """

        def end(code: int) -> None:
            self.leave(code)
            with contextlib.suppress(RuntimeError):  # the event loop has ended
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
        """Start the deadline: the process ends within ``leave_s``, by force with ``code``."""
        if not self._leaving:
            self._leaving = True
            threading.Thread(target=self._force, args=(code,), name="leave", daemon=True).start()

    def restored(self, code: int = 0) -> None:
        """Note that the terminal is restored: from now on nothing may be written to it. Starts the deadline."""
        self._restored = True
        self.leave(code)

    def _force(self, code: int) -> None:
        time.sleep(self._leave_s)
        if not self._restored:
            self.restore()
        os._exit(code)

    def restore(self, wait_s: float = 0.0) -> None:
        """Restore the terminal; wait at most ``wait_s`` for one that does not read."""
        with contextlib.suppress(OSError, ValueError, termios.error):
            if self.attributes is None:
                return  # no terminal: in a browser
            termios.tcsetattr(self._fd, termios.TCSANOW, self.attributes)
            fd = sys.__stderr__.fileno() if sys.__stderr__ else 2
            if select.select([], [fd], [], wait_s)[1]:
                os.write(fd, _RESTORE)
