"""The option --node of commands on runs, and how such a command reaches its run."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from gpuboard.cli.context import Context
from gpuboard.errors import UsageError
from gpuboard.launch.runs.access import LocalRun, RunAccess
from gpuboard.launch.runs.folder import FINAL, RunView, alive, find_run, note, read_runs, without_head
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.launch.runs.index import RunEntry
    from gpuboard.launch.runs.remote import NodeRuns


def add_node(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the node of a run's head."""
    parser.add_argument(
        "--node", metavar="NAME", help="a run that was started on this node; default: on this host, or on the node "
        "that a shared home names"
    )  # fmt: skip


@contextlib.contextmanager
def opened_run(context: Context, name: str, node: str | None, *, stored: bool = False) -> Iterator[RunAccess]:
    """Yield the run of ``name``: on ``node``, else of this host's folder, through its head's node if that is another.

    ``stored``: the files in this host's folder suffice. Raises UsageError, NodeLost.
    """
    if node is not None:
        nodes = context.named(node)
        if len(nodes) != 1:
            raise UsageError(f"--node takes one node here, and {node} are {len(nodes)}")
        with _connected(nodes[0], context) as place:
            yield place.find(name)
        return
    view = find_run(context.env, name)
    noted = view.node is not None  # its folder is there
    if noted or (not stored and view.state not in FINAL and alive(view.head) is None):
        from gpuboard.launch.runs.remote import RemoteRun, SharedRun, node_of

        if view.node is not None:
            found = context.named(view.node)
        else:
            host = node_of(context.known(), view.head.host)
            found = [] if host is None else context.reach([host])
        if found:
            with _connected(found[0], context) as place:
                yield SharedRun(RemoteRun(place, view.id), LocalRun(view))
            return
    yield LocalRun(view)


def listed_runs(context: Context) -> tuple[list[RunView], dict[str, str]]:
    """Return the runs of this host, and the nodes that gave no answer, with the reason.

    Of detached runs on nodes, which it has only noted, those nodes give the state.
    """
    found = read_runs(context.env)
    noted = {view.id: view.node for view in found if view.node is not None and view.state not in FINAL}
    if not noted:
        return found, {}
    from gpuboard.launch.runs.remote import runs_on  # late: most runs are this host's

    nodes = [node for node in context.scope().nodes if node.name in noted.values()]
    there, failed = runs_on(nodes, context.settings, context.new_scheduler())
    present = {view.id: view for view in there if view.id in noted}
    answered = {node.name for node in nodes} - failed.keys()
    for view in found:
        if view.id in noted and view.node in answered and view.id not in present:
            text = f"its folder on {clean(view.node)} does not exist any more; how the run ended is not known"
            present[view.id] = without_head(view, text)
    for view in present.values():
        note(context.env, view)
    return [present.get(view.id, view) for view in found], failed


def doubts(context: Context, views: Collection[RunView], limit_s: float) -> dict[str, str]:
    """Return which of ``views``, runs in progress by their files here, have not ended: by id, why that is uncertain.

    "" if it is certain. The nodes of heads that cannot be checked here are asked, all at once, for ``limit_s`` at most.
    """
    found = {view.id: "" for view in views}
    elsewhere = {view.id: view for view in views if view.node is not None or alive(view.head) is None}
    if not elsewhere:
        return found
    from gpuboard.cluster.inventory.nodes import named
    from gpuboard.launch.runs.remote import ask_all, node_of  # late: most runs are this host's

    known = context.known()
    runs: dict[Node, list[str]] = {}
    for view in elsewhere.values():
        node = named(view.node, known)[0] if view.node is not None else node_of(known, view.head.host)
        if node is None:
            found[view.id] = f"its head is on {clean(view.head.host)}, which is not one of the nodes"
        else:
            runs.setdefault(node, []).append(view.id)

    def states(place: NodeRuns) -> dict[str, RunEntry]:
        there = {}
        for run in runs[place.node]:
            with contextlib.suppress(UsageError):  # its folder was removed: only those of ended runs are
                there[run] = place.one(run)
        return there

    done, failed = ask_all(list(runs), context.settings, context.new_scheduler(), states, limit_s)
    for node, ids in runs.items():
        for run in ids:
            if node.name in failed:
                why = clean(str(failed[node.name]).removeprefix(f"{node.name}: "), 200)
                found[run] = f"{node.name} was asked and gave no answer: {why}"
            elif (entry := done[node.name].get(run)) is None or not entry.live:
                del found[run]
                if entry is not None and elsewhere[run].node is not None:
                    note(context.env, entry.view)
    return found


@contextlib.contextmanager
def _connected(node: Node, context: Context) -> Iterator[NodeRuns]:
    from gpuboard.launch.runs.remote import connected  # late: most runs are this host's

    with connected([node], context.settings, context.new_scheduler()) as (place,):
        yield place
