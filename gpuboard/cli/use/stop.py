"""`gpuboard stop RUN`: end a run as ctrl-C in its terminal would."""

from __future__ import annotations

import argparse
import time

from gpuboard.cli.context import Context
from gpuboard.cli.options import patience
from gpuboard.errors import GpuboardError
from gpuboard.launch import run_folder
from gpuboard.launch.stop import ask_to_stop

NAME = "stop"
HELP = "end a run: SIGTERM to its ranks, SIGKILL after the grace"

_PATIENCE_S = 15.0  # beyond the grace: nodes are emptied, the last state is written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="its id, the start of it, or `last`")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--grace", type=patience, metavar="D", help="in place of what launch was given")
    how.add_argument("--now", action="store_true", help="SIGKILL at once")
    parser.epilog = "examples:\n  gpuboard stop last\n  gpuboard stop r7kq --grace 5m"


def run(args: argparse.Namespace, context: Context) -> int:
    """Ask the run's head to stop it and wait until it has."""
    view = ask_to_stop(context.env, run_folder.find_run(context.env, args.run), 0.0 if args.now else args.grace)
    if view.state in run_folder.FINAL:
        print(f"run {view.id} has ended already: {view.state}")
        return 0
    print(f"run {view.id} is stopping", flush=True)
    longest = (args.grace or 3600.0) + _PATIENCE_S  # without --grace the head knows the time, and counts it down
    until = time.monotonic() + longest
    while time.monotonic() < until:
        view = run_folder.find_run(context.env, view.id)
        if view.state in run_folder.FINAL:
            print(f"run {view.id} {view.state}")
            return 0
        time.sleep(0.1)
    raise GpuboardError(f"run {view.id} has not ended in {longest:.0f} s; `gpuboard logs {view.id}` shows what it does")
