"""The driver of a real terminal: keeps the first frame, survives SIGSTOP, and sleeps until there is input."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import threading
from codecs import getincrementaldecoder
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from gpuboard.board.terminal.textual_compat import ContinueHookDriver, PasteParser, app_of

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp

_ALTERNATE = "\x1b[?1049h"
_READ = 4096  # bytes at once
_UNDECIDED_MS = 100  # between looks at whether an ESC is a key


class PollableEvent(threading.Event):
    """An event that poll() can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        super().set()
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        super().clear()
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)


class TerminalDriver(ContinueHookDriver):
    """See the module's docstring."""

    _inside = False  # already in the alternate screen

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.exit_event: PollableEvent = PollableEvent()

    def start_application_mode(self) -> None:
        """Set up the terminal, or take it over after the first frame."""
        guard = cast("BoardApp", app_of(self)).guard
        self._inside = guard is not None and guard.hand_over()
        super().start_application_mode()  # type: ignore[no-untyped-call]
        if guard is not None and self._inside:
            self.attrs_before = guard.attributes  # textual has saved the settings of the first frame
        self._inside = False

    def on_continue(self) -> None:
        """Set the terminal up again: after a SIGSTOP, which cannot be handled, it may have a shell's settings."""
        if not self.reads_keys:
            return  # the app is leaving
        try:
            foreground = os.tcgetpgrp(self.fileno) == os.getpgrp()
        except OSError as error:
            if error.errno != errno.ENOTTY:
                return  # the terminal has hung up
            foreground = True  # it is not the controlling terminal: there are no background jobs
        if foreground:
            self.suspend_application_mode()
            self.resume_application_mode()
        else:  # a shell has the terminal and shows its prompt; its `fg` sends SIGCONT only to a stopped process
            os.kill(os.getpid(), signal.SIGSTOP)

    def write(self, data: str) -> None:
        """Write, but do not enter the alternate screen twice: most terminals clear it then."""
        if not (self._inside and data == _ALTERNATE):
            super().write(data)

    def run_input_thread(self) -> None:
        """Read keys until the board ends. Input that is not UTF-8 is dropped with all that was read with it.

        textual's wakes up ten times a second: a tenth of the CPU time of a board of one node.
        """
        with self._input() as keys:
            self._read_keys(keys)

    def _read_keys(self, keys: io.FileIO) -> None:
        parser, decoder = PasteParser(), getincrementaldecoder("utf-8")()
        waiting = select.poll()
        for source in (keys, self.exit_event):
            waiting.register(source, select.POLLIN)
        while not self.exit_event.is_set():
            ready = dict(waiting.poll(_UNDECIDED_MS if parser.is_undecided else None))
            data = keys.read(_READ) if keys.fileno() in ready else None
            if data == b"":  # the end: nothing can come any more
                waiting.unregister(keys)
            try:
                text = decoder.decode(data or b"")
            except UnicodeDecodeError:
                parser, decoder = PasteParser(), getincrementaldecoder("utf-8")()
                continue
            for message in parser.feed(text) if text else ():
                self.process_message(message)
            for message in parser.tick():
                self.process_message(message)

    def _input(self) -> io.FileIO:
        """Open the terminal a second time, for reads that do not block: the flags of the first one are shared.

        A board that is stopped when it is about to read goes on to read when the shell has taken the input.
        """
        try:
            os.tcgetpgrp(self.fileno)
            return io.FileIO(os.open("/dev/tty", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:  # it is not the controlling terminal: no shell stops the board and reads from it
            return io.FileIO(self.fileno, closefd=False)
