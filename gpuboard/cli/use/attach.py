"""`gpuboard attach`: show a run's output from now on, pass on signals, exit with the run's exit code."""

from __future__ import annotations

import argparse
import contextlib
import queue
import signal
import sys
import time
from pathlib import Path

from gpuboard.cli.context import Context
from gpuboard.cli.options import whole
from gpuboard.cli.stderr import report
from gpuboard.errors import GpuboardError
from gpuboard.launch.output import LineSplitter, Relay, Screen
from gpuboard.launch.runs.control import ControlRequest, ask
from gpuboard.launch.runs.folder import FINAL, RunView, alive, find_run, judged, read_state
from gpuboard.launch.runs.follow import FollowedFile

NAME = "attach"
HELP = "show a run's output and messages until it ends; exit with its exit code"

_POLL_S = 0.2
_BACKLOG = 8 * 2**20  # characters not yet written to a slow terminal, above which no more are read
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run's id, its start, or `last`; default: last")
    parser.add_argument("--lines", type=whole(0, 10**6), default=5, metavar="N",
                        help="show the last N lines of each rank's stdout and stderr first; default: 5")  # fmt: skip
    parser.epilog = (
        "ctrl-C ends this command, not the run. USR1, USR2 and TERM are passed on to the ranks.\n\n"
        "examples:\n  gpuboard attach\n  gpuboard attach r7kq --lines 0"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Follow the run to its end; return its exit code, or 130 after ctrl-C."""
    view = find_run(context.env, args.run or "last")
    if view.state not in FINAL and alive(view.head) is None:
        raise GpuboardError(f"run {view.id} was launched on {view.head.host}; use `gpuboard attach {view.id}` there")
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in _FORWARDED:
        signal.signal(number, lambda number, _frame: received.put(number))
    try:
        with contextlib.closing(Screen(sys.stdout, sys.stderr)) as screen:
            view = _follow(view, screen, args.lines, received)
    except KeyboardInterrupt:
        report(f"run {view.id} goes on; `gpuboard stop {view.id}` stops it, `gpuboard attach {view.id}` returns to it")
        return 128 + signal.SIGINT
    report(f"run {view.id} {view.state}")
    return 1 if view.exit_code is None else view.exit_code


def _follow(view: RunView, screen: Screen, lines: int, received: queue.SimpleQueue[int]) -> RunView:
    """Show what the run writes until it ends; return its final state."""
    folder = Path(view.folder)
    relay = Relay({rank.rank: f"{rank.node}:{rank.index}" for rank in view.ranks}, None, screen, mark=lambda *_: "")
    files = [
        (rank.rank, stream, FollowedFile(folder / f"rank-{rank.rank}.{stream}", lines))
        for rank in view.ranks
        for stream in ("out", "err")
    ]
    log, messages = FollowedFile(folder / "head.log", lines), LineSplitter()
    while True:
        view = _state(view)  # before reading, so that nothing of an ended run is missed
        moved = False
        for rank, stream, file in files:
            if text := file.read():
                moved = True
                relay.output(rank, "err" if stream == "err" else "out", text.encode())
        screen.lines("err", [line.partition(" ")[2] for line in messages.feed(log.read())])  # without their times
        while not received.empty():
            _forward(view, received.get())
        if not moved and view.state in FINAL:
            break
        while not moved or screen.backlog > _BACKLOG:
            moved = True
            time.sleep(_POLL_S)
    for ended in view.ranks:
        relay.ended(ended.rank)
    for verdict in view.verdicts if view.exit_code is None else []:
        screen.lines("err", [f"gpuboard: {verdict.text}"])
    return view


def _state(view: RunView) -> RunView:
    now = read_state(Path(view.folder))
    if now is None:
        raise GpuboardError(f"{view.folder}: the run's folder was removed")
    return judged(now)


def _forward(view: RunView, number: int) -> None:
    try:
        ask(Path(view.folder), ControlRequest("signal", signal=number))
    except GpuboardError as error:
        report(f"cannot pass on {signal.Signals(number).name}: {error}")
