"""Output of the ranks: complete logs in the run's folder, prefixed lines and progress bars on the user's streams."""

from __future__ import annotations

import os
import queue
import re
import resource
import select
import shutil
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

from gpuboard.launch.causes.stderr import TAIL
from gpuboard.launch.runs.folder import incomplete

Stream = Literal["out", "err"]
STREAMS: tuple[Stream, ...] = ("out", "err")
MAX_LINE = 64 * 1024  # characters: a longer line is split into pieces of this size, which bounds the memory
_REDRAW_S = 0.1  # shortest time between two drawings of an unfinished line
_QUOTED = 1024  # characters of a line that is kept for messages
_OPEN_SHARE = 4  # log files open at a time: a quarter of the process's limit, the rest is for connections

# Cursor movements and erasures would tear prefixed lines of several ranks; colours (m) stay.
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_SGR = re.compile(r"\x1b\[[0-9;]*m")
# Other control sequences (character sets, reset, title): binary output of a rank must not change the terminal's state.
_CONTROLS = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


class LineSplitter:
    """Splits one stream into lines as a terminal shows them: a carriage return discards the text before it."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """Return the lines that ``text`` completes, without line ends."""
        *whole, rest = (self._rest + text).split("\n")
        lines = [_visible(line) for line in whole]
        if "\r" in rest:  # keep the visible part only: progress bars redraw a line thousands of times
            rest = _visible(rest) + ("\r" if rest.endswith("\r") else "")
        while len(rest) > MAX_LINE:
            lines.append(rest[:MAX_LINE])
            rest = rest[MAX_LINE:]
        self._rest = rest
        return lines

    @property
    def partial(self) -> str:
        """The visible part of the unfinished line: a progress bar, a prompt."""
        return _visible(self._rest)

    def close(self) -> list[str]:
        """Return the unfinished line, if any, as the last line."""
        rest, self._rest = self._rest, ""
        return [_visible(rest)] if rest else []


def _visible(line: str) -> str:
    if "\r" in line:
        line = line.rstrip("\r").rpartition("\r")[2]
    return _MOVES.sub("", line) if "\x1b" in line else line


class Writer:
    """Writes to the user's streams in a thread, so that a full pipe (e.g. of a pager) does not block the head."""

    def __init__(self, failed: Callable[[TextIO, OSError], None]) -> None:
        """``failed`` is called at the first error of a stream; BrokenPipeError: its reader has gone."""
        self._failed = failed
        self._queue: queue.SimpleQueue[tuple[TextIO, str] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.closed: set[TextIO] = set()  # whose reader has gone
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self.backlog = 0  # characters queued
        self._thread.start()

    def write(self, stream: TextIO, text: str) -> None:
        """Queue ``text``; never blocks."""
        with self._lock:
            self.backlog += len(text)
        self._queue.put((stream, text))

    def finish(self) -> None:
        """Wait without limit until everything is written."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, text = item
            try:
                if stream not in self.closed:
                    encoding = stream.encoding or "utf-8"  # which may lack some of the characters
                    _write(stream, text.encode(encoding, "replace"), encoding)
            except (OSError, ValueError) as error:  # the run and its logs continue
                self.closed.add(stream)
                if isinstance(error, OSError):
                    self._failed(stream, error)
            with self._lock:
                self.backlog -= len(text)


def _write(stream: TextIO, data: bytes, encoding: str) -> None:
    """Write all of ``data``, not through Python's buffers: those lose the rest of a write that ctrl-Z interrupts."""
    try:
        fd = stream.fileno()
    except OSError:  # without a descriptor, such as StringIO
        stream.write(data.decode(encoding))
        stream.flush()
        return
    stream.flush()
    _write_all(fd, data)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another process that shares it has set O_NONBLOCK
            select.select([], [fd], [])


class Screen:
    """The user's stdout and stderr. On a terminal the newest unfinished line stays below all others."""

    def __init__(
        self, out: TextIO, err: TextIO, clock: Callable[[], float] = time.monotonic, *, gone: str = ""
    ) -> None:
        """``gone``: what to say on ``err`` when the reader of ``out`` has gone, as at the end of ``| head``."""
        self._gone = gone
        self._streams: dict[Stream, TextIO] = {"out": out, "err": err}
        self._terminals = {name: stream.isatty() for name, stream in self._streams.items()}
        self._clock = clock
        # One writer keeps the order when both are terminals or one stream. Otherwise two: a full pipe must not delay
        # our messages.
        first = Writer(self._write_failed)
        together = out is err or all(self._terminals.values())
        self._writers = {"out": first, "err": first if together else Writer(self._write_failed)}
        self.failed = False  # some output could not be written
        self._live: tuple[Stream, str] | None = None  # stream and line
        self._drawn_at = float("-inf")
        self._pinned = False

    @property
    def backlog(self) -> int:
        """Characters not yet written to the user's streams."""
        return max(writer.backlog for writer in self._writers.values())

    @property
    def unread(self) -> bool:
        """Whether the reader of stdout has gone, as at the end of ``| head``."""
        return self._streams["out"] in self._writers["out"].closed

    def terminal(self, stream: Stream) -> bool:
        """Whether ``stream`` is a terminal."""
        return self._terminals[stream]

    def lines(self, stream: Stream, lines: list[str]) -> None:
        """Print whole lines above the unfinished one."""
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
        """Show an unfinished line; on a terminal only and at most ten times a second."""
        if self._terminals[stream] and not self._pinned and self._clock() - self._drawn_at >= _REDRAW_S:
            self._draw(stream, line)

    def settle(self, timeout_s: float) -> None:
        """Wait until all is written, but not longer than ``timeout_s``: the reader may be suspended too."""
        until = time.monotonic() + timeout_s
        while self.backlog and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """Move the cursor to the start of a line and wait until all is written."""
        self._erase()
        for writer in dict.fromkeys(self._writers.values()):
            writer.finish()

    def _write_failed(self, stream: TextIO, error: OSError) -> None:
        """Report the error; called in a writer's thread."""
        words = f"cannot write to stdout: {error.strerror}; the rest of the ranks' output is in the run's logs only"
        if isinstance(error, BrokenPipeError):  # the reader wants no more
            words = self._gone
        else:
            self.failed = True
        if words and stream is self._streams["out"]:  # about stderr nothing can be reported: stdout is data
            erased = "\r\x1b[K" if self._terminals["err"] else ""  # an unfinished line
            self._put("err", f"{erased}gpuboard: {words}\n")

    def pin(self, line: str) -> None:
        """From now on show ``line`` in place of the ranks' unfinished ones, if stderr is a terminal."""
        self._pinned = True
        if self._terminals["err"]:
            self._draw("err", line)

    def unpin(self) -> None:
        """Show unfinished lines of the ranks again."""
        self._pinned = False
        self._erase()

    def _draw(self, stream: Stream, line: str) -> None:
        if self.backlog:
            return
        self._erase()
        line = _CONTROLS.sub("", line).expandtabs()
        plain = _SGR.sub("", line)
        fitting = _fitting(plain, shutil.get_terminal_size().columns - 1)
        line = line if fitting == plain else fitting
        self._live = (stream, line)
        self._drawn_at = self._clock()
        self._put(stream, line + ("\x1b[0m" if "\x1b" in line else ""))

    def _erase(self) -> None:
        if self._live is not None:
            self._put(self._live[0], "\r\x1b[K")
            self._live = None

    def _put(self, stream: Stream, text: str) -> None:
        self._writers[stream].write(self._streams[stream], text)


def _fitting(text: str, width: int) -> str:
    """Return the start of ``text`` that fits into ``width`` cells; a wide character (CJK, emoji) takes two."""
    for at, character in enumerate(text):
        width -= 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if width < 0:
            return text[:at]
    return text


class Logs:
    """The files ``rank-<R>.out`` and ``rank-<R>.err``: the ranks' output, unchanged."""

    def __init__(self, folder: Path, report: Callable[[str], None], heading: str = "") -> None:
        """``heading``: a line that precedes the output in each file, that of an earlier attempt of the run aside."""
        self._folder = folder
        self._report = report
        self._heading = f"\n{heading}\n".encode() if heading else b""
        self._begun: set[str] = set()
        self._files: dict[str, BinaryIO] = {}  # the least recently used one first
        self._most = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _OPEN_SHARE)
        self.failed = False

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Append ``data``. The first error (a full disk) is reported; none ends the run."""
        name = f"rank-{rank}.{stream}"
        try:
            file = self._files.pop(name, None)
            if file is None:
                if len(self._files) >= self._most:
                    self._close(next(iter(self._files)))
                file = (self._folder / name).open("ab", buffering=0)
                if self._heading and name not in self._begun:
                    self._begun.add(name)
                    data = self._heading + data
            self._files[name] = file
            _write_all(file.fileno(), data)
        except OSError as error:
            self._failed(name, error)

    def close(self) -> None:
        """Close the files; a later write reopens them."""
        for name in list(self._files):
            self._close(name)

    def _close(self, name: str) -> None:
        try:
            self._files.pop(name).close()
        except OSError as error:  # NFS may report only now that earlier writes found a full disk
            self._failed(name, error)

    def _failed(self, name: str, error: OSError) -> None:
        if not self.failed:
            self.failed = True
            self._report(incomplete(self._folder / name, error))


class Relay:
    """Passes the ranks' output to the logs and to the user."""

    def __init__(
        self,
        labels: Mapping[int, str],
        logs: Logs | None,
        screen: Screen,
        *,
        mark: Callable[[int, str], str],
    ) -> None:
        """``labels``: rank → ``gpu02:1``. ``mark`` returns the prefix of a line of a rank, "" for none. ``logs`` None:
        what is shown is there already.

        Each line is labelled with its rank. A single rank is labelled on a terminal only: a pipe gets its output as is.
        """
        self._several = len(labels) > 1
        self._logs = logs
        self._screen = screen
        self._prefixes = {
            (rank, stream): self._prefix(rank, stream, label) for rank, label in labels.items() for stream in STREAMS
        }
        self._mark = mark
        self._lines: dict[tuple[int, Stream], LineSplitter] = {}
        self.last_line: dict[int, str] = {}
        self.errors: dict[int, deque[str]] = {}  # the ends of the ranks' stderr

    def output(self, rank: int, stream: Stream, data: bytes) -> None:
        """Handle one piece of output of a rank; only the logs contain what is not UTF-8."""
        if self._logs is not None:
            self._logs.write(rank, stream, data)
        lines = self._lines.setdefault((rank, stream), LineSplitter())
        self._print(rank, stream, lines.feed(data.decode("utf-8", "replace")))
        partial = lines.partial
        if partial.strip():
            self._remember(rank, partial)
            self._screen.live(stream, self._prefixes[rank, stream] + partial)

    def moved(self, rank: int, stream: Stream, label: str) -> None:
        """Label what follows with another GPU, if it is another one."""
        prefix = self._prefix(rank, stream, label)
        if prefix != self._prefixes[rank, stream]:
            self._close(rank, stream)
            self._prefixes[rank, stream] = prefix

    def ended(self, rank: int) -> None:
        """Print the rank's unfinished line."""
        for stream in STREAMS:
            self._close(rank, stream)

    def _prefix(self, rank: int, stream: Stream, label: str) -> str:
        return f"[rank {rank} {label}] " if self._several or self._screen.terminal(stream) else ""

    def _close(self, rank: int, stream: Stream) -> None:
        lines = self._lines.pop((rank, stream), None)
        if lines is not None:
            self._print(rank, stream, lines.close())

    def _print(self, rank: int, stream: Stream, lines: list[str]) -> None:
        for line in lines:
            if line.strip():
                self._remember(rank, line)
                if stream == "err":
                    self.errors.setdefault(rank, deque(maxlen=TAIL)).append(self.last_line[rank])
        prefix = self._prefixes[rank, stream]
        self._screen.lines(stream, [prefix + self._mark(rank, line) + line for line in lines])

    def _remember(self, rank: int, line: str) -> None:
        self.last_line[rank] = _SGR.sub("", line)[:_QUOTED]  # without colour: it is quoted in our messages
