"""`gpuboard explain`: what every rank of a run is doing now, and what blocks."""

from __future__ import annotations

import argparse
import sys

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.options import whole
from gpuboard.cli.run_access import add_node, opened_run
from gpuboard.errors import UsageError
from gpuboard.launch.runs.folder import FINAL
from gpuboard.launch.stalls.evidence import RankEvidence
from gpuboard.launch.stalls.foreign import explain_process
from gpuboard.launch.stalls.request import explain_run
from gpuboard.launch.stalls.verdict import Explanation
from gpuboard.model.text import clean

NAME = "explain"
HELP = "show what every rank is doing now and what blocks"


class _Report(msgspec.Struct, frozen=True):
    schema: int
    run: str | None
    state: str
    explanation: Explanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run's id, its start, or `last`; default: last")
    parser.add_argument("--pid", type=whole(1, 2**22), metavar="PID",
                        help="a rank of any other job: its ranks on this node are shown")  # fmt: skip
    add_node(parser)
    parser.add_argument("--stacks", action="store_true", help="print the whole stack of every rank")
    parser.add_argument("--json", action="store_true", help="print as JSON, stacks and collectives included")
    parser.epilog = "examples:\n  gpuboard explain\n  gpuboard explain r7kq --stacks\n  gpuboard explain --pid 4242"


def run(args: argparse.Namespace, context: Context) -> int:
    """Inspect the ranks and print what they are doing."""
    if args.pid is not None and args.run is not None:
        raise UsageError("RUN and --pid cannot be combined")
    if args.pid is not None:
        report = _Report(1, None, "running", explain_process(args.pid))
        title = f"the job of pid {args.pid}"
    else:
        with opened_run(context, args.run or "last", args.node) as found:
            view = found.view()
            report = _Report(1, view.id, view.state, explain_run(found))
        title = f"run {view.id}: {view.state}"
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        return 0
    shown = report.explanation
    print(title)
    for line in shown.picture:
        print(f"  {line}")
    if shown.verdict:
        print(f"why: {shown.verdict}")
        if shown.remedy:
            print(f"  → {shown.remedy}")
    elif report.state not in FINAL:
        print("no rank waits for another one")
    for rank in shown.ranks if args.stacks else []:
        print("\n".join(_stack(rank)))
    for line in shown.missing:
        print(f"not seen: {line}")
    return 0


def _stack(rank: RankEvidence) -> list[str]:
    lines = [f"rank {rank.rank}, pid {rank.pid}, innermost frame first:"]
    return lines + [f"    {clean(f.file, 200)}:{f.line} in {clean(f.function, 100)}" for f in rank.stack]
