"""`gpuboard` and `gpuboard board`: the live board; where stdout is no terminal, the status."""

from __future__ import annotations

import argparse
import os

from gpuboard.cli.context import Context
from gpuboard.cli.main import mind_leases
from gpuboard.cli.options import natural
from gpuboard.cli.say import say

NAME = "board"
HELP = "the live board: every GPU, reservations, runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    # what `serve` starts for a browser of COLUMNS ROWS: packets on stdin and stdout are its terminal
    parser.add_argument("--browser", nargs=2, type=natural, help=argparse.SUPPRESS)
    parser.epilog = (
        "examples:\n  gpuboard\n  gpuboard board --nodes 'gpu[01-03]'\n\n"
        "? shows every key, / filters, ctrl-p finds any action, node or GPU by name, q leaves. Keys and themes are\n"
        "set in the config (docs/commands.md); sort, filter and theme are kept between starts."
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Open the board; return the exit code."""
    if args.browser is None and not context.stdout_is_tty:
        return _status(context)
    from gpuboard.board.terminal import gc
    from gpuboard.board.terminal import guard as terminal

    if args.browser is None and (why := terminal.cannot_draw(context.env)):
        say(f"no board on this terminal: {why}. The status instead:")
        return _status(context)
    from gpuboard.board.core import Core

    env = context.env
    if context.config_file is not None:  # what the board starts is to read the same one
        env = {**env, "GPUBOARD_CONFIG": str(context.config_file.absolute())}
    nodes = context.reach(context.nodes())  # what ssh has to ask, it asks before the board takes the terminal
    core = Core(nodes, context.settings, env, scheduler=context.new_scheduler())
    guard = terminal.Guard()
    first = None
    try:
        if all(node.host is None for node in nodes):
            core.connect()  # this machine's agent reads meanwhile; ssh would have to be imported first
            if args.browser is None and len(nodes) == 1:
                from gpuboard.board.terminal.first_frame import FirstFrame

                first = FirstFrame(core, guard)
                guard.cover()
                first.start()
        from gpuboard.board.app import BoardApp  # 250 ms: only for the board
        from gpuboard.board.dialogs import launch_process

        app = BoardApp(core, guard)
        gc.calm()
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
        guard.give_back()
        core.close()


def _status(context: Context) -> int:
    from gpuboard.cli.see import status

    mind_leases(context)
    return status.run(argparse.Namespace(watch=None, json=False), context)
