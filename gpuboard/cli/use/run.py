"""`gpuboard run --n N -- CMD…`: reserve GPUs on one node, run a command there, release."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuboard.cli.context import Context
from gpuboard.cli.options import natural
from gpuboard.cli.reserve.allocate import add_filters, add_gpus, add_slurm, add_terms, job_options, progress
from gpuboard.cli.status_file import OPTION, outcome_of, recorded
from gpuboard.cli.stderr import report
from gpuboard.errors import UsageError
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.leases.output.formats import Allocation
    from gpuboard.model.lease import Lease

NAME = "run"
HELP = "reserve GPUs on one node, run a command there, then release"

_EPILOG = """\
examples:
  gpuboard run --n 1 -- python eval.py
  gpuboard run --n 2 --model H100 --wait -- bash

The command runs on the node of its GPUs (over ssh on another machine), in the
same folder and with your terminal. `run` exits with its exit code, or 128 + n
after signal n. Background processes that it leaves are killed when it ends."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s (--n N | --gpus GPUS) [options] -- CMD …"
    which = parser.add_argument_group("which GPUs, all on one node")
    which.add_argument("--n", type=natural, metavar="N", help="number of GPUs")
    add_gpus(which, "instead of --n: gpu01:0,3 or UUIDs")
    add_filters(which)
    held = parser.add_argument_group("the lease")
    add_terms(held)
    add_slurm(parser)
    held.add_argument("--uuid", action="store_true", help="UUIDs instead of indexes in CUDA_VISIBLE_DEVICES")
    held.add_argument(OPTION, metavar="FILE", help="write the outcome to FILE as JSON, also after a failure")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- CMD …", help="the command and its arguments")
    parser.epilog = _EPILOG


def run(args: argparse.Namespace, context: Context) -> int:
    """Reserve, run, release; return the command's exit code."""
    outcome = outcome_of(NAME)
    with recorded(outcome, args.status_file):
        code = _run(args, context, outcome)
        outcome["exit_code"] = code
    return code


def _run(args: argparse.Namespace, context: Context, outcome: dict[str, Any]) -> int:
    from gpuboard.keeper.holder import identify
    from gpuboard.leases.reserve import release_own, reserve, terms_of
    from gpuboard.model.request import Request

    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv or not argv[0]:
        raise UsageError("no command given; write it after --\n  see: gpuboard run --help")
    cwd = context.folder()
    request = Request(
        n=args.n,
        picks=tuple(args.gpus or ()),
        max_nodes=None if args.gpus else 1,
        one_node=True,
        model=args.model,
        gpu_mem=args.gpu_mem,
        topology=args.topology,
        allow_sick=args.allow_sick,
        exclude=tuple(args.exclude),
    )
    terms = terms_of(args.for_s, identify(os.getpid()), args.purpose or clean(argv[0], 100), context.settings)
    scope = context.scope()
    with (
        context.ledger(lambda: scope) as ledger,
        ledger.allocator(picks=request.picks, options=job_options(args), progress=progress(context)) as allocator,
        reserve(allocator, request, terms, wait_s=args.wait, notify=report) as allocation,
    ):
        names = [entry.name for entry in allocation.rank_map.nodes]
        if len(names) > 1:
            raise UsageError(f"run uses one node, but --gpus names {', '.join(names)}; use gpuboard launch")
    node = _node_of(allocation.lease, names[0], scope.nodes)
    outcome |= {"lease": allocation.lease.id, "node": node.name, "started": True}
    outcome["gpus"] = [{"index": rank.index, "uuid": rank.uuid} for rank in allocation.rank_map.ranks]
    try:
        return _start(argv, cwd, allocation, node, context, uuids=args.uuid)
    finally:
        release_own(context.ledger(), allocation.lease, report)


def _node_of(lease: Lease, name: str, nodes: Sequence[Node]) -> Node:
    """Return a node of a lease: reached through the lease's job, else the node of that name in scope."""
    if lease.job is not None:
        from gpuboard.cluster.inventory.nodes import Node

        return Node(name, name, job=lease.job)
    return next(node for node in nodes if node.name == name)


def _start(argv: list[str], cwd: str, allocation: Allocation, node: Node, context: Context, *, uuids: bool) -> int:
    from gpuboard.leases import remote_exec
    from gpuboard.leases.output.formats import variables

    values = variables(allocation.on(node.name), uuids=uuids)
    environ, lease, settings = context.env, allocation.lease.id, context.settings
    signal_command: partial[list[str]] | None = None
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if node.host is None:
        command = remote_exec.local_command(argv, values, cwd)
    elif node.job is not None:
        from gpuboard.transport.slurm.srun import slurm_environ

        command = remote_exec.step_command(node, argv, values, cwd, settings, terminal=terminal)
        environ = slurm_environ(environ)
        signal_command = partial(remote_exec.step_signal, node, lease, settings)
    else:
        command = remote_exec.remote_command(node.host, argv, values, cwd, settings, terminal=terminal)
        signal_command = partial(remote_exec.remote_signal, node.host, lease, settings)
    sys.stdout.flush()
    return remote_exec.run_command(command, environ, lease, signal_command)
