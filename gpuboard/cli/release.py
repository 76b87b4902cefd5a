"""`gpuboard release ID…|--mine`: end leases at once."""

from __future__ import annotations

import argparse
import sys

import msgspec

from gpuboard.allocate.held import chosen, gpus_words, leases, release
from gpuboard.cli.context import Context
from gpuboard.cli.main import say
from gpuboard.cli.status import reached
from gpuboard.errors import UsageError

NAME = "release"
HELP = "end leases of yours at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="a lease's id, or enough of its start")
    parser.add_argument("--mine", action="store_true", help="all leases of yours on the nodes in scope")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1): released, failed")
    parser.epilog = (
        "examples:\n  gpuboard release k3f9\n  gpuboard release --mine\n\n"
        "Nothing is killed: what still runs on the GPUs is shown as overdue.\n"
        "exit code 5: no such lease, or not yours (root may release anybody's)"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Release what was named; every id is tried, and the first failure decides the exit code."""
    if args.mine == bool(args.ids):
        raise UsageError("which lease? name it, or --mine, not both\n  see: gpuboard leases")
    with reached(context) as (fleet, snapshot):
        found = leases(fleet, snapshot)
        mine = chosen(args.ids, fleet, found.unread)
        ended = [release(lease, found.leases, fleet, context.env, say) for lease in mine]
    released = [{"id": end.lease, "gpus": end.gpus} for end in ended if end.gpus]
    failed = [{"id": end.lease, "node": node, "message": words} for end in ended for node, words in end.failed.items()]
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode({"schema": 1, "released": released, "failed": failed}) + b"\n")
    else:
        for end in ended:
            if end.gpus:
                print(f"released {end.lease}: {gpus_words(end.gpus)}")
        if not ended:
            print("you have no leases here")
    for failure in failed:
        words = f"{failure['message']}; without its keeper what lies on {failure['node']} lapses within 90 s"
        print(f"gpuboard: {failure['id']}: {words}", file=sys.stderr)
    return 1 if failed else 0
