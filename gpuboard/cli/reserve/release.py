"""`gpuboard release ID…|--mine`: end leases immediately."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from functools import partial

from gpuboard.cli.context import Context
from gpuboard.cli.see.status import settled
from gpuboard.cli.stderr import report
from gpuboard.cli.stdout import write_json
from gpuboard.errors import UsageError
from gpuboard.model.lease import gpus_text
from gpuboard.model.text import clean

_ASK_S = 5.0  # for the nodes of runs whose heads cannot be checked here

NAME = "release"
HELP = "end your leases immediately"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="lease id, or its start")
    parser.add_argument(
        "--mine", action="store_true", help="all your leases on the nodes in scope, and that of this shell"
    )
    parser.add_argument("--force", action="store_true", help="also leases that one of your runs uses, or may use")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1): released, failed, unread")
    parser.epilog = (
        "examples:\n  gpuboard release k3f9\n  gpuboard release --mine\n\n"
        "Processes on the GPUs are not killed; they are shown as overdue. A lease that is\n"
        "a Slurm job is cancelled, and Slurm kills the job's processes.\n"
        "exit codes: 0 all released and confirmed by every node; 1 some GPUs were not\n"
        "  released, or a node could not be read; 5 no such lease, or not yours (root may\n"
        "  release any); 6 no node could be reached"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Release the named leases; a failure does not prevent the release of others."""
    if args.mine == bool(args.ids):
        raise UsageError("pass either lease ids or --mine\n  `gpuboard leases` lists the leases")
    scope = partial(context.scope_of, args.ids)
    with context.ledger(scope, settle=partial(settled, context=context)) as ledger:
        found = ledger.find(args.ids)
        used = {} if args.force else _in_use(context, {lease.id for lease in found.leases})
        ended = [ledger.release(lease) for lease in found.leases if lease.id not in used]
    done = [each for each in ended if each.gpus or not each.failed]
    released = [{"id": each.lease, "gpus": each.gpus} for each in done]
    failed: list[dict[str, str | None]] = [
        {"id": each.lease, "node": node, "message": reason} for each in ended for node, reason in each.failed.items()
    ]
    failed += [
        {"id": lease.id, "node": None, "message": f"not released: {used[lease.id]}"}
        for lease in found.leases
        if lease.id in used
    ]
    if args.json:
        write_json({"schema": 1, "released": released, "failed": failed, "unread": found.unread})
    else:
        for each in done:
            print(f"released {each.lease}: {gpus_text(each.gpus) or 'it held no GPUs'}")
        if not found.leases and found.unreached is None:
            print(f"you have no leases{' on the nodes that were read' if found.unread else ''}")
    if args.mine and found.unread and found.unreached is None:
        names = ", ".join(clean(name, 64) for name in found.unread)
        report(f"not read, so leases there were not released: {names}; yours, if any, remain until their holders end")
    for failure in failed:
        report(f"lease {failure['id']}: {failure['message']}")
    if found.unreached is not None:
        raise found.unreached
    return 1 if failed or (args.mine and found.unread) else 0


def _in_use(context: Context, leases: Collection[str]) -> dict[str, str]:
    """Return, by lease, which run of this user uses it or may use it, with the remedy."""
    from gpuboard.cli.run_access import doubts
    from gpuboard.launch.runs.folder import FINAL, read_runs

    views = {view.id: view for view in read_runs(context.env) if view.lease in leases and view.state not in FINAL}
    used = {}
    for run, doubt in doubts(context, views.values(), _ASK_S).items():
        view = views[run]
        name = f"run {run} ({clean(view.target, 80)})"
        words = f"{name} may still use it ({doubt})" if doubt else f"{name} uses it"
        stop = f"`gpuboard stop {run}` ends the run, --force releases the lease all the same"
        used[str(view.lease)] = f"{words}; {stop}"
    return used
