"""`gpuboard doctor`: check this machine, the nodes and all that a launch needs, with cause and remedy."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from gpuboard import paths
from gpuboard.cli.context import Context
from gpuboard.cli.see.status import settled
from gpuboard.cli.setup import launch_checks, links
from gpuboard.cli.setup.config import problems_of
from gpuboard.cli.stdout import write_json
from gpuboard.cli.table import pad, paint, wrap
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.errors import ConfigError, GpuboardError, NoNodeReached, UsageError

if TYPE_CHECKING:
    from gpuboard.launch.preflight.check import Check

NAME = "doctor"
HELP = "check config, ssh, NVML, reservations and what a launch needs"

_COLOURS = {"ok": "32", "warn": "33", "fail": "1;31", "skipped": "2"}
_STATUS, _NAME = 7, 14  # widths in cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1): one object per check")
    launch_checks.add_arguments(parser)
    links.add_arguments(parser)
    parser.epilog = (
        "examples:\n  gpuboard doctor\n  gpuboard doctor --nodes 'gpu[01-03]'\n"
        "  gpuboard doctor --n 16 --per-node 8\n"
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
    if args.seconds:
        raise UsageError("--seconds belongs to --nccl")
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
        write_json({"schema": 1, "checks": checks})
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
        nodes = list(context.scope_of([args.lease] if args.lease else []).nodes)
    except GpuboardError as error:
        if context.nodesets or launch_checks.requested(args):
            raise
        wrong = [config_failure("nodes", error)]
    with launch_checks.started(args, context, nodes) as (title, planned, probe, used):
        more = [node for node in used if node.name not in {known.name for known in nodes}]
        with contextlib.closing((context.fleet if probe is None else context.fleet_of_run)([*nodes, *more])) as fleet:
            fleet.start()
            facts = machine_facts(context.settings, context.env)
            seen, snapshot = read_nodes(fleet, [*nodes, *more], lambda fleet: settled(fleet, context))
            names = [node.name for node in nodes]
            configured = config_checks([str(file) for file in files if file.exists()], problems, names)
            sections = {
                "this machine": [*configured, *wrong, *machine_checks(facts, fleet.schedule)],
                "nodes": node_checks(seen),
                title: planned + ([] if probe is None else probe.checks(snapshot)),
            }
    return sections, none_reached(seen)


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
