"""`gpuboard attach`: show a run's output from now on, pass on signals, exit with the run's exit code."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import queue
import signal
import sys
import time
from collections.abc import Callable

from gpuboard.cli.context import Context
from gpuboard.cli.options import whole
from gpuboard.cli.run_access import add_node, opened_run
from gpuboard.cli.stderr import report
from gpuboard.errors import GpuboardError
from gpuboard.launch.output import STREAMS, LineSplitter, Relay, Screen, Stream
from gpuboard.launch.runs.access import RunAccess, persistently
from gpuboard.launch.runs.control import FORWARDED, ControlRequest
from gpuboard.launch.runs.folder import FINAL, RunView

NAME = "attach"
HELP = "show a run's output and messages until it ends; exit with its exit code"

_MESSAGES = "head.log"
_LINE = 512  # bytes of a line at the end of a file, on average, that are read at most
_BACKLOG = 8 * 2**20  # characters not yet written to a slow terminal, above which no more are read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run's id, its start, or `last`; default: last")
    parser.add_argument("--lines", type=whole(0, 10**4), default=5, metavar="N",
                        help="show the last N lines of each rank's stdout and stderr first; default: 5")  # fmt: skip
    add_node(parser)
    parser.epilog = (
        "ctrl-C ends this command, not the run. USR1, USR2 and TERM are passed on to the ranks.\n\n"
        "examples:\n  gpuboard attach\n  gpuboard attach r7kq --lines 0\n  gpuboard attach last --node gpu01"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Follow the run to its end; return its exit code, or 130 after ctrl-C."""
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    with opened_run(context, args.run or "last", args.node) as found:
        view = found.view()
        for number in FORWARDED:
            signal.signal(number, lambda number, _frame: received.put(number))
        try:
            with contextlib.closing(Screen(sys.stdout, sys.stderr)) as screen:
                view = _Attached(found, view, screen, args.lines).follow(received)
        except KeyboardInterrupt:
            report(f"run {view.id} goes on; `gpuboard stop {view.id}` stops it, `gpuboard attach {view.id}` returns")
            return 128 + signal.SIGINT
    report(f"run {view.id} {view.state}")
    return 1 if view.exit_code is None else view.exit_code


class _Attached:
    """One run whose output is shown."""

    def __init__(self, run: RunAccess, view: RunView, screen: Screen, lines: int) -> None:
        self._run = run
        self._view = view
        self._screen = screen
        self._lines = lines
        labels = {rank.rank: f"{rank.node}:{rank.index}" for rank in view.ranks}
        self._relay = Relay(labels, None, screen, mark=lambda *_: "")
        self._messages = LineSplitter()
        self._show: dict[str, Callable[[str], None]] = {_MESSAGES: self._show_messages}
        for rank in labels:
            for stream in STREAMS:
                self._show[f"rank-{rank}.{stream}"] = self._shown(rank, stream)
        self._offsets = dict.fromkeys(self._show, 0)
        # a piece may end inside a character
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self._show}

    def follow(self, received: queue.SimpleQueue[int]) -> RunView:
        """Show the last lines, then what follows until the run ends; return its final state."""
        self._show_last()
        while True:
            self._view = persistently(self._run.view, report)  # before reading: nothing of an ended run is missed
            moved = self._show_new()
            while not received.empty():
                self._forward(received.get())
            if self._screen.unread:
                raise BrokenPipeError
            if not moved and self._view.state in FINAL:
                break
            while not moved or self._screen.backlog > _BACKLOG:
                moved = True
                time.sleep(self._run.poll_s)
        for rank in self._view.ranks:
            self._relay.ended(rank.rank)
        for verdict in self._view.verdicts if self._view.exit_code is None else []:
            self._screen.lines("err", [f"gpuboard: {verdict.text}"])
        return self._view

    def _show_last(self) -> None:
        sizes = persistently(lambda: self._run.sizes(list(self._show)), report)
        before = {name: max(0, size - self._lines * _LINE) for name, size in sizes.items()}
        self._offsets |= before
        ends = dict.fromkeys(sizes, b"")
        while left := {name: self._offsets[name] for name in sizes if self._offsets[name] < sizes[name]}:
            pieces = self._read(left)
            if not pieces:
                break
            for name, data in pieces.items():
                ends[name] += data
        for name, data in ends.items():
            lines = data.splitlines(keepends=True)
            if before[name] and len(lines) > 1:
                lines = lines[1:]  # its start was not read
            self._feed(name, b"".join(lines[-self._lines :] if self._lines else []))

    def _show_new(self) -> bool:
        pieces = self._read(self._offsets)
        for name, data in pieces.items():
            self._feed(name, data)
        return bool(pieces)

    def _read(self, offsets: dict[str, int]) -> dict[str, bytes]:
        pieces = persistently(lambda: self._run.read(offsets), report)
        for name, data in pieces.items():
            self._offsets[name] += len(data)
        return pieces

    def _feed(self, name: str, data: bytes) -> None:
        self._show[name](self._decoders[name].decode(data))

    def _shown(self, rank: int, stream: Stream) -> Callable[[str], None]:
        return lambda text: self._relay.output(rank, stream, text.encode())

    def _show_messages(self, text: str) -> None:
        """Show the head's messages, without their times."""
        self._screen.lines("err", [line.partition(" ")[2] for line in self._messages.feed(text)])

    def _forward(self, number: int) -> None:
        try:
            self._run.ask(ControlRequest("signal", signal=number))
        except GpuboardError as error:
            report(f"cannot pass on {signal.Signals(number).name}: {error}")
