"""`gpuboard launch`: reserve, start one rank per GPU, watch, explain, release."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.options import patience, typed, whole
from gpuboard.cli.reserve.allocate import add_request, add_slurm, add_terms, job_options, progress, request_of
from gpuboard.cli.say import say
from gpuboard.cli.status_file import OPTION, outcome_of, recorded
from gpuboard.errors import NoSuchLease, Refused, UsageError
from gpuboard.launch.parent_watch import LifeLine
from gpuboard.model.units import parse_duration

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.launch.output import Screen
    from gpuboard.launch.plan import LaunchPlan
    from gpuboard.launch.run_folder import RunView
    from gpuboard.leases.ledger import Scope
    from gpuboard.model.rankmap import RankMap
    from gpuboard.model.snapshot import Snapshot

NAME = "launch"
HELP = "start distributed PyTorch on reserved GPUs: one rank per GPU, watched and explained"

_EPILOG = """\
TARGET is train.py, -m package.module, or package.module:function (called once a rank, inside the process group).
Everything after TARGET reaches it untouched, so our options come first.

GPUs come from --rank-map, else --lease, else --n, else the lease of this shell (GPUBOARD_LEASE), else, inside a Slurm
job, all that it has.

examples:
  gpuboard launch --n 4 train.py --lr 3e-4
  gpuboard launch --lease k3f9 -m experiments.train
  gpuboard launch --rank-map map.json --device cpu package.train:main"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s [--n N | --lease ID | --rank-map FILE] [options] TARGET [ARGS …]"
    add_request(parser)
    held = parser.add_argument_group("what is held already")
    held.add_argument("--lease", metavar="ID", help="use the GPUs of this lease of yours; with --n: N of them")
    held.add_argument("--rank-map", metavar="FILE", help="use this map, as `allocate` writes one or by hand")
    add_terms(parser.add_argument_group("how it is reserved"))
    add_slurm(parser)
    run = parser.add_argument_group("how they run")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same with gloo, without GPUs")
    run.add_argument("--python", metavar="PATH", help="the nodes' training interpreter; default: that of VIRTUAL_ENV, "
                     "CONDA_PREFIX or PATH")  # fmt: skip
    run.add_argument("--env", action="append", default=[], metavar="K[=V]", help="send one more variable to the ranks")
    run.add_argument("--wrap", type=typed(_words), default=[], metavar="WORDS",
                     help="put these words before the interpreter, e.g. 'apptainer exec --nv x.sif'")  # fmt: skip
    run.add_argument("--grace", type=patience, default=30.0, metavar="D",
                     help="from SIGTERM to SIGKILL; default 30s")  # fmt: skip
    run.add_argument("--lost-head", type=typed(_duration_or_never), default=60.0, metavar="D|never",
                     help="end the ranks when this command is silent for so long; default 60s")  # fmt: skip
    run.add_argument("--dry-run", action="store_true", help="print what would be done; reserve and start nothing")
    run.add_argument("--json", action="store_true", help="with --dry-run: print the plan as JSON")
    run.add_argument(OPTION, metavar="FILE", help="write what happened as JSON, however it ends")
    # How the board starts a run: under an id it knows, its words in the run's folder alone, ended when the board ends.
    run.add_argument("--run-id", help=argparse.SUPPRESS)
    run.add_argument("--life-line", type=whole(0, 10**6), metavar="FD", help=argparse.SUPPRESS)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, default=None, help=argparse.SUPPRESS)
    parser.add_argument("target", nargs=argparse.REMAINDER, metavar="TARGET [ARGS …]", help="what each rank runs")
    parser.epilog = _EPILOG


def run(args: argparse.Namespace, context: Context) -> int:
    """Reserve, start, watch, release; return the exit code of the run."""
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # until the head takes over they end us as ctrl-C does: all given back
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    outcome = outcome_of(NAME)
    line = None
    if args.life_line is not None:
        try:
            line = LifeLine(args.life_line, lambda: os.kill(os.getpid(), signal.SIGINT))
        except OSError as error:
            raise UsageError(f"--life-line {args.life_line}: {error.strerror}") from error
    with recorded(outcome, args.status_file):
        code = _launch(args, context, outcome, line)
        outcome["exit_code"] = code
    return code


def _launch(args: argparse.Namespace, context: Context, outcome: dict[str, Any], line: LifeLine | None) -> int:
    from gpuboard.launch import environ, plan, rank_map_source, run_folder, target

    what = target.parse_target(args.target, args.module)
    sent = environ.sent(context.env, args.env)
    options = plan.LaunchOptions(
        device=args.device,
        python=args.python,
        wrap=tuple(args.wrap),
        grace_s=args.grace,
        lost_head_s=args.lost_head,
    )
    scope = _scope(context)
    sent |= environ.of_job(context.env) if context.job is not None else {}
    with _screen(quiet=args.run_id is not None) as screen, _rank_map(args, context) as (rank_map, where):
        nodes = rank_map_source.nodes_of(rank_map, scope.nodes)
        plan.check_rank_map(rank_map, nodes, where, args.device)
        decided = plan.launch_plan(
            rank_map,
            what,
            run=args.run_id or run_folder.new_run_id(),
            secret=secrets.token_hex(16),
            cwd=context.folder(),
            environ=sent,
            options=options,
        )
        if args.dry_run:
            shown = {"schema": 1, "dry_run": True, **plan.shown(decided)}
            print(json.dumps(shown, indent=1) if args.json else plan.plan_text(decided))
            return 0
        used = [nodes[config.node] for config in decided.nodes]
        if (stale := environ.stale(context.env)) and all(node.host is not None for node in used):
            say(f"{', '.join(stale)} of your environment: every rank gets its own")  # here the supervisor says it
        return _head(decided, used, context, screen, outcome, line=line)


@contextlib.contextmanager
def _screen(*, quiet: bool) -> Iterator[Screen]:
    """Yield the person's stdout and stderr; ``quiet``: nobody's, for logs and head.log hold all of it."""
    from gpuboard.launch.output import Screen

    with contextlib.ExitStack() as stack:
        out = err = stack.enter_context(open(os.devnull, "w", encoding="utf-8")) if quiet else None
        yield stack.enter_context(contextlib.closing(Screen(out or sys.stdout, err or sys.stderr)))


def _head(
    decided: LaunchPlan,
    nodes: Sequence[Node],
    context: Context,
    screen: Screen,
    outcome: dict[str, Any],
    *,
    line: LifeLine | None,
) -> int:
    from gpuboard.launch.head import Head
    from gpuboard.launch.run_folder import RunFolder
    from gpuboard.transport.connector import Connector

    folder = RunFolder(context.env, decided.run)
    connector = Connector(context.settings)
    read_gpus = _gpu_reader(nodes, context) if decided.options.device == "cuda" else None
    head = Head(
        decided,
        folder,
        screen,
        connector=connector,
        nodes={node.name: node for node in nodes},
        read_gpus=read_gpus,
    )
    if line is not None:
        line.then(lambda: head.stop("the board that launched it is closed"))
    try:
        return head.run()
    finally:
        if line is not None:
            line.then(lambda: None)  # what follows gives back what was reserved
        connector.close()
        view: RunView = head.view()
        outcome |= {"run": msgspec.to_builtins(view), "checks": msgspec.to_builtins(head.checks)}


def _gpu_reader(nodes: Sequence[Node], context: Context) -> Callable[[Callable[[Snapshot], None]], None]:
    """Return what starts one reading of ``nodes`` in the background; it is handed over whatever answers."""

    def start(done: Callable[[Snapshot], None]) -> None:
        from gpuboard.cluster.fleet import FIRST_READING_S, Fleet

        # To the scheduler a job's GPUs are all given away, whatever of the job uses them.
        inside = all(node.job is not None for node in nodes)
        fleet = Fleet(nodes, context.settings, interval_s=None) if inside else context.fleet(nodes)
        fleet.start()

        def read() -> None:
            fleet.wait_all(fleet.connect_s + FIRST_READING_S)
            fleet.freshen()
            done(fleet.snapshot())
            fleet.close()

        threading.Thread(target=read, name="gpus", daemon=True).start()

    return start


@contextlib.contextmanager
def _rank_map(args: argparse.Namespace, context: Context) -> Iterator[tuple[RankMap, str]]:
    """Yield the rank map and the words for where it comes from; gives back what it reserved itself."""
    from gpuboard.launch.rank_map_source import read_rank_map

    asked = args.n is not None or bool(args.gpus)
    inside = context.env.get("GPUBOARD_LEASE")
    if args.rank_map:
        if asked or args.lease:
            raise UsageError("--rank-map says which GPUs; it goes with none of --n, --gpus and --lease")
        yield read_rank_map(Path(args.rank_map)), args.rank_map
    elif args.lease or (inside and not args.gpus):
        yield _of_lease(args, context)
    elif asked or context.job is not None:
        with _reserved(args, context) as found:
            yield found
    else:
        raise UsageError("which GPUs? pass --n N, --lease ID or --rank-map FILE, or run inside `gpuboard allocate`")


def _of_lease(args: argparse.Namespace, context: Context) -> tuple[RankMap, str]:
    """Return the map of the lease named, else of the one this shell holds; with ``--n`` of a part of it."""
    from gpuboard.launch.rank_map_source import read_rank_map

    lease = args.lease or context.env["GPUBOARD_LEASE"]
    where = f"lease {lease}" if args.lease else f"GPUBOARD_LEASE={lease}"
    file = context.env.get("GPUBOARD_RANK_MAP")
    if not args.lease and args.n is None and file and Path(file).is_file():
        found = read_rank_map(Path(file))
        if found.lease == lease:  # else the shell has moved on to another lease than the file's
            return found, f"GPUBOARD_RANK_MAP={file}"
    try:
        with context.ledger(lambda: _scope(context)) as ledger:
            return ledger.existing(lease, args.n).rank_map, where
    except NoSuchLease as error:
        if args.lease:
            raise
        raise NoSuchLease(f"{error}; this shell's GPUBOARD_LEASE names it: unset that to reserve anew") from None


@contextlib.contextmanager
def _reserved(args: argparse.Namespace, context: Context) -> Iterator[tuple[RankMap, str]]:
    """Reserve for this process and yield the map; release at the end. With ``--dry-run`` nothing is taken."""
    from gpuboard.keeper.holder import identify
    from gpuboard.launch.rank_map_source import cpu_rank_map
    from gpuboard.leases.rank_map import rank_map
    from gpuboard.leases.reserve import release_own, reserve, terms_of

    request = request_of(args) if args.n is not None or args.gpus else None
    scope = context.scope()
    terms = terms_of(args.for_s, identify(os.getpid()), args.purpose, context.settings)
    held = None
    with context.ledger(lambda: scope) as ledger:
        allocator = ledger.allocator(picks=args.gpus or (), options=job_options(args), progress=progress(context))
        try:
            with allocator:
                if request is None:
                    args.n = allocator.count()
                    request = request_of(args)
                if args.dry_run:
                    choice = allocator.plan(request, args.for_s)
                    if not choice.gpus:
                        raise UsageError(f"--dry-run: Slurm chooses the GPUs when the job starts\n{choice.why}")
                    found = rank_map(None, choice.gpus, {node.name: node.address for node in scope.nodes})
                else:
                    with reserve(allocator, request, terms, wait_s=args.wait, notify=say) as allocation:
                        found, held = allocation.rank_map, allocation.lease
        except Refused as refused:
            if args.device != "cpu" or refused.refusal.gpus or args.n is None:
                raise
            say("no GPU in scope: the ranks share the CPU, and nothing is reserved")
            found = cpu_rank_map(args.n, scope.nodes, spread=scope.explicit, addresses=allocator.addresses())
    try:
        yield found, "the reservation"
    finally:
        if held is not None:
            release_own(context.ledger(), held, say)


def _scope(context: Context) -> Scope:
    """Return the nodes a run may use; inside a lease on a machine without configured nodes: those of the lease."""
    if context.job is not None:
        return context.scope()
    from gpuboard.cluster.inventory.nodes import inventory
    from gpuboard.leases.ledger import Scope

    leased = context.env.get("GPUBOARD_NODES") if context.env.get("GPUBOARD_LEASE") else None
    if leased and not context.said and not context.settings.nodes:
        return Scope(tuple(context.reach(inventory(context.settings, [leased]))))
    return Scope(tuple(context.reach(context.nodes())), explicit=bool(context.said))


def _words(text: str) -> list[str]:
    words = shlex.split(text)
    if not words:
        raise ValueError("no words to put before the interpreter")
    return words


def _duration_or_never(text: str) -> float | None:
    return None if text == "never" else parse_duration(text)
