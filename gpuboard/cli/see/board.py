"""`gpuboard` and `gpuboard board`: the live board, or the status where stdout is not a terminal."""

from __future__ import annotations

import argparse
import os

from gpuboard.cli.context import Context
from gpuboard.cli.main import recover_leases
from gpuboard.cli.options import natural
from gpuboard.cli.stderr import report

NAME = "board"
HELP = "open the live board: GPUs, reservations, runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    # internal, for `serve`: a board of COLUMNS ROWS for a browser, connected through stdin and stdout
    parser.add_argument("--browser", nargs=2, type=natural, help=argparse.SUPPRESS)
    parser.epilog = (
        "examples:\n  gpuboard\n  gpuboard board --nodes 'gpu[01-03]'\n\n"
        "Keys: ? lists all keys, / filters, ctrl-p finds any action, node or GPU by name,\n"
        "q quits. The config sets keys and themes (docs/commands.md). The board restores\n"
        "its sort order, filter and theme at the next start."
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Open the board; return the exit code."""
    if args.browser is None and not context.stdout_is_tty:
        return _status(context)
    from gpuboard.board.terminal import gc
    from gpuboard.board.terminal import guard as terminal

    if args.browser is None and (why := terminal.cannot_draw(context.env)):
        report(f"cannot show the board on this terminal: {why}; showing the status instead:")
        return _status(context)
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
        guard.undo_enter()
        core.close()


def _status(context: Context) -> int:
    from gpuboard.cli.see import status

    recover_leases(context)
    return status.run(argparse.Namespace(watch=None, json=False), context)
