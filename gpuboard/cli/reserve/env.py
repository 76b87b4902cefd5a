"""`gpuboard env ID [--node N]`: the variables of a lease again, for a second shell, also on another of its nodes."""

from __future__ import annotations

import argparse
import os
import sys

from gpuboard.cli.context import Context
from gpuboard.cli.say import say
from gpuboard.errors import UsageError
from gpuboard.keeper.holder import evaluator_kind
from gpuboard.leases.output.shell import FORMATS, SHELLS

NAME = "env"
HELP = "print the variables of a lease again, for a second shell"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("id", metavar="ID", help="a lease of yours; default: $GPUBOARD_LEASE", nargs="?")
    parser.add_argument("--node", metavar="N", help="the GPUs of this node; default: of this machine")
    parser.add_argument("--format", choices=FORMATS, metavar="FORMAT", help=f"one of {', '.join(FORMATS)}")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    parser.add_argument("--uuid", action="store_true", help="UUIDs, not indexes, in CUDA_VISIBLE_DEVICES")
    parser.epilog = 'examples:\n  eval "$(gpuboard env k3f9)"\n  eval "$(gpuboard env k3f9 --node gpu02)"'


def run(args: argparse.Namespace, context: Context) -> int:
    """Print the variables; on a failure the caller prints the lines that fail closed."""
    from gpuboard.leases.output.formats import render

    text = args.id or context.env.get("GPUBOARD_LEASE")
    if not text:
        raise UsageError("which lease? write its id; `gpuboard leases` lists them")
    form = args.format or evaluator_kind()
    with context.ledger() as ledger:
        allocation = ledger.existing(text)
    names = [node.name for node in allocation.rank_map.nodes]
    if args.node is not None and args.node not in names:
        raise UsageError(f"lease {allocation.lease.id} has no GPU on {args.node}; it has some on {', '.join(names)}")
    if args.node is not None:
        allocation = allocation.on(args.node)
    sys.stdout.flush()
    os.write(1, render(allocation, form, uuids=args.uuid).encode("utf-8", "surrogateescape"))
    if form in SHELLS and allocation.here is None:
        say(f"lease {allocation.lease.id} has no GPU on this machine; add --node {names[0]} for those of {names[0]}")
    return 0
