"""What a GPU's driver reports beyond its four readings: clocks, activity, throughput (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from gpuboard.board.history.activity import PastSensors
from gpuboard.board.text.detail.graphs import Graph
from gpuboard.board.text.detail.host import rate
from gpuboard.board.text.format import UNKNOWN
from gpuboard.board.text.lines import NAME, Runs, named
from gpuboard.board.text.plots import meter, scale
from gpuboard.board.theme.styles import Glyphs, plot_role
from gpuboard.model.gpu import Sensors
from gpuboard.model.snapshot import GpuView

_BAR = 8
_GB = 1e9
_RATE = 9  # cells of the longest rate, "1010 MB/s"
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # bytes/s of a PCIe lane, by generation


def activity_graphs(gpu: GpuView, past: PastSensors) -> list[Graph]:
    """Return the graphs of what a GPU reports: activity of SMs and tensor cores, PCIe and NVLink throughput."""
    read, times, role = gpu.sensors or Sensors(), [at for at, _ in past], plot_role(gpu.state)
    found = []
    for name, key in (("SM activity", "sm_activity"), ("Tensor cores", "tensor_activity")):
        now, values = getattr(read, key), [None if one is None else getattr(one, key) for _, one in past]
        if now is not None or any(value is not None for value in values):
            found.append(Graph(name, f"{UNKNOWN if now is None else now} %", times, values, 100.0, role))
    for name, link, most in (("PCIe", "pcie", pcie_most(gpu)), ("NVLink", "nvlink", read.nvlink_max)):
        both, pairs = _both(read, link), [None if one is None else _both(one, link) for _, one in past]
        if both is None and not any(pairs):
            continue
        values = [None if pair is None else max(pair) / _GB for pair in pairs]
        words = UNKNOWN if both is None else f"in {rate(both[1])}, out {rate(both[0])}"
        words += f" of {rate(most)}" if most else ""
        high = most / _GB if most else scale(values) or 1.0
        found.append(Graph(name, words, times, values, high, role, words=lambda value: rate(value * _GB)))
    return found


def _both(read: Sensors, link: str) -> tuple[int, int] | None:
    """Return what is sent and received over a kind of link, in bytes per second."""
    sent, received = getattr(read, f"{link}_sent"), getattr(read, f"{link}_received")
    return None if sent is None or received is None else (sent, received)


def sensor_lines(gpu: GpuView, glyphs: Glyphs, width: int, *, old: bool = False, throughput: bool = True) -> list[Runs]:
    """Return clocks, fan, engines, activity and throughput; in one line what the driver does not report.

    ``old``: the values are not current. ``throughput`` False: it is in the graphs.
    """
    read = gpu.sensors or Sensors()
    clock = f"{read.sm_clock} of {read.sm_clock_max}" if read.sm_clock_max is not None else str(read.sm_clock)
    values = {
        "SM clock": None if read.sm_clock is None else f"{clock} MHz",
        "memory clock": None if read.memory_clock is None else f"{read.memory_clock} MHz",
        "performance": None if read.performance_state is None else f"P{read.performance_state}",
        "fan": None if read.fan is None else f"{read.fan} %",
        "encoder": None if read.encoder is None else f"{read.encoder} %",
        "decoder": None if read.decoder is None else f"{read.decoder} %",
    }
    known = [f"{name} {words}" for name, words in values.items() if words is not None]
    measured = {
        "activity": _activity(gpu, read, glyphs, width),
        "PCIe throughput": _throughput("PCIe", gpu, (read.pcie_sent, read.pcie_received), pcie_most(gpu), glyphs),
        "NVLink throughput": _throughput(
            "NVLink", gpu, (read.nvlink_sent, read.nvlink_received), read.nvlink_max, glyphs
        ),
    }
    missing = [name for name, words in values.items() if words is None]
    missing += [name for name, lines in measured.items() if not lines and (name != "NVLink throughput" or gpu.links)]
    lines = named("Sensors", ", ".join(known), "", width) if known else []
    lines += [line for name, some in measured.items() for line in some if throughput or name == "activity"]
    if old:
        lines = [[(text, "dim") for text, _ in line] for line in lines]
    return lines + (named("Not reported", ", ".join(missing), "dim", width) if missing else [])


def beside_utilization(gpu: GpuView, room: int) -> str:
    """Return the activity that fits into ``room`` cells: ``  SM 85 %   tensor 61 %``; "" where none is reported."""
    read = gpu.sensors or Sensors()
    words = ""
    for name, value in (("SM", read.sm_activity), ("tensor", read.tensor_activity)):
        if value is not None and len(words) + len(name) + 8 <= room:
            words += f"  {name} {value} %".ljust(len(name) + 8)
    return words.rstrip()


def pcie_most(gpu: GpuView) -> float | None:
    """Return what the PCIe link carries each way, in B/s, at its highest generation: an idle GPU lowers it."""
    lane = _LANE.get(gpu.pcie_generation_max or gpu.pcie_generation or 0)
    return None if lane is None or gpu.pcie_width is None else lane * gpu.pcie_width


def _activity(gpu: GpuView, read: Sensors, glyphs: Glyphs, width: int) -> list[Runs]:
    shown = [
        (name, value)
        for name, value in (
            ("SM", read.sm_activity),
            ("occupancy", read.sm_occupancy),
            ("tensor", read.tensor_activity),
            ("DRAM", read.dram_activity),
        )
        if value is not None
    ]
    if not shown:
        return []
    formats = (("HMMA", read.tensor_hmma), ("IMMA", read.tensor_imma), ("DMMA", read.tensor_dmma))
    used = ", ".join(f"{name} {value} %" for name, value in formats if value is not None)
    wide = NAME + sum(len(name) + _BAR + 10 for name, _ in shown) - 3 <= width
    line: Runs = [("Activity".ljust(NAME), "dim")]
    for number, (name, value) in enumerate(shown):
        line.append((f"{'   ' if number else ''}{name} ", "dim"))
        if wide:
            line += _meter(value / 100, gpu, glyphs)
        line.append((f"{value:>4} %" if wide else f"{value:>3} %", ""))
    return [line, *(named("", f"tensor cores by format: {used}", "dim", width) if used else [])]


def _meter(part: float, gpu: GpuView, glyphs: Glyphs) -> Runs:
    full, empty = meter(part, _BAR, glyphs)
    return [(full, plot_role(gpu.state)), (empty, "dim")]


def _throughput(name: str, gpu: GpuView, both: Sequence[int | None], most: float | None, glyphs: Glyphs) -> list[Runs]:
    sent, received = both
    if sent is None or received is None:
        return []
    line: Runs = [(name.ljust(NAME), "dim")]
    if most:
        line += [*_meter(min(1.0, max(sent, received) / most), gpu, glyphs), ("  ", "")]
    line += [("in ", "dim"), (rate(received).ljust(_RATE), ""), ("  out ", "dim"), (rate(sent).ljust(_RATE), "")]
    return [[*line, *([(f"  of {rate(most)} each way", "dim")] if most else [])]]
