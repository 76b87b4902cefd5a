"""`gpuboard record`: write what the board shows to a file, which `board --replay` and `status --replay` read."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import msgspec

from gpuboard import __version__
from gpuboard.cli.context import Context
from gpuboard.cli.options import typed
from gpuboard.cli.stderr import report
from gpuboard.model.text import quoted
from gpuboard.model.units import format_duration, parse_duration
from gpuboard.recording.file import RecordingWriter
from gpuboard.recording.frames import Frame

if TYPE_CHECKING:
    from gpuboard.board.core import Core

NAME = "record"
HELP = "record the cluster to a file, to be replayed later"

_EVERY_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the file to create; an existing one is never changed")
    parser.add_argument("--every", type=typed(_period), default=_EVERY_S, metavar="TIME",
                        help="read the nodes this often: 1s to 1h; default: 5s")  # fmt: skip
    parser.add_argument("--for", dest="for_s", type=typed(parse_duration), metavar="TIME",
                        help="end after this long; default: at ctrl-C or SIGTERM")  # fmt: skip
    parser.add_argument("--commands", action="store_true", help="keep whole command lines of processes, which may hold "
                        "tokens; default: the program's name only")  # fmt: skip
    parser.epilog = (
        "examples:\n  gpuboard record incident.gz\n  gpuboard record day.gz --for 24h --every 10s\n"
        "  gpuboard board --replay day.gz --at 14:00 --speed 60\n"
        "  gpuboard status --replay day.gz --at 14:03:21\n\n"
        "The file has readings, reservations and jobs as the board shows them, with user\n"
        "names, as JSON lines (zcat FILE). At most the last 10 s are lost when gpuboard is\n"
        "killed or the disk is full."
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Record until stopped; return the exit code."""
    from gpuboard.board.core import Core

    settings = msgspec.structs.replace(context.settings, interval=f"{args.every:g}s")
    nodes = context.reach(context.nodes())
    writer = RecordingWriter(args.file, version=__version__, commands=args.commands)
    before = [(number, signal.signal(number, _end)) for number in (signal.SIGTERM, signal.SIGHUP)]
    core = Core(nodes, settings, context.env, scheduler=context.new_scheduler())
    began = time.monotonic()
    until = None if args.for_s is None else began + args.for_s
    try:
        core.connect()
        _record(core, writer, args.every, until, context)
    except KeyboardInterrupt:
        pass  # the usual end
    finally:
        core.close()
        if context.stderr_is_tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        try:
            writer.close()
        finally:
            for number, handler in before:
                signal.signal(number, handler)
            if not writer.bytes:
                args.file.unlink(missing_ok=True)
    if not writer.frames:
        report(f"nothing was recorded; {args.file} is removed")
        return 130
    report(f"{args.file}: {_summary(writer, time.monotonic() - began)}; gpuboard board --replay {args.file}")
    return 0


def _record(core: Core, writer: RecordingWriter, every_s: float, until: float | None, context: Context) -> None:
    """Write a frame for every reading until ``until`` (monotonic seconds), or until interrupted."""
    core.fleet.wait_all(core.fleet.connect_s)
    began = due = time.monotonic()
    while True:
        scene = core.scene()
        writer.add(Frame(time.time(), scene.snapshot, scene.leases, scene.uids))
        if context.stderr_is_tty:
            words = f"recording: {_summary(writer, time.monotonic() - began)}; ctrl-C ends"
            print(f"\r{words}\x1b[K", end="", file=sys.stderr, flush=True)
        if until is not None and time.monotonic() >= until:
            return
        due = max(due + every_s, time.monotonic())
        time.sleep(max(0.0, min(due, until or due) - time.monotonic()))


def _summary(writer: RecordingWriter, seconds: float) -> str:
    size = writer.bytes
    amount = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"
    return f"{format_duration(seconds)}, {writer.frames} frames, {amount}"


def _period(text: str) -> float:
    seconds = parse_duration(text)
    if not 1 <= seconds <= 3600:
        raise ValueError(f"{quoted(text)} is not between one second and an hour")
    return seconds


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
