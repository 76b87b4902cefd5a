"""`gpuboard logs RUN`: print the complete output of a run's ranks; `-f` follows it."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Sequence

from gpuboard.cli.context import Context
from gpuboard.cli.options import whole
from gpuboard.cli.run_access import add_node, opened_run
from gpuboard.cli.stderr import report
from gpuboard.errors import UsageError
from gpuboard.launch.output import LineSplitter
from gpuboard.launch.runs.access import RunAccess, persistently
from gpuboard.launch.runs.folder import FINAL, RunView
from gpuboard.launch.runs.places import labelled

NAME = "logs"
HELP = "print the output of a run's ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's id, its start, or `last`")
    parser.add_argument(
        "--rank", type=whole(0, 10**6), metavar="R", help="print only the output of rank R, without line prefixes"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="print new output until the run ends")
    add_node(parser)
    parser.epilog = (
        "examples:\n  gpuboard logs last\n  gpuboard logs r7kq --rank 3 -f\n  gpuboard logs last --node gpu01 -f"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Print the logs: stdout of the ranks on stdout, stderr on stderr."""
    with opened_run(context, args.run, args.node, stored=not args.follow) as found:
        view = found.view()
        ranks = list(view.last_places)
        if args.rank is not None and args.rank not in ranks:
            raise UsageError(f"run {view.id} has no rank {args.rank}; it has {len(ranks)}, numbered from 0")
        tails = [
            _Tail(rank, stream, raw=args.rank is not None)
            for rank in (ranks if args.rank is None else [args.rank])
            for stream in ("out", "err")
        ]
        for tail in tails:  # one after the other, as far as they go now
            _print_new(found, [tail], follow=args.follow)
        while args.follow:
            final = persistently(found.view, report).state in FINAL  # before reading, so that no output is missed
            moved = _print_new(found, tails, follow=True)
            if final:
                break
            if not moved:
                time.sleep(found.poll_s)
    for tail in tails:
        tail.close()
    return 0


def _print_new(run: RunAccess, tails: Sequence[_Tail], *, follow: bool) -> bool:
    """Print all new output, and return whether there was any. ``follow``: open a lost connection again."""
    moved = False

    def read() -> dict[str, bytes]:
        return run.read({tail.name: tail.offset for tail in tails})

    while pieces := persistently(read, report) if follow else read():
        moved = True
        view = persistently(run.view, report) if follow else run.view()  # after reading: where the ranks were then
        for tail in tails:
            if tail.name in pieces:
                tail.print(pieces[tail.name], view)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return moved


class _Tail:
    """Prints one log file as it grows. ``offset``: the bytes that are printed."""

    def __init__(self, rank: int, stream: str, *, raw: bool) -> None:
        self.name = f"rank-{rank}.{stream}"
        self.offset = 0
        self._rank = rank
        self._stream = stream
        self._raw = raw
        self._label = ""  # of the GPU on which the rank wrote the lines
        self._lines = LineSplitter()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a piece may end within a character
        self._target = sys.stdout if stream == "out" else sys.stderr

    def print(self, data: bytes, view: RunView) -> None:
        """Print the next bytes of the file; ``view``: the run, read after them."""
        if self._raw:
            self._target.buffer.write(data)
        else:
            for label, part in labelled(view, self._rank, self._stream, self.offset, data):
                if label != self._label:
                    self._print(self._lines.close())
                    self._label = label
                self._print(self._lines.feed(self._decoder.decode(part)))
        self.offset += len(data)

    def close(self) -> None:
        """Print an unfinished last line."""
        self._print(self._lines.feed(self._decoder.decode(b"", final=True)))
        self._print(self._lines.close())
        self._target.flush()

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            self._target.write(f"[rank {self._rank} {self._label}] {line}\n")
