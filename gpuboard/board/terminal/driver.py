"""The driver of a real terminal: keeps the first frame, survives SIGSTOP and input that is not UTF-8."""

from __future__ import annotations

import errno
import os
import signal
from typing import TYPE_CHECKING, cast

from gpuboard.board.terminal.textual_compat import ContinueHookDriver, app_of

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp

_ALTERNATE = "\x1b[?1049h"


class TerminalDriver(ContinueHookDriver):
    """See the module's docstring."""

    _inside = False  # already in the alternate screen

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
        """Read keys until the board ends. Input that is not UTF-8 is dropped with all that was read with it."""
        while True:
            try:
                super().run_input_thread()
            except UnicodeDecodeError:
                if not self.exit_event.is_set():
                    continue
            return
