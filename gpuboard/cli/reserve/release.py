"""`gpuboard release ID…|--mine`: end leases at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.reserve.owned import SLURM, Owned, owned
from gpuboard.cli.say import say
from gpuboard.cli.see.status import reached
from gpuboard.errors import NoNodeReached, UsageError
from gpuboard.leases.claims.queries import ReleasedLease, chosen, gpus_words, leases, release
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
    mine, rest = owned(args.ids, context)
    ended: list[ReleasedLease] = []
    unread: list[str] = []
    unreached: NoNodeReached | None = None
    if mine.nodes:
        try:
            ended, unread = _claims(rest, mine, context)
        except NoNodeReached as error:
            unreached = error  # what is Slurm's is ended all the same
    for lease in mine.in_slurm:
        from gpuboard.leases.slurm.queries import end  # only where there is a Slurm

        assert mine.jobs is not None
        words = end(lease, mine.jobs, context.env)
        ended.append(ReleasedLease(lease.lease, [] if words else lease.gpus, {SLURM: clean(words)} if words else {}))
    done = [each for each in ended if each.gpus or not each.failed]
    released = [{"id": each.lease, "gpus": each.gpus} for each in done]
    failed = [
        {"id": each.lease, "node": node, "message": words} for each in ended for node, words in each.failed.items()
    ]
    if args.json:
        told = {"schema": 1, "released": released, "failed": failed, "unread": unread}
        sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    else:
        for each in done:
            print(f"released {each.lease}: {gpus_words(each.gpus) or 'it held nothing'}")
        if not ended and unreached is None:
            print(f"you have no leases here{' that could be seen' if unread else ''}")
    if args.mine and unread:
        names = ", ".join(clean(name, 64) for name in unread)
        say(f"not read, leases of yours may still lie there and expire when their holders end: {names}")
    for failure in failed:
        say(f"{failure['id']}: {failure['message']}")
    if unreached is not None:
        raise unreached
    return 1 if failed or (args.mine and unread) else 0


def _claims(ids: Sequence[str], mine: Owned, context: Context) -> tuple[list[ReleasedLease], list[str]]:
    """End the leases that lie on the nodes; return also the nodes that were not read."""
    with reached(context, mine.nodes) as (fleet, snapshot):
        found = leases(fleet, snapshot)
        named = chosen(ids, fleet, found.unread)
        return [release(lease, found.leases, fleet, context.env, say) for lease in named], found.unread
