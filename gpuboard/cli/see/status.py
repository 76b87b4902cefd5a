"""`gpuboard status`: a row per GPU, its state and the reason: a table, CSV, or JSON (model/snapshot.py, schema 1)."""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from gpuboard.agent.nvml.terms import RATE_SPAN_S
from gpuboard.board.scene import Place, Scene
from gpuboard.cli.context import Context
from gpuboard.cli.options import typed
from gpuboard.cli.replay import add_replay, open_replay
from gpuboard.cli.see import columns
from gpuboard.cli.see.columns import COLUMNS, DeviceRow
from gpuboard.cli.see.selection import Selection
from gpuboard.cli.see.selection import add_arguments as add_selection
from gpuboard.cli.stderr import report, show_progress
from gpuboard.cli.stdout import write_json
from gpuboard.cli.table import Cell, Row, elide, render, wrap, write_csv
from gpuboard.cluster.snapshot.views import hides_gpus
from gpuboard.errors import NoNodeReached, UsageError
from gpuboard.leases.ledger import Scope
from gpuboard.model.snapshot import NodeView, Snapshot, scheduler_words, tally
from gpuboard.model.state import STATES
from gpuboard.model.text import clean, quoted
from gpuboard.model.units import parse_duration, parse_number

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.leases.composite import CompositeLedger

_READ_S = 5.0  # deadline of further readings
NAME = "status"
HELP = "show every GPU: state, reason, memory, load, users"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="print JSON (schema 1); with --watch one line per snapshot")
    kind.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="csv: for spreadsheets, RFC 4180"
    )
    parser.add_argument(
        "--watch", nargs="?", const=0.0, type=typed(_seconds), metavar="S",
        help="repeat every S seconds (0.5, 2, 30s) until ctrl-C; without S: at `interval` of the config",
    )  # fmt: skip
    parser.add_argument("--columns", metavar="NAMES", help=f"the columns, in order; of {', '.join(COLUMNS)}")
    add_selection(parser)
    add_replay(parser)
    parser.epilog = (
        "examples:\n  gpuboard status\n  gpuboard status --nodes 'gpu[01-03]' --watch 2\n"
        "  gpuboard status --free --sort mem,desc\n  gpuboard status --user me --columns node,gpu,util,reason\n"
        "  gpuboard status --format csv --filter 'model:H100 util<10' > idle.csv\n"
        "  gpuboard status --json | jq -r '.nodes[].gpus[] | select(.state==\"free\").uuid'\n\n"
        "exit code 6: no node could be reached"
    )


class StatusOutput:
    """How snapshots are printed. Raises UsageError for options that contradict each other."""

    def __init__(self, args: argparse.Namespace, context: Context) -> None:
        self.selection = Selection(args.filter, args.user, free=args.free, sort=args.sort)
        self.kind = "json" if args.json else args.format
        default = columns.CSV if self.kind == "csv" else columns.TABLE
        self.names = columns.columns(args.columns) if args.columns else default
        self.measures = not columns.MEASURED.isdisjoint({*self.names, *self.selection.keys})
        self._context = context
        if self.kind == "json" and (args.columns or args.sort):
            raise UsageError("--columns and --sort are for the table and CSV; JSON has every field, by node and index")
        if self.kind == "csv" and args.watch is not None:
            raise UsageError("--watch cannot be combined with --format csv; --watch --json prints a line per snapshot")

    def show(self, scene: Scene) -> None:
        """Print a scene."""
        if self.kind == "json":
            write_json(self.selection.snapshot(scene, self.selection.listed(scene)))
            sys.stdout.flush()
        elif self.kind == "csv":
            fields = columns.fields(self.names)
            write_csv(list(fields), ([value(row) for value in fields.values()] for row in self._records(scene)))
            if missing := [clean(node.name, 64) for node in scene.snapshot.nodes if not node.gpus]:
                report(f"not listed, as no GPU of them is known: {', '.join(missing)}; `gpuboard status` shows why")
        else:
            print("\n".join(self.lines(scene)))

    def lines(self, scene: Scene) -> list[str]:
        """Return the lines of the table."""
        return table(scene, self._context.width, self.names, self.selection, colour=self._context.colour)

    def _records(self, scene: Scene) -> Iterator[DeviceRow]:
        """Yield the GPUs, each followed by its MIG devices."""
        for place in self.selection.ordered(scene, self.selection.listed(scene)):
            yield from columns.devices(place, scene)


def run(args: argparse.Namespace, context: Context) -> int:
    """Show the cluster once, or until interrupted."""
    output = StatusOutput(args, context)
    if (replay := open_replay(args)) is not None:
        if args.watch is not None:
            raise UsageError("--watch cannot be combined with --replay")
        recording, at = replay
        frame = recording.at(recording.end if at is None else at)
        output.show(Scene(frame.snapshot, frame.leases, uids=frame.uids))
        return 0
    nodes = context.reach(context.nodes())
    if args.watch is None:
        scene = read(nodes, context, measures=output.measures)
        output.show(scene)
        suggest_setup(nodes, scene.snapshot, context)
        return NoNodeReached.exit_code if no_node_reached(scene.snapshot) else 0
    interval_s = args.watch or context.settings.interval_s(len(nodes))
    fleet = context.fleet(nodes, interval_s=interval_s, one_shot=False)
    with contextlib.closing(fleet), _ledger(nodes, context) as ledger:
        fleet.start()
        settled(fleet, context)
        _watch(fleet, ledger, output, context, interval_s)
    return 0


def read(nodes: Sequence[Node], context: Context, *, measures: bool = False) -> Scene:
    """Read every node once; return the snapshot with its leases. ``measures``: with what takes two readings more."""
    with contextlib.closing(context.fleet(nodes)) as fleet, _ledger(nodes, context) as ledger:
        fleet.start()
        snapshot = settled(fleet, context)
        return _scene(fleet, _measured(fleet, snapshot) if measures else snapshot, ledger)


def _measured(fleet: Fleet, first: Snapshot) -> Snapshot:
    """Return a snapshot with the activity of SMs and tensor cores, which is an average between two readings."""
    names = [node.name for node in first.nodes if node.source == "nvml" and node.age_s is not None]
    for name in names:
        fleet.send(name, "look", {"uuid": None})
    fleet.refresh(names, _READ_S)
    time.sleep(RATE_SPAN_S + 0.1)
    fleet.refresh(names, _READ_S)
    return fleet.snapshot()


def _ledger(nodes: Sequence[Node], context: Context) -> CompositeLedger:
    return context.ledger(lambda: Scope(tuple(nodes), explicit=bool(context.nodesets)))


def _scene(fleet: Fleet, snapshot: Snapshot, ledger: CompositeLedger) -> Scene:
    return Scene(snapshot, ledger.leases(fleet, snapshot), uids=fleet.uids())


def suggest_setup(nodes: Sequence[Node], snapshot: Snapshot, context: Context) -> None:
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
        if missing:
            shown = True
            show_progress(f"waiting {waited_s:.0f} s; no reading yet from {', '.join(missing)}", context)

    fleet.wait_all(fleet.connect_s + 5, show)
    if shown:
        show_progress("", context)
    fleet.freshen()
    return fleet.snapshot()


def no_node_reached(snapshot: Snapshot) -> bool:
    """Return whether no node has delivered a reading."""
    return all(node.age_s is None for node in snapshot.nodes)


def table(
    scene: Scene,
    width: int | None,
    names: Sequence[str] = columns.TABLE,
    selection: Selection | None = None,
    *,
    colour: bool,
) -> list[str]:
    """Return the lines of the table and, last, the totals. ``width`` in terminal cells; None: no limit."""
    selection = selection or Selection()
    listed = selection.listed(scene)

    def rows_of(places: Iterable[Place]) -> list[Row]:
        return [Row(columns.cells(row, names)) for place in places for row in columns.devices(place, scene)]

    rows = rows_of(selection.ordered(scene, listed)) if selection.sorts else []
    for node, places in listed:
        rows += [] if selection.sorts else rows_of(places)
        rows += _node_rows(node, names)
    titles = [COLUMNS[name].column for name in names]
    lines = render(titles, rows, columns.steps(names), width, colour=colour)
    total = sums(selection.snapshot(scene, listed), scene.snapshot)
    if text := scheduler_words(scene.snapshot.scheduler):
        lines += ["", *_wrapped(clean(text), width)]
    return [*lines, "", *_wrapped(total, width)]


def _wrapped(text: str, width: int | None) -> list[str]:
    return [text] if width is None else wrap(text, width)


def sums(snapshot: Snapshot, whole: Snapshot | None = None) -> str:
    """Return the text below the table: the number of GPUs in each state, and of nodes whose GPUs are not known.

    ``whole``: the snapshot that ``snapshot`` is the listed part of.
    """
    whole = whole or snapshot
    unread = {
        "unreachable": sum(node.state == "unreachable" for node in whole.nodes),
        "without working NVML": sum(node.state == "up" and hides_gpus(node) for node in whole.nodes),
    }
    counts: list[str] = []
    for kind, states in tally(gpu for node in snapshot.nodes for gpu in node.gpus).parts:
        parts = [f"{states[state]} {state}" for state in reversed(STATES) if states[state]]
        counts.append(f"{kind}: {', '.join(parts)}" if parts else kind)
    text = "; ".join(counts)
    if snapshot is not whole:
        text += (
            f"; {sum(len(node.gpus) for node in snapshot.nodes)} of {sum(len(node.gpus) for node in whole.nodes)} GPUs"
        )
        text += " match"
    for words, count in unread.items():
        if count:
            nodes = f"{count} of {len(whole.nodes)} nodes" if len(whole.nodes) > 1 else "the node is"
            text += f"; {nodes} {words}, {'its' if count == 1 else 'their'} GPUs are not counted"
    if any(node.source == "simulated" for node in whole.nodes):
        text += "; SIMULATED"
    return f"{clean(snapshot.cluster)}: {text}" if snapshot.cluster else text


def _node_rows(node: NodeView, names: Sequence[str]) -> list[Row]:
    """Return what is wrong with a node as a whole."""
    name = clean(node.name, 64)
    found: list[Cell] = []
    if node.error or not node.gpus:
        error = clean(node.error or "no GPU found")
        up = "up" if node.gpus else "GPUs unknown" if hides_gpus(node) else "no GPU"
        state = up if node.state == "up" else node.state
        text = error if error.startswith(state) else f"{state}: {error}"
        found.append(Cell(text, "1;31" if node.state == "unreachable" else "35"))
    if node.scheduler_reason or node.scheduler_reservation:
        text = clean(f"Slurm: {node.scheduler_state}: {node.scheduler_reason or node.scheduler_reservation}")
        found.append(Cell(text, "35"))
    if node.claims_error:
        found.append(Cell(f"cannot be reserved: {clean(node.claims_error)}", "35"))
    if names[0] == "node":
        return [Row((Cell(name),), cell) for cell in found]
    return [Row((Cell(""),), Cell(f"{name}: {cell.text}", cell.colour)) for cell in found]


def _seconds(text: str) -> float:
    """Return the seconds of ``2``, ``0.5`` or ``30s``; at least 0.2, so that a typo does not overload the nodes."""
    try:
        seconds = parse_number(text)
    except ValueError:
        seconds = parse_duration(text)
    if not 0.2 <= seconds <= 86400:
        raise ValueError(f"{quoted(text)} is not between 0.2 seconds and a day")
    return seconds


def _watch(fleet: Fleet, ledger: CompositeLedger, output: StatusOutput, context: Context, interval_s: float) -> None:
    """Show the cluster repeatedly: in place on a terminal, elsewhere one table after the other."""
    json = output.kind == "json"
    in_place = context.stdout_is_tty and not json and context.env.get("TERM") != "dumb"
    if in_place:
        print("\x1b[2J", end="")
    due = time.monotonic()
    try:
        while True:
            scene = _scene(fleet, fleet.snapshot(), ledger)
            if in_place:
                sys.stdout.write(_frame(output.lines(scene), context, interval_s))
                sys.stdout.flush()
            else:
                output.show(scene)
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


def _frame(shown: Sequence[str], context: Context, interval_s: float) -> str:
    """Return one frame, drawn over the last one without clearing the screen, which would flicker."""
    width, height = context.width or 80, shutil.get_terminal_size().lines
    totals = max(number for number, line in enumerate(shown) if not line)  # they follow the last blank line
    lines, tail = list(shown[:totals]), shown[totals:][: max(1, height - 3)]
    room = max(1, height - 2 - len(tail))
    if len(lines) > room:
        more = f"… {len(lines) - room + 1} more rows; enlarge the terminal, or pass --nodes or --filter"
        lines = [*lines[: room - 1], elide(more, width)]
    stamp = time.strftime("%H:%M:%S")
    head = elide(f"{stamp}  every {interval_s:g} s, ctrl-C ends", width)
    body = "".join(f"{line}\x1b[K\r\n" for line in [head, *lines, *tail[:-1]])
    # mode 2026, "synchronized output": terminals that support it update the screen at once
    return f"\x1b[?2026h\x1b[H{body}{tail[-1]}\x1b[K\x1b[J\x1b[?2026l"
