"""The table of GPUs: a row per GPU, and below it one per MIG device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gpuboard.board.arrange import Group, age_of, key_of, sensor, users_of
from gpuboard.board.arrange import Row as Item
from gpuboard.board.history import History
from gpuboard.board.scene import Place, Scene
from gpuboard.board.tables.columns import BAR, SPARK, ColumnChoice, layout
from gpuboard.board.text.format import UNKNOWN, age, pair, percent, reason_of
from gpuboard.board.text.gpu_row import (
    Device,
    Shown,
    degrees,
    device_slot,
    device_state,
    known,
    owner,
    row_key,
    state_runs,
    watts,
    with_devices,
)
from gpuboard.board.text.picture import group_words, trouble_role
from gpuboard.board.text.plots import curve, meter, part_of, per_cell
from gpuboard.board.theme.styles import plot_role
from gpuboard.board.widgets.grid import Cell, Column, Grid, LazyRows, Row
from gpuboard.model.gpu import short_model
from gpuboard.model.snapshot import GpuView, MigView, NodeView


class GpuTable(Grid):
    """GPUs in rows. Keys are UUIDs, also of MIG devices, and ``node:NAME`` of nodes without known GPUs."""

    def __init__(self, history: History, *, id: str | None = None) -> None:
        super().__init__((), marks=True, id=id)
        self._history = history
        self._scene: Scene | None = None
        self._items: Sequence[Item] = ()
        self.chosen: tuple[ColumnChoice, ...] = ()  # by the user; none: the usual columns
        self._named = True  # whether there is a column with the users

    def choose(self, chosen: Sequence[ColumnChoice]) -> None:
        self.chosen = tuple(chosen)
        if self._scene is not None:
            self.show(self._scene, self._items)

    def width_of(self, key: str) -> int:
        """Return the cells of a column; 0: it is not shown."""
        return next((size for index, size in self._widths.items() if self.columns[index].key == key), 0)

    def show(self, scene: Scene, items: Sequence[Item]) -> None:
        self._scene, self._items = scene, items
        self.set_columns(self._laid_out(scene))
        self.set_rows(LazyRows(with_devices(items), row_key, self._row))

    def _laid_out(self, scene: Scene) -> tuple[Column, ...]:
        return layout(scene, self.scrollable_content_region.width - self._indent, self.chosen)

    def _share(self) -> None:
        """Choose the columns for a new width, too: it may be known only when the first line is drawn."""
        if self._scene is not None:
            self.columns = self._laid_out(self._scene)
        self._named = any(column.key == "user" for column in self.columns)
        super()._share()

    def _row(self, item: Shown) -> Row:
        if isinstance(item, Group):
            return Row(item.key, (Cell(group_words(item)),), group=True)
        if isinstance(item, Device):
            return Row(item.mig.uuid, partial(self._cells, item), dim=item.place.node.state != "up")
        if isinstance(item, NodeView):
            error = item.error or "no GPU found"
            words = Cell(f"connecting: {error}" if item.connecting else error, trouble_role(item), rest=True)
            if self.columns[0].key != "node":
                return Row(key_of(item), (words._replace(text=f"{item.name}  {words.text}"),))
            if len(self.columns) == 1 or self.columns[1].key != "index":
                return Row(key_of(item), (Cell(item.name), words))
            return Row(key_of(item), (Cell(item.name), Cell(UNKNOWN, "unknown"), words))
        return Row(item.gpu.uuid, partial(self._cells, item), dim=item.node.state != "up")

    def _cells(self, item: Place | Device) -> Sequence[Cell]:
        if isinstance(item, Device):
            return [_OF_MIG[column.key](self, item) for column in self.columns]
        return [_OF_GPU[column.key](self, item) for column in self.columns]

    @property
    def scene(self) -> Scene:
        assert self._scene is not None  # rows come with their scene
        return self._scene

    def curve(self, gpu: GpuView) -> Cell:
        """Return the utilization of the last minutes."""
        glyphs = self._look.glyphs
        values = self._history.means((gpu.uuid,), SPARK * per_cell(glyphs))
        return Cell(curve(values, 1, glyphs, 0.0, 100.0)[0], "dim" if gpu.state == "free" else gpu.state)

    def reason(self, place: Place) -> Cell:
        """Return the reason, with the age of a stale reading and without the user beside it."""
        node, gpu = place.node, place.gpu
        shown = self.words(gpu)
        if node.state == "stale" and gpu.state != "unknown":  # an unknown one has it in the reason
            return shown._replace(text=f"{age(age_of(node, gpu))} old: {shown.text}")
        return shown

    def words(self, of: GpuView | MigView) -> Cell:
        """Return the reason of a state without the user beside it."""
        words = reason_of(of, users_of(of, self.scene) if self._named else ())
        return Cell(words, "dim" if of.state == "free" else "")

    def memory(self, of: GpuView | MigView) -> Cell:
        """Return a bar, and the memory in use and in total."""
        part, words = part_of(of.memory_used, of.memory_total), pair(of.memory_used, of.memory_total, 3)
        if part is None:
            return Cell(((" " * BAR + " ", ""), (words, "unknown")))
        full, track = meter(part, BAR, self._look.glyphs)
        return Cell(((full, plot_role(of.state)), (f"{track} ", "dim"), (words, "")))


def _age(place: Place) -> Cell:
    return known(age(age_of(place.node, place.gpu)), "dim")


_OF_GPU: Mapping[str, Callable[[GpuTable, Place], Cell]] = {
    "node": lambda table, at: Cell(at.node.name),
    "index": lambda table, at: Cell(str(at.gpu.index)),
    "model": lambda table, at: Cell(short_model(at.gpu.name)),
    "memory": lambda table, at: table.memory(at.gpu),
    "utilization": lambda table, at: known(percent(at.gpu.utilization)),
    "sm": lambda table, at: known(percent(sensor(at.gpu, "sm_activity"))),
    "tensor": lambda table, at: known(percent(sensor(at.gpu, "tensor_activity"))),
    "spark": lambda table, at: table.curve(at.gpu),
    "power": lambda table, at: watts(at.gpu),
    "temperature": lambda table, at: degrees(at.gpu),
    "user": lambda table, at: Cell(*owner(at.gpu, table.scene)),
    "lease": lambda table, at: Cell(", ".join(at.gpu.leases)),
    "job": lambda table, at: Cell(", ".join(job.id for job in at.gpu.jobs)),
    "age": lambda table, at: _age(at),
    "state": lambda table, at: Cell(state_runs(at.gpu)),
    "reason": lambda table, at: table.reason(at),
    "command": lambda table, at: Cell(
        max(at.gpu.processes, key=lambda each: each.memory or 0).command if at.gpu.processes else ""
    ),
    "uuid": lambda table, at: Cell(at.gpu.uuid),
}
_OF_MIG: Mapping[str, Callable[[GpuTable, Device], Cell]] = {
    "node": lambda table, at: Cell("" if at.place.leads else at.place.node.name),  # else in the row of its GPU
    **dict.fromkeys(("spark", "command"), lambda table, at: Cell("")),  # too, or not known
    # NVML does not have them of MIG devices
    **dict.fromkeys(("utilization", "sm", "tensor", "power", "temperature"), lambda table, at: Cell("-", "dim")),
    "index": lambda table, at: Cell(device_slot(at.place.gpu, at.mig)),
    "model": lambda table, at: Cell(at.mig.profile),
    "memory": lambda table, at: table.memory(at.mig),
    "user": lambda table, at: Cell(*owner(at.mig, table.scene)),
    "lease": lambda table, at: Cell(", ".join(at.mig.leases)),
    "job": lambda table, at: Cell(", ".join(job.id for job in at.mig.jobs)),
    "age": lambda table, at: _age(at.place),
    "state": lambda table, at: device_state(at.mig),
    "reason": lambda table, at: table.words(at.mig),
    "uuid": lambda table, at: Cell(at.mig.uuid),
}
