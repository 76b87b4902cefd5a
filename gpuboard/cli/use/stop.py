"""`gpuboard stop RUN`: stop a run like ctrl-C in its terminal."""

from __future__ import annotations

import argparse
import time

from gpuboard.cli.context import Context
from gpuboard.cli.options import duration_or_zero
from gpuboard.errors import GpuboardError
from gpuboard.launch.runs import folder as run_folder
from gpuboard.launch.runs.control import ask_to_stop

NAME = "stop"
HELP = "stop a run: SIGTERM to its ranks, SIGKILL after a grace period"

_MARGIN_S = 15.0  # after the grace period, for ending all processes and writing the final state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's id, the start of it, or `last`")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--grace", type=duration_or_zero, metavar="D",
                     help="time from SIGTERM to SIGKILL: 30s, 5m; default: that of the launch")  # fmt: skip
    how.add_argument("--now", action="store_true", help="send SIGKILL immediately")
    parser.epilog = "examples:\n  gpuboard stop last\n  gpuboard stop r7kq --grace 5m"


def run(args: argparse.Namespace, context: Context) -> int:
    """Send a stop request to the run's head and wait for the end of the run."""
    view = ask_to_stop(context.env, run_folder.find_run(context.env, args.run), 0.0 if args.now else args.grace)
    if view.state in run_folder.FINAL:
        print(f"run {view.id} has ended already: {view.state}")
        return 0
    print(f"run {view.id} is stopping", flush=True)
    longest = (args.grace or 3600.0) + _MARGIN_S  # without --grace only the head knows the period
    until = time.monotonic() + longest
    while time.monotonic() < until:
        view = run_folder.find_run(context.env, view.id)
        if view.state in run_folder.FINAL:
            print(f"run {view.id} {view.state}")
            return 0
        time.sleep(0.1)
    raise GpuboardError(f"run {view.id} did not end within {longest:.0f} s; `gpuboard logs {view.id}` shows its output")
