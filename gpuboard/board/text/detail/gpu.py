"""One GPU as lines of text: identity, users, plots of the last minutes, links and health (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from gpuboard.board.arrange import age_of
from gpuboard.board.dialogs.request_form import local
from gpuboard.board.history import Samples
from gpuboard.board.scene import Place, Scene
from gpuboard.board.text.cells import fit, fit_runs
from gpuboard.board.text.detail.graphs import Graph, GraphFrame, graph_width, graphs
from gpuboard.board.text.detail.health import evidence
from gpuboard.board.text.detail.sensors import beside_utilization
from gpuboard.board.text.detail.topology import legend, matrix, neighbours
from gpuboard.board.text.format import age, flag_role, pair
from gpuboard.board.text.gpu_row import RED_HOT, device_slot
from gpuboard.board.text.lines import NAME, Runs, named, wrapped
from gpuboard.board.text.plots import scale
from gpuboard.board.theme.styles import LETTERS, plot_role
from gpuboard.model.links import SELF, UNKNOWN
from gpuboard.model.snapshot import GpuView, NodeView, shown_flags
from gpuboard.model.units import format_duration, format_size, ranges, seconds_of

FLAG_WORDS = {
    "rogue": "a process of a user who does not hold it",
    "idle": "reserved or allocated, but unused for a while",
    "overdue": "its lease has ended, processes of its owner still run",
    "disputed": "held by two leases, or by a job and a lease",
    "sick": "see Health",
    "mig": "split into MIG devices",
}
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_CELL = 6  # of a matrix of links
_NAME = 11  # cells of the users of processes
_PERCENT = 5  # cells of the longest percentage
_MEMORY_WARN = 0.95  # part in use from which allocations are about to fail
_POWER_LEAST = 100.0  # watts: the top of the graph of a GPU without a limit, at least


def head(place: Place, scene: Scene, width: int) -> list[Runs]:
    """Return a GPU's identity, its state with the reason, and its leases and jobs."""
    node, gpu = place.node, place.gpu
    lines: list[Runs] = [[(f"{node.name}  GPU {gpu.index}", "title"), (f"  {gpu.name}", "")]]
    bus = "   ".join(filter(None, (gpu.pci_bus_id, f"NUMA {gpu.numa_node}" if gpu.numa_node is not None else "")))
    one_line = f"{gpu.uuid}   {bus}".rstrip()
    lines += [[(text, "dim")] for text in ([one_line] if len(one_line) <= width else [gpu.uuid, bus]) if text]
    state = f"{LETTERS.get(gpu.state, '?')} {gpu.state}"
    leases = [one for one in scene.leases_on(gpu.uuid) if one.id in gpu.leases]  # two users may have taken one id
    listed = gpu.state == "reserved" and len(leases) == len(gpu.leases) > 0  # below, with the same words
    lines += named("State", state if listed else f"{state}: {gpu.reason}", gpu.state, width)
    for flag in shown_flags(gpu):
        words = "; ".join(gpu.sick) if flag == "sick" and gpu.sick else FLAG_WORDS.get(flag, "")
        lines += named("", f"{flag}: {words}", flag_role(flag), width)
    for lease in leases:
        words = f"{lease.id} of {lease.owner}, {format_duration(lease.remaining_s)} left"
        words += f": {lease.purpose}" if lease.purpose else ""
        lines += named("Lease", words, "mine" if lease.mine else "", width)
    for lease_id in dict.fromkeys(gpu.leases):
        if not any(lease.id == lease_id for lease in leases):
            lines += named("Lease", lease_id, "", width)
    now = seconds_of(scene.snapshot.at) if gpu.jobs else 0.0
    for job in gpu.jobs:
        words = f"{job.id} of {job.user} in {job.partition or 'no partition'}"
        if job.until is not None:
            until = seconds_of(job.until)
            words += f", {format_duration(max(0.0, until - now))} left, until {local(until, now)}"
        lines += named("Job", words, "", width)
    for device in gpu.mig:
        used = pair(device.memory_used, device.memory_total, 1)
        words = f"{LETTERS.get(device.state, '?')} {device.state}: {device.reason}; {used}"
        lines += named(f"{device_slot(gpu, device)} {device.profile}"[: NAME - 1], words, device.state, width)
    return lines


def age_line(node: NodeView, gpu: GpuView) -> Runs:
    """Return the age of the values and the compute mode."""
    mode = "?" if gpu.compute_mode is None else COMPUTE_MODES.get(gpu.compute_mode, "?")
    return [("Age".ljust(NAME), "dim"), (age(age_of(node, gpu)).ljust(12), ""), ("compute mode ", "dim"), (mode, "")]


def readings(gpu: GpuView, samples: Samples, frame: GraphFrame, further: Sequence[Graph] = ()) -> list[Runs]:
    """Return the four readings with their graphs over the span of ``frame``, and ``further`` ones below them."""
    total = gpu.memory_total or 0
    total_gib = total / 2**30
    limit = "?" if gpu.power_limit is None else f"{gpu.power_limit:.0f}"
    power_top = gpu.power_limit or max(_POWER_LEAST, scale(samples.power))
    power = "?" if gpu.power is None else f"{gpu.power:.0f}"
    memory = f"{format_size(gpu.memory_used)} of {format_size(gpu.memory_total)}"
    shared = ", the host's" if gpu.memory_shared else ""
    times, role = samples.times, plot_role(gpu.state)
    beside = beside_utilization(gpu, graph_width(frame) - NAME - _PERCENT)
    utilization = _unit(gpu.utilization, "%").ljust(_PERCENT if beside else 0) + beside
    shown = [
        Graph("Utilization", utilization, times, samples.utilization, 100.0, role, peaks=samples.peak),
        Graph(
            "Memory",
            memory + shared,
            times,
            tuple([None if part is None else part * total_gib for part in samples.memory]),
            total_gib or 1.0,
            role,
            warn=_MEMORY_WARN * total_gib or inf,
        ),
        Graph("Power", f"{power} of {limit} W", times, samples.power, power_top, role, words=_watts),
        Graph(
            "Temperature", _unit(gpu.temperature, "°C"), times, samples.temperature, 100.0, role, RED_HOT, RED_HOT + 5
        ),
    ]
    return graphs([*shown, *further], frame)


def _watts(value: float) -> str:
    """Return a power of the past, which is kept within 1.3 %."""
    return f"{round(value, -1) if value >= 50 else value:.0f}"


def _unit(value: float | None, unit: str) -> str:
    return f"? {unit}" if value is None else f"{value:.0f} {unit}"


def processes(place: Place, most: int, width: int) -> list[Runs]:
    """Return a line per process: user, pid, memory, command; of ``most`` lines, long commands have several."""
    found = place.gpu.processes
    if found is None:
        return [[("cannot be read", "unknown")]]
    if not found:
        return [[("none", "dim")]]
    by_memory = sorted(found, key=lambda process: -(process.memory or 0))
    lines: list[Runs] = []
    each = max(1, most // len(found))
    for process in by_memory[:most]:
        user = process.user or "hidden"
        role = "bad" if process.rogue else "unknown" if process.user is None else ""
        name = fit(f"{'!' if process.rogue else ' '}{user}", _NAME - 1) + " "
        values = f"{process.pid:>7} {format_size(process.memory):>8} "
        lead = _NAME + len(values)
        first, *further = wrapped(process.command, max(1, width - lead), most=each) or [""]
        lines.append([(name, role), (values, ""), (first, "dim")])
        lines += [[(" " * lead, ""), (text, "dim")] for text in further]
    if len(found) > most:
        lines.append([(f"and {len(found) - most} more", "dim")])
    return lines


def links(place: Place, width: int) -> list[Runs]:
    """Return the links between the node's GPUs as a matrix, or only this GPU's row where that does not fit."""
    node, gpu = place.node, place.gpu
    if len(node.gpus) < 2:
        return [[("the only GPU of its node", "dim")]]
    known = legend(node)
    if not known:
        return [[("not readable", "unknown")]]
    table = matrix(node)
    lines: list[Runs] = []
    if _CELL * (len(table.indexes) + 1) <= width:
        lines.append([("GPU".ljust(_CELL), "dim"), *((f"{index:>{_CELL}}", "dim") for index in table.indexes)])
        for other, words in zip(node.gpus, table.words, strict=True):
            own = other.uuid == gpu.uuid
            row = [(f"{word:>{_CELL}}", "unknown" if word == "?" else "dim" if word == SELF else "") for word in words]
            if own:  # the blanks are apart: a theme may underline
                row = [
                    run
                    for text, role in row
                    for run in fit_runs([(text.strip(), role or "mine")], _CELL, "", right=True)
                ]
            lines.append([(f"{other.index}".ljust(_CELL), "title" if own else "dim"), *row])
    else:
        lines += [
            [(f"{word:<6}", "unknown" if word == "?" else ""), (f"GPU {ranges(indexes)}", "")]
            for word, indexes in neighbours(gpu, node)
        ]
    explained = "; ".join(f"{word} {meaning}" for word, meaning in known)
    return lines + [[(line, "dim")] for line in wrapped(explained, width)]


def neighbour_line(place: Place, width: int) -> list[Runs]:
    """Return the links in one line: ``NV18 GPU 1-3; SYS GPU 4-7``."""
    found = neighbours(place.gpu, place.node)
    if found and all(word == UNKNOWN for word, _ in found):
        return named("Links", "not readable", "unknown", width)
    words = "; ".join(f"{word} GPU {ranges(indexes)}" for word, indexes in found)
    return named("Links", words or "the only GPU of its node", "", width)


def health(gpu: GpuView, width: int, *, only_bad: bool = False) -> list[Runs]:
    """Return the health checks; ``only_bad``: only those that found something, or one line for none."""
    found = evidence(gpu)
    if only_bad:
        bad = [item for item in found if item.role in {"bad", "warn"}]
        unread = [item.name for item in found if item.role == "unknown"]
        lines = [line for item in bad for line in named(item.name, item.words, item.role, width)]
        if unread:
            lines += named("Not readable", ", ".join(unread), "unknown", width)
        return lines or named("Health", "no problem found", "good", width)
    marks = {"good": "ok", "warn": "warn", "bad": "bad", "unknown": "?", "dim": ""}
    lines = []
    for item in found:
        for number, line in enumerate(
            named(item.name, item.words, item.role if item.role != "good" else "", width - 5)
        ):
            mark = marks[item.role] if not number else ""
            lines.append([line[0], (f"{mark:<5}", item.role), *line[1:]])
    return lines
