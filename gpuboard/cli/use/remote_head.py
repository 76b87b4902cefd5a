"""`gpuboard launch --detach` where the run's first node is another machine: its head is started there."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.use.detached import detached_run
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.keeper import client as keeper
from gpuboard.keeper.client import LeaseRecord
from gpuboard.launch.detached.heartbeats import shared_record
from gpuboard.launch.detached.process import DetachingHead
from gpuboard.launch.detached.remote import HeadConfig, RemoteHead
from gpuboard.launch.output import LineSplitter, Screen
from gpuboard.launch.runs.folder import note
from gpuboard.model.decoding import from_json
from gpuboard.transport.connector import Connector

SLURM_REFUSED = (
    "--detach cannot be combined with GPUs that are reached through a Slurm job; a batch job needs no terminal: "
    "sbatch --gpus=N --wrap 'gpuboard launch TARGET …'"
)


def lead_elsewhere(
    config: HeadConfig, context: Context, screen: Screen, outcome: dict[str, Any], detaching: DetachingHead
) -> int:
    """Start the head on the first node and hand it what this launch has reserved; return when it has detached.

    ``config`` describes the run as seen from here. Returns 0, or the exit code of a head that ended before. ``outcome``
    becomes that of such a head; one that has detached will record its own.
    """
    first = config.nodes[0]
    if first.job is not None:
        raise UsageError(SLURM_REFUSED)
    there = [_seen_from(node, first) for node in config.nodes]
    config = msgspec.structs.replace(config, nodes=there, lease=_lease(config, detaching, context, there))
    text = LineSplitter()
    connector = Connector(context.settings)
    head = RemoteHead(first, connector, lambda printed: screen.lines("err", text.feed(printed)))
    with contextlib.ExitStack() as followed:
        try:
            head.start()
            head.send(config=config.packed())
            followed.enter_context(_interrupting(head))
            started, message = _follow(head, context, detaching)
        finally:
            head.close()
            connector.close()
            screen.lines("err", text.close())
        outcome.clear()
        if started:
            run = detached_run(message)
            note(context.env, msgspec.structs.replace(run, node=first.name))
            detaching.leave(screen, message.encode())
            return 0
    outcome |= from_json(message, dict[str, Any])
    return int(outcome["exit_code"])


@contextlib.contextmanager
def _interrupting(head: RemoteHead) -> Iterator[None]:
    """Pass interrupts to ``head`` instead of raising them.

    An exception could take the place of its last message, and leave a run that goes on there unreported.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ours = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    before = [(number, signal.signal(number, lambda *_: head.interrupt())) for number in ours]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _follow(head: RemoteHead, context: Context, detaching: DetachingHead) -> tuple[bool, str]:
    """Return whether the head has detached, and its last message: that of its detaching, or its outcome."""
    outcome = ""
    while True:
        line = head.wait()
        if line is None:
            head.send(signal=int(signal.SIGINT))
        elif line.kind == "adopted" and detaching.reserved is not None:
            # The keeper there has sent its first heartbeats, so from here on that one alone holds the lease.
            keeper.forget(detaching.reserved, context.env)
            detaching.reserved = None
            head.send(proceed=True)
        elif line.kind == "started":
            return True, line.message
        elif line.kind == "ended":
            outcome = line.message
        elif outcome:
            return False, outcome
        else:
            name = head.node.name
            if line.kind == "closed":
                raise GpuboardError(f"the run's head on {name} was killed before the run was detached")
            raise GpuboardError(
                f"connection to the run's head on {name} lost before the run was detached: {line.message}; "
                f"`gpuboard runs --node {name}` shows whether it goes on"
            )


def _seen_from(node: Node, first: Node) -> Node:
    return msgspec.structs.replace(node, host=None if node == first else node.host or node.name)


def _lease(
    config: HeadConfig, detaching: DetachingHead, context: Context, nodes: Sequence[Node]
) -> dict[str, Any] | None:
    """Return the record of the lease for the keeper of the head's node.

    That keeper takes over what this launch reserved. Any other lease stays with its own keeper, and gets heartbeats
    from both on the nodes that the run may use.
    """
    if detaching.reserved is None:
        shared = shared_record(config.whole_lease or config.plan.rank_map, nodes, context.settings)
        return None if shared is None else shared.plain()
    record = keeper.record_of(detaching.reserved, context.env)
    if record is None:
        raise GpuboardError(f"lease {detaching.reserved} has no keeper any more; no rank was started")
    return _handed(record, nodes).plain()


def _handed(record: LeaseRecord, nodes: Sequence[Node]) -> LeaseRecord:
    """Return the record for the keeper of the first node. Its end counts from now: clocks differ between machines."""
    hosts = {node.name: node.host for node in nodes}
    kept = [node._replace(host=hosts.get(node.name, node.host or node.name)) for node in record.nodes]
    left_s = record.until - time.clock_gettime(time.CLOCK_BOOTTIME)
    return record._replace(nodes=kept, holder=None, session=0, group=0, created=0.0, until=left_s)
