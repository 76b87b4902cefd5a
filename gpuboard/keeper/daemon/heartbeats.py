"""The nodes of all leases, and when each lease needs its next heartbeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuboard.keeper.daemon.calls import Calls, NodeAnswer
from gpuboard.keeper.daemon.jobs import JobCalls, JobWatch
from gpuboard.keeper.daemon.loop import KeeperLoop, boottime, log
from gpuboard.keeper.daemon.nodes import Connectors, Logins, NodeCalls, node_key
from gpuboard.keeper.record import KeptNode, LeaseRecord
from gpuboard.keeper.timing import KeeperTiming

Touched = Callable[[str, list[str], NodeAnswer], None]


class _Node:
    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.until: dict[str, float] = {}  # the end of each lease
        self.due: float | None = None
        self.failures = 0


class Nodes:
    """The nodes of all leases. ``touched`` receives a node's name, the leases of a heartbeat, and the answer."""

    def __init__(self, loop: KeeperLoop, touched: Touched, timing: KeeperTiming) -> None:
        self._loop = loop
        self._touched = touched
        self._nodes: dict[str, _Node] = {}
        self.logins = Logins(timing)
        self._connectors = Connectors(self.logins)
        self._watch = JobWatch(timing)
        self._timing = timing

    def attach(self, record: LeaseRecord, node: KeptNode) -> None:
        """Start heartbeats for a lease on ``node``."""
        known = self._known(record, node)
        known.until[record.lease] = record.until
        known.due = 0.0

    def detach(self, record: LeaseRecord, node: KeptNode) -> None:
        """Stop heartbeats for a lease on ``node``."""
        known = self._known(record, node)
        known.until.pop(record.lease, None)
        if not known.until:
            known.due = None

    def call(
        self, record: LeaseRecord, node: KeptNode, op: str, args: dict[str, Any], answered: Callable[[NodeAnswer], None]
    ) -> None:
        """Send a call to a node; ``answered`` is called on the loop."""
        self._known(record, node).calls.call(op, args, self._loop.report(answered))

    def close(self, needed: set[str]) -> None:
        """Close the connections to nodes without a lease, except those whose :func:`key_of` is in ``needed``."""
        for key in [key for key, node in self._nodes.items() if not node.until and key not in needed]:
            self._nodes.pop(key).calls.close()

    def touch(self, now: float) -> None:
        """Send the heartbeats that are due."""
        for node in self._nodes.values():
            if node.due is not None and node.due <= now:
                # Also right after a lease ends: the node then removes its claim, by its own clock.
                ends = [until + 0.5 for until in node.until.values() if until + 0.5 > now]
                node.due = min(now + node.calls.every_s, *ends) if ends else now + node.calls.every_s
                leases = sorted(node.until)
                node.calls.call("touch", {"leases": leases}, self._loop.report(self._answered(node, leases)))

    def next_due(self) -> float:
        """Return when :meth:`touch` must be called next."""
        return min(
            (node.due for node in self._nodes.values() if node.due is not None),
            default=boottime() + self._timing.heartbeat_s,
        )

    def _answered(self, node: _Node, leases: list[str]) -> Callable[[NodeAnswer], None]:
        def take(answer: NodeAnswer) -> None:
            node.failures = node.failures + 1 if answer.kind else 0
            if answer.kind and node.due is not None:
                again_s = self._timing.retry_after_s(node.failures)
                node.due = boottime() + again_s
                log(f"{node.calls.name}: heartbeat failed: {answer.message}; retry in {again_s:.0f} s")
            self._touched(node.calls.name, leases, answer)

        return take

    def _known(self, record: LeaseRecord, node: KeptNode) -> _Node:
        key = key_of(record, node)
        if key not in self._nodes:
            self._nodes[key] = _Node(self._new_calls(record, node))
        return self._nodes[key]

    def _new_calls(self, record: LeaseRecord, node: KeptNode) -> Calls:
        if record.job is None:
            return NodeCalls(node, record, self._connectors, self._timing)
        return JobCalls(node.name, record.lease, record.job, self._watch, self._timing)


def key_of(record: LeaseRecord, node: KeptNode) -> str:
    """Return the key of a lease's connection: leases on one node share it, a job has its own."""
    return node_key(node, record.settings) if record.job is None else f"job {record.job.number} of {record.lease}"
