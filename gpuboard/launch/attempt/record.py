"""What a head prints, and what it keeps in the run's folder."""

from __future__ import annotations

import time

from gpuboard.launch.output import Screen
from gpuboard.launch.runs.folder import RunFolder
from gpuboard.model.units import iso


class AttemptRecord:
    """The messages and files of one attempt. No method raises: a full disk must not end a run."""

    def __init__(self, folder: RunFolder, screen: Screen) -> None:
        self.folder = folder
        self.screen = screen
        self._incomplete = False  # the folder cannot be written

    def write(self, name: str, value: object) -> bool:
        """Write ``value`` as JSON into the run's folder; return whether that succeeded."""
        error = self.folder.keep(name, value)
        if error:
            self.report_incomplete(error)
        return not error

    def report_incomplete(self, message: str) -> None:
        """Print the first of the messages about files that cannot be written: they have one reason, a full disk."""
        if not self._incomplete:
            self._incomplete = True
            self.print(message)

    def print(self, text: str) -> None:
        """Print a message on stderr and keep it in head.log."""
        lines = [f"gpuboard: {line}" if not line.startswith(" ") else line for line in text.splitlines()]
        self.screen.lines("err", lines)
        self.folder.log(f"{iso(time.time())} {line}\n" for line in lines)
