"""`gpuboard runs`: list this user's launches with their state and result."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.table import Cell, Column, Row, Step, render
from gpuboard.launch.runs.folder import RunList, RunView, lived_s, places, read_runs, runs_dir
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration

NAME = "runs"
HELP = "list your launches: state, age, exit code, ranks"

_SHOWN = 20
_COLUMNS = (
    Column("RUN"), Column("STATE"), Column("AGE", right=True), Column("CODE", right=True), Column("LEASE"),
    Column("RANKS"), Column("TARGET"),
)  # fmt: skip
_RUN, _STATE, _AGE, _CODE, _LEASE, _RANKS, _TARGET = range(len(_COLUMNS))
_STEPS = (Step(_TARGET, 16), Step(_RANKS, 14), Step(_LEASE, 0), Step(_TARGET, 8), Step(_RANKS, 0))
_COLOURS = {"failed": "31", "running": "32", "stopped": "33", "stalled": "33"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--all", action="store_true", help=f"list all runs; default: the newest {_SHOWN}")
    parser.add_argument("--json", action="store_true", help="print all runs as JSON (schema 1)")
    parser.epilog = (
        "examples:\n  gpuboard runs\n  gpuboard runs --json | jq -r '.runs[] | select(.state==\"running\").id'"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Print the runs, newest last."""
    found = read_runs(context.env)
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode(RunList(1, found)) + b"\n")
        return 0
    if not found:
        print(f"no runs yet in {runs_dir(context.env)}; `gpuboard launch --n 2 train.py` starts one")
        return 0
    shown = found if args.all else found[-_SHOWN:]
    rows = [row for view in shown for row in _rows(view, time.time())]
    for line in render(_COLUMNS, rows, _STEPS, context.width, colour=context.colour):
        print(line)
    if len(shown) < len(found):
        print(f"({len(found) - len(shown)} older runs in {runs_dir(context.env)}; --all lists them)")
    return 0


def _rows(view: RunView, now: float) -> list[Row]:
    age = lived_s(view, now)
    cells = (
        Cell(clean(view.id)),
        Cell(clean(view.state), _COLOURS.get(view.state, "")),
        Cell("?" if age is None else format_duration(age)),
        Cell("" if view.exit_code is None else str(view.exit_code)),
        Cell(clean(view.lease or "-")),
        Cell(places(view)),
        Cell(clean(view.target)),
    )
    return [Row(cells)] + [Row((Cell(""),), span=Cell(clean(v.text))) for v in view.verdicts[:1]]
