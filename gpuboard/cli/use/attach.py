"""`gpuboard attach`: show a run's output from now on, pass on signals, exit with the run's exit code."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import queue
import signal
import sys
import time

from gpuboard.cli.context import Context
from gpuboard.cli.options import whole
from gpuboard.cli.run_access import add_node, opened_run
from gpuboard.cli.stderr import report
from gpuboard.errors import GpuboardError
from gpuboard.launch.output import STREAMS, LineSplitter, Relay, Screen
from gpuboard.launch.runs.access import RunAccess, persistently
from gpuboard.launch.runs.control import FORWARDED, ControlRequest
from gpuboard.launch.runs.folder import FINAL, RunView
from gpuboard.launch.runs.places import labelled

NAME = "attach"
HELP = "show a run's output and messages until it ends"

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
        "examples:\n  gpuboard attach\n  gpuboard attach r7kq --lines 0\n  gpuboard attach last --node gpu01\n\n"
        "`attach` exits with the run's exit code. ctrl-C ends this command, not the run.\n"
        "The signals USR1, USR2 and TERM are passed on to the ranks."
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
        labels = view.last_places
        self._relay = Relay(labels, None, screen, mark=lambda *_: "")
        self._messages = LineSplitter()
        self._logs = {f"rank-{rank}.{stream}": (rank, stream) for rank in labels for stream in STREAMS}
        self._offsets = dict.fromkeys([_MESSAGES, *self._logs], 0)
        # a piece may end inside a character
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self._offsets}

    def follow(self, received: queue.SimpleQueue[int]) -> RunView:
        """Show the last lines, then what follows until the run ends; return its final state."""
        self._show_last()
        ended = False
        while not ended:
            pieces = self._read(self._offsets)
            over = self._view.state in FINAL  # before reading: nothing of an ended run is missed
            self._view = persistently(self._run.view, report)  # after reading: it has the ranks' places at that time
            for name, data in pieces.items():
                self._feed(name, data, self._offsets[name] - len(data))
            ended = over and not pieces
            idle = not pieces and self._view.state not in FINAL
            while not received.empty():
                self._forward(received.get())
            if self._screen.unread:
                raise BrokenPipeError
            while idle or self._screen.backlog > _BACKLOG:
                idle = False
                time.sleep(self._run.poll_s)
        for rank in self._view.last_places:
            self._relay.ended(rank)
        for verdict in self._view.verdicts if self._view.exit_code is None else []:
            self._screen.lines("err", [f"gpuboard: {verdict.text}"])
        return self._view

    def _show_last(self) -> None:
        sizes = persistently(lambda: self._run.sizes(list(self._offsets)), report)
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
            shown = b"".join(lines[-self._lines :] if self._lines else [])
            self._feed(name, shown, self._offsets[name] - len(shown))

    def _read(self, offsets: dict[str, int]) -> dict[str, bytes]:
        pieces = persistently(lambda: self._run.read(offsets), report)
        for name, data in pieces.items():
            self._offsets[name] += len(data)
        return pieces

    def _feed(self, name: str, data: bytes, offset: int) -> None:
        decode = self._decoders[name].decode
        if name == _MESSAGES:  # without their times
            self._screen.lines("err", [line.partition(" ")[2] for line in self._messages.feed(decode(data))])
            return
        rank, stream = self._logs[name]
        for label, part in labelled(self._view, rank, stream, offset, data):
            self._relay.moved(rank, stream, label)
            self._relay.output(rank, stream, decode(part).encode())

    def _forward(self, number: int) -> None:
        try:
            self._run.ask(ControlRequest("signal", signal=number))
        except GpuboardError as error:
            report(f"cannot pass on {signal.Signals(number).name}: {error}")
