"""`gpuboard stop RUN`: stop a run like ctrl-C in its terminal."""

from __future__ import annotations

import argparse
import time

from gpuboard.cli.context import Context
from gpuboard.cli.options import duration_or_zero
from gpuboard.cli.run_access import add_node, opened_run
from gpuboard.cli.stderr import report
from gpuboard.errors import GpuboardError
from gpuboard.launch.runs.access import RunAccess, ask_to_stop, persistently
from gpuboard.launch.runs.folder import FINAL

NAME = "stop"
HELP = "stop a run: SIGTERM to its ranks, SIGKILL after a grace period"

_MARGIN_S = 15.0  # after the grace period, for ending all processes and writing the final state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's id, its start, or `last`")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--grace", type=duration_or_zero, metavar="D",
                     help="time from SIGTERM to SIGKILL: 30s, 5m; default: that of the launch")  # fmt: skip
    how.add_argument("--now", action="store_true", help="send SIGKILL immediately")
    add_node(parser)
    parser.epilog = (
        "examples:\n  gpuboard stop last\n  gpuboard stop r7kq --grace 5m\n  gpuboard stop r7kq --node gpu01"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Send a stop request to the run's head and wait for the end of the run."""
    with opened_run(context, args.run, args.node) as found:
        return _stop(found, 0.0 if args.now else args.grace)


def _stop(run: RunAccess, grace_s: float | None) -> int:
    view = ask_to_stop(run, grace_s)
    if view.state in FINAL:
        print(f"run {view.id} has ended already: {view.state}")
        return 0
    print(f"run {view.id} is stopping", flush=True)
    longest = (3600.0 if grace_s is None else grace_s) + _MARGIN_S  # without --grace only the head knows the period
    until = time.monotonic() + longest
    while time.monotonic() < until:
        view = persistently(run.view, report, until)
        if view.state in FINAL:
            print(f"run {view.id} {view.state}")
            return 0
        time.sleep(run.poll_s)
    raise GpuboardError(f"run {view.id} did not end within {longest:.0f} s; `gpuboard logs {view.id}` shows its output")
