"""The driver of a real terminal: textual's, but bytes that are no UTF-8 do not end the board."""

from __future__ import annotations

from textual.drivers.linux_driver import LinuxDriver


class TerminalDriver(LinuxDriver):
    """A terminal, also one in a locale of the last century."""

    def run_input_thread(self) -> None:
        """Read keys until the board ends. What cannot be decoded is passed over, with what was read along with it."""
        while True:
            try:
                super().run_input_thread()
            except UnicodeDecodeError:
                if not self.exit_event.is_set():
                    continue
            return
