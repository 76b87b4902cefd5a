"""The columns of `gpuboard status`, named like the keys of the filter: cells of a table and fields of CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gpuboard.board.arrange import age_of, is_user_unknown, sensor, users_of
from gpuboard.board.filter.conditions import ALIASES
from gpuboard.board.scene import Place, Scene
from gpuboard.board.text.format import reason_beside
from gpuboard.cli.options import nearest
from gpuboard.cli.table import Cell, Column, Step
from gpuboard.errors import UsageError
from gpuboard.model.gpu import GpuState, short_model
from gpuboard.model.request import slot
from gpuboard.model.snapshot import GpuView, MigView, NodeView, free_memory, mig_number, shown_flags
from gpuboard.model.text import clean, quoted
from gpuboard.model.units import format_duration

_COLOURS: dict[GpuState, str] = {
    "free": "32", "reserved": "36", "allocated": "34", "busy": "33", "occupied": "33", "unknown": "35",
    "broken": "1;31",
}  # fmt: skip
Value = str | int | float | None


class DeviceRow(NamedTuple):
    """What a row is about: a GPU, or with ``mig`` one of its MIG devices."""

    node: NodeView
    gpu: GpuView
    scene: Scene
    mig: MigView | None = None

    @property
    def number(self) -> int | None:
        """The number of the MIG device on its GPU."""
        return None if self.mig is None else mig_number(self.gpu, self.mig.uuid)

    @property
    def users(self) -> list[str]:
        """Whoever holds or uses it, each once."""
        return list(users_of(self.mig or self.gpu, self.scene))

    @property
    def memory(self) -> tuple[int | None, int | None]:
        """Bytes used and in total."""
        part = self.mig or self.gpu
        return part.memory_used, part.memory_total

    @property
    def free(self) -> int | None:
        """Bytes neither used nor reserved by the driver."""
        return free_memory(self.mig or self.gpu)


class StatusColumn(NamedTuple):
    """A column: its heading, its cell in the table, and its fields in CSV by name, which states the unit."""

    column: Column
    cell: Callable[[DeviceRow], Cell]
    fields: dict[str, Callable[[DeviceRow], Value]]


def devices(place: Place, scene: Scene) -> list[DeviceRow]:
    """Return a GPU and its MIG devices as rows, without those that are left out."""
    node, gpu = place.node, place.gpu
    parts = (DeviceRow(node, gpu, scene, mig) for mig in gpu.mig if mig.uuid not in place.hidden)
    return [DeviceRow(node, gpu, scene), *parts]


def of_gpu(value: Callable[[GpuView], Value]) -> Callable[[DeviceRow], Value]:
    """Return a field that MIG devices do not have."""
    return lambda device: value(device.gpu) if device.mig is None else None


def measured(words: Callable[[GpuView], str | None]) -> Callable[[DeviceRow], Cell]:
    """Return a cell with a value of the GPU, ``?`` for unknown, empty for a MIG device."""
    return lambda device: Cell("" if device.mig is not None else words(device.gpu) or "?")


def _state(device: DeviceRow) -> Cell:
    state = (device.mig or device.gpu).state
    return Cell(state, _COLOURS.get(state, ""))


def _user(device: DeviceRow) -> Cell:
    if users := device.users:
        return Cell(",".join(clean(user, 32) for user in users))
    return Cell("?" if is_user_unknown(device.mig or device.gpu) else "-")


def _reason(device: DeviceRow, *, beside: bool) -> Cell:
    """Return state's reason and the flags; ``beside`` the user's column without the name shown there."""
    gpu, why = device.gpu, clean((device.mig or device.gpu).reason)
    if beside:
        why = reason_beside(why, [clean(user, 32) for user in device.users])
    if device.mig is not None:
        return Cell(why)
    if gpu.memory_shared:
        why += "; memory shared with the host"
    if device.node.state == "stale" and gpu.state != "unknown":
        why = f"{_age(device).text} old: {why}"
    reasons = f"sick ({clean('; '.join(gpu.sick))})"
    if flags := [reasons if flag == "sick" and gpu.sick else flag for flag in shown_flags(gpu)]:
        why = f"{'+'.join(flags)}; {why}"
    return Cell(why)


def _memory(device: DeviceRow) -> Cell:
    """Return GiB used and in total; one decimal below 10 GiB used."""
    used, total = device.memory
    left = "?" if used is None else f"{used / 2**30:.{1 if used < 10 * 2**30 else 0}f}"
    right = "?" if total is None else f"{total / 2**30:.0f}"
    return Cell(f"{left}/{right}G")


def _age(device: DeviceRow) -> Cell:
    age_s = age_of(device.node, device.gpu)
    if age_s is None:
        return Cell("?")
    return Cell(f"{age_s:.1f}s" if age_s < 10 else format_duration(age_s))


def _index(device: DeviceRow) -> Cell:
    return Cell(slot(device.gpu.index, device.number))


def _leases(device: DeviceRow) -> list[str]:
    return (device.mig or device.gpu).leases


def _jobs(device: DeviceRow) -> list[str]:
    return [job.id for job in (device.mig or device.gpu).jobs]


def _commands(device: DeviceRow) -> list[str]:
    return [process.command for process in (device.mig or device.gpu).processes or ()]


def _listed(words: Callable[[DeviceRow], list[str]], limit: int = 32) -> Callable[[DeviceRow], Cell]:
    return lambda device: Cell(",".join(clean(word, limit) for word in words(device)))


def _gib(device: DeviceRow) -> Cell:
    free = device.free
    return Cell("?" if free is None else f"{free / 2**30:.0f}G")


def _model(device: DeviceRow) -> str:
    return device.gpu.name if device.mig is None else device.mig.profile


def _short_model(device: DeviceRow) -> Cell:
    return Cell(clean(short_model(_model(device)), 64))


def _activity(title: str, of: str) -> StatusColumn:
    return StatusColumn(
        Column(title, right=True, least=4),
        measured(lambda gpu: None if (value := sensor(gpu, of)) is None else f"{value}%"),
        {f"{of}_percent": of_gpu(lambda gpu: sensor(gpu, of))},
    )


COLUMNS: dict[str, StatusColumn] = {
    "node": StatusColumn(
        Column("NODE"), lambda d: Cell(clean(d.node.name, 64)),
        {"node": lambda d: d.node.name, "node_state": lambda d: d.node.state},
    ),
    "gpu": StatusColumn(
        Column("GPU", right=True), _index, {"gpu": lambda d: d.gpu.index, "mig_device": lambda d: d.number}
    ),
    "uuid": StatusColumn(
        Column("UUID"), lambda d: Cell(clean((d.mig or d.gpu).uuid, 64)), {"uuid": lambda d: (d.mig or d.gpu).uuid}
    ),
    "model": StatusColumn(Column("MODEL"), _short_model, {"model": _model}),
    "state": StatusColumn(Column("STATE", least=8), _state, {"state": lambda d: (d.mig or d.gpu).state}),
    "flag": StatusColumn(
        Column("FLAGS"), lambda d: Cell("+".join(shown_flags(d.gpu)) if d.mig is None else ""),
        {"flags": of_gpu(lambda gpu: " ".join(gpu.flags))},
    ),
    "user": StatusColumn(Column("USER", least=5), _user, {"users": lambda d: " ".join(d.users)}),
    "lease": StatusColumn(Column("LEASE", least=6), _listed(_leases), {"leases": lambda d: " ".join(_leases(d))}),
    "job": StatusColumn(Column("JOB", least=6), _listed(_jobs), {"jobs": lambda d: " ".join(_jobs(d))}),
    "mem": StatusColumn(
        Column("MEM", right=True, least=7), _memory,
        {"memory_used_bytes": lambda d: d.memory[0], "memory_total_bytes": lambda d: d.memory[1]},
    ),
    "free": StatusColumn(Column("FREE", right=True, least=4), _gib, {"memory_free_bytes": lambda d: d.free}),
    "util": StatusColumn(
        Column("UTIL", right=True, least=4),
        measured(lambda gpu: None if gpu.utilization is None else f"{gpu.utilization}%"),
        {"utilization_percent": of_gpu(lambda gpu: gpu.utilization)},
    ),
    "sm": _activity("SM", "sm_activity"),
    "tensor": _activity("TENSOR", "tensor_activity"),
    "temp": StatusColumn(
        Column("TEMP", right=True, least=4),
        measured(lambda gpu: None if gpu.temperature is None else f"{gpu.temperature}°C"),
        {"temperature_celsius": of_gpu(lambda gpu: gpu.temperature)},
    ),
    "power": StatusColumn(
        Column("POWER", right=True, least=5),
        measured(lambda gpu: None if gpu.power is None else f"{gpu.power:.0f}W"),
        {"power_watts": of_gpu(lambda gpu: gpu.power), "power_limit_watts": of_gpu(lambda gpu: gpu.power_limit)},
    ),
    "age": StatusColumn(
        Column("AGE", right=True, least=4), _age, {"age_seconds": lambda d: age_of(d.node, d.gpu)}
    ),
    "command": StatusColumn(
        Column("COMMAND"), _listed(_commands, 512), {"commands": lambda d: "; ".join(_commands(d))}
    ),
    "reason": StatusColumn(
        Column("REASON"), lambda d: _reason(d, beside=False), {"reason": lambda d: (d.mig or d.gpu).reason}
    ),
}  # fmt: skip
TABLE = ("node", "gpu", "model", "state", "user", "mem", "util", "temp", "power", "reason")
MEASURED = {"sm", "tensor"}  # between two readings
CSV = tuple(name for name in COLUMNS if name not in {"free", "command", *MEASURED})  # a command may hold a password
# Columns cut or dropped (0) in a narrow terminal, in this order. Node, index and state always remain.
STEPS = (
    ("command", 40), ("reason", 36), ("uuid", 16), ("model", 14), ("user", 16), ("age", 0), ("power", 0), ("temp", 0),
    ("model", 9), ("node", 16), ("user", 8), ("command", 16), ("reason", 20), ("uuid", 0), ("free", 0), ("job", 0),
    ("lease", 0), ("flag", 0), ("tensor", 0), ("sm", 0),
    ("model", 0), ("util", 0), ("command", 0), ("user", 0), ("reason", 12), ("mem", 0),
    ("node", 8), ("reason", 4),
)  # fmt: skip


def steps(names: Sequence[str]) -> list[Step]:
    """Return the steps that make a table of these columns narrower; its last column is never dropped."""
    at = {name: number for number, name in enumerate(names)}
    return [Step(at[name], to) for name, to in STEPS if name in at and (to or name != names[-1])]


def cells(device: DeviceRow, names: Sequence[str]) -> tuple[Cell, ...]:
    """Return a row of the table with these columns."""
    return tuple(
        _reason(device, beside=True) if name == "reason" and "user" in names else COLUMNS[name].cell(device)
        for name in names
    )


def fields(names: Sequence[str]) -> dict[str, Callable[[DeviceRow], Value]]:
    """Return the fields of CSV with these columns, by name."""
    return {field: value for name in names for field, value in COLUMNS[name].fields.items()}


def columns(text: str) -> tuple[str, ...]:
    """Return the columns in ``text``, separated by commas. Raises UsageError for an unknown or repeated one."""
    found = [named(word.strip(), COLUMNS, "--columns", "a column") for word in text.split(",")]
    if repeated := next((name for name in found if found.count(name) > 1), None):
        raise UsageError(f"--columns: {repeated} is listed twice")
    return tuple(found)


def named(word: str, names: Iterable[str], option: str, what: str) -> str:
    """Return the one of ``names`` that ``word`` or its alias is. Raises UsageError with the list and the nearest."""
    known = list(names)
    name = ALIASES.get(word.lower(), word.lower())
    if name in known:
        return name
    near = nearest(word.lower()[:100], [*known, *(alias for alias, of in ALIASES.items() if of in known)])
    meant = f"; did you mean {ALIASES.get(near, near)}?" if near else ""
    raise UsageError(f"{option}: {quoted(word)} is not {what}{meant}\n  there are: {', '.join(known)}")
