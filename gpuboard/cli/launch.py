"""`gpuboard launch`: reserve, start one rank per GPU, watch, explain, release."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.main import say
from gpuboard.cli.options import natural, typed
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.model.units import parse_duration

if TYPE_CHECKING:
    from gpuboard.cluster.inventory import Node
    from gpuboard.launch.plan import LaunchPlan
    from gpuboard.launch.runs import RunView
    from gpuboard.model.rankmap import RankMap
    from gpuboard.model.snapshot import Snapshot

NAME = "launch"
HELP = "start distributed PyTorch on reserved GPUs: one rank per GPU, watched and explained"

_EPILOG = """\
TARGET is train.py, -m package.module, or package.module:function (called once a rank, inside the process group).
Everything after TARGET reaches it untouched, so our options come first.

GPUs come from --rank-map, else --lease, else --n, else the lease of this shell (GPUBOARD_LEASE).

examples:
  gpuboard launch --n 4 train.py --lr 3e-4
  gpuboard launch --lease k3f9 -m experiments.train
  gpuboard launch --rank-map map.json --device cpu package.train:main"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s [--n N | --lease ID | --rank-map FILE] [options] TARGET [ARGS …]"
    gpus = parser.add_argument_group("which GPUs")
    gpus.add_argument(
        "--n", type=natural, metavar="N", help="reserve N GPUs for this run; inside a lease: pick N of it"
    )
    gpus.add_argument("--lease", metavar="ID", help="use the GPUs of this lease of yours")
    gpus.add_argument("--rank-map", metavar="FILE", help="use this map, as `allocate` writes one or by hand")
    run = parser.add_argument_group("how they run")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same with gloo, without GPUs")
    run.add_argument("--python", metavar="PATH", help="the nodes' training interpreter; default: that of VIRTUAL_ENV, "
                     "CONDA_PREFIX or PATH")  # fmt: skip
    run.add_argument("--env", action="append", default=[], metavar="K[=V]", help="send one more variable to the ranks")
    run.add_argument("--wrap", type=typed(_words), default=[], metavar="WORDS",
                     help="put these words before the interpreter, e.g. 'apptainer exec --nv x.sif'")  # fmt: skip
    run.add_argument("--grace", type=typed(parse_duration), default=30.0, metavar="D",
                     help="from SIGTERM to SIGKILL; default 30s")  # fmt: skip
    run.add_argument("--lost-head", type=typed(_duration_or_never), default=60.0, metavar="D|never",
                     help="end the ranks when this command is silent for so long; default 60s")  # fmt: skip
    run.add_argument("--dry-run", action="store_true", help="print what would be done; reserve and start nothing")
    run.add_argument("--json", action="store_true", help="with --dry-run: print the plan as JSON")
    run.add_argument("--status-file", metavar="FILE", help="write what happened as JSON, however it ends")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, default=None, help=argparse.SUPPRESS)
    parser.add_argument("target", nargs=argparse.REMAINDER, metavar="TARGET [ARGS …]", help="what each rank runs")
    parser.epilog = _EPILOG


def run(args: argparse.Namespace, context: Context) -> int:
    """Reserve, start, watch, release; return the exit code of the run."""
    outcome: dict[str, object] = {"schema": 1, "command": "launch", "exit_code": 1, "error": None, "run": None}
    try:
        code = _launch(args, context, outcome)
        outcome["exit_code"] = code
        return code
    except GpuboardError as error:
        outcome |= {"exit_code": error.exit_code, "error": str(error)}
        raise
    except KeyboardInterrupt:
        outcome |= {"exit_code": 130, "error": "interrupted"}
        raise
    finally:
        if args.status_file:
            Path(args.status_file).write_bytes(msgspec.json.encode(outcome) + b"\n")


def _launch(args: argparse.Namespace, context: Context, outcome: dict[str, object]) -> int:
    from gpuboard.launch import environ, plan, runs, target

    what = target.parse_target(args.target, args.module)
    sent = environ.sent(context.env, args.env)
    options = plan.LaunchOptions(
        device=args.device,
        python=args.python,
        wrap=tuple(args.wrap),
        grace_s=args.grace,
        lost_head_s=args.lost_head,
    )
    nodes = {node.name: node for node in context.nodes()}
    with _rank_map(args, context) as (rank_map, where):
        plan.check_rank_map(rank_map, nodes, where, args.device)
        decided = plan.launch_plan(
            rank_map,
            what,
            run=runs.new_run_id(),
            secret=secrets.token_hex(16),
            cwd=os.getcwd(),
            environ=sent,
            options=options,
        )
        if args.dry_run:
            text = json.dumps(plan.shown(decided), indent=1) if args.json else plan.plan_text(decided)
            print(text)
            return 0
        used = [nodes[config.node] for config in decided.nodes]
        if (stale := environ.stale(context.env)) and all(node.host is not None for node in used):
            say(f"{', '.join(stale)} of your environment: every rank gets its own")  # here the supervisor says it
        return _head(decided, used, context, outcome)


def _head(decided: LaunchPlan, nodes: Sequence[Node], context: Context, outcome: dict[str, object]) -> int:
    from gpuboard.launch.head import Head
    from gpuboard.launch.output import Screen
    from gpuboard.launch.runs import RunFolder
    from gpuboard.transport.connector import Connector

    folder = RunFolder(context.env, decided.run)
    screen = Screen(sys.stdout, sys.stderr)
    connector = Connector(context.settings)
    read_gpus = _gpu_reader(nodes, context) if decided.options.device == "cuda" else None
    head = Head(
        decided,
        folder,
        screen,
        connector=connector,
        hosts={node.name: node.host for node in nodes},
        read_gpus=read_gpus,
    )
    try:
        return head.run()
    finally:
        connector.close()
        view: RunView = head.view()
        outcome |= {"run": msgspec.to_builtins(view), "checks": msgspec.to_builtins(head.checks)}
        screen.finish()


def _gpu_reader(nodes: Sequence[Node], context: Context) -> Callable[[Callable[[Snapshot], None]], None]:
    """Return what starts one reading of ``nodes`` in the background."""

    def start(done: Callable[[Snapshot], None]) -> None:
        fleet = context.fleet(nodes)
        fleet.start()

        def read() -> None:
            fleet.wait(parse_duration(context.settings.connect_timeout))
            done(fleet.snapshot())
            fleet.close()

        threading.Thread(target=read, name="gpus", daemon=True).start()

    return start


@contextlib.contextmanager
def _rank_map(args: argparse.Namespace, context: Context) -> Iterator[tuple[RankMap, str]]:
    """Yield the rank map and the words for where it comes from; gives back what it reserved itself."""
    from gpuboard.launch.source import read_rank_map

    if args.rank_map:
        if args.n is not None or args.lease:
            raise UsageError("--rank-map says which GPUs; it goes with neither --n nor --lease")
        yield read_rank_map(Path(args.rank_map)), args.rank_map
        return
    raise UsageError("which GPUs? pass --n N, --lease ID or --rank-map FILE, or run inside `gpuboard allocate`")


def _words(text: str) -> list[str]:
    words = shlex.split(text)
    if not words:
        raise ValueError("no words to put before the interpreter")
    return words


def _duration_or_never(text: str) -> float | None:
    return None if text == "never" else parse_duration(text)
