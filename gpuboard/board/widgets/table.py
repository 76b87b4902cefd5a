"""The table of GPUs: a row per GPU, and below it one per MIG device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gpuboard.board.arrange import Group, age_of, key_of
from gpuboard.board.arrange import Row as Item
from gpuboard.board.scene import Place, Scene
from gpuboard.board.text.cells import width
from gpuboard.board.text.format import UNKNOWN, age, pair, percent, short_model
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
from gpuboard.board.text.plots import bar, spark
from gpuboard.board.widgets.grid import Cell, Column, Grid, LazyRows, Row
from gpuboard.model.snapshot import NodeView

_BAR = 4
_SPARK = 10
_NAME_LEAST, _NAME_MOST = 6, 20

Utilization = Callable[[str, int], Sequence[int | None]]  # a GPU's newest samples, as History.utilization


class GpuTable(Grid):
    """GPUs in rows. Keys are UUIDs, also of MIG devices, and ``node:NAME`` of nodes without known GPUs."""

    DEFAULT_CSS = "GpuTable { padding: 0; }"

    def __init__(self, utilization: Utilization, *, id: str | None = None) -> None:
        super().__init__((), marks=True, id=id)
        self._utilization = utilization
        self._scene: Scene | None = None

    def plain(self, key: str, cell: Cell) -> str:
        """Return a cell as text to copy; the bar before the memory is left out."""
        if key == "memory" and isinstance(cell.text, tuple):
            cell = cell._replace(text=cell.text[-1:])
        return super().plain(key, cell)

    def show(self, scene: Scene, items: Sequence[Item]) -> None:
        """Show the rows of ``arrange`` for a scene."""
        self._scene = scene
        self._lay_out(scene)
        self.set_rows(LazyRows(with_devices(items), row_key, self._row))

    def _lay_out(self, scene: Scene) -> None:
        """Set the columns. Keys are those of ``arrange.SORTS``; ``_gpu`` and ``_device`` give a cell for each."""
        name = max((width(node.name) for node in scene.snapshot.nodes), default=0)
        self.set_columns(
            (
                Column("node", "Node", min(max(name, _NAME_LEAST), _NAME_MOST)),
                Column("index", "GPU", 3, right=True),
                Column("model", "Model", 12, drop=5),
                Column("memory", "Memory", _BAR + 9),
                Column("utilization", "Util", 4, right=True),
                Column("spark", "", _SPARK, drop=6),
                Column("power", "Power", 5, right=True, drop=4),
                Column("temperature", "Temp", 5, right=True, drop=3),
                Column("user", "User", 10),
                Column("age", "Age", 4, right=True, drop=2),
                Column("state", "State", 12),
                Column("reason", "Reason", 0, weight=1, least=16, drop=1),
            )
        )

    def _row(self, item: Shown) -> Row:
        if isinstance(item, Group):
            return Row(item.key, (Cell(group_words(item)),), group=True)
        if isinstance(item, Device):
            return Row(item.mig.uuid, partial(self._device, item), dim=item.place.node.state != "up")
        if isinstance(item, NodeView):
            error = item.error or "no GPU found"
            words = Cell(f"connecting: {error}" if item.connecting else error, trouble_role(item), rest=True)
            return Row(key_of(item), (Cell(item.name), Cell(UNKNOWN, "unknown"), words))
        return Row(item.gpu.uuid, partial(self._gpu, item), dim=item.node.state != "up")

    def _gpu(self, place: Place) -> Sequence[Cell]:
        assert self._scene is not None  # rows come with their scene
        node, gpu = place.node, place.gpu
        glyphs = self._look.glyphs
        return (
            Cell(node.name),
            Cell(str(gpu.index)),
            Cell(short_model(gpu.name)),
            self._memory(gpu.memory_used, gpu.memory_total, gpu.state),
            known(percent(gpu.utilization)),
            Cell(spark(self._utilization(gpu.uuid, _SPARK), _SPARK, glyphs), "dim"),
            known(UNKNOWN if gpu.power is None else f"{gpu.power:.0f}W"),
            degrees(gpu),
            Cell(*owner(gpu, self._scene)),
            _age(age_of(node, gpu)),
            Cell(state_runs(gpu)),
            Cell(gpu.reason, "dim" if gpu.state == "free" else ""),
        )

    def _device(self, device: Device) -> Sequence[Cell]:
        node, gpu = device.place.node, device.place.gpu
        mig = device.mig
        assert self._scene is not None  # as above
        return (
            Cell("", ""),
            Cell("MIG", "dim"),
            Cell(mig.profile),
            self._memory(mig.memory_used, mig.memory_total, mig.state),
            Cell("-", "dim"),  # NVML has no utilization of MIG devices
            Cell(""),
            Cell("-", "dim"),
            Cell("-", "dim"),
            device_owner(mig, self._scene),
            _age(age_of(node, gpu)),
            device_state(mig),
            Cell(mig.reason, "dim" if mig.state == "free" else ""),
        )

    def _memory(self, used: int | None, total: int | None, state: str) -> Cell:
        part = None if used is None or not total else used / total
        if part is None:
            return Cell(((" " * _BAR + " ", ""), (pair(used, total, 3), "unknown")))
        return Cell(((bar(part, _BAR, self._look.glyphs) + " ", state), (pair(used, total, 3), "")))


def _age(seconds: float | None) -> Cell:
    return known(age(seconds), "dim")
