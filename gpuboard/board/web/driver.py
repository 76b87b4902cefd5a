"""The driver of a board whose terminal is a browser: textual's, speaking packets over stdin and stdout, made safe.

The board ends with the server that started it, however that ends. Files that it saves stay on this machine, as those
of a board in a terminal do.
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
from textual.drivers.web_driver import WebDriver

from gpuboard.board.terminal.textual_compat import app_of

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LEAVE_S = 1.5  # for an orderly end once the server has gone


class BrowserDriver(WebDriver):
    """See the module's docstring. Taken by `gpuboard board --browser`, which ``web/session.py`` starts."""

    def __init__(
        self, app: App[Any], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        super().__init__(app, debug=debug, mouse=mouse, size=size)

    def run_input_thread(self) -> None:
        """Pass input on until stdin ends: then the server has gone, perhaps before it could be watched for."""
        super().run_input_thread()
        if not self.exit_event.is_set():
            app_of(self).post_message(messages.ExitApp())
            threading.Thread(target=_leave_soon, name="leave", daemon=True).start()

    def open_url(self, url: str, new_tab: bool = True) -> None:
        """Open a web address; no other kind of URL is handed to the browser."""
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
        """Save a file on this machine, as in a terminal: the server serves no files that a program chose."""
        Driver.deliver_binary(
            self, binary, delivery_key=delivery_key, save_path=save_path, encoding=encoding, name=name
        )


def _leave_soon() -> None:
    time.sleep(_LEAVE_S)
    os._exit(1)
