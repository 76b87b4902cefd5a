"""`gpuboard renew ID --for D`: let a lease end D from now."""

from __future__ import annotations

import argparse
import time
from functools import partial

from gpuboard.cli.context import Context
from gpuboard.cli.options import typed
from gpuboard.cli.see.status import settled
from gpuboard.cli.stderr import report
from gpuboard.cli.stdout import write_json
from gpuboard.leases.ledger import Renewed
from gpuboard.leases.terms import duration
from gpuboard.model.units import day_time, format_duration, iso, parse_duration

NAME = "renew"
HELP = "make your lease end a given time from now"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("id", metavar="ID", help="lease id, or its start")
    parser.add_argument(
        "--for", dest="for_s", required=True, type=typed(parse_duration), metavar="D", help="time from now: 30m, 8h, 2d"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1): id, until, nodes")
    parser.epilog = (
        "example:\n  gpuboard renew k3f9 --for 8h\n\n"
        "exit codes: 1 not renewed on some of its nodes, or not found while a node could\n"
        "  not be read; 5 no such lease, or not yours; 6 no node could be reached"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Renew one lease on every node it covers."""
    duration(args.for_s, context.settings)
    scope = partial(context.scope_of, [args.id])
    with context.ledger(scope, settle=partial(settled, context=context)) as ledger:
        found = ledger.find([args.id])
        if found.unreached is not None:
            raise found.unreached
        renewed = [(lease.id, ledger.renew(lease, args.for_s)) for lease in found.leases]
    for lease, outcome in renewed:
        _report(lease, outcome, args)
    return 1 if any(outcome.failed for _, outcome in renewed) else 0


def _report(lease: str, outcome: Renewed, args: argparse.Namespace) -> None:
    if outcome.nodes:
        until = time.time() + outcome.for_s
        if args.json:
            write_json({"schema": 1, "id": lease, "until": iso(until), "nodes": outcome.nodes})
        else:
            where = "" if not outcome.failed else f" on {', '.join(outcome.nodes)}"
            print(f"{lease} now ends {day_time(until)}, in {format_duration(outcome.for_s)}{where}")
    for where, reason in outcome.failed.items():
        report(f"lease {lease} was not renewed ({where}): {reason}")
