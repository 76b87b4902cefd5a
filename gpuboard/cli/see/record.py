"""`gpuboard record`: write what the board shows to a file, which `board --replay` and `status --replay` read."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from gpuboard import __version__
from gpuboard.cli.context import Context
from gpuboard.cli.options import path, typed
from gpuboard.cli.stderr import report, show_progress
from gpuboard.errors import Interrupted
from gpuboard.model.text import quoted
from gpuboard.model.units import format_duration, iso, parse_duration
from gpuboard.recording.events import EVENTS_MOST, ClusterEvent
from gpuboard.recording.file import ForwardClock, RecordingWriter
from gpuboard.recording.frames import Frame

if TYPE_CHECKING:
    from gpuboard.board.core import Core

NAME = "record"
HELP = "record the cluster to a file, to be replayed later"

_EVERY_S = 5.0
_READ_S = 5.0  # deadline of the second reading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", metavar="FILE", type=path, help="the file to create; an existing one is never changed")
    parser.add_argument("--every", type=typed(_period), default=_EVERY_S, metavar="D",
                        help="time between two readings: 1s to 1h; default: 5s")  # fmt: skip
    parser.add_argument("--for", dest="for_s", type=typed(parse_duration), metavar="D",
                        help="duration of the recording; default: until ctrl-C or SIGTERM")  # fmt: skip
    parser.add_argument("--commands", action="store_true", help="keep whole command lines of processes, which may hold "
                        "tokens; default: the program's name only")  # fmt: skip
    parser.epilog = (
        "examples:\n  gpuboard record incident.gz\n  gpuboard record day.gz --for 24h --every 10s\n"
        "  gpuboard board --replay day.gz --at 14:00 --speed 60\n"
        "  gpuboard status --replay day.gz --at 14:03:21\n\n"
        "The file has readings, reservations, jobs and events as the board shows them,\n"
        "with user names, as JSON lines (zcat FILE). At most the last 10 s are lost when\n"
        "gpuboard is killed or the disk is full."
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Record until stopped; return the exit code."""
    from gpuboard.board.core import Core

    settings = msgspec.structs.replace(context.settings, interval=f"{args.every:g}s")
    nodes = context.reach(context.nodes())
    with (
        contextlib.closing(Core(nodes, settings, context.env, scheduler=context.new_scheduler())) as core,
        _End() as end,
    ):
        writer = RecordingWriter(args.file, version=__version__, commands=args.commands)
        began = time.monotonic()
        try:
            core.connect()
            with end.at_once():
                core.fleet.wait_all(core.fleet.connect_s)
                # a GPU is free after two readings: without this one the first frame would have none
                core.fleet.refresh([node.name for node in core.fleet.snapshot().nodes if node.gpus], _READ_S)
            _record(core, writer, args, end, context)
        except KeyboardInterrupt:
            pass  # the usual end
        finally:
            show_progress("", context)
            writer.close()
    if not writer.frames:
        report(f"nothing was recorded; {args.file} is removed")
        return Interrupted.exit_code
    seen = shlex.join(["gpuboard", "board", "--replay", str(args.file)])
    report(f"{args.file}: {_summary(writer, time.monotonic() - began)}; {seen}")
    return 0


def _record(core: Core, writer: RecordingWriter, args: argparse.Namespace, end: _End, context: Context) -> None:
    """Write a frame for every reading, for ``--for`` or until interrupted."""
    from gpuboard.board.overview.log import EventFinder

    finder, events = EventFinder(), list[ClusterEvent]()
    began = due = time.monotonic()
    until = math.inf if args.for_s is None else began + args.for_s
    clock = ForwardClock()
    while True:
        scene = core.scene()
        at, ahead_s = clock.read()
        if ahead_s:
            report(f"the clock was set back by {format_duration(ahead_s)}; the recording's times do not follow it")
        # events have the times of the frames, which are written in milliseconds
        snapshot = msgspec.structs.replace(scene.snapshot, at=iso(round(at, 3)))
        events = [*events, *finder.find(snapshot, scene.leases, at)][-EVENTS_MOST:]
        writer.add(Frame(at, snapshot, scene.leases, scene.uids, events))
        show_progress(f"recording: {_summary(writer, time.monotonic() - began)}; ctrl-C ends", context)
        if time.monotonic() >= until:
            return
        due = max(due + args.every, time.monotonic())
        with end.at_once():
            time.sleep(max(0.0, min(due, until) - time.monotonic()))


class _End:
    """SIGINT, SIGTERM and SIGHUP end the recording between two frames: none is written in part or twice.

    The second signal ends it at once, also while a file system hangs.
    """

    def __init__(self) -> None:
        self._asked = self._waits = False
        self._before: list[tuple[int, Any]] = []

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a background job of a script
                self._before.append((number, signal.signal(number, self._signalled)))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at a signal within the block, or at its begin where one came before."""
        self._waits = True
        try:
            if self._asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._waits = False

    def _signalled(self, _number: int, _frame: FrameType | None) -> None:
        at_once, self._asked = self._waits or self._asked, True
        if at_once:
            raise KeyboardInterrupt


def _summary(writer: RecordingWriter, seconds: float) -> str:
    size = writer.bytes
    amount = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"
    return f"{format_duration(seconds)}, {writer.frames} {'frame' if writer.frames == 1 else 'frames'}, {amount}"


def _period(text: str) -> float:
    seconds = parse_duration(text)
    if not 1 <= seconds <= 3600:
        raise ValueError(f"{quoted(text)} is not between one second and an hour")
    return seconds
