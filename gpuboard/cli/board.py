"""`gpuboard` and `gpuboard board`: the live board; where stdout is no terminal, the status."""

from __future__ import annotations

import argparse

from gpuboard.cli.context import Context

NAME = "board"
HELP = "the live board: every GPU, reservations, runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = (
        "examples:\n  gpuboard\n  gpuboard board --nodes 'gpu[01-03]'\n\n? shows the keys, ctrl-p every action."
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Open the board; return the exit code."""
    if not context.stdout_is_tty:
        from gpuboard.cli import status

        return status.run(argparse.Namespace(watch=None, json=False), context)
    from gpuboard.board.app import BoardApp  # 250 ms: only for the board
    from gpuboard.board.core import Core

    core = Core(context.nodes(), context.settings, context.env)
    try:
        return BoardApp(core).run() or 0
    finally:
        core.close()
