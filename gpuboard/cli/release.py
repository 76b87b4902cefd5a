"""`gpuboard release ID…|--mine`: end leases at once."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.leases import gpus_words, leases
from gpuboard.cli.main import say
from gpuboard.cli.status import NO_NODE_REACHED, nobody_reached, settled
from gpuboard.errors import NoSuchLease, UsageError
from gpuboard.model.lease import Lease, LeaseGpu
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.ledger.nodes import Mine

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
    with contextlib.closing(context.fleet()) as fleet:
        fleet.start()
        snapshot = settled(fleet, context)
        if nobody_reached(snapshot):
            print("gpuboard: no node could be reached; `gpuboard status` shows why", file=sys.stderr)
            return NO_NODE_REACHED
        found = leases(fleet, snapshot)
        ended = [_release(mine, found.leases, fleet, context) for mine in chosen(args.ids, fleet, found.unread)]
    released = [{"id": mine.lease, "gpus": gpus} for mine, gpus, _ in ended if gpus]
    failed = [
        {"id": mine.lease, "node": node, "message": words}
        for mine, _, missed in ended
        for node, words in missed.items()
    ]
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode({"schema": 1, "released": released, "failed": failed}) + b"\n")
    else:
        for mine, gpus, _ in ended:
            if gpus:
                print(f"released {mine.lease}: {gpus_words(gpus)}")
        if not ended:
            print("you have no leases here")
    for failure in failed:
        words = f"{failure['message']}; without its keeper what lies on {failure['node']} lapses within 90 s"
        print(f"gpuboard: {failure['id']}: {words}", file=sys.stderr)
    return 1 if failed else 0


def chosen(ids: list[str], fleet: Fleet, unread: list[str]) -> list[Mine]:
    """Return the leases that ``ids`` name, all of ours without ids. Raises NoSuchLease before anything is changed."""
    from gpuboard.ledger import nodes as ledger

    claims, uids = fleet.claims(), fleet.uids()
    if not ids:
        return list(ledger.mine(claims, uids).values())
    found = {}
    for text in ids:
        try:
            mine = ledger.find(text, claims, uids)
        except NoSuchLease as error:
            theirs = {
                node: [c.uuid for c in on if c.lease == text and c.state == "live"] for node, on in claims.items()
            }
            ended = {node: uuids for node, uuids in theirs.items() if uuids and uids.get(node) == 0}
            if ended:  # root may end anybody's
                mine = ledger.Mine(text, ended, sorted(ended))
            elif unread:
                raise NoSuchLease(f"{error}; not read, so it may lie there: {', '.join(unread)}") from None
            else:
                raise
        found[mine.lease] = mine
    return list(found.values())


def _release(
    mine: Mine, known: list[Lease], fleet: Fleet, context: Context
) -> tuple[Mine, list[LeaseGpu], dict[str, str]]:
    """End one lease; return it with the GPUs that were released, and by node why not."""
    from gpuboard.ledger import keeper
    from gpuboard.ledger import nodes as ledger

    try:
        keeper.forget(mine.lease, context.env)  # first, so that it does not take the release for a loss
    except (keeper.KeeperError, OSError) as error:
        say(f"warning: {error}; {mine.lease} is released all the same, the keeper may report it as lost")
    outcome = ledger.release(fleet.call, mine.lease, mine.nodes)
    index = {gpu.uuid: gpu.index for lease in known for gpu in lease.gpus}
    gpus = [LeaseGpu(node, index.get(uuid), uuid) for node, uuids in outcome.done.items() for uuid in uuids]
    return mine, gpus, {node: clean(str(error)) for node, error in outcome.failed.items()}
