"""`gpuboard runs`: list this user's launches with their state and result."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

from gpuboard.cli.context import Context
from gpuboard.cli.run_access import listed_runs
from gpuboard.cli.stderr import report
from gpuboard.cli.stdout import write_json
from gpuboard.cli.table import Cell, Column, Row, Step, render
from gpuboard.cluster.inventory.nodes import folded
from gpuboard.errors import NoNodeReached
from gpuboard.launch.runs.folder import RunList, RunView, lived_s, places, runs_dir
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration

NAME = "runs"
HELP = "list your launches: state, age, exit code, ranks"

_SHOWN = 20
_COLUMNS = (
    Column("RUN"), Column("STATE"), Column("AGE", right=True), Column("CODE", right=True), Column("LEASE"),
    Column("RANKS"),
)  # fmt: skip
_NODE, _TARGET = Column("NODE"), Column("TARGET")
_RUN, _STATE, _AGE, _CODE, _LEASE, _RANKS = range(len(_COLUMNS))
_COLOURS = {"failed": "31", "running": "32", "stopped": "33", "stalled": "33"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--all", action="store_true", help=f"list all runs; default: the newest {_SHOWN}")
    parser.add_argument("--json", action="store_true", help="print all runs as JSON (schema 1)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--node", metavar="NODESET", help="list the runs that were started on these nodes: gpu01,gpu02")
    where.add_argument("--all-nodes", action="store_true", help="list the runs of this host and of all nodes")
    parser.epilog = (
        "examples:\n  gpuboard runs\n  gpuboard runs --all-nodes\n"
        "  gpuboard runs --json | jq -r '.runs[] | select(.state==\"running\").id'\n\n"
        "exit code 6: none of the nodes could be reached"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Print the runs, newest last."""
    asked = args.all_nodes or args.node is not None
    found, failed = ([], {}) if args.node is not None else listed_runs(context)
    code = 0
    if asked:
        from gpuboard.launch.runs.remote import once, runs_on  # late: most lists are of this host

        nodes = context.scope().nodes if args.node is None else context.named(args.node)
        there, failed = runs_on(nodes, context.settings, context.new_scheduler())
        found = once([*found, *there])
        code = NoNodeReached.exit_code if len(failed) == len(nodes) else 0
    _report_failed(failed)
    if args.json:
        write_json(RunList(1, found, failed))
        return code
    if not found and code == 0:
        where = "on the nodes that were read" if asked else f"in {runs_dir(context.env)}"
        print(f"no runs yet {where}; `gpuboard launch --n 2 train.py` starts one")
    if not found:
        return code
    shown = found if args.all else found[-_SHOWN:]
    rows = [row for view in shown for row in _rows(view, time.time(), node=asked)]
    columns = [*_COLUMNS, _NODE, _TARGET] if asked else [*_COLUMNS, _TARGET]
    target = len(columns) - 1
    steps = (Step(target, 16), Step(_RANKS, 14), Step(_LEASE, 0), Step(target, 8), Step(_RANKS, 0))
    for line in render(columns, rows, steps, context.width, colour=context.colour):
        print(line)
    if len(shown) < len(found):
        print(f"({len(found) - len(shown)} older runs; --all lists them)")
    return code


def _report_failed(failed: Mapping[str, str]) -> None:
    """Print which nodes gave no answer, those with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, why in failed.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        report(f"{folded(names)}: runs there are not listed: {why}")


def _rows(view: RunView, now: float, *, node: bool) -> list[Row]:
    age = lived_s(view, now)
    cells = (
        Cell(clean(view.id)),
        Cell(clean(view.state), _COLOURS.get(view.state, "")),
        Cell("?" if age is None else format_duration(age)),
        Cell("" if view.exit_code is None else str(view.exit_code)),
        Cell(clean(view.lease or "-")),
        Cell(places(view)),
        *([Cell(clean(view.node or "here"))] if node else []),
        Cell(clean(view.target)),
    )
    verdicts = [(f"attempt {v.attempt}: " if view.attempt > 1 else "") + clean(v.text) for v in view.newest[:1]]
    return [Row(cells)] + [Row((Cell(""),), span=Cell(text)) for text in verdicts]
