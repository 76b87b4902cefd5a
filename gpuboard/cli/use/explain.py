"""`gpuboard explain`: what every rank of a run is doing now, and what blocks."""

from __future__ import annotations

import argparse
import os
import re

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.options import whole
from gpuboard.cli.run_access import opened_run
from gpuboard.cli.stdout import write_json
from gpuboard.cluster.inventory.nodes import Node, folded, named
from gpuboard.errors import UsageError
from gpuboard.launch.runs.folder import FINAL
from gpuboard.launch.stalls.evidence import RankEvidence
from gpuboard.launch.stalls.foreign import Placed, explain_job
from gpuboard.launch.stalls.request import explain_run
from gpuboard.launch.stalls.verdict import Explanation
from gpuboard.model.text import clean, split_outside

NAME = "explain"
HELP = "show what every rank is doing now and what blocks"


class _Report(msgspec.Struct, frozen=True):
    schema: int
    run: str | None
    state: str
    explanation: Explanation


class _JobReport(msgspec.Struct, frozen=True):
    job: dict[str, str]
    ranks: list[Placed]
    explanation: Explanation


class _Jobs(msgspec.Struct, frozen=True):
    schema: int
    jobs: list[_JobReport]
    unseen: list[str]
    failed: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s [RUN] [--node NAME] [options]\n       %(prog)s [--pid PID] [--node NODESET] [options]"
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run's id, its start, or `last`; default: last")
    parser.add_argument("--pid", type=whole(1, 2**22), metavar="PID",
                        help="a rank or launcher of any other job, on this node or the first of --node")  # fmt: skip
    parser.add_argument(
        "--node", metavar="NODESET", help="with RUN: the node on which it was started; without: all your "
        "distributed jobs on these nodes, by RANK and WORLD_SIZE in the processes' environment"
    )  # fmt: skip
    parser.add_argument("--stacks", action="store_true", help="print the whole stack of every rank")
    parser.add_argument("--json", action="store_true", help="print as JSON, stacks and collectives included")
    parser.epilog = (
        "examples:\n  gpuboard explain\n  gpuboard explain r7kq --stacks\n  gpuboard explain --pid 4242\n"
        "  gpuboard explain --node gpu01,gpu02"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Inspect the ranks and print what they are doing."""
    if args.pid is not None and args.run is not None:
        raise UsageError("RUN and --pid cannot be combined")
    if args.run is None and (args.pid is not None or args.node is not None):
        return _explain_jobs(args, context)
    with opened_run(context, args.run or "last", args.node) as found:
        explanation = explain_run(found)
        view = found.view()  # after it: the run may end meanwhile
    report = _Report(1, view.id, view.state, explanation)
    if args.json:
        write_json(report)
        return 0
    _show(f"run {view.id}: {view.state}", report.explanation, final=view.state in FINAL, stacks=args.stacks)
    return 0


def _explain_jobs(args: argparse.Namespace, context: Context) -> int:
    """Explain the jobs on nodes that gpuboard need not have started, or that of one process."""
    from gpuboard.launch.stalls.foreign_nodes import find_jobs  # late: most explanations are of a run

    if args.node is None:
        nodes = [Node(os.uname().nodename.partition(".")[0], None)]
        found = find_jobs(nodes, context.settings, lambda: None, args.pid)
    else:
        nodes = context.named(args.node)
        if args.pid is not None and not re.search("[!&^]", args.node):  # the first as written: `nodes` is sorted
            first = named(split_outside(args.node, ",")[0], context.known())[0].name
            nodes.sort(key=lambda node: node.name != first)
        found = find_jobs(nodes, context.settings, context.new_scheduler, args.pid)
    reports = [_JobReport(job.job, job.ranks, explain_job(job)) for job in found.jobs]
    unseen = [*found.unseen, *(f"{name}: {why}" for name, why in found.failed.items())]
    if args.json and args.pid is not None:
        explained = reports[0].explanation
        explained = msgspec.structs.replace(explained, missing=[*explained.missing, *unseen])
        write_json(_Report(1, None, "running", explained))
        return 0
    if args.json:
        write_json(_Jobs(1, reports, found.unseen, found.failed))
        return 0
    if not reports:
        print(
            f"you have no distributed job on {folded([node.name for node in nodes if node.name not in found.failed])}"
        )
    for job, report in zip(found.jobs, reports, strict=True):
        _show(job.title(), report.explanation, final=False, stacks=args.stacks)
    for line in unseen:
        print(f"not seen: {line}")
    return 0


def _show(title: str, shown: Explanation, *, final: bool, stacks: bool) -> None:
    print(title)
    for line in shown.picture:
        print(f"  {line}")
    if shown.verdict:
        print(f"why: {shown.verdict}")
        if shown.remedy:
            print(f"  → {shown.remedy}")
    elif not final:
        print("no rank waits for another one")
    for line in shown.pace:
        print(line)
    for rank in shown.ranks if stacks else []:
        print("\n".join(_stack(rank)))
    for line in shown.missing:
        print(f"not seen: {line}")


def _stack(rank: RankEvidence) -> list[str]:
    lines = [f"rank {rank.rank}, pid {rank.pid}, innermost frame first:"]
    return lines + [f"    {clean(f.file, 200)}:{f.line} in {clean(f.function, 100)}" for f in rank.stack]
