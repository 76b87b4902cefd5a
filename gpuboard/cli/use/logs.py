"""`gpuboard logs RUN`: print the complete output of a run's ranks; `-f` follows it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpuboard.cli.context import Context
from gpuboard.cli.options import whole
from gpuboard.errors import UsageError
from gpuboard.launch.output import LineSplitter
from gpuboard.launch.runs.folder import FINAL, RunView, find_run

NAME = "logs"
HELP = "print the output of a run's ranks"

_POLL_S = 0.2
_CHUNK = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's id, the start of it, or `last`")
    parser.add_argument(
        "--rank", type=whole(0, 10**6), metavar="R", help="print only the output of rank R, without line prefixes"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="print new output until the run ends")
    parser.epilog = "examples:\n  gpuboard logs last\n  gpuboard logs r7kq --rank 3 -f"


def run(args: argparse.Namespace, context: Context) -> int:
    """Print the logs: stdout of the ranks on stdout, stderr on stderr."""
    view = find_run(context.env, args.run)
    ranks = [rank.rank for rank in view.ranks]
    if args.rank is not None and args.rank not in ranks:
        raise UsageError(f"run {view.id} has no rank {args.rank}; it has {len(ranks)}, numbered from 0")
    tails = [
        _Tail(Path(view.folder), rank, stream, raw=args.rank is not None, label=_label(view, rank))
        for rank in (ranks if args.rank is None else [args.rank])
        for stream in ("out", "err")
    ]
    while True:
        final = find_run(context.env, view.id).state in FINAL  # before reading, so that no output is missed
        moved = [tail.print_new() for tail in tails]
        if not args.follow or final:
            break
        if not any(moved):
            time.sleep(_POLL_S)
    for tail in tails:
        tail.close()
    return 0


def _label(view: RunView, number: int) -> str:
    rank = next(rank for rank in view.ranks if rank.rank == number)
    return f"[rank {number} {rank.node}:{rank.index}] "


class _Tail:
    """Prints one log file as it grows."""

    def __init__(self, folder: Path, rank: int, stream: str, *, raw: bool, label: str) -> None:
        self._path = folder / f"rank-{rank}.{stream}"
        self._offset = 0
        self._raw = raw
        self._label = label
        self._lines = LineSplitter()
        self._target = sys.stdout if stream == "out" else sys.stderr

    def print_new(self) -> bool:
        """Print all new output; return whether there was any."""
        moved = False
        while data := self._read():
            moved = True
            self._offset += len(data)
            if self._raw:
                self._target.buffer.write(data)
            else:
                self._print(self._lines.feed(data.decode("utf-8", "replace")))
        self._target.flush()
        return moved

    def close(self) -> None:
        """Print an unfinished last line."""
        self._print(self._lines.close())
        self._target.flush()

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                return file.read(_CHUNK)
        except FileNotFoundError:
            return b""  # the file is created at the first output

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            self._target.write(f"{self._label}{line}\n")
