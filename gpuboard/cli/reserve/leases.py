"""`gpuboard leases`: list the leases on the nodes in scope."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence

import msgspec

from gpuboard.board.dialogs.request_form import local
from gpuboard.board.scene import Scene
from gpuboard.board.tables.held import HeldLease, held
from gpuboard.cli.context import Context
from gpuboard.cli.see.status import no_node_reached, settled
from gpuboard.cli.stderr import report
from gpuboard.cli.stdout import write_json
from gpuboard.cli.table import Cell, Column, Row, Step, render, write_csv
from gpuboard.errors import NoNodeReached
from gpuboard.model.lease import Lease, LeaseList, gpus_text
from gpuboard.model.text import clean, same_user
from gpuboard.model.units import format_duration

NAME = "leases"
HELP = "list leases: owner, GPUs, end, time left, holder"

COLUMNS = (
    Column("LEASE"), Column("OWNER"), Column("GPUS"), Column("UNTIL"), Column("LEFT", right=True), Column("FLAGS"),
    Column("FROM"), Column("HOLDER"), Column("PURPOSE"),
)  # fmt: skip
_LEASE, _OWNER, _GPUS, _UNTIL, _LEFT, _FLAGS, _FROM, _HOLDER, _PURPOSE = range(len(COLUMNS))
STEPS = (
    Step(_PURPOSE, 16), Step(_GPUS, 24), Step(_FROM, 0), Step(_OWNER, 12), Step(_HOLDER, 14), Step(_HOLDER, 0),
    Step(_FLAGS, 16), Step(_GPUS, 12), Step(_UNTIL, 0), Step(_PURPOSE, 6), Step(_OWNER, 6), Step(_FLAGS, 8),
)  # fmt: skip
_FIELDS = (
    "lease", "owner", "uid", "gpus", "gpu_count", "from", "until", "remaining_seconds", "flags", "host", "holder_pid",
    "job", "purpose",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    kind.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="csv: for spreadsheets, RFC 4180"
    )
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--mine", action="store_true", help="list only your own leases")
    whose.add_argument("--user", metavar="U", help="list only the leases of U; me: your own")
    parser.epilog = (
        "examples:\n  gpuboard leases --mine\n  gpuboard leases --format csv > leases.csv\n"
        "  gpuboard leases --json | jq -r '.leases[] | select(.owner == \"alice\").id'"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Print the leases of the nodes in scope."""
    scope = context.scope()
    with context.ledger(lambda: scope) as ledger, contextlib.closing(context.fleet(scope.nodes)) as fleet:
        fleet.start()
        snapshot = settled(fleet, context)
        scene = Scene(snapshot, ledger.leases(fleet, snapshot, fresh=True), uids=fleet.uids())
    mine = args.mine or args.user == "me"
    found = [
        one
        for one in held(scene)
        if (one.mine or not mine) and (mine or args.user is None or same_user(one.lease.owner, args.user))
    ]
    of_user = f"no leases of {clean(args.user, 64)}" if args.user else "no leases"
    if args.json or args.format == "json":
        leases = [msgspec.structs.replace(one.lease, flags=one.flags) for one in found]
        listed = msgspec.structs.replace(scene.leases, leases=leases)
        write_json(listed)
    elif args.format == "csv":
        write_csv(_FIELDS, (_record(one) for one in found))
        for line in _unread(scene.leases):
            report(line)
    else:
        for line in table(
            found, scene.leases, context.width, nothing="you have no leases" if mine else of_user, colour=context.colour
        ):
            print(line)
    return NoNodeReached.exit_code if no_node_reached(snapshot) else 0


def table(
    found: Sequence[HeldLease], whole: LeaseList, width: int | None, *, nothing: str = "no leases", colour: bool
) -> list[str]:
    """Return the lines of the table: ``found`` of all leases, else ``nothing``. ``width`` in cells; None: no limit."""
    lines = [nothing + (" on the nodes that were read" if whole.unread else "")]
    if found:
        now = time.time()
        lines = render(COLUMNS, [_row(one, now) for one in found], STEPS, width, colour=colour)
    return [*lines, *_unread(whole)]


def _unread(whole: LeaseList) -> list[str]:
    if not whole.unread:
        return []
    from gpuboard.nodesets import fold  # 30 ms: only for unread nodes

    unread = fold(clean(name, 64) for name in whole.unread)
    return [f"not read, so leases there are not listed: {unread}; `gpuboard status` shows why"]


def _row(one: HeldLease, now: float) -> Row:
    lease, marks = one.lease, one.marks
    return Row(
        (
            Cell(clean(lease.id, 32)),
            Cell(clean(lease.owner, 64)),
            Cell(gpus_text(lease.gpus)),
            Cell(local(one.until, now)),
            Cell(format_duration(lease.remaining_s)),
            Cell(
                clean("".join(words for words, _ in marks)), "1;31" if any(role == "bad" for _, role in marks) else "35"
            ),
            Cell(clean(lease.host, 64)),
            Cell(_holder(lease)),
            Cell(clean(lease.purpose)),
        )
    )


def _record(one: HeldLease) -> tuple[str | int | float | None, ...]:
    lease = one.lease
    return (
        lease.id, lease.owner, lease.uid, gpus_text(lease.gpus), len(lease.gpus), lease.since, lease.until,
        round(lease.remaining_s), " ".join(one.flags), lease.host, lease.holder.pid if lease.holder else None,
        lease.job, lease.purpose,
    )  # fmt: skip


def _holder(lease: Lease) -> str:
    if lease.holder is None:
        return "detached" if lease.job is None else f"Slurm job {clean(lease.job, 32)}"
    life = {True: " alive", False: " ended", None: ""}[lease.holder.alive]  # None: on another host
    return f"pid {lease.holder.pid}{life}"
