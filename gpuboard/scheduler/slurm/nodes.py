"""What `scontrol show node -d` and `show reservation` print → nodes. Pure; raises only Unreadable.

Formats: the printers of Slurm 20.02 to 26.05 (api/node_info.c, api/reservation_info.c) and recordings of 22.05. Only
administrators choose texts in them (reasons, comments, names of reservations), so the first occurrence of a key counts.
"""

from __future__ import annotations

import re
import time
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from gpuboard import nodesets
from gpuboard.model.schedule import Gres, SchedulerNode
from gpuboard.model.text import clean
from gpuboard.scheduler.slurm.gres import GresError, Resources, resources
from gpuboard.scheduler.slurm.records import Unreadable, moment, records, value

# sinfo(1), "NODE STATE CODES": suffixes of a state; scontrol printed them before 21.08.
_SIGNS = {"*": "not_responding", "~": "powered_down", "#": "powering_up", "!": "power_down", "%": "powering_down",
          "$": "maintenance", "@": "reboot_issued", "^": "reboot_requested", "-": "planned"}  # fmt: skip
# States of slurm_protocol_defs.c, 22.05 to 25.11, and their names in earlier versions.
_STATES = frozenset({
    "allocated", "down", "error", "future", "idle", "mixed", "unknown",
    "blocked", "cloud", "completing", "drain", "drained", "draining", "dynamic_future", "dynamic_norm", "external",
    "fail", "failing", "invalid_reg", "maint", "maintenance", "no_respond", "not_responding", "perfctrs", "planned",
    "power_down", "power_up", "powered_down", "powering_down", "powering_up", "reboot", "reboot_issued",
    "reboot_requested", "reserved", "resume",
})  # fmt: skip
_ONCE = ("CoresPerSocket=", "Boards=", "ThreadsPerCore=")  # each once in a record: else it is damaged or two are merged
_LATER = "Comment|Extra|InstanceId|InstanceType|ReservationName|TLSCertTokenSet|TLSCertLastRenewal|Topology|Parameters"
_REASON = re.compile(rf" Reason=(.*?)(?: \[([^\[\]@]*)@([^\[\]@]*)\])?(?=\s+(?:{_LATER})=|\s*$)", re.DOTALL)


class Reservation(NamedTuple):
    """An active reservation."""

    name: str
    nodes: tuple[str, ...]


def nodes(text: str) -> dict[str, SchedulerNode]:
    """Return the nodes of `scontrol show node -d`; one that is partly unreadable has a ``doubt``.

    Raises Unreadable where the text is no list of nodes.
    """
    found: dict[str, SchedulerNode] = {}
    for record in records(text, "NodeName", "scontrol show node"):
        node = _node(record)
        if node.name in found:
            raise Unreadable(f"`scontrol show node` printed node {node.name} twice")
        found[node.name] = node
    return found


def _node(record: str) -> SchedulerNode:
    """Return a node. Raises Unreadable where its name or state is missing."""
    name = record.partition(" ")[0]
    state = value(record, " State=")
    try:
        known = nodesets.listed(name) == (name,)
    except ValueError:
        known = False
    if not known or not state or any(record.count(key) != 1 for key in _ONCE):
        raise Unreadable(f"`scontrol show node` printed a node that cannot be read: {clean(record, 120)!r}")
    doubts: list[str] = []
    words = _state(state)
    if not _STATES.issuperset(words):
        doubts.append(f"unknown state {clean(state, 64)!r}")
        words = tuple(word for word in words if word in _STATES)
    have = _resources(value(record, " Gres=") or "?", doubts)  # "(null)": it has none
    field = value(record, " GresUsed=")
    used = _resources(field, doubts)
    if not doubts:
        doubts += _contradictions(have, None if field is None else used)
    return SchedulerNode(
        name=name,
        hostname=clean(value(record, " NodeHostName=") or name, 256),
        address=clean(value(record, " NodeAddr=") or "", 256),
        state="+".join(words) or "unknown",
        reason=_reason(record),
        reservation=clean(value(record, " ReservationName=") or "", 96),
        gpus=have.gpus,
        used=used.gpus,
        shards=sum(gres.count for gres in have.shards),
        used_shards=_placed(used.shards),
        partitions=_words(value(record, " Partitions=")),
        features=_words(value(record, " ActiveFeatures=")),
        doubt="; ".join(doubts),
    )


def _resources(field: str | None, doubts: list[str]) -> Resources:
    try:
        return resources(field or "")
    except GresError as error:
        doubts.append(f"its GPUs in Slurm's answer cannot be read: {error}")
        return Resources()


def _contradictions(have: Resources, used: Resources | None) -> list[str]:
    """Return contradictions between the GPUs in use (None: not reported) and the GPUs there are."""
    if used is None:
        return ["Slurm does not report which of its GPUs are in use"] if have.gpus or have.shards else []
    counts: dict[str, int] = {}
    for gres in have.gpus:
        counts[gres.type] = counts.get(gres.type, 0) + gres.count
    total = sum(counts.values())
    types = {gres.type for gres in used.gpus}
    if total and not types:
        return ["Slurm does not report which of its GPUs are in use"]
    if total and types != set(counts) and "" not in types | set(counts):  # types may be defined in gres.conf only
        return ["Slurm does not report the use of all its GPUs"]
    for gres in used.gpus:
        if gres.count > counts.get(gres.type, total) or any(index >= total for index in gres.indexes or ()):
            return ["Slurm reports GPUs in use that it does not have"]
    if sum(gres.count for gres in used.shards) > sum(gres.count for gres in have.shards):
        return ["Slurm reports more shards in use than it has"]
    return []


def _placed(shards: tuple[Gres, ...]) -> tuple[Gres, ...]:
    """Return shards with their GPUs where known: with several types each may have its own numbering."""
    return shards if len(shards) == 1 else tuple(replace(gres, indexes=None) for gres in shards if gres.count)


@lru_cache(maxsize=1024)  # few different ones for many nodes
def _state(text: str) -> tuple[str, ...]:
    """Return ``mixed``, ``drain`` for ``MIXED+DRAIN``, ``idle``, ``not_responding`` for ``IDLE*``."""
    found: list[str] = []
    for word in text.split("+"):
        found.append(word.rstrip("".join(_SIGNS)).lower())
        if word and word[-1] in _SIGNS:
            found.append(_SIGNS[word[-1]])
    return tuple(dict.fromkeys(found))


def _reason(record: str) -> str:
    """Return why a node is drained or down, set by whom and when: ``bad link (root, 2026-11-21 08:29)``."""
    match = _REASON.search(record) if " Reason=" in record else None
    if match is None:
        return ""
    words, who, when = match.groups()
    words = " ".join(words.split())
    if who is None:
        return clean(words)
    at = moment(when)
    if at is not None:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
    return clean(f"{clean(words, 400)} ({who}, {when})")


def reservations(text: str) -> list[Reservation]:
    """Return the active reservations of `scontrol show reservation`. Raises Unreadable."""
    found: list[Reservation] = []
    listed = records(text, "ReservationName", "scontrol show reservation", "No reservations in the system")
    for record in listed:
        names = value(record, " Nodes=")
        if value(record, " State=") == "ACTIVE" and names not in {None, "", "(null)"}:
            try:
                found.append(Reservation(clean(record.partition(" ")[0], 96), nodesets.listed(names or "")))
            except ValueError:
                continue  # the nodes' states show that they are reserved, only the name is missing then
    return found


@lru_cache(maxsize=1024)
def _words(text: str | None) -> tuple[str, ...]:
    return tuple(clean(word, 96) for word in text.split(",") if word) if text and text != "(null)" else ()
