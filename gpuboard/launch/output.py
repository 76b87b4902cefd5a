"""What ranks print: whole logs in the run's folder, prefixed lines for the person, progress bars kept sane."""

from __future__ import annotations

import os
import queue
import re
import select
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

Stream = Literal["out", "err"]
STREAMS: tuple[Stream, ...] = ("out", "err")
MAX_LINE = 64 * 1024  # characters without an end of line that are kept; more is passed on in pieces of this size
_REDRAW_S = 0.1
_OPEN_FILES = 256  # below the usual limit of 1,024 with room for the connections

# Cursor movements and erasures would tear prefixed lines of several ranks; colours (m) stay.
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_SGR = re.compile(r"\x1b\[[0-9;]*m")
# What else a terminal obeys (character sets, a reset, its title): a rank that prints binary data must not break it.
_CONTROLS = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


class LineSplitter:
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


class Writer:
    """Writes to the person's streams from a thread: a pager that is not read must not stop the head from watching."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[TextIO, str] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._gone: set[TextIO] = set()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self.backlog = 0  # characters that wait to be written
        self._thread.start()

    def write(self, stream: TextIO, text: str) -> None:
        """Queue ``text``; never blocks."""
        with self._lock:
            self.backlog += len(text)
        self._queue.put((stream, text))

    def finish(self) -> None:
        """Wait until everything is written, as long as the reader takes."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, text = item
            try:
                if stream not in self._gone:
                    encoding = stream.encoding or "utf-8"  # a rank may print what the person's terminal has no sign for
                    _write(stream, text.encode(encoding, "replace"), encoding)
            except (OSError, ValueError):  # the reader has left (`| head`); the run and its logs go on
                self._gone.add(stream)
            with self._lock:
                self.backlog -= len(text)


def _write(stream: TextIO, data: bytes, encoding: str) -> None:
    """Write all of it. Not through Python's buffers, which lose the rest of a write that ctrl-Z broke off."""
    try:
        fd = stream.fileno()
    except OSError:  # no file
        stream.write(data.decode(encoding))
        stream.flush()
        return
    stream.flush()
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # whoever shares it with us wants it so
            select.select([], [fd], [])


class Screen:
    """The person's stdout and stderr. On a terminal the last unfinished line stays below all others."""

    def __init__(self, out: TextIO, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._streams: dict[Stream, TextIO] = {"out": out, "err": err}
        self._terminals = {name: stream.isatty() for name, stream in self._streams.items()}
        self._clock = clock
        # One for both where they show on one terminal, in order; else a stuck pipe must not hold our own words back.
        first = Writer()
        self._writers = {"out": first, "err": first if all(self._terminals.values()) else Writer()}
        self._live: tuple[Stream, str] | None = None  # stream and line
        self._drawn_at = float("-inf")
        self._pinned = False

    @property
    def backlog(self) -> int:
        """Characters that the person's side has not taken yet."""
        return max(writer.backlog for writer in self._writers.values())

    def terminal(self, stream: Stream) -> bool:
        """Whether ``stream`` is a terminal."""
        return self._terminals[stream]

    def lines(self, stream: Stream, lines: list[str]) -> None:
        """Print whole lines, above the live one."""
        if not lines:
            return
        if self._terminals[stream]:
            lines = [_CONTROLS.sub("", line) for line in lines]
        reset = "\x1b[0m" if self._terminals[stream] else ""
        text = "".join(line + (reset if "\x1b" in line else "") + "\n" for line in lines)
        if self._terminals[stream]:
            self._erase()
        self._put(stream, text)

    def live(self, stream: Stream, line: str) -> None:
        """Show an unfinished line, on a terminal only and ten times a second at most."""
        if self._terminals[stream] and not self._pinned and self._clock() - self._drawn_at >= _REDRAW_S:
            self._draw(stream, line)

    def close(self) -> None:
        """Leave the cursor at the start of a line and wait until all is written."""
        self._erase()
        for writer in dict.fromkeys(self._writers.values()):
            writer.finish()

    def pin(self, line: str) -> None:
        """Show a line of ours on stderr, if that is a terminal, in place of the ranks' unfinished ones from now on."""
        self._pinned = True
        if self._terminals["err"]:
            self._draw("err", line)

    def _draw(self, stream: Stream, line: str) -> None:
        if self.backlog:
            return
        self._erase()
        line = _CONTROLS.sub("", line)
        width = shutil.get_terminal_size().columns - 1
        if len(_SGR.sub("", line)) > width:
            line = _SGR.sub("", line)[:width]
        self._live = (stream, line)
        self._drawn_at = self._clock()
        self._put(stream, line + ("\x1b[0m" if "\x1b" in line else ""))

    def _erase(self) -> None:
        if self._live is not None:
            self._put(self._live[0], "\r\x1b[K")
            self._live = None

    def _put(self, stream: Stream, text: str) -> None:
        self._writers[stream].write(self._streams[stream], text)


class Logs:
    """The files ``rank-<R>.out`` and ``rank-<R>.err``: every byte a rank wrote, as it wrote it."""

    def __init__(self, folder: Path, complain: Callable[[str], None]) -> None:
        self._folder = folder
        self._complain = complain
        self._files: dict[str, BinaryIO] = {}
        self._failed = False

    def write(self, rank: int, stream: Stream, text: str) -> None:
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
    """Takes the ranks' output to the logs and to the person."""

    def __init__(
        self,
        labels: Mapping[int, str],
        logs: Logs,
        screen: Screen,
        *,
        mark: Callable[[int, str], str],
    ) -> None:
        """``labels``: rank → ``gpu02:1``. ``mark`` returns words to put before a line of a rank ("": none).

        Lines carry their rank; those of a single rank do only on a terminal, so that a pipe gets what the script wrote.
        """
        self._prefixes = {
            (rank, stream): f"[rank {rank} {label}] " if len(labels) > 1 or screen.terminal(stream) else ""
            for rank, label in labels.items()
            for stream in STREAMS
        }
        self._logs = logs
        self._screen = screen
        self._mark = mark
        self._lines: dict[tuple[int, Stream], LineSplitter] = {}
        self.last_line: dict[int, str] = {}
        self.last_error: dict[int, str] = {}

    def output(self, rank: int, stream: Stream, text: str) -> None:
        """Handle one piece of output of a rank."""
        self._logs.write(rank, stream, text)
        lines = self._lines.setdefault((rank, stream), LineSplitter())
        self._print(rank, stream, lines.feed(text))
        partial = lines.partial
        if partial.strip():
            self._remember(rank, stream, partial)
            self._screen.live(stream, self._prefixes[rank, stream] + partial)

    def ended(self, rank: int) -> None:
        """Print what the rank left unfinished."""
        for stream in STREAMS:
            lines = self._lines.pop((rank, stream), None)
            if lines is not None:
                self._print(rank, stream, lines.close())

    def _print(self, rank: int, stream: Stream, lines: list[str]) -> None:
        for line in lines:
            if line.strip():
                self._remember(rank, stream, line)
        prefix = self._prefixes[rank, stream]
        self._screen.lines(stream, [prefix + self._mark(rank, line) + line for line in lines])

    def _remember(self, rank: int, stream: Stream, line: str) -> None:
        line = _SGR.sub("", line)  # it is shown among our own words
        self.last_line[rank] = line
        if stream == "err":
            self.last_error[rank] = line
