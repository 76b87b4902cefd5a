"""What ranks print: whole logs in the run's folder, prefixed lines for the person, progress bars kept sane."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

MAX_LINE = 64 * 1024  # characters without an end of line that are kept; more is passed on in pieces of this size
_REDRAW_S = 0.1
_OPEN_FILES = 256  # below the usual limit of 1,024 with room for the connections

# Cursor movements and erasures would tear prefixed lines of several ranks; colours (m) stay.
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_SGR = re.compile(r"\x1b\[[0-9;]*m")


class Lines:
    """Cuts one stream into lines the way a terminal would show them: text before a carriage return is overwritten."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """Return the lines that ``text`` completes, without their ends."""
        *whole, rest = (self._rest + text).split("\n")
        lines = [_visible(line) for line in whole]
        if "\r" in rest:  # only what is visible of an unfinished line is kept: bars redraw it thousands of times
            rest = _visible(rest) + ("\r" if rest.endswith("\r") else "")
        while len(rest) > MAX_LINE:
            lines.append(rest[:MAX_LINE])
            rest = rest[MAX_LINE:]
        self._rest = rest
        return lines

    @property
    def partial(self) -> str:
        """The unfinished line as it is visible now: a progress bar, a prompt."""
        return _visible(self._rest)

    def close(self) -> list[str]:
        """Return the unfinished line, if there is one, as the last line."""
        rest, self._rest = self._rest, ""
        return [_visible(rest)] if rest else []


def _visible(line: str) -> str:
    if "\r" in line:
        line = line.rstrip("\r").rpartition("\r")[2]
    return _MOVES.sub("", line) if "\x1b" in line else line


class Screen:
    """The person's side of one stream of ours. On a terminal the last unfinished line stays below the others."""

    def __init__(self, stream: TextIO, *, terminal: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._terminal = terminal
        self._clock = clock
        self._live = ""
        self._drawn_at = float("-inf")
        self._gone = False

    def lines(self, lines: list[str]) -> None:
        """Print whole lines, above the live one."""
        if not lines:
            return
        text = "".join(line + ("\x1b[0m\n" if _SGR.search(line) and self._terminal else "\n") for line in lines)
        self._write(self._erase() + text)

    def live(self, line: str) -> None:
        """Show an unfinished line, on a terminal only, ten times a second at most; "" takes it away."""
        if not self._terminal or (line and self._clock() - self._drawn_at < _REDRAW_S):
            return
        erase = self._erase()
        width = shutil.get_terminal_size().columns - 1
        if len(_SGR.sub("", line)) > width:
            line = _SGR.sub("", line)[:width]
        self._live = line
        self._drawn_at = self._clock()
        self._write(erase + line + ("\x1b[0m" if _SGR.search(line) else ""))

    def _erase(self) -> str:
        erase = "\r\x1b[K" if self._live else ""
        self._live = ""
        return erase

    def _write(self, text: str) -> None:
        if self._gone or not text:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (BrokenPipeError, ValueError):  # the reader has left (`| head`); the run and its logs go on
            self._gone = True


class Logs:
    """The files ``rank-<R>.out`` and ``rank-<R>.err``: every byte a rank wrote, as it wrote it."""

    def __init__(self, folder: Path, complain: Callable[[str], None]) -> None:
        self._folder = folder
        self._complain = complain
        self._files: dict[str, BinaryIO] = {}
        self._failed = False

    def write(self, rank: int, stream: str, text: str) -> None:
        """Append ``text``; a full disk is said once and costs the log, never the run."""
        name = f"rank-{rank}.{stream}"
        try:
            if name not in self._files:
                if len(self._files) >= _OPEN_FILES:
                    self.close()
                self._files[name] = (self._folder / name).open("ab", buffering=0)
            self._files[name].write(text.encode("utf-8", "replace"))
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._complain(f"logs are incomplete: {self._folder / name}: {error.strerror}")

    def close(self) -> None:
        """Close the files; a later write opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class Relay:
    """Takes the ranks' output to the logs and to the person's stdout and stderr."""

    def __init__(
        self,
        labels: dict[int, str],
        logs: Logs,
        out: Screen,
        err: Screen,
        *,
        prefix: bool,
        mark: Callable[[int, str], str],
    ) -> None:
        """``labels``: rank → ``gpu02:1``. ``mark`` returns words to put before a line of a rank ("": none)."""
        self._prefixes = {rank: f"[rank {rank} {label}] " if prefix else "" for rank, label in labels.items()}
        self._logs = logs
        self._screens = {"out": out, "err": err}
        self._mark = mark
        self._lines: dict[tuple[int, str], Lines] = {}
        self.last_line: dict[int, str] = {}
        self.last_error: dict[int, str] = {}

    def output(self, rank: int, stream: str, text: str) -> None:
        """Handle one piece of output of a rank; ``stream`` is "out" or "err"."""
        self._logs.write(rank, stream, text)
        lines = self._lines.setdefault((rank, stream), Lines())
        self._print(rank, stream, lines.feed(text))
        partial = lines.partial
        if partial.strip():
            self._remember(rank, stream, partial)
            self._screens[stream].live(self._prefixes[rank] + partial)

    def ended(self, rank: int) -> None:
        """Print what the rank left unfinished."""
        for stream in self._screens:
            lines = self._lines.pop((rank, stream), None)
            if lines is not None:
                self._print(rank, stream, lines.close())

    def _print(self, rank: int, stream: str, lines: list[str]) -> None:
        for line in lines:
            if line.strip():
                self._remember(rank, stream, line)
        self._screens[stream].lines([self._prefixes[rank] + self._mark(rank, line) + line for line in lines])

    def _remember(self, rank: int, stream: str, line: str) -> None:
        self.last_line[rank] = line
        if stream == "err":
            self.last_error[rank] = line
