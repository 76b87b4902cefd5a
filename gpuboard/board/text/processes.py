"""Processes on GPUs as rows (pure)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from gpuboard.board.scene import Place, Scene
from gpuboard.board.text.format import FLAG_MARKS, UNKNOWN, flag_role
from gpuboard.board.text.gpu_row import known
from gpuboard.board.text.plots import meter
from gpuboard.board.text.rows import Cell, Column, Row, Runs
from gpuboard.board.theme.styles import Glyphs
from gpuboard.cluster.snapshot.processes import (
    JobProcesses,
    Running,
    ended_leases,
    gpus_of,
    note,
    process_key,
    sums,
    totals,
)
from gpuboard.model.snapshot import ProcessView
from gpuboard.model.units import compact_size, format_duration

BUSY_SM = 5  # percent of SM time below which a process counts as idle
_METER, _METER_FROM = 6, 140  # cells of the meter of SM time, and of the terminal from which there is one
_INDENT = 2  # of the processes below the heading of their group

_USER = Column("user", "User", 10)
_REST = (
    Column("pid", "Pid", 8, right=True),
    Column("memory", "Memory", 6, right=True, drop=2),
    Column("sm", "SM%", 4, right=True, drop=3),
    Column("cpu", "CPU%", 5, right=True, drop=5),
    Column("host", "Host", 5, right=True, drop=7),
    Column("time", "Time", 7, right=True, drop=4),
    Column("job", "Job", 8, drop=8),
    Column("lease", "Lease", 6, drop=6),
    Column("container", "Container", 12, drop=9),
    Column("note", "Note", 8, drop=1),
    Column("command", "Command", 20, weight=1, least=20),
)
PROCESS_COLUMNS = (_USER, *_REST)
CLUSTER_COLUMNS = (_USER, Column("node", "Node", 8, weight=0), Column("gpu", "GPU", 5, right=True), *_REST)
NODE_MOST = 24  # cells of the column of nodes


def process_rows(place: Place, *, dim: bool) -> list[Row]:
    """Return the rows of a GPU's processes, most memory first; their keys are ``process_key``'s."""
    found = sorted(place.gpu.processes or (), key=lambda process: (-(process.memory or 0), process.pid))
    ended = ended_leases([place.node])
    return [Row(process_key(process), partial(process_cells, process, ended), dim=dim) for process in found]


def process_cells(process: ProcessView, ended: Collection[str], *, mine: bool = False) -> tuple[Cell, ...]:
    """Return the cells of a process, one for each of ``PROCESS_COLUMNS``. ``ended``: the ``ended_leases``."""
    words = note(process, ended)
    sm, cpu = process.sm_percent, process.cpu_percent
    return (
        Cell("hidden", "unknown") if process.user is None else Cell(process.user, "mine" if mine else ""),
        Cell(str(process.pid)),
        known(compact_size(process.memory)),
        known(UNKNOWN if sm is None else str(sm), "dim" if sm is not None and sm < BUSY_SM else ""),
        known(UNKNOWN if cpu is None else f"{cpu:.0f}"),
        known(compact_size(process.host_memory)),
        known(UNKNOWN if process.runtime_s is None else format_duration(process.runtime_s)),
        Cell(process.job or "-", "" if process.job else "dim"),
        Cell(process.lease or "-", "" if process.lease else "dim"),
        Cell(process.container or "-", "" if process.container else "dim"),
        Cell(words, flag_role(words) if words in FLAG_MARKS else "dim"),
        Cell(process.command),
    )


def with_values(
    columns: Sequence[Column], found: Collection[ProcessView], ended: Collection[str]
) -> tuple[Column, ...]:
    """Return columns of processes with no width for those in which none has a value, so that commands get the room."""
    values: dict[str, bool] = {
        "job": any(process.job for process in found),
        "lease": any(process.lease for process in found),
        "container": any(process.container for process in found),
        "note": any(note(process, ended) for process in found),
    }
    return tuple(column if values.get(column.key, True) else column._replace(width=0) for column in columns)


def no_processes(place: Place) -> str:
    """Return the text in place of processes where none can be shown."""
    return "no process" if place.gpu.processes is not None else "? cannot read the processes"


def cluster_columns(
    names: Collection[str], cells: int, found: Collection[ProcessView], ended: Collection[str]
) -> tuple[Column, ...]:
    """Return the columns of processes on many nodes, for ``cells`` in all; names are as wide as the longest."""
    sizes = {"node": min(NODE_MOST, max([4, *map(len, names)])), "sm": 4 + meter_cells(cells)}
    columns = [column._replace(width=sizes.get(column.key, column.width)) for column in CLUSTER_COLUMNS]
    return with_values(columns, found, ended)


def meter_cells(cells: int) -> int:
    """Return the width of the meter of SM time, where ``cells`` are there in all; 0: there is no room for one."""
    return _METER if cells >= _METER_FROM else 0


def running_row(
    item: Running | JobProcesses,
    scene: Scene,
    ended: Collection[str],
    *,
    mine: bool,
    indent: bool,
    bar: int,
    glyphs: Glyphs,
) -> Row:
    """Return the row of a process in ``cluster_columns``, or the heading of a group."""
    if isinstance(item, JobProcesses):
        words = f"{item.title}  {sums(item.processes)}{_total(item.processes, old_nodes(scene))}"
        return Row(group_key(item), (Cell(words),), group=True)
    made = partial(_running_cells, item, scene, ended, mine=mine, indent=indent, bar=bar, glyphs=glyphs)
    return Row(item.key, made, dim=_is_old(item, scene))


def group_key(group: JobProcesses) -> str:
    return f"group {group.title}"


def _running_cells(
    one: Running, scene: Scene, ended: Collection[str], *, mine: bool, indent: bool, bar: int, glyphs: Glyphs
) -> tuple[Cell, ...]:
    user, pid, memory, sm, *rest = process_cells(one, ended, mine=mine)
    if indent:
        user = user._replace(text=" " * _INDENT + str(user.text))
    if bar:
        dim = _is_old(one, scene)
        full, track = meter(None if one.sm_percent is None else one.sm_percent / 100, bar, glyphs)
        sm = Cell(((full, "dim" if dim else "busy"), (track, "dim"), (f"{sm.text:>4}", sm.style or "dim" * dim)))
    return (user, Cell(one.node), Cell(gpus_of(one, scene.nodes)), pid, memory, sm, *rest)


def old_nodes(scene: Scene) -> frozenset[str]:
    """Return the nodes whose processes are shown as they were at their last reading."""
    return frozenset(node.name for node in scene.snapshot.nodes if node.state != "up")


def _is_old(one: Running, scene: Scene) -> bool:
    return scene.nodes[one.node].state != "up"


def _total(found: Sequence[Running], old: Collection[str]) -> str:
    """Return the memory and the mean SM time of processes, as far as known; without the SM time on ``old`` nodes."""
    memory = [one.memory for one in found]
    percents = [one.sm_percent for one in found if one.sm_percent is not None and one.node not in old]
    words = "" if None in memory else f"  {compact_size(sum(size or 0 for size in memory))}"
    return words + (f"  SM {sum(percents) / len(percents):.0f}%" if percents else "")


def overview(
    found: Sequence[Running], shown: Sequence[Running], selected: Sequence[Running], order: str, old: Collection[str]
) -> Runs:
    """Return the line above the list: what is selected and ``shown``, on what actions depend, how much there is.

    ``old``: the ``old_nodes``.
    """
    words = f"{totals(found)}{_total(found, old)}" if found else "Processes: none"
    runs: list[tuple[str, str]] = []
    if selected:
        hidden = len({one.key for one in selected} - {one.key for one in shown})
        runs.append((f"{len(selected)} selected{f', {hidden} hidden' if hidden else ''}   ", "marked"))
    if len(shown) != len(found):
        count = len(shown)
        runs.append((f"{count} match the filter   " if count != 1 else "1 matches the filter   ", "title"))
    return (*runs, (words, "title"), (f"   {order}", "dim"))


def about(one: Running, scene: Scene) -> list[Runs]:
    """Return the lines about the process under the cursor: columns cut long values."""
    places = f"{one.node}:{gpus_of(one, scene.nodes)}"
    parts = [f"pid {one.pid} on {places}", f"{compact_size(one.memory)} GPU", f"{compact_size(one.host_memory)} host"]
    parts += [f"{word} {value}" for word, value in (("job", one.job), ("lease", one.lease)) if value]
    parts += [f"container {one.container}"] if one.container else []
    parts += [f"uid {one.uid}"] if one.uid is not None else []
    return [((f"{one.user or 'hidden'}  {'  '.join(parts)}", "bad" if one.rogue else ""),), ((one.command, "dim"),)]
