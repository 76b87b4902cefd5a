"""`gpuboard` and `gpuboard board`: the live board, or the status where stdout is not a terminal."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from gpuboard.cli.context import Context
from gpuboard.cli.main import load, parser_of, recover_leases
from gpuboard.cli.options import natural, typed
from gpuboard.cli.replay import add_replay, open_replay
from gpuboard.cli.stderr import report
from gpuboard.errors import UsageError
from gpuboard.model.text import quoted
from gpuboard.model.units import parse_number

if TYPE_CHECKING:
    from gpuboard.recording.file import Recording

NAME = "board"
HELP = "open the live board: GPUs, reservations, runs"

_FASTEST = 1800  # of a replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    # internal, for `serve`: a board of COLUMNS ROWS for a browser, connected through stdin and stdout
    parser.add_argument("--browser", nargs=2, type=natural, help=argparse.SUPPRESS)
    add_replay(parser)
    parser.add_argument(
        "--speed", type=typed(_speed), metavar="N", help="with --replay: play N times as fast, 1 to 1800"
    )
    parser.epilog = (
        "examples:\n  gpuboard\n  gpuboard board --nodes 'gpu[01-03]'\n"
        "  gpuboard board --replay day.gz --at 14:00 --speed 60\n\n"
        "Keys: ? lists all keys, / filters, ctrl-p finds any action, node or GPU by name,\n"
        "q quits. The config sets keys and themes (docs/commands.md). The board restores\n"
        "its sort order, filter and theme at the next start."
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Open the board; return the exit code."""
    replay = open_replay(args)
    if args.speed is not None and replay is None:
        raise UsageError("--speed needs --replay FILE")
    if args.browser is None and not context.stdout_is_tty:
        return _status(args, context)
    from gpuboard.board.terminal import gc
    from gpuboard.board.terminal import guard as terminal

    if args.browser is None and (why := terminal.cannot_draw(context.env)):
        report(f"cannot show the board on this terminal: {why}; showing the status instead:")
        return _status(args, context)
    if replay is not None:
        return _play(*replay, args.speed or 1.0, context)
    from gpuboard.board.core import Core

    env = context.env
    if context.config_file is not None:  # commands that the board starts read the same file
        env = {**env, "GPUBOARD_CONFIG": str(context.config_file.absolute())}
    nodes = context.reach(context.nodes())  # ssh asks for passwords before the board takes the terminal
    core = Core(nodes, context.settings, env, scheduler=context.new_scheduler())
    guard = terminal.Guard()
    first = None
    try:
        if all(node.host is None for node in nodes):
            core.connect()  # overlaps the local agent with the imports; ssh would have to be imported first
            if args.browser is None and len(nodes) == 1:
                from gpuboard.board.terminal.first_frame import FirstFrame

                first = FirstFrame(core, guard)
                guard.cover()
                first.start()
        from gpuboard.board.app import BoardApp  # 250 ms: only for the board
        from gpuboard.board.dialogs import launch_process

        app = BoardApp(core, guard)
        gc.calm(len(nodes))
        if args.browser is None:
            app.scene = first.end() if first else None
            app.may_restart = True
            app.run()
            if app.next is not None:
                core.close()
                command = [*launch_process.command(), *app.next]
                os.execve(command[0], command, {**env})
        else:
            from gpuboard.board.web.driver import BrowserDriver

            app.driver_class = BrowserDriver
            app.run(size=tuple(args.browser))
        guard.restored(app.return_code or 0)
        return app.return_code or 0
    finally:
        guard.undo_enter()
        core.close()


def _play(recording: Recording, at: float | None, speed: float, context: Context) -> int:
    from gpuboard.board.replay.app import ReplayApp  # 250 ms: only for the board
    from gpuboard.board.replay.core import ReplayCore
    from gpuboard.board.terminal import gc
    from gpuboard.board.terminal import guard as terminal

    core = ReplayCore(recording, context.settings, context.env)
    core.player.speed = speed
    core.player.seek(recording.begin if at is None else at)
    guard = terminal.Guard()
    app = ReplayApp(core, guard)
    gc.calm(len(core.nodes))
    try:
        app.run()
        guard.restored(app.return_code or 0)
        return app.return_code or 0
    finally:
        guard.undo_enter()
        core.close()


def _speed(text: str) -> float:
    speed = parse_number(text)
    if not 1 <= speed <= _FASTEST:
        raise ValueError(f"{quoted(text)} is not between 1 and {_FASTEST}")
    return speed


def _status(args: argparse.Namespace, context: Context) -> int:
    if args.replay is None:
        recover_leases(context)
    status = load("status")
    words = [f"--{name}={value}" for name, value in (("replay", args.replay), ("at", args.at)) if value is not None]
    return status.run(parser_of(status).read(words), context)
