"""`gpuboard allocate`: reserve GPUs and print what a shell, a launcher or a program needs to use them."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
from typing import TYPE_CHECKING

from gpuboard.cli.context import Context
from gpuboard.cli.options import natural, patience, typed
from gpuboard.cli.say import say
from gpuboard.errors import GpuboardError, Refused, UsageError
from gpuboard.keeper.holder import evaluator_kind, find_holder, shell_kind
from gpuboard.leases import picks
from gpuboard.leases.output.shell import FORMATS, SHELLS, fail_closed
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration, parse_duration, parse_size

if TYPE_CHECKING:
    from gpuboard.leases.ledger import Allocator, JobOptions
    from gpuboard.leases.output.formats import Allocation
    from gpuboard.model.request import Choice, Request

NAME = "allocate"
HELP = "reserve GPUs; prints CUDA_VISIBLE_DEVICES and more for the shell that evaluates it"

_EPILOG = """\
examples:
  export CUDA_VISIBLE_DEVICES=; eval "$(gpuboard allocate --n 4)" || exit      in scripts (sh, bash, zsh)
  eval "`gpuboard allocate --n 4`"                                             csh, tcsh
  gpuboard allocate --n 4 | source                                             fish
  gpuboard allocate --n 8 --per-node 4 --model H100 --wait 2h --format json
  gpuboard allocate --gpus gpu01:0,3@gpu02:1 --for 2h --detach

The lease lives as long as the process that evaluates the output, at the longest --for. Where Slurm gives the GPUs it is
a job of Slurm's (docs/slurm.md).
exit codes: 2 usage, 3 can never be met, 4 not free now, 6 no node reached, 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_request(parser)
    held = parser.add_argument_group("how it is held")
    add_terms(held)
    held.add_argument("--detach", action="store_true", help="no holder: the lease lasts for --for, whoever ends")
    held.add_argument("--holder", type=natural, metavar="PID", help="live with this process in place of the shell")
    add_slurm(parser)
    out = parser.add_argument_group("what is printed")
    out.add_argument("--dry-run", action="store_true", help="say what would be taken and why; take nothing")
    out.add_argument("--format", choices=FORMATS, metavar="FORMAT", help=f"one of {', '.join(FORMATS)}")
    out.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    out.add_argument("--uuid", action="store_true", help="UUIDs, not indexes, in CUDA_VISIBLE_DEVICES")
    out.add_argument("--rank-map", metavar="FILE", help="write the rank map to FILE too")
    parser.epilog = _EPILOG


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which GPUs, but for how they spread over nodes where one node is meant."""
    which = parser.add_argument_group("which GPUs")
    which.add_argument("--n", type=natural, metavar="N", help="how many in all")
    which.add_argument(
        "--gpus",
        action=_AddPicks,
        type=typed(picks.parse_picks),
        metavar="GPUS",
        help="exactly these: gpu01:0,3@gpu02:1, a MIG device as gpu01:2:1, UUIDs",
    )
    which.add_argument("--per-node", type=natural, metavar="K", help="exactly K on each node")
    which.add_argument(
        "--max-nodes", type=natural, metavar="M", help="on at most M nodes; default: the fewest possible"
    )
    add_filters(which)


def add_filters(group: argparse._ArgumentGroup) -> None:
    """Add the arguments that narrow down which GPUs may be taken."""
    group.add_argument("--model", metavar="NAME", help="a part of the GPU's name, or a glob: H100, '*A100*80GB*'")
    group.add_argument("--gpu-mem", type=typed(parse_size), metavar="SIZE", help="free memory each must have: 40GiB")
    group.add_argument("--topology", choices=("best", "any"), default="best", help="best: well linked (default)")
    group.add_argument(
        "--allow-sick",
        action="store_true",
        help="take a sick GPU too (`gpuboard status` says why it is) where healthy ones do not suffice",
    )
    group.add_argument("--exclude", action=_AddPicks, type=typed(_exclude), default=[], metavar="GPUS",
                       help="none of these: gpu01:0, gpu02 or gpu[02-04] (all of them), UUIDs")  # fmt: skip


def add_terms(group: argparse._ArgumentGroup) -> None:
    """Add the arguments that say how long to hold and to wait."""
    group.add_argument("--for", dest="for_s", type=typed(parse_duration), metavar="D",
                       help="the longest it may last: 30m, 8h; default: max_lease; of a Slurm job 1h")  # fmt: skip
    group.add_argument("--wait", nargs="?", const=float("inf"), type=patience, metavar="D",
                       help="wait until it is free, at most D")  # fmt: skip
    group.add_argument("--purpose", default="", metavar="TEXT", help="shown to others")


def add_slurm(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a lease that is a job of Slurm."""
    group = parser.add_argument_group("where Slurm gives the GPUs (defaults: [slurm] in the config)")
    group.add_argument("--partition", metavar="NAME", help="the partition of the job")
    group.add_argument("--account", metavar="NAME", help="the account that pays for it")
    group.add_argument("--qos", metavar="NAME", help="its quality of service")
    group.add_argument("--reservation", metavar="NAME", help="take the GPUs from this reservation of Slurm's")
    group.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="OPTION",
        help="one more option of sbatch: --slurm=--constraint=a100; may be given several times",
    )


def job_options(args: argparse.Namespace) -> JobOptions:
    """Return the options of a scheduler's job."""
    from gpuboard.leases.ledger import JobOptions

    return JobOptions(args.partition, args.account, args.qos, args.reservation, tuple(args.slurm))


def run(args: argparse.Namespace, context: Context) -> int:
    """Reserve and print; on a failure nothing is reserved, and the caller prints the lines that fail closed."""
    try:
        return _run(args, context)
    except GpuboardError as error:
        if args.dry_run and args.format != "json" and isinstance(error, Refused):
            explain(error)
        raise


def _run(args: argparse.Namespace, context: Context) -> int:
    if args.detach and args.for_s is None:
        raise UsageError("--detach: for how long? Without a holder only --for ends the lease; add --for 8h")
    if args.detach and args.holder is not None:
        raise UsageError("--detach means no holder; leave out --holder or --detach")
    with (
        context.ledger() as ledger,
        ledger.allocator(
            picks=args.gpus or (), options=job_options(args), progress=progress(context)
        ) as allocator,  # reads local GPUs while the rest is imported
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
    gc.freeze()  # what is loaded stays; __main__ has put collections off until here
    gc.enable()
    if args.dry_run:
        return _show_plan(allocator.plan(request, args.for_s), form, context)
    with reserve(allocator, request, terms, wait_s=args.wait, notify=say) as allocation:
        if args.rank_map:
            import msgspec

            write_private(args.rank_map, msgspec.json.encode(allocation.rank_map) + b"\n")
        allocator.handing_over(allocation.lease)
        _publish(allocation, form, uuids=args.uuid)
    _comment(allocation, form, context)
    return 0


def request_of(args: argparse.Namespace) -> Request:
    """Return what the arguments ask for. Raises UsageError when they contradict each other."""
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
    """Return what shows one line of progress on stderr, in place when that is a terminal, else each one once.

    No words: the line is taken away, other things follow.
    """
    said: set[str] = set()

    def show(words: str) -> None:
        text = clean(words, 500)
        if context.stderr_is_tty:
            if text or said:
                width = shutil.get_terminal_size().columns
                print(f"\r\x1b[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)
            said.add(text)
        elif text.partition(": ")[2] not in said and text:  # a log file: only what has changed
            said.add(text.partition(": ")[2])
            say(text)

    return show


def _publish(allocation: Allocation, form: str, *, uuids: bool) -> None:
    """Write to stdout. A reader that has gone is an error here: nobody would know of the lease."""
    from gpuboard.leases.output.formats import render

    data = render(allocation, form, uuids=uuids).encode("utf-8", "surrogateescape")
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        raise
    except OSError as error:
        raise GpuboardError(f"stdout: {error.strerror}; nothing is reserved") from error


def _comment(allocation: Allocation, form: str, context: Context) -> None:
    lease = allocation.lease
    if form in SHELLS and allocation.here is None and lease.job is not None:
        say(
            f"lease {lease.id} is Slurm job {lease.job} on {allocation.nodeset}; it has no GPU on this machine, so "
            "CUDA_VISIBLE_DEVICES is empty here; use it with `gpuboard launch`, or start in it with: "
            f"srun --jobid={lease.job} --overlap --pty bash"
        )
    elif form in SHELLS and allocation.here is None:
        first = allocation.rank_map.nodes[0].name
        say(
            f"lease {lease.id} has no GPU on this machine, so CUDA_VISIBLE_DEVICES is empty here; "
            f"on {allocation.nodeset} run: gpuboard env {lease.id} --node {first}"
        )
    elif context.stderr_is_tty:
        gpus = ", ".join(f"{rank.node}:{rank.index}" for rank in allocation.rank_map.ranks)
        say(f"{gpus} reserved as {lease.id}, for {format_duration(lease.remaining_s)} at most")
    from gpuboard.keeper import client as keeper

    for words in keeper.warn(context.env):
        say(f"warning: {words}")


def _show_plan(choice: Choice, form: str, context: Context) -> int:
    from gpuboard.model.request import slot

    nodes = dict.fromkeys(gpu.node for gpu in choice.gpus)
    gpus = "@".join(f"{name}:{','.join(slot(g.index, g.mig) for g in choice.gpus if g.node == name)}" for name in nodes)
    what = f"take {clean(gpus, 2000)}" if gpus else "ask Slurm"
    why = "\n".join(clean(line, 4000) for line in choice.why.splitlines())
    words = f"would {what}\n{why}\nnothing was taken (--dry-run)"
    if form == "json":
        import msgspec

        sys.stdout.write(msgspec.json.encode({"schema": 1, "dry_run": True, **msgspec.to_builtins(choice)}).decode())
        print()
    elif form in SHELLS and not context.stdout_is_tty:
        # A shell may evaluate what we print: words that come from nodes must not be among it.
        print(words, file=sys.stderr)
        sys.stdout.write(fail_closed(form, 0))
    else:
        print(words)
    return 0


def explain(refused: Refused) -> None:
    """Print the reason for every GPU on stderr."""
    from gpuboard.model.request import slot

    for gpu in refused.refusal.gpus:
        print(f"  {clean(gpu.node, 64)}:{slot(gpu.index, gpu.mig)} {gpu.state}: {clean(gpu.reason)}", file=sys.stderr)


class _AddPicks(argparse.Action):
    """Takes what an option that may be given several times names, within the bounds of one."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        """Add what was named now to what was named before."""
        found = list(getattr(namespace, self.dest) or ())
        try:
            picks.add(found, values)
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, found)


def _exclude(text: str):  # type: ignore[no-untyped-def]
    return picks.parse_picks(text, whole_nodes=True)
