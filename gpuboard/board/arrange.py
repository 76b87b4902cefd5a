"""Scene + sort + group + filter → rows, for the picture and the table (pure).

A row is a :class:`Place` (a GPU; key: its UUID), a NodeView (a node without known GPUs; key ``node:NAME``) or a
:class:`Group` (the heading of the rows below it; key ``group:NAME``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from gpuboard.board.scene import Place, Scene, without
from gpuboard.model.gpu import GpuState
from gpuboard.model.snapshot import GpuView, MigView, NodeView, Tally, has_current_values, tally

VIEWS = ("picture", "table")
GROUPS = ("none", "node", "model", "user", "state")
STATE_ORDER: tuple[GpuState, ...] = ("free", "reserved", "allocated", "busy", "occupied", "mig", "unknown", "broken")
NOBODY = "no one"
PANES = ("auto", "right", "below", "hidden")
_RIGHT_FROM, _BELOW_FROM = 150, 44  # columns and lines from which the detail pane is there by itself
_BESIDE = 96  # columns that stay for the rows beside it
_PANE_WIDEST, _PANE_LEAST, _PANE_TALLEST = 64, 6, 18

Matches = Callable[[NodeView, GpuView | None, Scene], bool]


class ViewState(msgspec.Struct, frozen=True):
    """View, order and filter of the cluster screen; kept between starts."""

    view: str = "picture"  # one of VIEWS
    sort: str = ""  # a key of SORTS; "": by node and index
    reverse: bool = False
    group: str = "none"  # one of GROUPS
    filter: str = ""  # in the language of filter/language.py, with the keys of filter/conditions.py
    pane: str = "auto"  # where the cursor's GPU is shown in detail: one of PANES


class Group(msgspec.Struct, frozen=True):
    """The heading of the rows below it."""

    key: str
    name: str
    counts: Tally  # of its GPUs
    node: NodeView | None = None  # when grouped by node


class NodeRow(msgspec.Struct, frozen=True):
    """A row of the picture."""

    key: str
    node: NodeView
    shown: frozenset[str] | None  # UUIDs of the GPUs shown in this row; None: all
    first: int = 0  # of the node's GPUs in this row, where they take several rows
    last: int | None = None  # the one after them; None: all that follow
    leads: bool = True  # whether it is the first of these rows
    hidden: frozenset[str] = frozenset()  # UUIDs of MIG devices that a filter leaves out, or that another row has

    @property
    def gpus(self) -> Sequence[GpuView]:
        return self.node.gpus[self.first : self.last] if self.first or self.last is not None else self.node.gpus

    @property
    def parts(self) -> list[GpuView]:
        """The GPUs of the node that are shown, without the hidden devices."""
        return [without(gpu, self.hidden) for gpu in self.node.gpus if self.shown is None or gpu.uuid in self.shown]


Row = Place | NodeView | Group
RowT = TypeVar("RowT", bound=Row)


def pane_of(view: ViewState, columns: int, lines: int) -> tuple[str, int]:
    """Return where the detail pane is on a terminal of that size, one of PANES but "auto", and its columns or lines."""
    place = view.pane
    if place == "auto":
        place = "right" if columns >= _RIGHT_FROM else "below" if lines >= _BELOW_FROM else "hidden"
    if place == "right" and columns >= _RIGHT_FROM:
        return place, min(columns - _BESIDE, _PANE_WIDEST)
    return ("hidden", 0) if place == "hidden" else ("below", max(_PANE_LEAST, min(2 * lines // 5, _PANE_TALLEST)))


def key_of(row: Row) -> str:
    """Return what identifies a row across refreshes, sorts and filters."""
    if isinstance(row, Place):
        return row.gpu.uuid
    return row.key if isinstance(row, Group) else f"node:{row.name}"


def arrange(scene: Scene, view: ViewState, matches: Matches | None = None) -> list[Row]:
    """Return the rows of the table. Sorting is stable; unknown values come last in both directions."""
    rows = in_order(_rows(scene, matches), view, scene)
    if view.group not in GROUPS or view.group == "none":
        return rows
    backwards = view.reverse and view.sort == view.group

    def ordered(names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: _group_order(name, view.group), reverse=backwards)

    members: dict[str, list[Row]] = {}
    for row in rows:
        if view.group == "user" and isinstance(row, Place) and row.gpu.mig:
            devices = _by_user(row, scene)
            for number, name in enumerate(ordered(devices)):
                part = msgspec.structs.replace(
                    row, hidden=frozenset(mig.uuid for mig in row.gpu.mig) - devices[name], leads=not number
                )
                members.setdefault(name, []).append(part)
        else:
            members.setdefault(_group_of(row, view.group, scene), []).append(row)
    arranged: list[Row] = []
    for name in ordered(members):
        below = members[name]
        counts = tally(row.part for row in below if isinstance(row, Place))
        node = scene.nodes.get(name) if view.group == "node" else None
        arranged.append(Group(f"group:{name}", name, counts, node))
        arranged += below
    return arranged


def arrange_nodes(scene: Scene, view: ViewState, matches: Matches | None = None) -> list[NodeRow | Group]:
    """Return the rows of the picture. Nodes are ordered by the first of their GPUs in the table.

    A node whose GPUs belong to several groups has a row in each. Grouping by node adds no headings.
    """
    whole = matches is None and view.group in {"none", "node"}
    if whole and not view.sort:
        return [NodeRow(f"node:{node.name}", node, None) for node in natural_nodes(scene)]
    if view.group == "node":
        view = msgspec.structs.replace(view, group="none")
    arranged: list[NodeRow | Group] = []
    below: dict[str, tuple[NodeView, list[str], set[str]]] = {}
    group = ""

    def finish() -> None:
        arranged.extend(
            NodeRow(
                f"node:{name}{group}",
                node,
                None if whole or not node.gpus else frozenset(uuids),
                hidden=frozenset(hidden),
            )
            for name, (node, uuids, hidden) in below.items()
        )
        below.clear()

    for row in arrange(scene, view, matches):
        if isinstance(row, Group):
            finish()
            group = f"/{row.name}"
            arranged.append(row)
        elif isinstance(row, NodeView):
            below[row.name] = (row, [], set())
        else:
            _, uuids, hidden = below.setdefault(row.node.name, (row.node, [], set()))
            uuids.append(row.gpu.uuid)
            hidden.update(row.hidden)
    finish()
    return arranged


def count(rows: Iterable[Row | NodeRow]) -> tuple[int, int]:
    """Return how many GPUs rows have, MIG devices in place of their GPU, and how many nodes without known GPUs."""
    gpus: list[GpuView] = []
    nodes = 0
    for row in rows:
        if isinstance(row, Place):
            gpus.append(row.part)
        elif isinstance(row, NodeRow):
            gpus += row.parts
            nodes += not row.node.gpus
        else:
            nodes += isinstance(row, NodeView)
    counts = tally(gpus)
    return counts.gpus.total() + counts.devices.total(), nodes


def natural_nodes(scene: Scene) -> list[NodeView]:
    """Return the nodes in natural order: gpu2 before gpu10."""
    nodes = scene.snapshot.nodes
    return [nodes[at] for at in _natural_order(tuple([node.name for node in nodes]))]


@lru_cache(maxsize=1)
def _natural_order(names: tuple[str, ...]) -> list[int]:
    return sorted(range(len(names)), key=lambda at: natural(names[at]))


@lru_cache(maxsize=20_000)
def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Return a sort key for natural order: gpu2 < gpu10, case ignored."""
    # isdecimal digits of other scripts would pass \d and int(), but sort apart from ASCII ones all the same
    return tuple((words.casefold(), int(digits or -1)) for words, digits in re.findall(r"([^0-9]*)([0-9]{0,18})", name))


def users_of(of: GpuView | MigView, scene: Scene) -> tuple[str, ...]:
    """Return the users of a GPU or a MIG device, each once: owners of leases, jobs, processes (most memory first)."""
    names: dict[str, None] = {}
    for lease in scene.leases_on(of.uuid):
        names[lease.owner] = None
    for job in of.jobs:
        names[job.user] = None
    for process in sorted(of.processes or (), key=lambda process: -(process.memory or 0)):
        if process.user is not None:
            names[process.user] = None
    return tuple(names)


def is_user_unknown(of: GpuView | MigView) -> bool:
    """Return whether there may be a user of a GPU or MIG device for which ``users_of`` has no name."""
    unread = of.processes is None and (isinstance(of, GpuView) or of.state not in {"free", "reserved"})
    return unread or of.state == "occupied" or bool(of.processes)


def age_of(node: NodeView, gpu: GpuView) -> float | None:
    """Return how old a GPU's values are, in seconds; None: never read."""
    return None if node.age_s is None else node.age_s + gpu.delay_s


def sensor(gpu: GpuView, name: str) -> int | None:
    """Return a value of ``Sensors`` (model/gpu.py) by its name, such as ``sm_activity``; None: not reported."""
    value: int | None = None if gpu.sensors is None else getattr(gpu.sensors, name)
    return value


def _memory(place: Place, scene: Scene) -> float | None:
    used, total = place.gpu.memory_used, place.gpu.memory_total
    return None if used is None or not total else used / total


def _age(place: Place, scene: Scene) -> float | None:
    """Return the age of old values, 0 of current ones: which of those is a second older changes all the time."""
    return 0.0 if has_current_values(place.node, place.gpu) else age_of(place.node, place.gpu)


def _user(place: Place, scene: Scene) -> Any:
    users = users_of(place.gpu, scene)
    return natural(users[0]) if users else None


SORTS: Mapping[str, Callable[[Place, Scene], Any]] = {
    "node": lambda place, scene: natural(place.node.name),
    "index": lambda place, scene: place.gpu.index,
    "model": lambda place, scene: natural(place.gpu.name),
    "memory": _memory,
    "utilization": lambda place, scene: place.gpu.utilization,
    "sm": lambda place, scene: sensor(place.gpu, "sm_activity"),
    "tensor": lambda place, scene: sensor(place.gpu, "tensor_activity"),
    "power": lambda place, scene: place.gpu.power,
    "temperature": lambda place, scene: place.gpu.temperature,
    "user": _user,
    "age": _age,
    "state": lambda place, scene: STATE_ORDER.index(place.gpu.state) if place.gpu.state in STATE_ORDER else None,
    "reason": lambda place, scene: place.gpu.reason or None,
    "free-gpus": lambda place, scene: scene.free_on.get(place.node.name),
}


def _rows(scene: Scene, matches: Matches | None) -> list[Row]:
    found: list[Row] = []
    places = scene.places
    for node in natural_nodes(scene):
        if not node.gpus:
            if matches is None or matches(node, None, scene):
                found.append(node)
            continue
        for gpu in node.gpus:
            place = places[gpu.uuid]
            if place.gpu is not gpu:  # a UUID on two nodes (one machine with two names) is one row
                continue
            shown = place if matches is None else matching(place, scene, matches)
            if shown is not None:
                found.append(shown)
    return found


def matching(place: Place, scene: Scene, matches: Matches) -> Place | None:
    """Return a GPU that matches, with those of its MIG devices that do; if none does, but the GPU itself, with all."""
    node, gpu = place.node, place.gpu
    if not gpu.mig:
        return place if matches(node, gpu, scene) else None
    whole = matches(node, gpu, scene)
    alone = matches(node, msgspec.structs.replace(gpu, mig=[]), scene)  # "-user:alice": it has devices of others, too
    hidden = frozenset(device.uuid for device in gpu.mig if not matches(node, as_gpu(gpu, device), scene))
    if len(hidden) < len(gpu.mig):
        return Place(node, gpu, hidden) if whole or alone else None
    return place if whole and alone else None


def as_gpu(gpu: GpuView, device: MigView) -> GpuView:
    """Return a MIG device as a GPU by itself."""
    return msgspec.structs.replace(
        gpu,
        uuid=device.uuid,
        name=f"{gpu.name} {device.profile}",
        state=device.state,
        reason=device.reason,
        memory_used=device.memory_used,
        memory_total=device.memory_total,
        memory_reserved=None,
        leases=device.leases,
        jobs=device.jobs,
        processes=device.processes,
        mig=[],
    )


def in_order(rows: list[RowT], view: ViewState, scene: Scene) -> list[RowT]:
    """Return rows in the order of a view; unknown values come last in both directions."""
    value_of = SORTS.get(view.sort)
    if value_of is None:
        return rows
    known: list[tuple[Any, RowT]] = []
    unknown: list[RowT] = []
    for row in rows:
        if isinstance(row, Place):
            value = value_of(row, scene)
        else:
            value = natural(row.name) if view.sort == "node" and isinstance(row, NodeView) else None
        if value is None:
            unknown.append(row)
        else:
            known.append((value, row))
    known.sort(key=lambda pair: pair[0], reverse=view.reverse)
    return [*(row for _, row in known), *unknown]


def _group_of(row: Row, group: str, scene: Scene) -> str:
    if isinstance(row, NodeView):
        return {"node": row.name, "state": "unknown"}.get(group, "unknown")
    assert isinstance(row, Place)
    if group == "node":
        return row.node.name
    if group == "model":
        return row.gpu.name
    if group == "state":
        return row.gpu.state
    return _user_group(row.gpu, scene)


def _user_group(of: GpuView | MigView, scene: Scene) -> str:
    """Return the group of a GPU or MIG device: its first user, "no one" or "unknown"."""
    if users := users_of(of, scene):
        return users[0]
    return "unknown" if of.state == "unknown" or is_user_unknown(of) else NOBODY


def _by_user(place: Place, scene: Scene) -> dict[str, set[str]]:
    """Return the UUIDs of the shown devices of a GPU in MIG mode, by the group that they belong to."""
    found: dict[str, set[str]] = {}
    for device in place.part.mig:
        found.setdefault(_user_group(device, scene), set()).add(device.uuid)
    return found


def _group_order(name: str, group: str) -> tuple[Any, ...]:
    if group == "state":
        return (STATE_ORDER.index(name),) if name in STATE_ORDER else (len(STATE_ORDER),)
    return (name in {NOBODY, "unknown"}, natural(name))
