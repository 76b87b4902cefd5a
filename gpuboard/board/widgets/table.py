"""The table of GPUs: a row per GPU, and below it one per MIG device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gpuboard.board.arrange import Group, activity, age_of, key_of, users_of
from gpuboard.board.arrange import Row as Item
from gpuboard.board.scene import Place, Scene
from gpuboard.board.tables.columns import BAR, SPARK, ColumnChoice, layout
from gpuboard.board.text.format import UNKNOWN, age, pair, percent, reason_beside, short_model
from gpuboard.board.text.gpu_row import (
    Device,
    Shown,
    degrees,
    device_owner,
    device_state,
    known,
    owner,
    row_key,
    state_runs,
    with_devices,
)
from gpuboard.board.text.picture import group_words, trouble_role
from gpuboard.board.text.plots import curve, meter, per_cell
from gpuboard.board.widgets.grid import Cell, Column, Grid, LazyRows, Row
from gpuboard.model.snapshot import NodeView

Means = Callable[[Sequence[str], int], Sequence[float | None]]  # of utilization in the last minutes, as History.means


class GpuTable(Grid):
    """GPUs in rows. Keys are UUIDs, also of MIG devices, and ``node:NAME`` of nodes without known GPUs."""

    def __init__(self, means: Means, *, id: str | None = None) -> None:
        super().__init__((), marks=True, id=id)
        self._means = means
        self._scene: Scene | None = None
        self._items: Sequence[Item] = ()
        self._chosen: tuple[ColumnChoice, ...] = ()
        self._named = True  # whether there is a column with the users

    def plain(self, key: str, cell: Cell) -> str:
        """Return a cell as text to copy; the bar before the memory is left out."""
        if key == "memory" and isinstance(cell.text, tuple):
            cell = cell._replace(text=cell.text[-1:])
        return super().plain(key, cell)

    @property
    def chosen(self) -> tuple[ColumnChoice, ...]:
        """The columns that the user has chosen; none: the usual ones."""
        return self._chosen

    def choose(self, chosen: Sequence[ColumnChoice]) -> None:
        self._chosen = tuple(chosen)
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
        return layout(scene, self.scrollable_content_region.width - self._indent, self._chosen)

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
            return Row(item.mig.uuid, partial(self._device, item), dim=item.place.node.state != "up")
        if isinstance(item, NodeView):
            error = item.error or "no GPU found"
            words = Cell(f"connecting: {error}" if item.connecting else error, trouble_role(item), rest=True)
            if self.columns[0].key != "node":
                return Row(key_of(item), (words._replace(text=f"{item.name}  {words.text}"),))
            if len(self.columns) == 1 or self.columns[1].key != "index":
                return Row(key_of(item), (Cell(item.name), words))
            return Row(key_of(item), (Cell(item.name), Cell(UNKNOWN, "unknown"), words))
        return Row(item.gpu.uuid, partial(self._gpu, item), dim=item.node.state != "up")

    def _gpu(self, place: Place) -> Sequence[Cell]:
        return [self._gpu_cell(column.key, place) for column in self.columns]

    def _gpu_cell(self, key: str, place: Place) -> Cell:
        node, gpu = place.node, place.gpu
        match key:
            case "node":
                return Cell(node.name)
            case "index":
                return Cell(str(gpu.index))
            case "model":
                return Cell(short_model(gpu.name))
            case "memory":
                return self._memory(gpu.memory_used, gpu.memory_total, gpu.state)
            case "utilization":
                return known(percent(gpu.utilization))
            case "sm" | "tensor":
                return known(percent(activity(gpu, key)))
            case "spark":
                glyphs = self._look.glyphs
                values = self._means((gpu.uuid,), SPARK * per_cell(glyphs))
                return Cell(curve(values, 1, glyphs, 0.0, 100.0)[0], "dim" if gpu.state == "free" else gpu.state)
            case "power":
                return known(UNKNOWN if gpu.power is None else f"{gpu.power:.0f}W")
            case "temperature":
                return degrees(gpu)
            case "user":
                assert self._scene is not None  # rows come with their scene
                return Cell(*owner(gpu, self._scene))
            case "lease":
                return Cell(", ".join(gpu.leases))
            case "job":
                return Cell(", ".join(job.id for job in gpu.jobs))
            case "age":
                return _age(age_of(node, gpu))
            case "state":
                return Cell(state_runs(gpu))
            case "command":
                return Cell(max(gpu.processes, key=lambda each: each.memory or 0).command if gpu.processes else "")
            case "uuid":
                return Cell(gpu.uuid)
            case "reason":
                return self._reason(place)
        raise KeyError(key)

    def _reason(self, place: Place) -> Cell:
        """Return the reason, with the age of a stale reading and without the user beside it."""
        node, gpu = place.node, place.gpu
        assert self._scene is not None  # rows come with their scene
        words = reason_beside(gpu.reason, users_of(gpu, self._scene)) if self._named else gpu.reason
        if node.state == "stale" and gpu.state != "unknown":  # an unknown one has it in the reason
            words = f"{age(age_of(node, gpu))} old: {words}"
        return Cell(words, "dim" if gpu.state == "free" else "")

    def _device(self, device: Device) -> Sequence[Cell]:
        return [self._device_cell(column.key, device) for column in self.columns]

    def _device_cell(self, key: str, device: Device) -> Cell:
        mig = device.mig
        match key:
            case "index":
                return Cell("MIG", "dim")
            case "model":
                return Cell(mig.profile)
            case "memory":
                return self._memory(mig.memory_used, mig.memory_total, mig.state)
            case "utilization" | "sm" | "tensor" | "power" | "temperature":
                return Cell("-", "dim")  # NVML does not have them of MIG devices
            case "user":
                assert self._scene is not None  # as above
                return device_owner(mig, self._scene)
            case "lease":
                return Cell(", ".join(mig.leases))
            case "job":
                return Cell(", ".join(job.id for job in mig.jobs))
            case "age":
                return _age(age_of(device.place.node, device.place.gpu))
            case "state":
                return device_state(mig)
            case "uuid":
                return Cell(mig.uuid)
            case "reason":
                return Cell(mig.reason, "dim" if mig.state == "free" else "")
            case "node" | "spark" | "command":
                return Cell("")  # as in the row of its GPU, or not known of MIG devices
        raise KeyError(key)

    def _memory(self, used: int | None, total: int | None, state: str) -> Cell:
        part = None if used is None or not total else used / total
        if part is None:
            return Cell(((" " * BAR + " ", ""), (pair(used, total, 3), "unknown")))
        full, track = meter(part, BAR, self._look.glyphs)
        return Cell(((full, state), (f"{track} ", "dim"), (pair(used, total, 3), "")))


def _age(seconds: float | None) -> Cell:
    return known(age(seconds), "dim")
