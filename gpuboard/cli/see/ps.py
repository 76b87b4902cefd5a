"""`gpuboard ps`: the processes on the GPUs of all nodes; a table, or JSON (cluster/snapshot/processes.py, schema 1)."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from gpuboard.agent.processes import CPU_SPAN_S
from gpuboard.board.filter.matchers import ME
from gpuboard.board.filter.processes import is_mine
from gpuboard.cli.context import Context
from gpuboard.cli.see.status import no_node_reached, settled, suggest_setup
from gpuboard.cli.stderr import report
from gpuboard.cli.stdout import write_json
from gpuboard.cli.table import Cell, Column, Row, Step, elide, render
from gpuboard.cluster.inventory.nodes import folded
from gpuboard.cluster.snapshot.processes import (
    SORTS,
    ProcessList,
    Running,
    ended_leases,
    gpus_of,
    grouped,
    in_order,
    note,
    running,
    sums,
    totals,
    unread,
)
from gpuboard.errors import NoNodeReached
from gpuboard.model.snapshot import NodeView, Snapshot
from gpuboard.model.text import clean, same_user
from gpuboard.model.units import compact_size, format_duration

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet

NAME = "ps"
HELP = "list the processes on all GPUs: user, memory, load, job"

COLUMNS = (
    Column("USER", least=6),
    Column("NODE"),
    Column("GPU", right=True),
    Column("PID", right=True),
    Column("MEMORY", right=True),
    Column("SM%", right=True),
    Column("CPU%", right=True),
    Column("HOST", right=True),
    Column("TIME", right=True),
    Column("JOB"),
    Column("LEASE"),
    Column("CONTAINER"),
    Column("NOTE"),
    Column("COMMAND"),
)
_USER, _NODE, _GPU, _PID, _MEMORY, _SM, _CPU, _HOST, _TIME, _JOB, _LEASE, _CONTAINER, _NOTE, _COMMAND = range(
    len(COLUMNS)
)
_OPTIONAL = (_JOB, _LEASE, _CONTAINER, _NOTE)  # left out where no process has a value
# Columns cut or dropped in a narrow terminal, in this order. User, node, GPU and pid always remain.
_STEPS = (
    Step(_COMMAND, 40), Step(_CONTAINER, 0), Step(_USER, 16), Step(_HOST, 0), Step(_COMMAND, 24), Step(_JOB, 0),
    Step(_NODE, 16), Step(_TIME, 0), Step(_LEASE, 0), Step(_CPU, 0), Step(_COMMAND, 12), Step(_USER, 8), Step(_NOTE, 0),
    Step(_SM, 0), Step(_NODE, 8), Step(_GPU, 4), Step(_MEMORY, 0), Step(_COMMAND, 4), Step(_USER, 3), Step(_NODE, 2),
)  # fmt: skip
_READ_S = 5.0  # deadline of the second reading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    parser.add_argument("--user", metavar="U", help="list only the processes of U; me: your own")
    parser.add_argument(
        "--sort",
        choices=SORTS,
        default="node",
        metavar="KEY",
        help=f"one of {', '.join(SORTS)}; numbers: largest first; unknown values last; default: node",
    )
    parser.add_argument("--tree", action="store_true", help="group the table by your runs, by jobs and by leases")
    parser.epilog = (
        "examples:\n  gpuboard ps\n  gpuboard ps --user me --sort memory\n"
        "  gpuboard ps --json | jq '.processes[] | select(.rogue) | {node, pid, user}'\n\n"
        "SM%: percentage of the GPU's time in which kernels of the process ran.\n"
        "CPU%: percentage of one CPU.\n"
        "exit code 6: no node could be reached"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Print the processes of the nodes in scope once."""
    nodes = context.reach(context.nodes())
    with contextlib.closing(context.fleet(nodes)) as fleet:
        fleet.start()
        snapshot = _measured(fleet, settled(fleet, context))
        uids = fleet.uids()
    every = running(snapshot.nodes)
    if args.user is not None:
        every = [one for one in every if _is_of(one, args.user, uids.get(one.node))]
    found = in_order(every, args.sort)
    missing = unread(snapshot)
    if args.json:
        made = ProcessList(1, snapshot.at, snapshot.cluster, found, missing)
        write_json(made)
    else:
        read = snapshot.nodes
        lines = _tree(found, context, read) if args.tree else table(found, context.width, read, colour=context.colour)
        if not found:
            nothing = {None: "no processes", ME: "you have no processes"}
            words = nothing.get(args.user) or f"no processes of {clean(args.user, 64)}"
            lines = [words + (" on the GPUs that were read" if missing else "")]
        print("\n".join(lines), flush=True)  # before the message about what is missing
    if missing:
        report(f"not read, so processes there are not listed: {_places(missing)}; `gpuboard status` shows why")
    suggest_setup(nodes, snapshot, context)
    return NoNodeReached.exit_code if no_node_reached(snapshot) else 0


def _measured(fleet: Fleet, first: Snapshot) -> Snapshot:
    """Return a snapshot with CPU utilization, which is measured between two readings."""
    new = {
        node.name
        for node in first.nodes
        for gpu in node.gpus
        if any(one.cpu_percent is None and one.host_memory is not None for one in gpu.processes or ())
    }
    if not new:
        return first
    time.sleep(CPU_SPAN_S + 0.1)
    fleet.refresh(new, _READ_S)
    return fleet.snapshot()


def _is_of(process: Running, user: str, own_uid: int | None) -> bool:
    return is_mine(process, own_uid) if user == ME else same_user(process.user, user)


def _places(missing: Sequence[str]) -> str:
    """Return nodes folded to nodesets, and GPUs of other nodes one by one."""
    gpus = [name for name in missing if ":" in name]
    nodes = [name for name in missing if ":" not in name]
    return ", ".join([*([folded(nodes)] if nodes else []), *gpus])


def table(found: Sequence[Running], width: int | None, nodes: Sequence[NodeView], *, colour: bool) -> list[str]:
    """Return the lines of the table and, last, the totals. ``width`` in terminal cells; None: no limit.

    ``nodes``: those on which the processes were found.
    """
    return _lines(_rows(found, nodes), width, colour=colour) + _total(found, width)


def _tree(found: Sequence[Running], context: Context, nodes: Sequence[NodeView]) -> list[str]:
    """Return the table with a heading above the processes of each run, job and lease."""
    from gpuboard.launch.runs.folder import by_lease, read_runs  # late: 20 ms

    runs = {lease: view.id for lease, view in by_lease(read_runs(context.env)).items()}
    groups = grouped(found, runs, ended_leases(nodes))
    rows = _rows([one for group in groups for one in group.processes], nodes)
    head, *lines = _lines(rows, context.width, colour=context.colour)
    shown = [head]
    for group in groups:
        title = clean(f"{group.title}: {sums(group.processes)}")
        shown += ["", title if context.width is None else elide(title, context.width)]
        shown += lines[: len(group.processes)]
        del lines[: len(group.processes)]
    return shown + _total(found, context.width)


def _lines(rows: Sequence[Row], width: int | None, *, colour: bool) -> list[str]:
    kept = [n for n in range(len(COLUMNS)) if n not in _OPTIONAL or any(row.cells[n].text for row in rows)]
    at = {n: place for place, n in enumerate(kept)}
    steps = [Step(at[step.column], step.to) for step in _STEPS if step.column in at]
    shown = [Row(tuple(row.cells[n] for n in kept)) for row in rows]
    return render([COLUMNS[n] for n in kept], shown, steps, width, colour=colour)


def _total(found: Sequence[Running], width: int | None) -> list[str]:
    text = totals(found)
    return ["", text if width is None else elide(text, width)]


def _rows(found: Sequence[Running], nodes: Sequence[NodeView]) -> list[Row]:
    ended, by_name = ended_leases(nodes), {node.name: node for node in nodes}
    return [_row(one, gpus_of(one, by_name), ended) for one in found]


def _row(one: Running, gpus: str, ended: Collection[str]) -> Row:
    cells = (
        Cell("hidden", "35") if one.user is None else Cell(clean(one.user, 64)),
        Cell(clean(one.node, 64)),
        Cell(gpus),
        Cell(str(one.pid)),
        Cell(compact_size(one.memory)),
        Cell("?" if one.sm_percent is None else str(one.sm_percent)),
        Cell("?" if one.cpu_percent is None else f"{one.cpu_percent:.0f}"),
        Cell(compact_size(one.host_memory)),
        Cell("?" if one.runtime_s is None else format_duration(one.runtime_s)),
        Cell(clean(one.job or "", 64)),
        Cell(clean(one.lease or "", 64)),
        Cell(clean(one.container or "", 64)),
        Cell(note(one, ended), "1;31" if one.rogue else ""),
        Cell(clean(one.command)),
    )
    return Row(cells)
