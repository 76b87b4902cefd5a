"""The cluster at one moment with its leases, and its plain form in a recording (pure).

In a recording, ages are moments (epoch seconds): a value that only grows older does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gpuboard.model.decoding import convert
from gpuboard.model.late import plain
from gpuboard.model.lease import Lease, LeaseList
from gpuboard.model.snapshot import NodeView, SchedulerView, Snapshot
from gpuboard.model.text import CLEAN_MOST, clean, program
from gpuboard.model.units import iso, seconds_of
from gpuboard.recording.changes import Tree
from gpuboard.recording.events import ClusterEvent

# In a recording these are moments. They are computed at every snapshot from two clocks: a moment that has moved by less
# than this is the same one.
_SLACK_S = {"age_s": 0.1, "runtime_s": 2.0}

_TIMES = {"from", "until"}  # of leases and jobs, ISO 8601
_STEPS: dict[str, int] = {"cpu_percent": 1, "memory_used": 2**26, "load1": 1}  # of a node
_GPU_STEPS: dict[str, int] = {"power": 1}
_RATES = ("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")  # of a GPU's sensors: kept to two digits


class Frame(msgspec.Struct, frozen=True):
    """A moment of a recording."""

    at: float  # epoch seconds
    snapshot: Snapshot
    leases: LeaseList
    uids: dict[str, int] = {}  # the recording user's uid on each node
    events: Sequence[ClusterEvent] | None = None  # EVENTS_MOST at most, until then, oldest first; None: not recorded


def to_tree(frame: Frame, before: Tree = None, *, commands: bool = False) -> Tree:
    """Return the plain form of a frame; ``before``: that of the frame before it.

    Without ``commands`` a command line is cut to the program's name: arguments may hold tokens.
    """
    nodes = {}
    old = before["nodes"] if before else {}
    for node in frame.snapshot.nodes:
        tree = msgspec.to_builtins(node, enc_hook=plain)
        _round(tree)
        if not commands:
            _cut_commands(tree)
        nodes[node.name] = _moments(tree, old.get(node.name), frame.at)
    leases = msgspec.to_builtins(frame.leases)
    for lease in leases["leases"]:
        del lease["remaining_s"]
    scheduler = msgspec.to_builtins(frame.snapshot.scheduler)
    return {
        "cluster": frame.snapshot.cluster,
        "scheduler": _moments(scheduler, before["scheduler"] if before else None, frame.at),
        "nodes": nodes,
        "leases": leases["leases"],
        "unread": leases["unread"],
        "outdated": leases["outdated"],
        "uids": frame.uids,
    }


class Restorer:
    """Makes frames of plain forms again; the views of unchanged nodes are made once."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[Tree, NodeView, float]] = {}

    def frame(self, tree: Tree, at: float, events: Sequence[ClusterEvent] | None) -> Frame:
        """Return the frame of a plain form as it was ``at`` epoch seconds. Raises ValueError (msgspec's, too)."""
        if not isinstance(tree, dict) or not isinstance(tree.get("nodes"), dict):
            raise ValueError("no nodes")
        text = iso(at)
        nodes = [self._node(name, node, at) for name, node in tree["nodes"].items()]
        self._nodes = {name: self._nodes[name] for name in tree["nodes"]}
        scheduler = convert(_ages(tree.get("scheduler"), at), SchedulerView | None)
        leases = [_lease(one, at) for one in convert(tree.get("leases"), list[Any])]
        return Frame(
            at,
            Snapshot(1, text, convert(tree.get("cluster"), str), nodes, scheduler),
            LeaseList(
                1,
                text,
                leases,
                convert(tree.get("unread"), list[str]),
                convert(tree.get("outdated", []), list[str]),
            ),
            convert(tree.get("uids"), dict[str, int]),
            events,
        )

    def _node(self, name: str, tree: Tree, at: float) -> NodeView:
        known = self._nodes.get(name)
        if known is not None and known[0] is tree:
            _, view, then = known
            if view.age_s is not None and at != then:
                view = msgspec.structs.replace(view, age_s=max(0.0, view.age_s + at - then))
        else:
            view = convert(_ages(tree, at), NodeView)
        self._nodes[name] = (tree, view, at)
        return view


def is_clean(line: bytes) -> bool:
    """Return whether ``cleaned`` would change nothing in a line of JSON: as usual, and found ten times as fast."""
    return (
        line.isascii()
        and b"\\" not in line  # nothing is escaped: text is what is between two quotes
        and line.decode("ascii").isprintable()
        and max(map(len, line.split(b'"'))) <= CLEAN_MOST
    )


def cleaned(tree: Tree) -> Tree:
    """Return a tree with all its text cleaned: a recording may come from anybody."""
    if isinstance(tree, str):
        return clean(tree)
    if isinstance(tree, dict):
        return {clean(key): cleaned(value) for key, value in tree.items()}
    return [cleaned(value) for value in tree] if isinstance(tree, list) else tree


def _moments(tree: Tree, before: Tree, at: float) -> Tree:
    """Return a tree with moments in place of ages: the one in ``before`` where it is about the same."""
    if isinstance(tree, list):
        old = before if isinstance(before, list) and len(before) == len(tree) else [None] * len(tree)
        return [_moments(value, was, at) for value, was in zip(tree, old, strict=True)]
    if not isinstance(tree, dict):
        return tree
    was = before if isinstance(before, dict) else {}
    new = {}
    for key, value in tree.items():
        if key not in _SLACK_S:
            new[key] = _moments(value, was.get(key), at) if isinstance(value, dict | list) else value
        elif value is None:
            new[key] = None
        else:
            moment, known = round(at - value, 1), was.get(key)
            same = isinstance(known, float) and abs(known - moment) <= _SLACK_S[key]
            new[key] = known if same else moment
    return new


def _ages(tree: Tree, at: float) -> Tree:
    if isinstance(tree, list):
        return [_ages(value, at) for value in tree]
    if not isinstance(tree, dict):
        return tree
    return {key: _value(key, value, at) for key, value in tree.items()}


def _value(key: str, value: Tree, at: float) -> Tree:
    """Return a member with an age in place of a moment. Raises ValueError for a time that the board could not show."""
    if key in _SLACK_S and isinstance(value, int | float):
        return max(0.0, at - value)
    if key in _TIMES and isinstance(value, str):
        return iso(seconds_of(value))
    return _ages(value, at) if isinstance(value, dict | list) else value


def _lease(tree: Tree, at: float) -> Lease:
    lease = convert(_ages(tree, at), Lease)
    return msgspec.structs.replace(lease, remaining_s=max(0.0, seconds_of(lease.until) - at))


def _round(node: Tree) -> None:
    """Round what changes at every reading to what is shown of it: half of a recording would be such noise."""
    for tree, steps in ((node, _STEPS), *((gpu, _GPU_STEPS) for gpu in node["gpus"])):
        for key, step in steps.items():
            if tree[key] is not None:
                tree[key] = type(tree[key])(round(tree[key] / step) * step)
    for gpu in node["gpus"]:
        for key in _RATES if gpu["sensors"] else ():
            if (value := gpu["sensors"][key]) is not None:
                gpu["sensors"][key] = round(value, 2 - len(str(value)))


def _cut_commands(node: Tree) -> None:
    for part in [*node["gpus"], *(device for gpu in node["gpus"] for device in gpu["mig"])]:
        for process in part["processes"] or ():
            process["command"] = program(process["command"])
