"""`gpuboard launch`: reserve GPUs, start one rank per GPU, supervise, explain failures, release."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.options import duration_or_zero, typed, whole
from gpuboard.cli.reserve.allocate import add_request, add_slurm, add_terms, job_options, progress, request_of
from gpuboard.cli.status_file import OPTION, outcome_of, recorded
from gpuboard.cli.stderr import report
from gpuboard.cli.use.lead import lead
from gpuboard.cli.use.planned import planned, without_gpus
from gpuboard.errors import NoSuchLease, Refused, UsageError
from gpuboard.launch.parent_watch import Lifeline
from gpuboard.model.request import Request
from gpuboard.model.text import clean, quoted
from gpuboard.model.units import parse_duration

if TYPE_CHECKING:
    from gpuboard.launch.detached.process import DetachingHead
    from gpuboard.launch.output import Screen
    from gpuboard.launch.plan import LaunchPlan
    from gpuboard.leases.ledger import Allocator
    from gpuboard.model.rankmap import RankMap

NAME = "launch"
HELP = "start distributed PyTorch, one rank per GPU; explain failures"

_CLOSED = "stdout is closed, which does not end the run: the rest of the ranks' output is in its logs only"
_EPILOG = """\
TARGET is a script (train.py), a module (-m package.module), or a function
(package.module:function) that each rank calls inside the process group, and
that takes the arguments or parses sys.argv; with --no-python any program.
TARGET gets all arguments after it, so options of gpuboard come first.

GPUs come from the first of these that is given: --rank-map; --lease; --gpus;
the lease of this shell (GPUBOARD_LEASE; --n takes N of its GPUs); --n; all GPUs
of the Slurm job in which launch runs. Options that select GPUs (--per-node,
--model, --exclude, ...) are for GPUs that launch reserves, not for a lease.

examples:
  gpuboard launch --n 4 train.py --lr 3e-4
  gpuboard launch --lease k3f9 -m experiments.train
  gpuboard launch --rank-map map.json --device cpu package.train:main
  gpuboard launch --n 4 --no-python ./train.sh"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s [--n N | --lease ID | --rank-map FILE] [options]\n       TARGET [ARGS …]"
    add_request(parser)
    held = parser.add_argument_group("GPUs reserved before")
    held.add_argument("--lease", metavar="ID", help="use the GPUs of your lease ID; with --n: N of them")
    held.add_argument("--rank-map", metavar="FILE", help="use the GPUs of this rank map, e.g. from `allocate`")
    add_terms(parser.add_argument_group("the lease"))
    add_slurm(parser)
    run = parser.add_argument_group("ranks")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: gloo, --n ranks "
                     "without GPUs; reserves nothing, except through Slurm or with --gpus; default: cuda")  # fmt: skip
    run.add_argument("--python", metavar="PATH", help="Python interpreter of the ranks; default: that of VIRTUAL_ENV, "
                     "CONDA_PREFIX or PATH on the nodes")  # fmt: skip
    run.add_argument("--env", action="append", default=[], metavar="K[=V]", help="set variable K for the ranks, "
                     "to V or to its local value; may be repeated")  # fmt: skip
    run.add_argument("--wrap", type=typed(_command_line), default=[], metavar="WORDS",
                     help="command line in front of the interpreter: 'apptainer exec --nv x.sif'")  # fmt: skip
    run.add_argument("--grace", type=duration_or_zero, default=30.0, metavar="D",
                     help="time from SIGTERM to SIGKILL; default: 30s")  # fmt: skip
    run.add_argument("--helper-grace", type=duration_or_zero, default=30.0, metavar="D",
                     help="after success, time for processes that ranks left running; default: 30s")  # fmt: skip
    run.add_argument("--lost-head", type=typed(_duration_or_never), default=60.0, metavar="D|never",
                     help="stop the ranks after D without a connection to this command; default: 60s")  # fmt: skip
    run.add_argument("--on-stall", choices=("report", "kill"), default="report",
                     help="kill: stop a run in which nothing moves, exit code 1; default: report it")  # fmt: skip
    run.add_argument("--max-restarts", type=whole(0, 10**6), default=0, metavar="N", help="after a failure, start the "
                     "ranks again, at most N times, without GPUs that cannot be used if the lease has others; "
                     "default: 0")  # fmt: skip
    run.add_argument("--min-n", type=whole(1, 10**6), metavar="M", help="with --max-restarts: go on with fewer "
                     "ranks, at least M, where GPUs or nodes are lost; default: never fewer")  # fmt: skip
    run.add_argument("--stdin", nargs="?", const=0, type=whole(0, 10**6), metavar="RANK",
                     help="pass standard input on to rank RANK, without a number to rank 0; default: a terminal to the "
                     "only rank of a run, else /dev/null for all")  # fmt: skip
    run.add_argument("--no-python", action="store_true", help="TARGET is a program, started once per rank as it is; "
                     "needs neither Python nor torch on the nodes")  # fmt: skip
    run.add_argument("--no-preimport", dest="preimport", action="store_false", help="do not import torch before the "
                     "target; never done for a target that changes os.environ before")  # fmt: skip
    run.add_argument("--detach", action="store_true", help="return once the ranks run; the run goes on without "
                     "this terminal: see `attach`, `logs -f` and `stop`")  # fmt: skip
    run.add_argument("--skip", action="append", default=[], metavar="CHECK", help="do not let this preflight check "
                     "(named as in its message) prevent the launch; may be repeated")  # fmt: skip
    run.add_argument("--preflight-only", action="store_true", help="print all preflight checks, start no rank, "
                     "and exit with 0 or 7")  # fmt: skip
    run.add_argument("--dry-run", action="store_true", help="print the launch plan and warnings about "
                     "the script; reserve and start nothing")  # fmt: skip
    run.add_argument("--json", action="store_true", help="print the outcome as JSON on stdout, the output of the ranks "
                     "on stderr; with --dry-run: print the plan as JSON")  # fmt: skip
    run.add_argument(OPTION, metavar="FILE", help="write the outcome to FILE as JSON, also after a failure")
    # For the board: a given run id, output to the run's folder only, and an end of the run when the board ends.
    run.add_argument("--run-id", help=argparse.SUPPRESS)
    run.add_argument("--head", action="store_true", help=argparse.SUPPRESS)  # started by agent/launch/head_start.py
    run.add_argument("--life-line", type=whole(0, 10**6), metavar="FD", help=argparse.SUPPRESS)
    parser.add_argument("-m", dest="target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument(
        "target", nargs=argparse.REMAINDER, metavar="TARGET [ARGS …]", help="code of the ranks: see below"
    )
    parser.epilog = _EPILOG


def run(args: argparse.Namespace, context: Context) -> int:
    """Reserve, start, watch, release; return the exit code of the run."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # like ctrl-C until the head takes over: release, then exit
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    if args.head:
        from gpuboard.cli.use.served_head import serve_head  # late: no command of a user

        return serve_head(context)
    outcome = outcome_of(NAME)
    line = None
    detaching = None
    if args.detach:
        from gpuboard.cli.use.detached import await_detached  # late, as all of detached/: most runs stay attached
        from gpuboard.launch.detached.process import WaitingCommand, fork

        side = fork()
        if isinstance(side, WaitingCommand):
            return await_detached(side, context, as_json=args.json)
        detaching, line = side, side.line
    if args.life_line is not None:
        try:
            line = Lifeline(args.life_line, lambda: os.kill(os.getpid(), signal.SIGINT))
        except OSError as error:
            raise UsageError(f"--life-line {args.life_line}: {error.strerror}") from error
    with recorded(outcome, args.status_file, printed=args.json and not args.dry_run):
        code = _launch(args, context, outcome, line, detaching)
        if outcome:
            outcome["exit_code"] = code
    return code


def _launch(
    args: argparse.Namespace,
    context: Context,
    outcome: dict[str, Any],
    line: Lifeline | None,
    detaching: DetachingHead | None,
) -> int:
    from gpuboard.launch import environ, plan, rank_map_source, target
    from gpuboard.launch.lint.script import script_checks
    from gpuboard.launch.preflight.check import check_text
    from gpuboard.launch.runs import folder as run_folder

    if args.no_python and args.python:
        raise UsageError("--python cannot be combined with --no-python, which starts no interpreter")
    if args.dry_run and args.preflight_only:
        raise UsageError("--dry-run, which connects to no node, cannot be combined with --preflight-only")
    if args.stdin is not None and args.max_restarts:
        raise UsageError("--stdin cannot be combined with --max-restarts: what one attempt reads is gone for the next")
    if args.min_n is not None and not args.max_restarts:
        raise UsageError("--min-n needs --max-restarts N: only a restart can change the number of ranks")
    _check_skipped(args.skip)
    if detaching is not None:
        _check_detached(args)
    parsed = target.parse_target(args.target, program=args.no_python)
    if sys.stdin is None and args.stdin is not None:
        raise UsageError("--stdin: the standard input of this command is closed")
    sent = environ.sent(context.env, args.env)
    options = plan.LaunchOptions(
        device=args.device,
        python=args.python,
        wrap=tuple(args.wrap),
        grace_s=args.grace,
        lost_head_s=args.lost_head,
        helper_grace_s=args.helper_grace,
        on_stall=args.on_stall,
        stdin_rank=args.stdin,
        preimport=args.preimport,
        skip=tuple(args.skip),
        preflight_only=args.preflight_only,
        max_restarts=args.max_restarts,
        min_ranks=args.min_n,
    )
    scope = context.scope_of([args.lease or context.env.get("GPUBOARD_LEASE", "")])
    sent |= environ.of_job(context.env) if context.job is not None else {}
    with (
        _screen(quiet=args.run_id is not None, stdout=not (args.json or args.detach)) as screen,
        _rank_map(args, context, detaching) as (rank_map, where),
    ):
        nodes = rank_map_source.nodes_of(rank_map, scope.nodes)
        plan.check_rank_map(rank_map, nodes, where, args.device)
        if args.min_n is not None and args.min_n > rank_map.world_size:
            raise UsageError(f"--min-n {args.min_n} is more than the run has ranks: {rank_map.world_size}")
        alone = rank_map.world_size == 1 and args.run_id is None and not args.detach
        if args.stdin is None and alone and sys.stdin and sys.stdin.isatty():
            options = msgspec.structs.replace(options, stdin_rank=0)
        decided = plan.launch_plan(
            rank_map,
            parsed,
            run=args.run_id or run_folder.new_run_id(),
            secret=secrets.token_hex(16),
            cwd=context.folder(),
            environ=sent,
            options=options,
        )
        here = [config.cuda_visible_devices for config in decided.nodes if nodes[config.node].host is None]
        if ignored := environ.ignored_gpus(context.env, here):
            report(f"ignoring CUDA_VISIBLE_DEVICES={clean(ignored, 80)} from your environment; choose GPUs with --gpus")
        warnings = script_checks(parsed, Path(context.folder()))
        if args.dry_run:
            checks = msgspec.to_builtins(warnings)
            shown = {"schema": 1, "dry_run": True, **plan.shown(decided), "checks": checks}
            print(json.dumps(shown, indent=1) if args.json else plan.plan_text(decided))
            for check in warnings:
                report(check_text(check))
            return 0
        lease = _whole_lease(decided, context)
        if lease is not None:
            nodes |= rank_map_source.nodes_of(lease, scope.nodes)
        used = [nodes[config.node] for config in decided.nodes]
        if (stale := environ.stale(context.env)) and all(node.host is not None for node in used):
            # a supervisor on this machine would report them
            it = "it" if len(stale) == 1 else "them"
            report(f"ignoring {', '.join(stale)} from your environment; gpuboard sets {it} for each rank")
        if detaching is not None and used[0].host is not None:
            from gpuboard.cli.use.remote_head import lead_elsewhere
            from gpuboard.launch.detached.remote import HeadConfig

            file = args.status_file and os.path.abspath(args.status_file)
            spare = [nodes[node.name] for node in lease.nodes if node.name in nodes] if lease is not None else []
            known = [*used, *(node for node in spare if node not in used)]
            config = HeadConfig(decided, known, context.settings, warnings, file, whole_lease=lease)
            return lead_elsewhere(config, context, screen, outcome, detaching)
        if detaching is not None and detaching.reserved is None:
            from gpuboard.launch.detached.heartbeats import share, shared_record

            record = shared_record(lease or rank_map, list(nodes.values()), context.settings)
            if record is not None:
                share(record, context.env, used[0].name, report)
        code, in_logs = lead(
            decided,
            nodes,
            context,
            screen,
            outcome,
            lease=lease,
            script_checks=warnings,
            line=line,
            detaching=detaching,
        )
    unseen = args.run_id is not None or (detaching is not None and detaching.left)
    delivered = in_logs if unseen else not screen.failed  # known once the screen is closed
    return code or int(not delivered)


@contextlib.contextmanager
def _screen(*, quiet: bool, stdout: bool) -> Iterator[Screen]:
    """Yield the screen of stdout and stderr, or without ``stdout`` of stderr alone.

    ``quiet``: of /dev/null, as the logs and head.log contain all output.
    """
    from gpuboard.launch.output import Screen

    with contextlib.ExitStack() as stack:
        null = stack.enter_context(open(os.devnull, "w", encoding="utf-8")) if quiet else None
        out = sys.stdout if stdout else sys.stderr
        yield stack.enter_context(contextlib.closing(Screen(null or out, null or sys.stderr, gone=_CLOSED)))


def _whole_lease(plan: LaunchPlan, context: Context) -> RankMap | None:
    """Return the map of the whole lease if restarts may use GPUs other than the run's, or fewer; else None."""
    from gpuboard.leases.terms import stored_rank_map

    lease = plan.rank_map.lease
    whole = stored_rank_map(context.env, lease) if plan.options.max_restarts and lease is not None else None
    if whole is not None and whole.world_size > plan.rank_map.world_size:
        return whole
    return plan.rank_map if plan.options.min_ranks is not None else None


@contextlib.contextmanager
def _rank_map(
    args: argparse.Namespace, context: Context, detaching: DetachingHead | None
) -> Iterator[tuple[RankMap, str]]:
    """Yield the rank map and a description of its source; release what was reserved for this launch."""
    from gpuboard.launch.rank_map_source import read_rank_map

    requested = args.n is not None or bool(args.gpus)
    shell_lease = context.env.get("GPUBOARD_LEASE")
    if args.rank_map:
        if requested or args.lease:
            raise UsageError("--rank-map cannot be combined with --n, --gpus or --lease")
        _check_unselected(args, "--rank-map")
        yield read_rank_map(Path(args.rank_map)), args.rank_map
    elif args.lease or (shell_lease and not args.gpus):
        yield _of_lease(args, context)
    elif requested or context.job is not None:
        with _reserved(args, context, detaching) as found:
            yield found
    else:
        raise UsageError("no GPUs requested; pass --n N, --gpus GPUS, --lease ID or --rank-map FILE, before TARGET")


def _of_lease(args: argparse.Namespace, context: Context) -> tuple[RankMap, str]:
    """Return the rank map of ``--lease``, else of this shell's lease; with ``--n`` of N of its GPUs."""
    from gpuboard.launch.rank_map_source import read_rank_map

    lease = args.lease or context.env["GPUBOARD_LEASE"]
    _check_unselected(args, "--lease" if args.lease else f"GPUBOARD_LEASE={lease}; unset it to reserve other GPUs")
    where = f"lease {lease}" if args.lease else f"GPUBOARD_LEASE={lease}"
    file = context.env.get("GPUBOARD_RANK_MAP")
    if not args.lease and args.n is None and file and Path(file).is_file():
        found = read_rank_map(Path(file))
        if found.lease == lease:  # otherwise the shell has another lease by now
            return found, f"GPUBOARD_RANK_MAP={file}"
    try:
        with context.ledger(lambda: context.scope_of([lease])) as ledger:
            return ledger.existing(lease, args.n).rank_map, where
    except NoSuchLease as error:
        if args.lease or error.exit_code != NoSuchLease.exit_code:
            raise
        raise NoSuchLease(f"{error}; unset GPUBOARD_LEASE, which names it, to reserve other GPUs") from None


@contextlib.contextmanager
def _reserved(
    args: argparse.Namespace, context: Context, detaching: DetachingHead | None
) -> Iterator[tuple[RankMap, str]]:
    """Reserve for this process, yield the rank map, release at the end. ``--dry-run`` reserves nothing."""
    from gpuboard.keeper.holder import identify
    from gpuboard.leases.reserve import release_own, reserve, terms_of

    request = request_of(args) if args.n is not None or args.gpus else None
    scope = context.scope()
    terms = terms_of(args.for_s, identify(os.getpid()), args.purpose, context.settings)
    if detaching is not None and all(node.host is not None for node in scope.nodes):  # the head runs on one of them
        terms = msgspec.structs.replace(terms, moves=True)
    held = None
    with context.ledger(lambda: scope) as ledger:
        if detaching is not None and context.job is None and not ledger.rest().nodes:
            from gpuboard.cli.use.remote_head import SLURM_REFUSED

            raise UsageError(SLURM_REFUSED)
        allocator = ledger.allocator(picks=args.gpus or (), options=job_options(args), progress=progress(context))
        on_cpu = args.device == "cpu" and request is not None and not args.gpus
        with allocator:
            if (
                request and on_cpu and args.run_id is None and ledger.rest() == scope
            ):  # the board reserves what it shows
                found = without_gpus(request, scope, allocator)
            elif args.dry_run:
                request = request or _whole(args, allocator)
                found = planned(request, allocator, args.for_s)
            else:
                request = request or _whole(args, allocator)
                try:
                    with reserve(allocator, request, terms, wait_s=args.wait, notify=report) as allocation:
                        found, held = allocation.rank_map, allocation.lease
                except Refused as refused:
                    if not on_cpu or refused.refusal.gpus:
                        raise
                    report("no GPU in scope: the ranks run on the CPU, and nothing is reserved")
                    found = without_gpus(request, scope, allocator)
    if detaching is not None and held is not None:
        detaching.reserved = held.id
    try:
        yield found, "the reservation"
    finally:
        if held is not None and (detaching is None or detaching.reserved is not None):
            release_own(context.ledger(), held, report)


def _whole(args: argparse.Namespace, allocator: Allocator) -> Request:
    args.n = allocator.count()
    return request_of(args)


def _check_detached(args: argparse.Namespace) -> None:
    """Raise UsageError for options of a launch that needs this terminal, or that starts nothing."""
    for option, given in {
        "--stdin": args.stdin is not None,
        "--preflight-only": args.preflight_only,
        "--dry-run": args.dry_run,
        "--run-id": args.run_id is not None,
        "--life-line": args.life_line is not None,
    }.items():
        if given:
            raise UsageError(f"--detach cannot be combined with {option}")


def _check_skipped(names: Sequence[str]) -> None:
    """Raise UsageError for a name of ``--skip`` that is no check, or one without which no rank can run."""
    from gpuboard.launch.preflight.checks import REQUIRED, SKIPPABLE

    for name in names:
        if name not in SKIPPABLE:
            why = "no rank can run without it" if name in REQUIRED else "no such check"
            raise UsageError(f"--skip {quoted(name)}: {why}; checks to skip: {', '.join(SKIPPABLE)}")


def _check_unselected(args: argparse.Namespace, source: str) -> None:
    """Raise UsageError for options that select GPUs to be reserved, where ``source`` has them."""
    options = {
        "--gpus": args.gpus,
        "--per-node": args.per_node,
        "--max-nodes": args.max_nodes,
        "--model": args.model,
        "--gpu-mem": args.gpu_mem,
        "--topology": args.topology != "best",
        "--allow-sick": args.allow_sick,
        "--exclude": args.exclude,
    }
    given = [option for option, value in options.items() if value]
    if given:
        raise UsageError(f"{', '.join(given)} cannot be combined with {source}")


def _command_line(text: str) -> list[str]:
    words = shlex.split(text)
    if not words:
        raise ValueError("empty command line")
    return words


def _duration_or_never(text: str) -> float | None:
    return None if text == "never" else parse_duration(text)
