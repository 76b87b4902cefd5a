"""`gpuboard doctor`: check this machine, the nodes and all that a launch needs, with cause and remedy."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpuboard import paths
from gpuboard.cli.context import Context
from gpuboard.cli.see.status import settled
from gpuboard.cli.setup import links
from gpuboard.cli.setup.config import problems_of
from gpuboard.cli.table import pad, paint, wrap
from gpuboard.errors import ConfigError, GpuboardError, NoNodeReached, UsageError

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.doctor.launch import LaunchProbe
    from gpuboard.launch.preflight.check import Check

NAME = "doctor"
HELP = "check config, ssh, NVML, reservations and what a launch needs"

_COLOURS = {"ok": "32", "warn": "33", "fail": "1;31", "skipped": "2"}
_STATUS, _NAME = 7, 14  # widths in cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1): one object per check")
    launch = parser.add_argument_group("what a launch needs")
    launch.add_argument("--rank-map", metavar="FILE", help="check also the nodes, GPUs and connections of this rank "
                        "map, as `launch` does before it starts ranks; none is started")  # fmt: skip
    launch.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="as for launch; default: cuda")
    launch.add_argument("--python", metavar="PATH", help="Python interpreter of the ranks, as for launch")
    links.add_arguments(parser)
    parser.epilog = (
        "examples:\n  gpuboard doctor\n  gpuboard doctor --nodes 'gpu[01-03]'\n"
        "  gpuboard doctor --rank-map map.json\n"
        "  gpuboard doctor --nccl --gpus gpu01:0-7@gpu02:0-7\n"
        "  gpuboard doctor --json | jq -r '.checks[] | select(.status == \"fail\")'\n\n"
        "exit codes: 0 nothing failed, 1 a check failed, 6 no node could be reached;\n"
        "with --nccl as launch: 4 GPUs not free now, 7 preflight failed"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Run all checks and print their results."""
    if args.nccl:
        return links.run(args, context)
    if args.n or args.gpus or args.lease or args.seconds:
        raise UsageError("--n, --gpus, --lease and --seconds belong to --nccl")
    from gpuboard.doctor.machine import config_failure
    from gpuboard.launch.preflight.checks import failed

    try:
        _ = context.settings
    except ConfigError as error:
        sections, unreached = {"this machine": [config_failure("config", error)]}, False
    else:
        sections, unreached = _sections(args, context)
    checks = [check for section in sections.values() for check in section]
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode({"schema": 1, "checks": checks}) + b"\n")
    else:
        print("\n".join(page(sections, context.width, colour=context.colour)))
    return NoNodeReached.exit_code if unreached else int(bool(failed(checks)))


def _sections(args: argparse.Namespace, context: Context) -> tuple[dict[str, list[Check]], bool]:
    """Return the checks by section, and whether none of the nodes could be reached."""
    from gpuboard.cluster.inventory.first_run import config_of
    from gpuboard.doctor.collect import read_nodes
    from gpuboard.doctor.machine import config_checks, config_failure, machine_checks, machine_facts
    from gpuboard.doctor.nodes import node_checks, none_reached

    problems = problems_of(context.settings, context.env)
    files = [paths.SITE_CONFIG, context.config_file or config_of(context.env)]
    nodes: list[Node] = []
    wrong: list[Check] = []
    try:
        nodes = list(context.scope().nodes)
    except GpuboardError as error:
        if context.nodesets or args.rank_map:
            raise
        wrong = [config_failure("nodes", error)]
    with (
        _launch_probe(args, context, nodes) as (probe, more),
        contextlib.closing((context.fleet if probe is None else context.fleet_of_run)([*nodes, *more])) as fleet,
    ):
        fleet.start()
        facts = machine_facts(context.settings, context.env)
        seen, snapshot = read_nodes(fleet, [*nodes, *more], lambda fleet: settled(fleet, context))
        configured = config_checks([str(file) for file in files if file.exists()], problems, [n.name for n in nodes])
        sections = {
            "this machine": [*configured, *wrong, *machine_checks(facts, fleet.schedule)],
            "nodes": node_checks(seen),
        }
        if probe is not None:
            sections[f"launch of {args.rank_map}"] = probe.checks(snapshot)
    return sections, none_reached(seen)


@contextlib.contextmanager
def _launch_probe(
    args: argparse.Namespace, context: Context, nodes: Sequence[Node]
) -> Iterator[tuple[LaunchProbe | None, list[Node]]]:
    """Yield the started probe of ``--rank-map``, and the nodes of the map that are not among ``nodes``."""
    if args.rank_map is None:
        if args.python or args.device != "cuda":
            raise UsageError("--device and --python belong to --rank-map and --nccl")
        yield None, []
        return
    from gpuboard.doctor.launch import LaunchProbe
    from gpuboard.launch import environ, plan
    from gpuboard.launch.rank_map_source import nodes_of, read_rank_map
    from gpuboard.transport.connector import Connector

    rank_map = read_rank_map(Path(args.rank_map))
    reached = nodes_of(rank_map, nodes)
    plan.check_rank_map(rank_map, reached, args.rank_map, args.device)
    used = {entry.name: reached[entry.name] for entry in rank_map.nodes}
    sent = environ.sent(context.env, []) | (environ.of_job(context.env) if context.job is not None else {})
    options = plan.LaunchOptions(device=args.device, python=args.python)
    connector = Connector(context.settings)
    with contextlib.closing(connector):
        probe = LaunchProbe(rank_map, used, connector, cwd=context.folder(), environ=sent, options=options)
        with contextlib.closing(probe):
            probe.start()
            yield probe, [node for name, node in used.items() if name not in {n.name for n in nodes}]


def page(sections: dict[str, list[Check]], width: int | None, *, colour: bool) -> list[str]:
    """Return the lines for people: sections of checks, equal ones of several nodes as one, and a summary."""
    from gpuboard.doctor.fold import fold, summary
    from gpuboard.model.text import clean

    lines = []
    for title, checks in sections.items():
        if checks:
            lines.append(clean(title))
        for check in fold(checks):
            lines += _lines(check, width, colour=colour)
        if checks:
            lines.append("")
    return [*lines, summary([check for checks in sections.values() for check in checks])]


def _lines(check: Check, width: int | None, *, colour: bool) -> list[str]:
    words = "; ".join(part for part in (check.evidence, check.cause) if part)
    text = f"{check.node}: {words}" if check.node else words
    indent = 2 + _STATUS + 2 + _NAME + 2
    room = 10**6 if width is None else max(20, width - indent)
    status = paint(pad(check.status, _STATUS), _COLOURS[check.status], colour=colour)
    first, *rest = wrap(text, room)
    if check.remedy:
        start, *others = wrap(check.remedy, room - 2)
        rest += [f"→ {start}", *(f"  {line}" for line in others)]
    return [f"  {status}  {pad(check.name, _NAME)}  {first}", *(" " * indent + line for line in rest)]
