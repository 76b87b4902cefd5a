"""The driver of a board in a browser: textual's web driver (packets over stdin and stdout), made safe.

The board ends with its server, however the server ends. Saved files stay on this machine, as for a board in a terminal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

from textual import messages
from textual.app import App
from textual.driver import Driver
from textual.drivers import web_driver
from textual.drivers.web_driver import WebDriver
from textual.theme import Theme

from gpuboard.board.terminal.textual_compat import PasteParser, app_of

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LEAVE_S = 1.5  # for an orderly end after the server has ended

setattr(web_driver, "XTermParser", PasteParser)  # noqa: B010  # its driver has no other place for a parser


class BrowserDriver(WebDriver):
    """See the module's docstring. Used by `gpuboard board --browser`, which ``web/session.py`` starts."""

    def __init__(
        self, app: App[Any], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        super().__init__(app, debug=debug, mouse=mouse, size=size)

    def start_application_mode(self) -> None:
        """Start, with the page in the background colour of the theme: cells do not cover its last pixels."""
        super().start_application_mode()
        app = app_of(self)
        self._paint(app.current_theme)
        app.theme_changed_signal.subscribe(app, self._paint)

    def _paint(self, theme: Theme) -> None:
        colour = theme.background or ""
        self.write(f"\x1b]11;{colour}\x1b\\" if colour.startswith("#") else "\x1b]111\x1b\\")

    def run_input_thread(self) -> None:
        """Read input until end of file: then the server has ended, perhaps before PDEATHSIG was set."""
        super().run_input_thread()
        if not self.exit_event.is_set():
            app_of(self).post_message(messages.ExitApp())
            threading.Thread(target=_leave_soon, name="leave", daemon=True).start()

    def open_url(self, url: str, new_tab: bool = True) -> None:
        """Open an http or https URL in the browser; ignore all others."""
        if url.startswith(("https://", "http://")):
            super().open_url(url, new_tab=True)

    def deliver_binary(
        self,
        binary: BinaryIO | TextIO,
        *,
        delivery_key: str,
        save_path: Path,
        open_method: Literal["browser", "download"] = "download",
        encoding: str | None = None,
        mime_type: str | None = None,
        name: str | None = None,
    ) -> None:
        """Save a file on this machine, as in a terminal: the server never serves files chosen by a program."""
        Driver.deliver_binary(
            self, binary, delivery_key=delivery_key, save_path=save_path, encoding=encoding, name=name
        )


def _leave_soon() -> None:
    time.sleep(_LEAVE_S)
    os._exit(1)
