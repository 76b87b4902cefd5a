"""Inspections of all nodes of a run: the calls, py-spy for nodes that lack it, the replies."""

from __future__ import annotations

import base64
import functools
import shutil
import sys
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.launch.stalls.evidence import Inspection, RankEvidence
from gpuboard.launch.supervisors import CallReply, Supervisors
from gpuboard.model.replies import Done

_REPLY_S = 10.0  # the nodes' own deadline is 5 s


class Inspections:
    """At most one inspection at a time."""

    def __init__(self, supervisors: Supervisors, nodes: Mapping[str, Node]) -> None:
        self._supervisors = supervisors
        self._nodes = nodes
        self._missing: set[str] = set()  # nodes whose reply is awaited
        self._found: dict[str, Inspection] = {}
        self._sent: set[str] = set()  # nodes that got py-spy

    @property
    def running(self) -> bool:
        """Whether replies are awaited."""
        return bool(self._missing)

    def start(self, nodes: Collection[str]) -> None:
        """Inspect the ranks of ``nodes``."""
        self._missing, self._found = set(nodes), {}
        for node in nodes:
            if self._nodes[node].host is None:
                self._send_pyspy(node)  # a path: costs nothing
            self._inspect(node)

    def take(self, reply: CallReply) -> list[Inspection] | None:
        """Record a reply; return all inspections when it is the last one. Nodes that failed are left out.

        A node that replies that it lacks py-spy gets it and is inspected again, once; ranks may end in between.
        """
        if isinstance(reply.value, Inspection):
            first = self._found.get(reply.node)
            self._found[reply.node] = reply.value if first is None else completed(reply.value, first)
            if not reply.value.pyspy and self._send_pyspy(reply.node):
                self._inspect(reply.node)
                return None
        self._missing.discard(reply.node)
        return None if self._missing else list(self._found.values())

    def _inspect(self, node: str) -> None:
        self._supervisors.call(node, "inspect", {}, _REPLY_S, Inspection)

    def _send_pyspy(self, node: str) -> bool:
        """Send py-spy to a node unless it was sent before; return whether it was sent now."""
        args = pyspy_for(self._nodes[node])
        if node in self._sent or args is None:
            return False
        self._sent.add(node)
        self._supervisors.call(node, "py-spy", args, _REPLY_S, Done)
        return True


def completed(second: Inspection, first: Inspection) -> Inspection:
    """Return the second inspection of a node with what only the first one has: the collectives of ranks."""
    known = {one.rank: one for one in first.ranks}
    ranks = known | {one.rank: _completed(one, known.get(one.rank)) for one in second.ranks}
    return msgspec.structs.replace(second, ranks=[ranks[rank] for rank in sorted(ranks)])


def _completed(one: RankEvidence, before: RankEvidence | None) -> RankEvidence:
    if before is None or one.collectives is not None:
        return one
    return before if one.state in {None, "Z"} else msgspec.structs.replace(one, collectives=before.collectives)


def pyspy_for(node: Node) -> dict[str, str] | None:
    """Return the arguments of the call ``py-spy`` for a node; None if there is no py-spy here."""
    path = pyspy()
    if path is None:
        return None
    return {"path": str(path)} if node.host is None else {"data": _packed(path)}


@functools.cache
def _packed(path: Path) -> str:
    """Return a program for the call ``py-spy``; "" if it cannot be read."""
    try:
        return base64.b64encode(zlib.compress(path.read_bytes())).decode("ascii")
    except OSError:
        return ""


def pyspy() -> Path | None:
    """Return the py-spy that is installed with gpuboard, else that of PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    return Path(found) if found else None
