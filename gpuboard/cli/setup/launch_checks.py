"""The part of `gpuboard doctor` that checks a launch: of a rank map, of a lease, or of GPUs that would be reserved."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpuboard.cli.context import Context
from gpuboard.cli.reserve.allocate import add_request, progress, request_of
from gpuboard.errors import NoNodeReached, Refused, UsageError

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.doctor.launch import LaunchProbe
    from gpuboard.launch.preflight.check import Check
    from gpuboard.model.rankmap import RankMap


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a launch."""
    add_request(parser)
    launch = parser.add_argument_group(
        "what a launch needs",
        "With --n, --gpus, --lease or --rank-map: check also these nodes, GPUs and the\n"
        "connections between them, as `launch` does before it starts ranks. Nothing is\n"
        "reserved, no rank is started.",
    )
    launch.add_argument("--lease", metavar="ID", help="the GPUs of your lease ID; with --n: N of them")
    launch.add_argument("--rank-map", metavar="FILE", help="the GPUs of this rank map")
    launch.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="as for launch; default: cuda")
    launch.add_argument("--python", metavar="PATH", help="Python interpreter of the ranks, as for launch")


def requested(args: argparse.Namespace) -> bool:
    """Return whether the arguments name a launch."""
    return args.n is not None or bool(args.gpus or args.lease or args.rank_map)


@contextlib.contextmanager
def started(
    args: argparse.Namespace, context: Context, nodes: Sequence[Node]
) -> Iterator[tuple[str, list[Check], LaunchProbe | None, list[Node]]]:
    """Yield the launch to be checked: a title, the result of planning it, its started probe, and its nodes.

    ``nodes``: those in scope. A request that is refused is a failed check without a probe.
    """
    from gpuboard.cli.use.planned import SelectedLater
    from gpuboard.cluster.inventory.nodes import folded
    from gpuboard.launch.preflight.check import Check
    from gpuboard.model.lease import LeaseGpu, gpus_text

    if not requested(args):
        if args.python or args.device != "cuda":
            raise UsageError("--device and --python belong to --n, --gpus, --lease, --rank-map and --nccl")
        if any(getattr(args, name) for name in ("per_node", "max_nodes", "model", "gpu_mem", "exclude", "allow_sick")):
            raise UsageError("no GPUs requested; pass --n N")
        yield "", [], None, []
        return
    title = f"launch of {args.rank_map}" if args.rank_map else "launch"
    try:
        rank_map = _rank_map(args, context)
    except SelectedLater as error:
        why, _, job = str(error).partition("\n")
        remedy = "in the job: `gpuboard launch --preflight-only`, or `gpuboard doctor --n N` again"
        yield title, [Check("request", None, "skipped", why, job, remedy)], None, []
        return
    except (Refused, NoNodeReached) as error:  # the other checks may have the reason
        remedy = "`gpuboard allocate --dry-run` has the reason for every GPU"
        yield title, [Check("request", None, "fail", str(error), "", remedy)], None, []
        return
    checks = []
    if planned := not (args.rank_map or args.lease):
        where = gpus_text([LeaseGpu(rank.node, rank.index, rank.uuid) for rank in rank_map.ranks])
        if args.device == "cpu":
            where = folded([node.name for node in rank_map.nodes])
        ranks = f"{rank_map.world_size} rank{'s' if rank_map.world_size > 1 else ''}"
        checks = [Check("request", None, "ok", f"a launch would start {ranks} on {where}")]
    with _probe(args, context, rank_map, nodes, planned=planned) as (probe, used):
        yield title, checks, probe, used


def _rank_map(args: argparse.Namespace, context: Context) -> RankMap:
    """Return where the ranks would run. Raises what `launch` raises."""
    from gpuboard.cli.use.planned import planned, without_gpus
    from gpuboard.launch.rank_map_source import read_rank_map

    if args.rank_map:
        if args.n is not None or args.gpus or args.lease:
            raise UsageError("--rank-map cannot be combined with --n, --gpus or --lease")
        return read_rank_map(Path(args.rank_map))
    with context.ledger(lambda: context.scope_of([args.lease] if args.lease else [])) as ledger:
        if args.lease:
            return ledger.existing(args.lease, args.n).rank_map
        request, scope = request_of(args), context.scope()
        with ledger.allocator(picks=request.picks, progress=progress(context)) as allocator:
            if args.device == "cpu" and not request.picks and ledger.rest() == scope:
                return without_gpus(request, scope, allocator)
            return planned(request, allocator)


@contextlib.contextmanager
def _probe(
    args: argparse.Namespace, context: Context, rank_map: RankMap, nodes: Sequence[Node], *, planned: bool
) -> Iterator[tuple[LaunchProbe, list[Node]]]:
    """Yield the started probe of the nodes of ``rank_map``, and these nodes."""
    from gpuboard.doctor.launch import LaunchProbe
    from gpuboard.launch import environ, plan
    from gpuboard.launch.rank_map_source import nodes_of
    from gpuboard.transport.connector import Connector

    reached = nodes_of(rank_map, nodes)
    plan.check_rank_map(rank_map, reached, args.rank_map or "the request", args.device)
    used = {entry.name: reached[entry.name] for entry in rank_map.nodes}
    sent = environ.sent(context.env, []) | (environ.of_job(context.env) if context.job is not None else {})
    options = plan.LaunchOptions(device=args.device, python=args.python)
    with (
        contextlib.closing(Connector(context.settings)) as connector,
        contextlib.closing(
            LaunchProbe(rank_map, used, connector, cwd=context.folder(), environ=sent, options=options, planned=planned)
        ) as probe,
    ):
        probe.start()
        yield probe, list(used.values())
