"""Two snapshots and their leases → what happened in between (pure).

A node's GPUs are compared with those of its last snapshot in which it was up: what an unreachable node shows proves
nothing. What was already so when a node is first seen is no event. Unchanged lists of GPUs are recognised by identity.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gpuboard.model.gpu import xid_words
from gpuboard.model.lease import Lease, LeaseList
from gpuboard.model.request import slots
from gpuboard.model.snapshot import GpuView, NodeView, Snapshot, judged
from gpuboard.model.text import program
from gpuboard.model.units import format_duration, ranges, seconds_of
from gpuboard.recording.events import NODES_MAX, ClusterEvent, Kind

OF_NODES = frozenset({"unreachable", "stale", "back"})
_EARLY_S = 5.0  # a lease that ends at most this long before its time has expired
_LOST = "GPU lost: "


class Baseline(msgspec.Struct, frozen=True, gc=False):
    """What the next snapshot is compared with. Replaced by ``look``, never changed."""

    nodes: Mapping[str, NodeView] = {}  # as of the newest snapshot, or the last one in which it was not connecting
    up: Mapping[str, NodeView] = {}  # as of the last snapshot in which it was up
    down_since: Mapping[str, str] = {}  # of nodes that are not up: when that began here
    bad: frozenset[str] = frozenset()  # UUIDs of broken GPUs
    leases: Mapping[tuple[str, str], Lease] = {}  # by id and owner; those on unread nodes stay
    started: bool = False


def look(seen: Baseline, snapshot: Snapshot, leases: LeaseList) -> tuple[list[ClusterEvent], Baseline]:
    """Return what has happened since ``seen``, each event of one node or lease, and what to compare with next."""
    at = snapshot.at
    events: list[ClusterEvent] = []
    nodes, up, since, bad = dict(seen.nodes), dict(seen.up), dict(seen.down_since), set(seen.bad)
    for node in snapshot.nodes:
        name = node.name
        before = seen.nodes.get(name)
        if before is not None and judged(node) is judged(before) and node.state == before.state:
            nodes[name] = node
            continue
        if node.connecting:
            continue
        nodes[name] = node
        if before is not None and before.state != node.state:
            events += _of_node(before, node, at, since.get(name))
        if node.state != "up":
            since.setdefault(name, at)
            continue
        since.pop(name, None)
        last = up.get(name)
        up[name] = node
        if last is None:
            bad.update(gpu.uuid for gpu in judged(node) if gpu.state == "broken")
        elif judged(last) is not judged(node):
            events += _of_gpus(last, node, at, bad)
    ended, known = _of_leases(seen, snapshot, leases)
    return events + ended, Baseline(nodes, up, since, frozenset(bad), known, started=True)


def _of_node(before: NodeView, node: NodeView, at: str, since: str | None) -> Iterator[ClusterEvent]:
    """Yield the change of a node's connection."""
    if node.state == "up":
        away = f"after {format_duration(max(0.0, seconds_of(at) - seconds_of(since)))}" if since else ""
        yield ClusterEvent(at, "back", (node.name,), words=away)
    elif node.state == "unreachable" or before.state == "up":
        yield ClusterEvent(at, node.state, (node.name,), words=node.error or "")


def _of_gpus(before: NodeView, node: NodeView, at: str, bad: set[str]) -> Iterator[ClusterEvent]:
    """Yield what happened to the GPUs of a node; those that are broken are kept in ``bad``."""
    # Identity is enough in the usual case, in which only numbers have changed; there are thousands of GPUs.
    old_gpus, gpus = judged(before), judged(node)
    if len(old_gpus) == len(gpus) and all(
        gpu.uuid is old.uuid
        and gpu.state is old.state
        and gpu.error is old.error
        and gpu.xids is old.xids
        and gpu.sick is old.sick
        and (gpu.flags is old.flags or "rogue" not in gpu.flags)
        for old, gpu in zip(old_gpus, gpus, strict=True)
    ):
        return
    for old, gpu in _pairs(before, node):
        if gpu is None:
            if before.source == node.source != "slurm" and old.uuid not in bad:
                bad.add(old.uuid)
                yield ClusterEvent(at, "lost", (node.name,), str(old.index), words="the node no longer lists it")
        elif old is not gpu:
            for kind, user, words in _of_gpu(old, gpu, bad):
                yield ClusterEvent(at, kind, (node.name,), str(gpu.index), user, words)


def _of_gpu(old: GpuView, gpu: GpuView, bad: set[str]) -> Iterator[tuple[Kind, str, str]]:
    """Yield kind, user and words of what happened to a GPU."""
    if gpu.state == "broken" and gpu.uuid not in bad:
        bad.add(gpu.uuid)
        yield "lost" if gpu.reason.startswith(_LOST) else "broken", "", gpu.reason.removeprefix(_LOST)
    elif gpu.uuid in bad and gpu.state not in {"broken", "unknown"}:
        bad.discard(gpu.uuid)
        yield "recovered", "", f"now {gpu.state}"
    elif gpu.error is not None and old.error is None and gpu.uuid not in bad:
        yield "error", "", gpu.error
    if gpu.xids and old.xids is not None:
        known = {(xid.code, xid.at) for xid in old.xids}
        for xid in reversed(gpu.xids):
            if (xid.code, xid.at) not in known:
                yield "xid", "", xid_words(xid.code)
    already = {_kind_of(reason) for reason in old.sick}
    for reason in gpu.sick:
        if not reason.startswith("XID ") and _kind_of(reason) not in already:  # an XID is an event of its own
            yield "sick", "", reason
    known_users = {process.user for process in old.processes or () if process.rogue}
    for process in gpu.processes or ():
        if process.rogue and process.user not in known_users:
            known_users.add(process.user)
            yield "rogue", process.user or "", program(process.command) or "process"


def _pairs(before: NodeView, node: NodeView) -> Iterator[tuple[GpuView, GpuView | None]]:
    """Yield each GPU of ``before`` with its newest view; None where the node no longer lists it."""
    found = {gpu.uuid: gpu for gpu in judged(node)}
    yield from ((old, found.get(old.uuid)) for old in judged(before))


def _kind_of(reason: str) -> str:
    """Return a reason without its numbers: a growing count of errors is one event."""
    return re.sub(r"[0-9]+", "", reason)


def _of_leases(
    seen: Baseline, snapshot: Snapshot, leases: LeaseList
) -> tuple[list[ClusterEvent], dict[tuple[str, str], Lease]]:
    """Return the leases that have ended as events, and those that stand or may still stand."""
    known = {(lease.id, lease.owner): lease for lease in leases.leases}
    hidden = set(leases.unread)
    events = []
    for key, lease in seen.leases.items():
        if key in known:
            continue
        nodes = tuple(dict.fromkeys([*(gpu.node for gpu in lease.gpus), *lease.nodes]))
        if not hidden.isdisjoint(nodes) or lease.ledger in leases.outdated:
            known[key] = lease
            continue
        left_s = seconds_of(lease.until) - seconds_of(snapshot.at)
        expired = left_s <= _EARLY_S
        words = f"lease {lease.id}: {len(lease.gpus)} GPU{'s' * (len(lease.gpus) != 1)}"
        words += "" if expired else f", {format_duration(left_s)} before its end"
        found = [(gpu.index, gpu.mig) for gpu in lease.gpus if gpu.index is not None] if len(nodes) == 1 else []
        kind = "expired" if expired else "ended"
        events.append(ClusterEvent(snapshot.at, kind, nodes, slots(found), lease.owner, words))
    return events, known


def merged(events: Sequence[ClusterEvent]) -> list[ClusterEvent]:
    """Return events of one moment with those that are alike as one: an error on eight GPUs, 200 nodes unreachable."""
    alike: dict[tuple[str, str, str], list[ClusterEvent]] = {}
    for event in events:
        words = "" if event.kind in OF_NODES else event.words
        alike.setdefault((event.kind, event.user, words), []).append(event)
    return [_one(same) for same in alike.values()]


def _one(events: Sequence[ClusterEvent]) -> ClusterEvent:
    first = events[0]
    if len(events) == 1:
        return first
    nodes = tuple(dict.fromkeys(name for event in events for name in event.nodes))
    (words, often), *others = Counter(event.words for event in events).most_common()
    if others:
        words += f" ({often} of {len(events)})"
    indexes = [int(event.gpus) for event in events if event.gpus.isdecimal()]
    gpus = ranges(set(indexes)) if len(nodes) == 1 and len(indexes) == len(events) else ""
    return msgspec.structs.replace(first, nodes=nodes[:NODES_MAX], gpus=gpus, words=words)
