"""Leading a run in this process: what `gpuboard launch` does once the ranks' GPUs are known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gpuboard.cli.context import Context

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.launch.detached.process import Detaching
    from gpuboard.launch.head import Head
    from gpuboard.launch.output import Screen
    from gpuboard.launch.parent_watch import Lifeline
    from gpuboard.launch.plan import LaunchPlan
    from gpuboard.launch.preflight.check import Check
    from gpuboard.launch.runs.folder import RunView
    from gpuboard.model.rankmap import RankMap
    from gpuboard.model.snapshot import Snapshot


def lead(
    decided: LaunchPlan,
    nodes: Mapping[str, Node],
    context: Context,
    screen: Screen,
    outcome: dict[str, Any],
    *,
    lease: RankMap | None,
    script_checks: Sequence[Check],
    line: Lifeline | None,
    detaching: Detaching | None,
) -> tuple[int, bool]:
    """Lead the run in this process; return its exit code, and whether its logs are complete."""
    from gpuboard.launch.head import Head
    from gpuboard.launch.restarts import Attempts
    from gpuboard.launch.runs.folder import RunFolder, prune
    from gpuboard.leases.terms import uninterrupted
    from gpuboard.transport.connector import Connector

    folder = RunFolder(context.env, decided.run)
    threading.Thread(
        target=prune, args=(context.env, *context.settings.runs.limits()), name="prune", daemon=True
    ).start()
    connector = Connector(context.settings)
    read_lease = (
        None
        if lease is None
        else _gpu_reader([nodes[node.name] for node in lease.nodes if node.name in nodes], context)
    )

    def make(plan: LaunchPlan, before: Head | None, change: str) -> Head:
        used = {config.node: nodes[config.node] for config in plan.nodes}
        return Head(
            plan,
            folder,
            screen,
            connector=connector,
            nodes=used,
            read_gpus=_gpu_reader(list(used.values()), context) if plan.options.device == "cuda" else None,
            script_checks=script_checks,
            started=None if detaching is None or detaching.left else lambda: leave(detaching),
            read_lease=read_lease,
            before=before,
            change=change,
        )

    def leave(process: Detaching) -> None:
        from gpuboard.cli.use.detached import detached_message

        process.leave(screen, detached_message(attempts.head))

    attempts = Attempts(decided, make, lease)
    if line is not None:
        why = "the board that launched it is closed" if detaching is None else "the command that launched it has ended"
        line.then(lambda: attempts.stop(why))
    try:
        code = attempts.run()
        if detaching is not None and not detaching.left and code == 0:
            screen.lines(
                "err", [f"gpuboard: run {decided.run} has ended already; `gpuboard logs last` shows its output"]
            )
        return code, attempts.logs_complete
    finally:
        if line is not None:
            line.then(lambda: None)  # the run is over; the release must not be interrupted
        with uninterrupted():  # by one more ctrl-C of a user who has stopped the run
            connector.close()
            view: RunView = attempts.head.view()
            outcome |= {"run": msgspec.to_builtins(view), "checks": msgspec.to_builtins(attempts.head.checks)}


def _gpu_reader(nodes: Sequence[Node], context: Context) -> Callable[[Callable[[Snapshot], None]], None]:
    """Return a function that polls ``nodes`` once in the background and passes on the snapshot, complete or not."""

    def start(done: Callable[[Snapshot], None]) -> None:
        from gpuboard.cluster.fleet import FIRST_READING_S

        fleet = context.fleet_of_run(nodes)
        fleet.start()

        def read() -> None:
            fleet.wait_all(fleet.connect_s + FIRST_READING_S)
            fleet.freshen()
            done(fleet.snapshot())
            fleet.close()

        threading.Thread(target=read, name="gpus", daemon=True).start()

    return start
