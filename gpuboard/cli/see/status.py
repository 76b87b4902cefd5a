"""`gpuboard status`: a table with a row per GPU, its state and the reason; or JSON (model/snapshot.py, schema 1)."""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.options import typed
from gpuboard.cli.replay import add_replay, open_replay
from gpuboard.cli.stderr import report
from gpuboard.cli.table import Cell, Column, Row, Step, elide, render
from gpuboard.errors import NoNodeReached, UsageError
from gpuboard.model.snapshot import GpuView, MigView, NodeView, Snapshot, scheduler_words, shown_flags, tally
from gpuboard.model.state import STATES
from gpuboard.model.text import clean, quoted
from gpuboard.model.units import format_duration, parse_duration, parse_number

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.cluster.inventory.nodes import Node

NAME = "status"
HELP = "show every GPU: state, reason, memory, load, users"

COLUMNS = (
    Column("NODE"),
    Column("GPU", right=True),
    Column("MODEL"),
    Column("STATE", least=8),
    Column("WHO", least=6),
    Column("GiB", right=True, least=6),
    Column("UTIL", right=True, least=4),
    Column("TEMP", right=True, least=4),
    Column("POWER", right=True, least=5),
    Column("AGE", right=True, least=4),
    Column("WHY"),
)
_NODE, _GPU, _MODEL, _STATE, _WHO, _MEMORY, _UTIL, _TEMP, _POWER, _AGE, _WHY = range(len(COLUMNS))
# Columns cut or dropped in a narrow terminal, in this order. Node, index and state always remain.
STEPS = (
    Step(_WHY, 36), Step(_MODEL, 14), Step(_WHO, 16), Step(_POWER, 0), Step(_TEMP, 0), Step(_MODEL, 8), Step(_AGE, 0),
    Step(_NODE, 16), Step(_WHO, 8), Step(_WHY, 20), Step(_MODEL, 0), Step(_UTIL, 0), Step(_WHO, 0), Step(_WHY, 12),
    Step(_MEMORY, 0), Step(_NODE, 8), Step(_WHY, 4),
)  # fmt: skip
_COLOURS = {
    "free": "32", "reserved": "36", "allocated": "34", "busy": "33", "occupied": "33", "unknown": "35",
    "broken": "1;31",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1); with --watch one line per snapshot")
    parser.add_argument(
        "--watch", nargs="?", const=0.0, type=typed(_seconds), metavar="S",
        help="repeat every S seconds (0.5, 2, 30s) until ctrl-C; without S: at `interval` of the config",
    )  # fmt: skip
    add_replay(parser)
    parser.epilog = (
        "examples:\n  gpuboard status\n  gpuboard status --nodes 'gpu[01-03]' --watch 2\n"
        "  gpuboard status --json | jq -r '.nodes[].gpus[] | select(.state == \"free\").uuid'\n\n"
        "exit code 6: no node could be reached"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Show the cluster once, or until interrupted."""
    if (replay := open_replay(args)) is not None:
        if args.watch is not None:
            raise UsageError("--watch cannot be combined with --replay")
        recording, at = replay
        _show(recording.at(recording.end if at is None else at).snapshot, context, json=args.json)
        return 0
    nodes = context.reach(context.nodes())
    if args.watch is None:
        with contextlib.closing(context.fleet(nodes)) as fleet:
            fleet.start()
            snapshot = settled(fleet, context)
        _show(snapshot, context, json=args.json)
        _suggest_setup(nodes, snapshot, context)
        return NoNodeReached.exit_code if no_node_reached(snapshot) else 0
    interval_s = args.watch or context.settings.interval_s(len(nodes))
    with contextlib.closing(context.fleet(nodes, interval_s=interval_s, one_shot=False)) as fleet:
        fleet.start()
        settled(fleet, context)
        _watch(fleet, context, interval_s, json=args.json)
    return 0


def _suggest_setup(nodes: Sequence[Node], snapshot: Snapshot, context: Context) -> None:
    """Print the next steps on stderr where no node is configured and this machine has no GPU."""
    if any(node.gpus for node in snapshot.nodes):
        return
    from gpuboard.cluster.inventory.first_run import bare_machine, how_to_name  # late: only needed on a first run

    if bare_machine(nodes, context.settings, snapshot) is not None:
        report(f"{how_to_name(context.env)}; or try a simulated cluster: gpuboard demo --board")


def settled(fleet: Fleet, context: Context) -> Snapshot:
    """Wait until every node has delivered a reading or an error; return a snapshot.

    Each delivery extends the deadline to the connect timeout plus 5 s. After 1 s a terminal on stderr shows the wait.
    """
    shown = False

    def show(waited_s: float, missing: list[str]) -> None:
        nonlocal shown
        if context.stderr_is_tty and missing:
            shown = True
            text = f"waiting {waited_s:.0f} s; no reading yet from {', '.join(missing)}"
            width = shutil.get_terminal_size().columns
            print(f"\r{elide(clean(text), width - 1)}\x1b[K", end="", file=sys.stderr, flush=True)

    fleet.wait_all(fleet.connect_s + 5, show)
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    fleet.freshen()
    return fleet.snapshot()


def no_node_reached(snapshot: Snapshot) -> bool:
    """Return whether no node has delivered a reading."""
    return all(node.age_s is None for node in snapshot.nodes)


def table(snapshot: Snapshot, width: int | None, *, colour: bool) -> list[str]:
    """Return the lines of the table and, last, the totals. ``width`` in terminal cells; None: no limit."""
    rows: list[Row] = []
    for node in snapshot.nodes:
        rows += _node_rows(node)
    lines = render(COLUMNS, rows, STEPS, width, colour=colour)
    total = sums(snapshot)
    if text := scheduler_words(snapshot.scheduler):
        lines += ["", clean(text) if width is None else elide(clean(text), width)]
    return [*lines, "", total if width is None else elide(total, width)]


def sums(snapshot: Snapshot) -> str:
    """Return the last line: the number of GPUs in each state, and of unreachable nodes."""
    unreachable = sum(node.state == "unreachable" for node in snapshot.nodes)
    counts: list[str] = []
    for kind, states in tally(gpu for node in snapshot.nodes for gpu in node.gpus).parts:
        parts = [f"{states[state]} {state}" for state in reversed(STATES) if states[state]]
        counts.append(f"{kind}: {', '.join(parts)}" if parts else kind)
    text = "; ".join(counts)
    if unreachable:
        nodes = f"{unreachable} of {len(snapshot.nodes)} nodes" if len(snapshot.nodes) > 1 else "the node is"
        text += f"; {nodes} unreachable, {'its' if unreachable == 1 else 'their'} GPUs are not counted"
    if any(node.source == "simulated" for node in snapshot.nodes):
        text += "; SIMULATED"
    return f"{clean(snapshot.cluster)}: {text}" if snapshot.cluster else text


def _node_rows(node: NodeView) -> list[Row]:
    name = Cell(clean(node.name, 64))
    rows = [row for gpu in node.gpus for row in _gpu_rows(name, gpu, node)]
    if node.error or not rows:
        error = clean(node.error or "no GPU found")
        state = node.state if node.state != "up" else "no GPU" if not rows else "up"
        text = error if error.startswith(state) else f"{state}: {error}"
        rows.append(Row((name,), Cell(text, "1;31" if node.state == "unreachable" else "35")))
    if node.scheduler_reason or node.scheduler_reservation:
        text = clean(f"Slurm: {node.scheduler_state}: {node.scheduler_reason or node.scheduler_reservation}")
        rows.append(Row((name,), Cell(text, "35")))
    if node.claims_error:
        rows.append(Row((name,), Cell(f"cannot be reserved: {clean(node.claims_error)}", "35")))
    return rows


def _gpu_rows(name: Cell, gpu: GpuView, node: NodeView) -> list[Row]:
    why = clean(gpu.reason)
    if gpu.memory_shared:
        why += "; memory shared with the host"
    reasons = f"sick ({clean('; '.join(gpu.sick))})"
    if flags := [reasons if flag == "sick" and gpu.sick else flag for flag in shown_flags(gpu)]:
        why = f"{'+'.join(flags)}; {why}"
    cells = (
        name,
        Cell(str(gpu.index)),
        Cell(short_model(clean(gpu.name, 64))),
        Cell(gpu.state, _COLOURS.get(gpu.state, "")),
        Cell(_who(gpu)),
        Cell(_memory(gpu.memory_used, gpu.memory_total)),
        Cell("?" if gpu.utilization is None else f"{gpu.utilization}%"),
        Cell("?" if gpu.temperature is None else f"{gpu.temperature}°C"),
        Cell("?" if gpu.power is None else f"{gpu.power:.0f}W"),
        Cell(_age(node.age_s)),
        Cell(why),
    )
    return [Row(cells), *(_mig_row(name, gpu, mig, n) for n, mig in enumerate(gpu.mig))]


def _mig_row(name: Cell, gpu: GpuView, mig: MigView, number: int) -> Row:
    blank = Cell("")
    cells = (
        name, Cell(f"{gpu.index}:{number}"), Cell(clean(mig.profile, 32)), Cell(mig.state, _COLOURS.get(mig.state, "")),
        Cell(",".join(clean(lease, 16) for lease in mig.leases)), Cell(_memory(mig.memory_used, mig.memory_total)),
        blank, blank, blank, blank, Cell(clean(mig.reason)),
    )  # fmt: skip
    return Row(cells)


def short_model(name: str) -> str:
    """Return a GPU's name without the vendor prefixes."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _who(gpu: GpuView) -> str:
    """Return lease ids, jobs and the users of processes; ``?`` for a hidden owner."""
    found = [*gpu.leases, *(f"{job.user}/{job.id}" for job in gpu.jobs)]
    found += sorted({process.user or "?" for process in gpu.processes or ()})
    return ",".join(clean(word, 32) for word in found)


def _memory(used: int | None, total: int | None) -> str:
    """Return GiB used and GiB in total; one decimal below 10 GiB used."""
    left = "?" if used is None else f"{used / 2**30:.{1 if used < 10 * 2**30 else 0}f}"
    right = "?" if total is None else f"{total / 2**30:.0f}"
    return f"{left}/{right}"


def _age(age_s: float | None) -> str:
    if age_s is None:
        return "?"
    return f"{age_s:.1f}s" if age_s < 10 else format_duration(age_s)


def _seconds(text: str) -> float:
    """Return the seconds of ``2``, ``0.5`` or ``30s``; at least 0.2, so that a typo does not overload the nodes."""
    try:
        seconds = parse_number(text)
    except ValueError:
        seconds = parse_duration(text)
    if not 0.2 <= seconds <= 86400:
        raise ValueError(f"{quoted(text)} is not between 0.2 seconds and a day")
    return seconds


def _show(snapshot: Snapshot, context: Context, *, json: bool) -> None:
    if json:
        sys.stdout.buffer.write(msgspec.json.encode(snapshot) + b"\n")
        sys.stdout.buffer.flush()
    else:
        print("\n".join(table(snapshot, context.width, colour=context.colour)))


def _watch(fleet: Fleet, context: Context, interval_s: float, *, json: bool) -> None:
    """Show the cluster repeatedly: in place on a terminal, elsewhere one table after the other."""
    in_place = context.stdout_is_tty and not json and context.env.get("TERM") != "dumb"
    if in_place:
        print("\x1b[2J", end="")
    due = time.monotonic()
    try:
        while True:
            snapshot = fleet.snapshot()
            if in_place:
                sys.stdout.write(_frame(snapshot, context, interval_s))
                sys.stdout.flush()
            else:
                _show(snapshot, context, json=json)
                if not json:
                    print(flush=True)
            due = next_due(due, interval_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
    except KeyboardInterrupt:
        if in_place:
            print()  # put the shell's prompt below the table
        raise


def next_due(due: float, interval_s: float, now: float) -> float:
    """Return the first time after ``now`` in steps of ``interval_s`` from ``due``: missed updates are skipped."""
    return due + interval_s * max(1, math.ceil((now - due) / interval_s))


def _frame(snapshot: Snapshot, context: Context, interval_s: float) -> str:
    """Return one frame, drawn over the last one without clearing the screen, which would flicker."""
    height = shutil.get_terminal_size().lines
    *lines, blank, total = table(snapshot, context.width, colour=context.colour)
    room = height - 4
    if len(lines) > room:
        lines = [*lines[: room - 1], f"… {len(lines) - room + 1} more rows; enlarge the terminal or pass --nodes"]
    stamp = time.strftime("%H:%M:%S")
    head = elide(f"{stamp}  every {interval_s:g} s, ctrl-C ends", context.width or 80)
    body = "".join(f"{line}\x1b[K\r\n" for line in [head, *lines, blank])
    # mode 2026, "synchronized output": terminals that support it update the screen at once
    return f"\x1b[?2026h\x1b[H{body}{total}\x1b[K\x1b[J\x1b[?2026l"
