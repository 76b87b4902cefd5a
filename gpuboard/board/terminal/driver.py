"""The driver of a real terminal: textual's; a first frame stays, and bytes that are no UTF-8 do not end the board."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from typing import TYPE_CHECKING, cast

from textual.drivers.linux_driver import LinuxDriver

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp

_ALTERNATE = "\x1b[?1049h"


class TerminalDriver(LinuxDriver):
    """A terminal, also one in a locale of the last century."""

    _inside = False  # in the alternate screen already

    def start_application_mode(self) -> None:
        """Take the terminal, from the first frame where there is one."""
        guard = cast("BoardApp", self._app).guard
        self._inside = guard is not None and guard.hand_over()
        super().start_application_mode()  # type: ignore[no-untyped-call]
        if guard is not None and self._inside:
            self.attrs_before = guard.attributes  # the ones that textual found were ours
        self._inside = False

    def _sigcont_application(self, *words: object) -> None:
        """Come back. textual's takes whoever was stopped for somebody who had given the terminal back before."""
        if self._must_signal_resume:
            super()._sigcont_application(*words)
        else:
            with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._begin_again)

    def _begin_again(self) -> None:
        """Take the terminal anew after a SIGSTOP, of which nobody is told: its settings may be a shell's by now."""
        if self._key_thread is None or not self._key_thread.is_alive():
            return  # it is leaving
        try:
            ours = os.tcgetpgrp(self.fileno) == os.getpgrp()  # not in the background
        except OSError as error:
            if error.errno != errno.ENOTTY:
                return  # it has hung up
            ours = True  # one that controls no session has no background either
        if ours:
            self.suspend_application_mode()
            self.resume_application_mode()
        else:  # the terminal is a shell's, whose `fg` tells us only when we are stopped, and which has its prompt there
            os.kill(os.getpid(), signal.SIGSTOP)

    def write(self, data: str) -> None:
        """Write, but do not enter the alternate screen twice: most terminals blank it then."""
        if not (self._inside and data == _ALTERNATE):
            super().write(data)

    def run_input_thread(self) -> None:
        """Read keys until the board ends. What cannot be decoded is passed over, with what was read along with it."""
        while True:
            try:
                super().run_input_thread()
            except UnicodeDecodeError:
                if not self.exit_event.is_set():
                    continue
            return
