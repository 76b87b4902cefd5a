"""`gpuboard doctor --nccl`: launches a measurement of the links between GPUs and prints what it found."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.options import Parser, natural
from gpuboard.cli.stderr import report
from gpuboard.cli.stdout import write_json
from gpuboard.cli.table import Cell, Column, Row, Step, render
from gpuboard.errors import GpuboardError
from gpuboard.model.decoding import convert, from_json

if TYPE_CHECKING:
    from gpuboard.doctor.links import AllReduce, MeasuredLink
    from gpuboard.launch.preflight.check import Check
    from gpuboard.model.snapshot import Snapshot

_LARGEST = {"cuda": 256 * 2**20, "cpu": 4 * 2**20}  # bytes: where the bandwidth has its full height
_COLUMNS = (Column("LINK"), Column("KIND"), Column("THERE", right=True), Column("BACK", right=True), Column(""))
_STEPS = (Step(1, 0),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the measurement."""
    group = parser.add_argument_group("links between GPUs")
    group.add_argument("--nccl", action="store_true", help="measure the bandwidth between neighbours in the ring of "
                       "ranks and of an all-reduce, with NCCL (gloo with --device cpu), and name slow links; GPUs are "
                       "chosen and reserved as for launch")  # fmt: skip
    group.add_argument("--seconds", type=natural, metavar="S", help="with --nccl: duration of the measurement, without "
                       "the start of the ranks; default: 10")  # fmt: skip


def run(args: argparse.Namespace, context: Context) -> int:
    """Measure and print; return the exit code: 0, that of launch if it did not start, 1 if the measurement failed."""
    from gpuboard.launch.preflight.check import Check

    seconds = args.seconds or 10
    if context.stderr_is_tty:
        report(f"measuring for {seconds} s, once the ranks have started")
    outcome = _launch(args, context, seconds)
    code, folder = outcome["exit_code"], Path((outcome["run"] or {}).get("folder", ""))
    checks = convert(outcome["checks"], list[Check])
    links: list[MeasuredLink] = []
    reductions: list[AllReduce] = []
    if code == 0:
        checks, links, reductions = _results(folder, outcome, context, args.device, checks)
    else:
        words = [verdict["text"] for verdict in (outcome["run"] or {}).get("verdicts", [])]
        checks.append(Check("links", None, "fail", "; ".join(words), "", f"the logs are in {folder}"))
    if args.json:
        found = {"schema": 1, "checks": checks, "links": links, "all_reduce": reductions}
        write_json(found)
    elif code == 0:
        print("\n".join(_page(links, reductions, checks, context)))
    return code if code in {0, 7, 130, 143} else 1


def _launch(args: argparse.Namespace, context: Context, seconds: int) -> dict[str, Any]:
    """Launch the measurement as `gpuboard launch` does and return its outcome (docs/commands.md, --status-file).

    Its messages, among them failures of preflight, are on stderr. Raises what launch raises.
    """
    from gpuboard.cli.use import launch
    from gpuboard.launch.target import LINKS

    with tempfile.TemporaryDirectory(prefix="gpuboard-") as temporary:
        file = Path(temporary, "outcome.json")
        words = ["--purpose", "gpuboard doctor --nccl", "--status-file", str(file)]
        parser = Parser("gpuboard doctor", "")
        launch.add_arguments(parser)
        launching = parser.read([*words, LINKS, str(seconds), str(_LARGEST[args.device])])
        for name in vars(args).keys() & vars(launching).keys() - {"json"}:  # which GPUs, and how the ranks run
            setattr(launching, name, getattr(args, name))
        with contextlib.redirect_stdout(sys.stderr):  # NCCL prints to stdout, which is for the results
            launch.run(launching, context)
        found: dict[str, Any] = from_json(file.read_bytes())
    return found


def _results(
    folder: Path, outcome: dict[str, Any], context: Context, device: str, checks: list[Check]
) -> tuple[list[Check], list[MeasuredLink], list[AllReduce]]:
    """Return all checks, the links, and the all-reduces. Raises GpuboardError if the run's folder lacks the results."""
    from gpuboard.doctor.links import all_reduce, link_checks, links
    from gpuboard.launch.events import Measured
    from gpuboard.launch.runs.folder import RankView

    try:
        measured = from_json((folder / "measured.json").read_bytes(), Measured)
    except (OSError, msgspec.DecodeError) as error:
        raise GpuboardError(f"{folder / 'measured.json'}: cannot read the results: {error}") from error
    ranks = {rank.rank: rank for rank in convert(outcome["run"]["ranks"], list[RankView])}
    snapshot = _topology(folder, context) if device == "cuda" else None
    found = links(measured, ranks, snapshot)
    reductions = [all_reduce(one, len(ranks)) for one in measured.reductions]
    return checks + link_checks(found, reductions), found, reductions


def _topology(folder: Path, context: Context) -> Snapshot | None:
    """Return a reading of the run's nodes, for the kinds of their links; None if they are not in scope any more."""
    from gpuboard.cluster.fleet import FIRST_READING_S
    from gpuboard.launch.rank_map_source import nodes_of, read_rank_map

    try:
        rank_map = read_rank_map(folder / "rank_map.json")
        nodes = nodes_of(rank_map, context.scope().nodes)
    except GpuboardError:
        return None
    used = [nodes[entry.name] for entry in rank_map.nodes if entry.name in nodes]
    with contextlib.closing(context.fleet_of_run(used)) as fleet:
        fleet.start()
        fleet.wait_all(fleet.connect_s + FIRST_READING_S)
        return fleet.snapshot()


def _page(
    links: Sequence[MeasuredLink], reductions: Sequence[AllReduce], checks: Sequence[Check], context: Context
) -> list[str]:
    from gpuboard.doctor.links import all_reduce_words, gbps

    rows = [
        Row((
            Cell(" ↔ ".join(one.gpus)), Cell(one.kind), Cell(gbps(one.there)), Cell(gbps(one.back)),
            Cell(f"slow: the others have {gbps(one.usual)}" if one.slow and one.usual is not None else "", "33"),
        ))
        for one in links
    ]  # fmt: skip
    lines = render(_COLUMNS, rows, _STEPS, context.width, colour=context.colour)
    lines.append("")
    lines += [f"all-reduce of {all_reduce_words(each)}" for each in reductions]
    slow = [check for check in checks if check.name == "link" and check.status == "warn"]
    return [*lines, *(f"→ {remedy}" for remedy in dict.fromkeys(check.remedy for check in slow))]
