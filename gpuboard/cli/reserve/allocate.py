"""`gpuboard allocate`: reserve GPUs and print their variables for a shell, a launcher or a program."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

from gpuboard.cli.context import Context
from gpuboard.cli.options import duration_or_zero, natural, typed
from gpuboard.cli.stderr import report, show, show_progress
from gpuboard.errors import GpuboardError, Refused, UsageError
from gpuboard.files import write_all
from gpuboard.keeper.holder import evaluator_kind, find_holder, shell_kind
from gpuboard.leases import picks
from gpuboard.leases.output.shell import FORMATS, SHELLS, fail_closed
from gpuboard.model.request import Choice, Request
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration, parse_duration, parse_size

if TYPE_CHECKING:
    from gpuboard.leases.ledger import Allocator, JobOptions
    from gpuboard.leases.output.formats import Allocation

NAME = "allocate"
HELP = "reserve GPUs; print CUDA_VISIBLE_DEVICES for the shell"

_EPILOG = """\
examples:
  # sh, bash, zsh: stops the script where nothing was reserved
  export CUDA_VISIBLE_DEVICES=; eval "$(gpuboard allocate --n 4)" || exit
  # csh, tcsh
  eval "`gpuboard allocate --n 4`"
  # fish
  gpuboard allocate --n 4 | source
  # other uses
  gpuboard allocate --n 8 --per-node 4 --model H100 --wait 2h --format json
  gpuboard allocate --gpus gpu01:0,3@gpu02:1 --for 2h --detach

The lease lasts as long as its holder, the process that evaluates the output,
but no longer than --for. On Slurm's nodes it is a Slurm job (docs/slurm.md).
exit codes: 2 usage error, 3 the request can never be met, 4 not free now,
  6 no node could be reached, 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_request(parser)
    held = parser.add_argument_group("the lease")
    add_terms(held)
    held.add_argument("--detach", action="store_true", help="no holder: the lease lasts exactly --for (required)")
    held.add_argument("--holder", type=natural, metavar="PID", help="process with which the lease ends; default: the "
                      "one that evaluates the output")  # fmt: skip
    add_slurm(parser)
    out = parser.add_argument_group("output")
    out.add_argument("--dry-run", action="store_true", help="print what would be reserved and why; reserve nothing")
    add_format(out)
    out.add_argument("--rank-map", metavar="FILE", help="also write the rank map (JSON) to FILE")
    parser.epilog = _EPILOG


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select GPUs on any number of nodes."""
    which = parser.add_argument_group("which GPUs")
    which.add_argument("--n", type=natural, metavar="N", help="number of GPUs in total")
    add_gpus(which, "exactly these, instead of --n: gpu01:0,3@gpu02:1, UUIDs, or a MIG device: gpu01:2:1")
    which.add_argument("--per-node", type=natural, metavar="K", help="exactly K GPUs on each node")
    which.add_argument("--max-nodes", type=natural, metavar="M", help="at most M nodes; default: as few as possible")
    add_filters(which)


def add_gpus(group: argparse._ArgumentGroup, text: str) -> None:
    """Add the argument that names GPUs; ``text``: its help."""
    group.add_argument("--gpus", action=_AddPicks, type=typed(picks.parse_picks), metavar="GPUS",
                       help=f"{text}; may be repeated")  # fmt: skip


def add_filters(group: argparse._ArgumentGroup) -> None:
    """Add the arguments that restrict which GPUs may be reserved."""
    group.add_argument("--model", metavar="NAME", help="model of the GPUs, a part of its name or a glob: H100, "
                       "'*A100*80GB*'")  # fmt: skip
    group.add_argument("--gpu-mem", type=typed(parse_size), metavar="SIZE", help="free memory per GPU, at least: 40GiB")
    group.add_argument("--topology", choices=("best", "any"), default="best", help="best: the "
                       "GPUs with the fastest links to each other; any: ignore links; default: best")  # fmt: skip
    group.add_argument(
        "--allow-sick",
        action="store_true",
        help="take sick GPUs where healthy ones do not suffice (`gpuboard status` shows why a GPU is sick)",
    )
    group.add_argument("--exclude", action=_AddPicks, type=typed(_exclude), default=[], metavar="GPUS",
                       help="not these: gpu01:0, UUIDs, or whole nodes: gpu02, gpu[02-04]; may be "
                       "repeated")  # fmt: skip


def add_terms(group: argparse._ArgumentGroup) -> None:
    """Add the arguments for the lease's duration and purpose, and for waiting."""
    group.add_argument("--for", dest="for_s", type=typed(parse_duration), metavar="D",
                       help="maximum duration of the lease: 30m, 8h, 2d; default: max_lease in the config (24h), for a "
                       "Slurm job time in [slurm] (1h)")  # fmt: skip
    group.add_argument("--wait", nargs="?", const=float("inf"), type=duration_or_zero, metavar="D",
                       help="wait for free GPUs, at most D (30m, 2h); without D: no limit; default: do not "
                       "wait")  # fmt: skip
    group.add_argument("--purpose", default="", metavar="TEXT", help="description of the lease for other users")


def add_slurm(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a lease that is a Slurm job."""
    group = parser.add_argument_group("on Slurm's nodes (defaults: [slurm] in the config)")
    group.add_argument("--partition", metavar="NAME", help="partition of the job")
    group.add_argument("--account", metavar="NAME", help="account that the job is charged to")
    group.add_argument("--qos", metavar="NAME", help="quality of service of the job")
    group.add_argument("--reservation", metavar="NAME", help="Slurm reservation to take the GPUs from")
    group.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="OPTION",
        help="further option for sbatch: --slurm=--constraint=a100; may be repeated",
    )


def job_options(args: argparse.Namespace) -> JobOptions:
    """Return the options of the Slurm job."""
    from gpuboard.leases.ledger import JobOptions

    return JobOptions(args.partition, args.account, args.qos, args.reservation, tuple(args.slurm))


def add_format(group: argparse._ActionsContainer) -> None:
    """Add the arguments for what is printed for a lease."""
    group.add_argument("--format", choices=FORMATS, metavar="FORMAT", help=f"output format: {', '.join(FORMATS)}; "
                       "default: that of the shell that evaluates the output")  # fmt: skip
    group.add_argument("--json", dest="format", action="store_const", const="json", help="same as --format json")
    group.add_argument("--uuid", action="store_true", help="UUIDs instead of indexes in CUDA_VISIBLE_DEVICES")


def run(args: argparse.Namespace, context: Context) -> int:
    """Reserve and print. After a failure nothing is reserved, and the caller prints the lines that fail closed."""
    try:
        return _run(args, context)
    except GpuboardError as error:
        if args.dry_run and args.format != "json" and isinstance(error, Refused):
            explain(error)
        raise


def _run(args: argparse.Namespace, context: Context) -> int:
    if args.detach and args.for_s is None:
        raise UsageError("--detach requires --for: without a holder, only --for ends the lease; add e.g. --for 8h")
    if args.detach and args.holder is not None:
        raise UsageError("--detach cannot be combined with --holder: a detached lease has no holder")
    with (
        context.ledger() as ledger,
        ledger.allocator(
            picks=args.gpus or (), options=job_options(args), progress=progress(context)
        ) as allocator,  # polls local GPUs during the remaining imports
    ):
        return _reserve(args, context, allocator)


def _reserve(args: argparse.Namespace, context: Context, allocator: Allocator) -> int:
    from gpuboard.leases.reserve import reserve, terms_of
    from gpuboard.leases.terms import write_private

    request = request_of(args)
    if args.rank_map:
        path = args.rank_map = os.path.realpath(os.path.join(context.folder(), args.rank_map))
        if not os.path.isdir(os.path.dirname(path)) or (os.path.exists(path) and not os.path.isfile(path)):
            raise UsageError(f"--rank-map {path}: must be a file in an existing folder; for stdout: --format rank-map")
    holder = None if args.detach or args.dry_run else find_holder(args.holder)
    terms = terms_of(args.for_s, holder, args.purpose, context.settings)
    form = args.format or (shell_kind(holder.pid) if holder else evaluator_kind())
    gc.freeze()  # loaded modules are permanent; __main__ has disabled collection so far
    gc.enable()
    if args.dry_run:
        return _show_plan(allocator.plan(request, args.for_s), form, context)
    with reserve(allocator, request, terms, wait_s=args.wait, notify=report) as allocation:
        if args.rank_map:
            import msgspec

            write_private(args.rank_map, msgspec.json.encode(allocation.rank_map) + b"\n")
        allocator.handing_over(allocation.lease)
        _publish(allocation, form, uuids=args.uuid)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):  # ALRM: a deferred one (__main__)
            signal.signal(number, signal.SIG_IGN)  # the shell has the lease: lines that fail closed would hide that
    _comment(allocation, form, context)
    return 0


def request_of(args: argparse.Namespace) -> Request:
    """Return the request in the arguments. Raises UsageError when they contradict each other."""
    from gpuboard.leases.policy.candidates import check
    from gpuboard.model.request import Request

    request = Request(
        n=args.n,
        picks=tuple(args.gpus or ()),
        per_node=args.per_node,
        max_nodes=args.max_nodes,
        model=args.model,
        gpu_mem=args.gpu_mem,
        topology=args.topology,
        allow_sick=args.allow_sick,
        exclude=tuple(args.exclude),
    )
    check(request)
    return request


def progress(context: Context):  # type: ignore[no-untyped-def]
    """Return a function that shows a line of progress on stderr: in place on a terminal, elsewhere each text once.

    An empty text erases the line.
    """
    shown: set[str] = set()

    def notify(message: str) -> None:
        text = clean(message, 500)
        if context.shows_progress:
            if text or shown:
                show_progress(text, context)
            if text:
                shown.add(text)
        elif text.partition(": ")[2] not in shown and text:  # a log file: changes only
            shown.add(text.partition(": ")[2])
            report(text)

    return notify


def _publish(allocation: Allocation, form: str, *, uuids: bool) -> None:
    """Write to stdout. A closed pipe is an error: its reader would not learn of the lease."""
    from gpuboard.leases.output.formats import render

    data = render(allocation, form, uuids=uuids).encode("utf-8", "surrogateescape")
    try:
        write_all(1, data)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise GpuboardError(f"cannot write to stdout: {error.strerror}; nothing is reserved") from error


def _comment(allocation: Allocation, form: str, context: Context) -> None:
    lease = allocation.lease
    if form in SHELLS and allocation.here is None and lease.job is not None:
        report(
            f"lease {lease.id} is Slurm job {lease.job} on {allocation.nodeset}; it has no GPU on this machine, so "
            "CUDA_VISIBLE_DEVICES is empty here; start ranks in it with `gpuboard launch`, or open a shell in it: "
            f"srun --jobid={lease.job} --overlap --pty bash"
        )
    elif form in SHELLS and allocation.here is None:
        first = allocation.rank_map.nodes[0].name
        report(
            f"lease {lease.id} has no GPU on this machine, so CUDA_VISIBLE_DEVICES is empty here; "
            f"its GPUs are on {allocation.nodeset}; to use them, log in there and run: "
            f'eval "$(gpuboard env {lease.id} --node {first})"'
        )
    elif context.stderr_is_tty:
        gpus = ", ".join(f"{rank.node}:{rank.index}" for rank in allocation.rank_map.ranks)
        report(f"{gpus} reserved as {lease.id}, for {format_duration(lease.remaining_s)} at most")
    from gpuboard.keeper import client as keeper

    for warning in keeper.warn(context.env):
        report(f"warning: {warning}")


def _show_plan(choice: Choice, form: str, context: Context) -> int:
    from gpuboard.model.request import slot

    nodes = dict.fromkeys(gpu.node for gpu in choice.gpus)
    gpus = "@".join(f"{name}:{','.join(slot(g.index, g.mig) for g in choice.gpus if g.node == name)}" for name in nodes)
    what = f"take {clean(gpus, 2000)}" if gpus else "ask Slurm"
    why = "\n".join(clean(line, 4000) for line in choice.why.splitlines())
    text = f"would {what}\n{why}\nnothing was reserved (--dry-run)"
    if form == "json":
        import msgspec

        from gpuboard.cli.stdout import write_json

        write_json({"schema": 1, "dry_run": True, "lease": None, "rank_map": None, **msgspec.to_builtins(choice)})
    elif form in SHELLS and not context.stdout_is_tty:
        # A shell may evaluate stdout, so text from nodes goes to stderr.
        show(text)
        sys.stdout.write(fail_closed(form, 0))
    else:
        print(text)
    return 0


def explain(refused: Refused) -> None:
    """Print the reason for every GPU on stderr."""
    from gpuboard.model.request import slot

    for gpu in refused.refusal.gpus:
        show(f"  {clean(gpu.node, 64)}:{slot(gpu.index, gpu.mig)} {gpu.state}: {clean(gpu.reason)}")


class _AddPicks(argparse.Action):
    """Collects the GPUs of a repeated option; the limits hold for all of its values together."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        """Add the new GPUs to those of earlier values."""
        found = list(getattr(namespace, self.dest) or ())
        try:
            picks.add(found, values)
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, found)


def _exclude(text: str):  # type: ignore[no-untyped-def]
    return picks.parse_picks(text, whole_nodes=True)
