"""`gpuboard leases`: list the leases on the nodes in scope."""

from __future__ import annotations

import argparse
import contextlib
import sys

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.see.status import no_node_reached, settled
from gpuboard.cli.table import Cell, Column, Row, Step, render
from gpuboard.errors import NoNodeReached
from gpuboard.model.lease import Lease, LeaseList, gpus_text
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration

NAME = "leases"
HELP = "list leases: owner, GPUs, time left, holder"

COLUMNS = (
    Column("LEASE"), Column("OWNER"), Column("GPUS"), Column("LEFT", right=True), Column("FROM"), Column("HOLDER"),
    Column("WHAT"),
)  # fmt: skip
_LEASE, _OWNER, _GPUS, _LEFT, _FROM, _HOLDER, _WHAT = range(len(COLUMNS))
STEPS = (
    Step(_WHAT, 16), Step(_GPUS, 24), Step(_FROM, 0), Step(_OWNER, 12), Step(_HOLDER, 14), Step(_GPUS, 12),
    Step(_HOLDER, 0), Step(_WHAT, 6), Step(_OWNER, 6),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    parser.epilog = (
        "examples:\n  gpuboard leases\n  gpuboard leases --json | jq -r '.leases[] | select(.owner == \"alice\").id'"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Print the leases of the nodes in scope."""
    scope = context.scope()
    with context.ledger(lambda: scope) as ledger, contextlib.closing(context.fleet(scope.nodes)) as fleet:
        fleet.start()
        snapshot = settled(fleet, context)
        found = ledger.leases(fleet, snapshot, fresh=True)
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    else:
        for line in table(found, context.width, colour=context.colour):
            print(line)
    return NoNodeReached.exit_code if no_node_reached(snapshot) else 0


def table(found: LeaseList, width: int | None, *, colour: bool) -> list[str]:
    """Return the lines of the table. ``width`` in terminal cells; None: no limit."""
    lines = ["no leases" + (" on the nodes that were read" if found.unread else "")]
    if found.leases:
        lines = render(COLUMNS, [_row(lease) for lease in found.leases], STEPS, width, colour=colour)
    if found.unread:
        from gpuboard.nodesets import fold  # 30 ms: only for unread nodes

        unread = fold(clean(name, 64) for name in found.unread)
        lines.append(f"not read, so leases there are not listed: {unread}; `gpuboard status` shows why")
    return lines


def _row(lease: Lease) -> Row:
    what = clean(lease.purpose)
    if lease.flags:
        what = f"{'+'.join(lease.flags)}; {what}" if what else "+".join(lease.flags)
    return Row(
        (
            Cell(clean(lease.id, 32)),
            Cell(clean(lease.owner, 64)),
            Cell(gpus_text(lease.gpus)),
            Cell(format_duration(lease.remaining_s)),
            Cell(clean(lease.host, 64)),
            Cell(_holder(lease)),
            Cell(what, "35" if lease.flags else ""),
        )
    )


def _holder(lease: Lease) -> str:
    if lease.holder is None:
        return "detached" if lease.job is None else f"Slurm job {clean(lease.job, 32)}"
    life = {True: " alive", False: " ended", None: ""}[lease.holder.alive]  # None: on another host
    return f"pid {lease.holder.pid}{life}"
