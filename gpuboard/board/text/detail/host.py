"""A node itself as graphs: CPU, memory, load and network (pure)."""

from __future__ import annotations

from gpuboard.board.history import HostSamples
from gpuboard.board.text.detail.graphs import Graph, GraphFrame, graphs
from gpuboard.board.text.lines import Runs
from gpuboard.board.text.plots import scale
from gpuboard.model.snapshot import NodeView
from gpuboard.model.units import format_size

_MEMORY_WARN = 0.95  # part in use from which processes are about to be killed


def host_graphs(node: NodeView, samples: HostSamples, frame: GraphFrame) -> list[Runs]:
    """Return the readings of a node with their graphs; those that it does not report are named in one line."""
    times, total_gib = samples.times, (node.memory_total or 0) / 2**30
    most_gib = total_gib or 1.0
    cpu, load = f"{node.cpu_percent or 0:.0f} %", f"{node.load1 or 0:.2f}"
    used = f"{format_size(node.memory_used)} of {format_size(node.memory_total)}"
    memory = [None if part is None else part * total_gib for part in samples.memory]
    unit = 1e9 if max((value or 0.0 for value in samples.network), default=0.0) >= 1e9 else 1e6  # as ``rate`` has it
    network = [None if value is None else value / unit for value in samples.network]
    readings = (node.cpu_percent, node.memory_used, node.load1, node.net_received)
    shown = (
        Graph("CPU", cpu, times, samples.cpu, 100.0, peaks=samples.peak),
        Graph("Memory", used, times, memory, most_gib, warn=_MEMORY_WARN * most_gib),
        Graph("Load", load, times, samples.load, scale(samples.load), words="{:.1f}".format),
        Graph("Network", network_words(node), times, network, scale(network), words=lambda value: rate(value * unit)),
    )
    found, missing = [], []
    for now, graph in zip(readings, shown, strict=True):
        if now is None and not any(value is not None for value in graph.values):
            missing.append(graph.name)
        else:
            found.append(graph if now is not None else graph._replace(now="?"))
    lines = graphs(found, frame) if found else []
    return lines + ([[(f"Not reported: {', '.join(missing)}", "dim")]] if missing and node.state == "up" else [])


def network_words(node: NodeView) -> str:
    """Return what a node receives and sends."""
    received, sent = rate(node.net_received), rate(node.net_sent)
    number, _, unit = received.partition(" ")
    return f"in {number if sent.endswith(unit) else received}, out {sent}"


def rate(value: float | None) -> str:
    """Return bytes per second: ``840 kB/s``, ``1.3 MB/s``, ``12 GB/s``; ``?`` when unknown."""
    if value is None:
        return "?"
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s")):
        if value >= unit:
            return f"{value / unit:.1f} {name}" if value < 10 * unit else f"{value / unit:.0f} {name}"
    return f"{value / 1e3:.0f} kB/s"
