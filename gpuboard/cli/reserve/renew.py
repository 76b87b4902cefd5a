"""`gpuboard renew ID --for D`: a lease ends D from now."""

from __future__ import annotations

import argparse
import json
import time

from gpuboard.cli.context import Context
from gpuboard.cli.options import typed
from gpuboard.cli.reserve.owned import SLURM, owned
from gpuboard.cli.say import say
from gpuboard.cli.see.status import reached
from gpuboard.errors import UsageError
from gpuboard.leases.claims.queries import chosen, leases, renew
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration, iso, parse_duration

NAME = "renew"
HELP = "let a lease of yours end at another time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("id", metavar="ID", help="the lease's id, or enough of its start")
    parser.add_argument(
        "--for", dest="for_s", required=True, type=typed(parse_duration), metavar="D", help="from now: 30m, 8h, 2d"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1): id, until, nodes")
    parser.epilog = (
        "example:\n  gpuboard renew k3f9 --for 8h\n\n"
        "exit code 1: not renewed on each of its nodes, or it may lie on one that was not read; 5: no such lease,\n"
        "or not yours; 6: no node could be reached"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Renew one lease on every node it covers."""
    most_s = parse_duration(context.settings.max_lease)
    if args.for_s > most_s:
        raise UsageError(f"--for {format_duration(args.for_s)} is above max_lease, {format_duration(most_s)} here")
    mine, rest = owned([args.id], context)
    if rest:
        with reached(context, mine.nodes) as (fleet, snapshot):
            [named] = chosen(rest, fleet, leases(fleet, snapshot).unread)
            done, failed = renew(named, args.for_s, fleet, context.env)
        lease = named.lease
    else:
        from gpuboard.leases.slurm.queries import prolong  # only where there is a Slurm

        [job], lease = mine.in_slurm, mine.in_slurm[0].lease
        assert mine.jobs is not None
        error = prolong(job, args.for_s, mine.jobs, context.env)
        done, failed = ([], {SLURM: clean(error)}) if error else (sorted({gpu.node for gpu in job.gpus}), {})
    if done:
        until = iso(time.time() + args.for_s)
        if args.json:
            print(json.dumps({"schema": 1, "id": lease, "until": until, "nodes": done}))
        else:
            where = "" if not failed else f" on {', '.join(done)}"
            print(f"{lease} now ends {until}, in {format_duration(args.for_s)}{where}")
    for node, words in failed.items():
        say(f"{lease} was not renewed{f' on {node}' if node != SLURM else ''}: {words}")
    return 1 if failed else 0
