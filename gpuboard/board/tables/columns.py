"""The columns of the table of GPUs: those that are usual, and those that the user has chosen (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuboard.board.scene import Scene
from gpuboard.board.text.cells import width
from gpuboard.board.text.gpu_row import INDEX_LEAST, index_width
from gpuboard.board.text.rows import GAP, Column
from gpuboard.model.gpu import short_model
from gpuboard.model.snapshot import judged

BAR = 4  # cells of the bar before the memory
SPARK = 10
WIDTH_LEAST, WIDTH_MOST = 3, 80
_NAME_LEAST, _NAME_MOST = 6, 20
_MODEL_MOST = 18
_REASON_LEAST, _REASON_WANTED = 12, 30  # other columns are dropped until the reason has as many cells
# Keys that rows can be sorted by are those of ``arrange.SORTS``.
COLUMNS = {
    column.key: column
    for column in (
        Column("node", "Node", _NAME_LEAST),
        Column("index", "GPU", INDEX_LEAST, right=True),
        Column("model", "Model", 12, drop=5),
        Column("memory", "Memory", BAR + 9),
        Column("utilization", "Util", 4, right=True),
        Column("sm", "SM", 4, right=True, drop=6),
        Column("tensor", "Tensor", 7, right=True, drop=6),
        Column("spark", "5 min", SPARK, drop=6),
        Column("power", "Power", 5, right=True, drop=4),
        Column("temperature", "Temp", 5, right=True, drop=3),
        Column("user", "User", 10),
        Column("lease", "Lease", 8, drop=2),
        Column("job", "Job", 8, drop=2),
        Column("age", "Age", 4, right=True, drop=2),
        Column("state", "State", 12),
        Column("reason", "Reason", 0, weight=2, least=_REASON_LEAST, drop=1),
        Column("command", "Command", 0, weight=1, least=12, drop=2),
        Column("uuid", "UUID", 14, drop=7),
    )
}
ABOUT = {
    "node": "its name", "index": "its index on the node; 2:1 is MIG device 1 of GPU 2",
    "model": "without the maker's name",
    "memory": "used and in total", "utilization": "a kernel ran, in per cent of the time",
    "sm": "SMs at work, in per cent (Hopper and later)", "tensor": "tensor cores at work, in per cent of the time",
    "spark": "utilization, the newest at the right", "power": "in watts", "temperature": "in degrees Celsius",
    "user": "who holds or uses it", "lease": "ids of its leases", "job": "ids of its jobs",
    "age": "of the reading; stale ones show it in the reason", "state": "with its letter and the worst flag",
    "reason": "why it is in this state", "command": "of the process with the most memory", "uuid": "as CUDA takes it",
}  # fmt: skip
USUAL = (
    "node", "index", "model", "memory", "utilization", "spark", "power", "temperature", "user", "state", "reason",
)  # fmt: skip


class ColumnChoice(NamedTuple):
    """A column that the user has chosen. ``width`` in cells; 0: the usual one."""

    key: str
    width: int = 0

    def __str__(self) -> str:
        return f"{self.key}:{self.width}" if self.width else self.key


def choices(words: Sequence[str]) -> list[ColumnChoice]:
    """Return the columns kept between starts, ``key`` or ``key:width``, without unknown and repeated ones."""
    found: dict[str, ColumnChoice] = {}
    for word in words:
        key, _, size = word.partition(":")
        if key in COLUMNS:
            cells = int(size) if size.isascii() and size.isdigit() and len(size) < 4 else 0
            found[key] = ColumnChoice(key, min(max(cells, WIDTH_LEAST), WIDTH_MOST) if cells else 0)
    return list(found.values())


def layout(scene: Scene, space: int, chosen: Sequence[ColumnChoice] = ()) -> tuple[Column, ...]:
    """Return the columns of the table of ``scene``, ``space`` cells wide; without ``chosen`` the usual ones.

    The reason has as much room as it can have, up to a limit, before columns with a ``drop`` are shown. The model is
    usual only where GPUs have several, or are split into MIG devices.
    """
    if not chosen:
        gpus = [gpu for node in scene.snapshot.nodes for gpu in judged(node)]
        alike = len({gpu.name for gpu in gpus}) < 2 and not any(gpu.mig for gpu in gpus)
        chosen = [ColumnChoice(key) for key in USUAL if key != "model" or not alike]
    columns = [_sized(scene, choice) for choice in chosen]
    always = sum(column.width + GAP for column in columns if not column.drop)
    least = max(_REASON_LEAST, min(_REASON_WANTED, space - always))
    return tuple(
        column._replace(least=least) if column.key == "reason" and column.weight else column for column in columns
    )


def _sized(scene: Scene, choice: ColumnChoice) -> Column:
    column = COLUMNS[choice.key]
    if choice.width:
        return column._replace(width=choice.width, weight=0, least=0)
    if choice.key == "node":
        longest = max((width(node.name) for node in scene.snapshot.nodes), default=0)
        return column._replace(width=min(max(longest, _NAME_LEAST), _NAME_MOST))
    if choice.key == "index":
        return column._replace(width=index_width(gpu for node in scene.snapshot.nodes for gpu in judged(node)))
    if choice.key == "model":
        names = {gpu.name for node in scene.snapshot.nodes for gpu in judged(node)}
        longest = max((width(short_model(name)) for name in names), default=0)
        return column._replace(width=min(max(longest, column.width), _MODEL_MOST))
    return column
