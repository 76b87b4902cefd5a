"""The only node of a cluster, in as much detail as the screen has room for (pure).

A line about the host, a row with meters per GPU, of as many lines as there is room for, and the processes below.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from rich.style import Style

from gpuboard.board.arrange import Group, users_of
from gpuboard.board.history import MEMORY, POWER, UTILIZATION, History
from gpuboard.board.scene import Place, Scene
from gpuboard.board.text.cells import fit, fit_runs, width
from gpuboard.board.text.format import UNKNOWN, age, pair, percent, reason_of
from gpuboard.board.text.gpu_row import (
    INDEX_LEAST,
    Device,
    Shown,
    degrees,
    device_slot,
    device_state,
    index_width,
    known,
    owner,
    row_key,
    state_runs,
)
from gpuboard.board.text.lines import wrapped
from gpuboard.board.text.picture import group_words, trouble_role
from gpuboard.board.text.plots import curve, meter, metered, part_of, per_cell, scale
from gpuboard.board.text.processes import PROCESS_COLUMNS, process_cells, with_values
from gpuboard.board.text.rows import GAP, Cell, Column, Row, Runs, share
from gpuboard.board.theme.styles import Glyphs, plot_role
from gpuboard.cluster.snapshot.processes import device_numbers, ended_leases, process_key
from gpuboard.model.gpu import Sensors, short_model
from gpuboard.model.request import slot
from gpuboard.model.snapshot import GpuView, MigView, NodeView, ProcessView
from gpuboard.model.units import format_size

_HOST_LINES = 2  # the host and the titles
_PROCESS_LINES = 6  # at least that many are left for processes, their titles included, if a row is to be tall
_TALLEST = 12  # the meters, ten lines of curves, the reason
_TRACE_LINES = 2  # of the curve in the column "5 min", at most
_ONE_CURVE_LINE = 3  # lines of a row whose curves have one
_METER_LEAST = 3  # cells; a shorter meter shows nothing
_LIMIT_FROM = 14  # cells from which power stands beside its limit
_HOST_METER = 12
_USER = 10
_METERS = frozenset({"utilization", "memory", "power"})
_PLANES = {"trace": UTILIZATION, "utilization": UTILIZATION, "memory": MEMORY, "power": POWER}

TITLES = (Column("gpu", "GPU", 3, right=True), *PROCESS_COLUMNS)


class Layout(NamedTuple):
    """What the drawing of a row depends on besides its GPU."""

    scene: Scene
    history: History
    widths: Mapping[str, int]  # of the columns that fit, by key
    tall: int  # lines per row: the meters, the reason from 2, curves of the last minutes from 3
    glyphs: Glyphs

    def meter(self, column: str, part: float | None, words: str, role: str = "") -> Cell:
        """Return a meter and the words of its value; the words alone where the column is too narrow for both."""
        size = self.widths.get(column, 0)
        if size - len(words) - 1 < _METER_LEAST:
            return known(words.rjust(size))
        return Cell(metered(part, words, size, role, self.glyphs))

    def trace(self, column: str, of: GpuView | MigView, height: int) -> list[str]:
        """Return the last minutes of a reading as ``height`` lines as wide as its column."""
        size, high = self.widths[column], 100.0
        values = self.history.peaks(of.uuid, _PLANES[column], size * per_cell(self.glyphs))
        if column == "memory":
            high = 1.0
        elif column == "power":
            limit = of.power_limit if isinstance(of, GpuView) else None
            high = limit or scale(values)
        return curve(values, height, self.glyphs, 0.0, high)


def tall_for(node: NodeView, rows: int, height: int) -> int:
    """Return the lines per row on ``height`` lines, for ``rows`` rows and for all of the node's without a filter.

    Except for the headings of groups it depends on no reading, so that nothing jumps.
    """
    return max(1, min(_lines_each(node, rows, height), _TALLEST))


def _lines_each(node: NodeView, rows: int, height: int) -> int:
    every = sum(1 + len(gpu.mig) for gpu in node.gpus)
    return (height - _HOST_LINES - _PROCESS_LINES) // max(1, rows, every)


@lru_cache
def columns_for(tall: int, index: int = INDEX_LEAST) -> tuple[Column, ...]:
    """Return the columns for rows of ``tall`` lines: what stands in a further line is no column.

    ``index``: cells of the indexes.
    """
    columns = [
        Column("index", "GPU", index, right=True),
        Column("state", "State", 12),
        Column("utilization", "Utilization", 0, weight=3, least=9),
        Column("memory", "Memory", 0, weight=3, least=13),
        Column("power", "Power", 0, weight=2, least=6, drop=3),
        Column("temperature", "Temp", 5, right=True, drop=2),
    ]
    if tall < 3:
        columns.append(Column("trace", "5 min", 0, weight=1, least=8, drop=5))
    columns.append(Column("user", "User", _USER))
    if tall == 1:
        columns.append(Column("reason", "Reason", 0, weight=2, least=20, drop=4))
    return tuple(columns)


def row_of(item: Shown, layout: Layout) -> Row:
    """Return a row; its key is that of ``row_key``."""
    if isinstance(item, Group):
        return Row(item.key, (Cell(group_words(item)),), group=True)
    if isinstance(item, NodeView):
        # the reason stands above
        words = "no GPU found" if item.state == "up" else "connecting" if item.connecting else item.state
        return Row(row_key(item), (Cell("-", "dim"), Cell(words, trouble_role(item), rest=True)))
    if isinstance(item, Device):
        dim = item.place.node.state != "up"
        return Row(
            row_key(item), partial(_device_cells, item, layout), dim=dim, below=partial(_below, item.mig, layout)
        )
    dim = item.node.state != "up"
    return Row(row_key(item), partial(_gpu_cells, item, layout), dim=dim, below=partial(_below, item.gpu, layout))


def _gpu_cells(place: Place, layout: Layout) -> tuple[Cell, ...]:
    gpu = place.gpu
    watts = UNKNOWN if gpu.power is None else f"{gpu.power:.0f}"
    wide = gpu.power_limit is not None and layout.widths.get("power", 0) >= _LIMIT_FROM
    power = f"{f'{watts}/{gpu.power_limit:.0f}W':>9}" if wide else f"{watts:>4}W"
    cells = {
        "index": Cell(str(gpu.index)),
        "state": Cell(state_runs(gpu)),
        "utilization": layout.meter(
            "utilization", part_of(gpu.utilization, 100), f"{percent(gpu.utilization):>4}", plot_role(gpu.state)
        ),
        "memory": _memory(gpu, layout),
        "power": layout.meter("power", part_of(gpu.power, gpu.power_limit), power),
        "temperature": degrees(gpu),
        "trace": _recent(gpu, layout, 0),
        "user": Cell(*owner(gpu, layout.scene)),
        "reason": _reason(gpu, layout.scene),
    }
    return tuple(cells[column.key] for column in columns_for(layout.tall))


def _device_cells(device: Device, layout: Layout) -> tuple[Cell, ...]:
    gpu, mig = device.place.gpu, device.mig
    cells = {
        "index": Cell(device_slot(gpu, mig)),
        "state": device_state(mig),
        "utilization": Cell(mig.profile),  # NVML has no utilization of MIG devices
        "memory": _memory(mig, layout),
        "user": Cell(*owner(mig, layout.scene)),
        "reason": _reason(mig, layout.scene),
    }
    return tuple(cells.get(column.key, Cell("")) for column in columns_for(layout.tall))


def _below(of: GpuView | MigView, layout: Layout) -> list[Cell]:
    """Return the further lines of a row: the last minutes below the meters, and the reason of the state."""
    reason = _reason(of, layout.scene)
    model = short_model(of.name) + "   " if isinstance(of, GpuView) else ""
    indent = " " * (layout.widths.get("index", INDEX_LEAST) + GAP)  # below the state
    words: Runs = ((indent + model, "dim"), (str(reason.text), reason.style))
    whole = sum(size + GAP for size in layout.widths.values()) - GAP
    if layout.tall == _TRACE_LINES and isinstance(of, GpuView) and "trace" in layout.widths:
        before = itertools.takewhile(lambda column: column.key != "trace", columns_for(layout.tall))
        room = sum(layout.widths[column.key] + GAP for column in before if column.key in layout.widths) - GAP
        recent = _recent(of, layout, 1)
        if _size(words) > room and not str(recent.text).strip():
            return [Cell(words)]
        words = _with_sensors(words, of, room)
        return [Cell((*fit_runs(words, room, ""), (" " * GAP, ""), (str(recent.text), recent.style)))]
    height = layout.tall - 2
    if height < 1:
        return [Cell(_with_sensors(words, of, whole))][: layout.tall - 1]
    last = [words]
    if height > 1 and _size(words) > whole:  # in two lines, below curves that are one lower
        lead = width(indent + model)
        first, *further = wrapped(str(reason.text), whole - lead, most=2) or [""]
        last = [((indent + model, "dim"), (first, reason.style))]
        last += [((" " * lead, ""), (text, reason.style)) for text in further]
        height -= len(further)
    last[-1] = _with_sensors(last[-1], of, whole)
    lines: list[list[tuple[str, str | Style]]] = [[] for _ in range(height)]
    columns = [column.key for column in columns_for(layout.tall) if column.key in layout.widths]
    for column in columns[: 1 + max(columns.index(name) for name in _METERS if name in columns)]:
        style: str = "dim"
        if column in _METERS:
            drawn = layout.trace(column, of, height)
            style = style if layout.tall == _ONE_CURVE_LINE else plot_role(of.state)
        else:
            first = "  5 min" if column == "state" and isinstance(of, GpuView) else ""
            drawn = [fit(text, layout.widths[column]) for text in [first, *[""] * (height - 1)]]
        for line, text in zip(lines, drawn, strict=True):
            line += [(text, style), (" " * GAP, "")]
    return [*(Cell(tuple(line)) for line in lines), *map(Cell, last)]


def _size(words: Runs) -> int:
    return sum(width(text) for text, _ in words)


def _with_sensors(words: Runs, of: GpuView | MigView, room: int) -> Runs:
    """Return ``words`` with the performance state, clock and fan at the right end, as far as reported, if all fit."""
    read = (of.sensors if isinstance(of, GpuView) else None) or Sensors()
    values = (("P{:<2}", read.performance_state), ("{:>4} MHz", read.sm_clock), ("fan {:>3}%", read.fan))
    shown = "  ".join(form.format(value) for form, value in values if value is not None)
    gap = room - _size(words) - len(shown)
    return words if gap < GAP or not shown else (*words, (" " * gap, ""), (shown, "dim"))


def _recent(gpu: GpuView, layout: Layout, line: int) -> Cell:
    """Return a line of the curve of a GPU's utilization, which has two where its row has two."""
    if "trace" not in layout.widths:
        return Cell("")
    drawn = layout.trace("trace", gpu, min(layout.tall, _TRACE_LINES))
    return Cell(drawn[line], "dim" if gpu.state == "free" or layout.tall == 1 else plot_role(gpu.state))


def _memory(of: GpuView | MigView, layout: Layout) -> Cell:
    part = part_of(of.memory_used, of.memory_total)
    return layout.meter("memory", part, pair(of.memory_used, of.memory_total, 3), plot_role(of.state))


def _reason(of: GpuView | MigView, scene: Scene) -> Cell:
    """Return the reason of a state, without the user if its column shows the whole name."""
    users = users_of(of, scene)
    whole = width(", ".join(users)) <= _USER
    return Cell(reason_of(of, users if whole else ()), "dim" if of.state == "free" else "")


def reason_lines(items: Sequence[Shown], key: str | None, scene: Scene, size: tuple[int, int]) -> Sequence[Runs]:
    """Return the line below the rows with the reason of the GPU at ``key``, where rows have no room for theirs.

    ``size``: cells for a row, and lines in all. Whether there is a line depends on no reading, so that nothing jumps.
    """
    cells, height = size
    node = scene.snapshot.nodes[0]
    columns = columns_for(1, index_width(node.gpus))
    if _lines_each(node, len(items), height) != 1 or any(columns[at].key == "reason" for at in share(columns, cells)):
        return []
    found = next((item for item in items if row_key(item) == key), None)
    if not isinstance(found, Device | Place):
        return [((" ", ""),)]
    of = found.mig if isinstance(found, Device) else found.gpu
    name = device_slot(found.place.gpu, found.mig) if isinstance(found, Device) else str(found.gpu.index)
    reason = _reason(of, scene)
    return [((f" GPU {name}  ", "dim"), (str(reason.text), reason.style))]


def host_lines(node: NodeView, glyphs: Glyphs, cells: int) -> Sequence[Runs]:
    """Return the host: name, driver, CPU and memory in one line as far as they fit; below it what is wrong with it."""
    old = node.state != "up"
    load = "" if node.load1 is None else f"  load {node.load1:<5.2f}"  # a fixed width: nothing behind it moves
    memory = f"{format_size(node.memory_used):>8} of {format_size(node.memory_total)}"
    parts: list[Runs] = [
        ((f" {node.name}", "title"),),
        _host("CPU", part_of(node.cpu_percent, 100), f"{percent(node.cpu_percent):>4}{load}", glyphs, old=old),
        _host("memory", part_of(node.memory_used, node.memory_total), memory, glyphs, old=old),
        ((f"driver {node.driver or UNKNOWN}", "dim"),),
        ((f"CUDA {node.cuda or UNKNOWN}", "dim"),),
    ]
    if old and node.age_s is not None:
        parts.insert(1, ((f"{node.state}, read {age(node.age_s)} ago", trouble_role(node)),))
    line: list[tuple[str, str | Style]] = []
    used = 0
    for part in parts:
        size = _size(part) + 3
        if used + size > cells + 1:
            continue
        line += [*([("   ", "")] if line else []), *part]
        used += size
    wrong = node.error or node.claims_error
    lines: list[Runs] = [tuple(line)]
    for words in wrapped(wrong, cells - 1, most=2) if wrong else []:
        lines.append(((f" {words}", trouble_role(node) if node.error else "warn"),))
    return lines


def _host(name: str, part: float | None, words: str, glyphs: Glyphs, *, old: bool) -> Runs:
    full, rest = meter(part, _HOST_METER, glyphs)
    role = "dim" if old else "unknown" if part is None else ""
    return ((f"{name} ", "dim"), (full, role), (rest, "dim"), (f" {words}", role))


def no_process(places: Sequence[Place]) -> str:
    """Return the text in place of processes where none can be shown."""
    if any(place.gpu.processes is None for place in places):
        return "? cannot read the processes"
    return "no process on these GPUs" if places else ""


def process_columns(places: Sequence[Place]) -> tuple[Column, ...]:
    found = [process for place in places for process in place.part.processes or ()]
    gpu = TITLES[0]._replace(width=index_width(places[0].node.gpus if places else ()))
    return with_values((gpu, *PROCESS_COLUMNS), found, _ended(places))


def _ended(places: Sequence[Place]) -> frozenset[str]:
    return ended_leases([place.node for place in places[:1]])  # all are on the only node


def process_rows(places: Sequence[Place]) -> list[Row]:
    """Return a row per process and GPU, by GPU, MIG device and memory."""
    found = {
        f"{place.gpu.index}:{process_key(process)}": (place, process)  # once: a GPU in MIG mode may have several places
        for place in places
        for process in place.part.processes or ()
    }
    devices, ended = {place.gpu.uuid: device_numbers(place.gpu) for place in places}, _ended(places)
    rows = [(key, place, devices[place.gpu.uuid].get(process_key(one)), one) for key, (place, one) in found.items()]
    rows.sort(key=lambda row: (row[1].gpu.index, -1 if row[2] is None else row[2], -(row[3].memory or 0), row[3].pid))
    return [
        Row(key, partial(_process_cells, slot(place.gpu.index, number), one, ended), dim=place.node.state != "up")
        for key, place, number, one in rows
    ]


def _process_cells(gpu: str, process: ProcessView, ended: Collection[str]) -> Sequence[Cell]:
    return (Cell(gpu), *process_cells(process, ended))
