"""Processes on GPUs as rows (pure)."""

from __future__ import annotations

from functools import partial

from gpuboard.board.scene import Place
from gpuboard.board.text.rows import Cell, Column, Row
from gpuboard.model.snapshot import ProcessView
from gpuboard.model.units import format_duration, format_size

PROCESS_COLUMNS = (
    Column("user", "User", 10),
    Column("pid", "Pid", 8, right=True),
    Column("memory", "Memory", 8, right=True, drop=2),
    Column("runtime", "Runtime", 7, right=True, drop=3),
    Column("job", "Job", 8, drop=5),
    Column("lease", "Lease", 6, drop=4),
    Column("container", "Container", 12, drop=6),
    Column("note", "Note", 8, drop=1),
    Column("command", "Command", 16, weight=1, least=16),
)


def process_key(process: ProcessView) -> str:
    """Return a process's identity: pids are reused."""
    return f"{process.pid}:{process.started}"


def process_rows(place: Place, *, dim: bool) -> list[Row]:
    """Return the rows of a GPU's processes, most memory first; their keys are ``process_key``'s."""
    found = sorted(place.gpu.processes or (), key=lambda process: (-(process.memory or 0), process.pid))
    return [Row(process_key(process), partial(process_cells, process), dim=dim) for process in found]


def process_cells(process: ProcessView) -> tuple[Cell, ...]:
    """Return the cells of a process, one for each of ``PROCESS_COLUMNS``."""
    note = "rogue" if process.rogue else process.type if process.type != "compute" else ""
    runtime = "?" if process.runtime_s is None else format_duration(process.runtime_s)
    return (
        Cell("hidden" if process.user is None else process.user, "unknown" if process.user is None else ""),
        Cell(str(process.pid)),
        Cell(format_size(process.memory), "unknown" if process.memory is None else ""),
        Cell(runtime, "unknown" if process.runtime_s is None else ""),
        Cell(process.job or "-", "" if process.job else "dim"),
        Cell(process.lease or "-", "" if process.lease else "dim"),
        Cell(process.container or "-", "" if process.container else "dim"),
        Cell(note, "bad" if process.rogue else "dim"),
        Cell(process.command),
    )


def no_processes(place: Place) -> str:
    """Return the text in place of processes where there are none to show."""
    return "no process" if place.gpu.processes is not None else "? cannot read the processes"
