"""`gpuboard env ID [--node N]`: print the variables of a lease for another shell, on any of its nodes."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from gpuboard.cli.context import Context
from gpuboard.cli.reserve.allocate import add_format
from gpuboard.cli.stderr import report
from gpuboard.errors import UsageError
from gpuboard.files import write_all
from gpuboard.keeper.holder import evaluator_kind
from gpuboard.leases.output.shell import SHELLS

NAME = "env"
HELP = "print the variables of a lease again, for another shell"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("id", metavar="ID", nargs="?", help="lease id, or its start; default: $GPUBOARD_LEASE")
    parser.add_argument("--node", metavar="N", help="print the variables for the GPUs on node N; default: this machine")
    add_format(parser)
    parser.epilog = 'examples:\n  eval "$(gpuboard env k3f9)"\n  eval "$(gpuboard env k3f9 --node gpu02)"'


def run(args: argparse.Namespace, context: Context) -> int:
    """Print the variables. After a failure the caller prints the lines that fail closed."""
    from gpuboard.leases.output.formats import render

    text = args.id or context.env.get("GPUBOARD_LEASE")
    if not text:
        raise UsageError("no lease given and GPUBOARD_LEASE is not set; pass a lease's id, listed by `gpuboard leases`")
    form = args.format or evaluator_kind()
    with context.ledger(partial(context.scope_of, [text])) as ledger:
        allocation = ledger.existing(text)
    names = [node.name for node in allocation.rank_map.nodes]
    if args.node is not None and args.node not in names:
        raise UsageError(f"lease {allocation.lease.id} has no GPU on {args.node}; its nodes: {', '.join(names)}")
    if args.node is not None:
        allocation = allocation.on(args.node)
    sys.stdout.flush()
    write_all(1, render(allocation, form, uuids=args.uuid).encode("utf-8", "surrogateescape"))
    if form in SHELLS and allocation.here is None:
        report(f"lease {allocation.lease.id} has no GPU on this machine; its GPUs on {names[0]}: add --node {names[0]}")
    return 0
