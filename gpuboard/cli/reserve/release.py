"""`gpuboard release ID…|--mine`: end leases at once."""

from __future__ import annotations

import argparse
import sys
from functools import partial

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.say import say
from gpuboard.cli.see.status import settled
from gpuboard.errors import UsageError
from gpuboard.model.lease import gpus_text
from gpuboard.model.text import clean

NAME = "release"
HELP = "end leases of yours at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="a lease's id, or enough of its start")
    parser.add_argument("--mine", action="store_true", help="all leases of yours on the nodes in scope")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1): released, failed, unread")
    parser.epilog = (
        "examples:\n  gpuboard release k3f9\n  gpuboard release --mine\n\n"
        "Nothing is killed: what still runs on the GPUs is shown as overdue. But a lease that is a job of Slurm is\n"
        "cancelled, and Slurm ends what runs in it.\n"
        "exit code 0: all of it was seen to be gone; 1: something was not released, or lies on a node that was not\n"
        "read; 5: no such lease, or not yours (root may release anybody's); 6: no node could be reached"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Release what was named; every id is tried, and the first failure decides the exit code."""
    if args.mine == bool(args.ids):
        raise UsageError("which lease? name it, or --mine, not both\n  see: gpuboard leases")
    with context.ledger(settle=partial(settled, context=context)) as ledger:
        found = ledger.find(args.ids)
        ended = [ledger.release(lease) for lease in found.leases]
    done = [each for each in ended if each.gpus or not each.failed]
    released = [{"id": each.lease, "gpus": each.gpus} for each in done]
    failed = [
        {"id": each.lease, "node": node, "message": words} for each in ended for node, words in each.failed.items()
    ]
    if args.json:
        shown = {"schema": 1, "released": released, "failed": failed, "unread": found.unread}
        sys.stdout.buffer.write(msgspec.json.encode(shown) + b"\n")
    else:
        for each in done:
            print(f"released {each.lease}: {gpus_text(each.gpus) or 'it held nothing'}")
        if not ended and found.unreached is None:
            print(f"you have no leases here{' that could be seen' if found.unread else ''}")
    if args.mine and found.unread:
        names = ", ".join(clean(name, 64) for name in found.unread)
        say(f"not read, leases of yours may still lie there and expire when their holders end: {names}")
    for failure in failed:
        say(f"{failure['id']}: {failure['message']}")
    if found.unreached is not None:
        raise found.unreached
    return 1 if failed or (args.mine and found.unread) else 0
