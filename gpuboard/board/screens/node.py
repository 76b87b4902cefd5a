"""One node in detail: its host, its connection with the last error and its remedy, and all its GPUs."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpuboard.board.arrange import natural_nodes, sensor, users_of
from gpuboard.board.gpu_actions import ActingScreen, GraphScreen
from gpuboard.board.history import History, Span
from gpuboard.board.scene import Place, Scene
from gpuboard.board.text.detail.graphs import GraphFrame
from gpuboard.board.text.detail.host import host_graphs, network_words
from gpuboard.board.text.format import age, percent, reason_beside, reason_of
from gpuboard.board.text.gpu_row import (
    INDEX_LEAST,
    degrees,
    device_slot,
    device_state,
    index_width,
    known,
    owner,
    state_runs,
    watts,
)
from gpuboard.board.text.lines import NAME, Runs, above, named
from gpuboard.board.text.plots import bins, curve, meter, part_of, per_cell
from gpuboard.board.text.single_node import TITLES, no_process, process_columns, process_rows
from gpuboard.board.theme.styles import Glyphs
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.grid import HEADER, Cell, Column, Grid, Row
from gpuboard.board.widgets.pane import Pane
from gpuboard.board.widgets.single_node import ProcessGrid
from gpuboard.model.gpu import short_model
from gpuboard.model.snapshot import GpuView, MigView, NodeView, shown_flags
from gpuboard.model.units import format_size

_STATE_ROLES = {"up": "good", "stale": "warn", "unreachable": "bad"}
_BAR = 10

_TRACE, _TRACE_FROM = 16, 140  # cells of a GPU's utilization over time, and of a screen that has room for it
_ACTIVITY_FROM = 160  # cells of a screen that has room for the activity of SMs and tensor cores
_GRAPH_LINES, _GRAPH_LINES_MOST = 3, 12
_GPU_LINES, _PROCESSES_FROM = 3, 5  # lines: of GPUs at least, and those that must be free for processes
_PROCESSES = 7  # lines that graphs leave to processes
_REST = 13  # lines of the screen besides graphs, GPUs and processes, seldom more


def gpu_columns(span: Span | None, *, active: bool = False, index: int = INDEX_LEAST) -> tuple[Column, ...]:
    """Return the columns of the GPUs, with utilization over ``span`` if given, and ``active``: activity beside it.

    ``index``: cells of the indexes.
    """
    return (
        Column("index", "GPU", index, right=True),
        Column("state", "State", 12),
        Column("user", "User", 10),
        Column("bar", "Memory", _BAR, drop=3),
        Column("gib", "GiB", 9, right=True),
        Column("utilization", "Util", 5, right=True),
        *([Column("sm", "SM", 5, right=True), Column("tensor", "Tensor", 6, right=True)] if active else []),
        *([Column("trace", span.name, _TRACE)] if span else []),
        Column("temperature", "Temp", 5, right=True, drop=2),
        Column("power", "Power", 6, right=True, drop=4),
        Column("model", "Model", 14, drop=5),
        Column("reason", "Reason", 24, weight=1, least=24, drop=1),
    )


def node_lines(node: NodeView, glyphs: Glyphs, width: int, *, host: bool = True) -> list[Runs]:
    """Return the lines about a node, its GPUs left out; ``host``: with its load."""
    driver = f"driver {node.driver or '?'}   CUDA {node.cuda or '?'}"
    if node.age_s is not None or node.source != "nvml":  # until the first reading "nvml" is an assumption
        driver += f"   read through {node.source}"
    lines: list[Runs] = [[(node.name, "title"), (f"  {driver}", "")]]
    role = "unknown" if node.connecting else _STATE_ROLES.get(node.state, "unknown")
    lines += named("Connection", _connection(node), role, width)
    if node.error is not None and not node.connecting:
        lines += named("Error", node.error, "bad", width)
    if node.claims_error is not None:
        lines += named("Reservations", f"not possible here: {node.claims_error}", "bad", width)
    if node.scheduler_state is not None:
        why = [node.scheduler_reason, node.scheduler_reservation and f"reservation {node.scheduler_reservation}"]
        words = "; ".join([node.scheduler_state, *filter(None, why)])
        lines += named("Scheduler", words, "warn" if any(why) else "", width)
    read = "never" if node.age_s is None else f"{age(node.age_s)} ago"
    lines += named("Last reading", read, "" if node.state == "up" else role, width)
    if host:
        lines += _host_lines(node, glyphs)
    lines += named("Host name", node.hostname or "?", "" if node.hostname else "unknown", width)
    addresses = ", ".join(map(_short, node.addresses))
    return lines + named("Addresses", addresses or "?", "" if addresses else "unknown", width)


def _short(address: str) -> str:
    """Return an IP address in its usual form, any other text as it is."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address


def _host_lines(node: NodeView, glyphs: Glyphs) -> list[Runs]:
    old = node.state != "up"
    words = f"{format_size(node.memory_used)} of {format_size(node.memory_total)}"
    lines = [
        _host("CPU", part_of(node.cpu_percent, 100), _cpu_words(node), glyphs, old),
        _host("Memory", part_of(node.memory_used, node.memory_total), words, glyphs, old),
    ]
    if node.net_received is not None:
        lines.append([("Network".ljust(NAME), "dim"), (network_words(node), "dim" if old else "")])
    return lines


def _connection(node: NodeView) -> str:
    if node.connecting:
        return f"connecting: {node.error or 'no answer yet'}"
    if node.source == "slurm":
        return "none: only Slurm shows it (docs/slurm.md, Ways to a node)"
    if node.state == "up":
        return "up" if node.connected else "up: connection lost, the newest reading is still fresh"
    if node.state == "stale":
        return "stale: connected, but no new reading"
    return "unreachable: never connected" if node.age_s is None else "unreachable: connection lost"


def _cpu_words(node: NodeView) -> str:
    load = "?" if node.load1 is None else f"{node.load1:.2f}"
    return f"{'?' if node.cpu_percent is None else f'{node.cpu_percent:.0f}'} %   load {load}"


def _host(name: str, part: float | None, words: str, glyphs: Glyphs, old: bool) -> Runs:
    role = "dim" if old else "unknown" if part is None else ""
    if part is None:
        return [(name.ljust(NAME), "dim"), (words, role)]
    full, track = meter(part, 20, glyphs)
    return [(name.ljust(NAME), "dim"), (full, role), (track, "dim"), (f"  {words}", role)]


def gpu_rows(
    node: NodeView,
    gpu: GpuView,
    scene: Scene,
    glyphs: Glyphs,
    trace: Callable[[str], str] | None,
    *,
    active: bool = False,
) -> list[Row]:
    """Return a GPU's row and one for each of its MIG devices; their keys are the UUIDs.

    ``trace``: UUID → a curve. ``active``: with the activity of SMs and tensor cores.
    """
    old = node.state != "up"
    rows = [Row(gpu.uuid, partial(_gpu_cells, node, gpu, scene, glyphs, trace, active=active), dim=old)]
    unmeasured = 3 + 2 * active + (trace is not None)  # from utilization to power
    return rows + [Row(mig.uuid, partial(_mig_cells, gpu, mig, scene, glyphs, unmeasured), dim=old) for mig in gpu.mig]


def _mig_cells(gpu: GpuView, device: MigView, scene: Scene, glyphs: Glyphs, unmeasured: int) -> Sequence[Cell]:
    return (
        Cell(device_slot(gpu, device)),
        device_state(device),
        Cell(*owner(device, scene)),
        *_memory_cells(device, device.state, glyphs),
        *[Cell("-", "dim")] * unmeasured,
        Cell(device.profile),
        Cell(reason_beside(device.reason, users_of(device, scene))),
    )


def _gpu_cells(
    node: NodeView, gpu: GpuView, scene: Scene, glyphs: Glyphs, trace: Callable[[str], str] | None, *, active: bool
) -> Sequence[Cell]:
    users = users_of(gpu, scene)
    flags = "".join(f"[{flag}] " for flag in shown_flags(gpu) if flag != "sick" or not gpu.sick)
    return (
        Cell(str(gpu.index)),
        Cell(state_runs(gpu)),
        Cell(*owner(gpu, scene)),
        *_memory_cells(gpu, gpu.state, glyphs),
        known(percent(gpu.utilization)),
        *([known(percent(sensor(gpu, of))) for of in ("sm_activity", "tensor_activity")] if active else []),
        *([Cell(trace(gpu.uuid), gpu.state)] if trace else []),
        degrees(gpu),
        watts(gpu),
        Cell(short_model(gpu.name)),
        Cell(f"{flags}{reason_of(gpu, users)}"),
    )


def _trace(history: History, span: Span, glyphs: Glyphs, uuid: str) -> str:
    samples = history.of(uuid, span)
    count = _TRACE * per_cell(glyphs)
    return curve(bins(samples.times, samples.utilization, span.seconds / count, count), 1, glyphs, 0.0, 100.0)[0]


def _memory_cells(of: GpuView | MigView, state: str, glyphs: Glyphs) -> tuple[Cell, Cell]:
    part = part_of(of.memory_used, of.memory_total)
    used = "?" if of.memory_used is None else f"{of.memory_used / 2**30:.1f}"
    total = "?" if of.memory_total is None else f"{of.memory_total / 2**30:.0f}"
    full, track = meter(part, _BAR, glyphs)
    return (Cell(((full, state), (track, "dim"))), Cell(f"{used}/{total}", "" if part is not None else "unknown"))


class NodeScreen(GraphScreen, ActingScreen):
    """One node: connection, host, GPUs."""

    TITLE_WORDS = "Node"
    NOTICE = False
    AUTO_FOCUS = "#gpus"
    DEFAULT_CSS = """
    NodeScreen #node { padding: 0 1; margin-bottom: 1; max-height: 60%; }
    NodeScreen #host { padding: 0 1; margin-bottom: 1; }
    NodeScreen #gpus { padding: 0 1; min-height: 4; }
    NodeScreen #processes { padding: 0 1; margin-top: 1; height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back", id="node.back"),
        Binding("left_square_bracket,left", "step(-1)", "Previous", id="node.previous", priority=True),
        Binding("right_square_bracket,right", "step(1)", "Next", id="node.next", priority=True),
    ]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.node_name = name
        self._has_span = False  # there is room for graphs, or for each GPU's utilization over time

    def compose(self) -> ComposeResult:
        yield Pane(id="node")
        yield Pane(id="host")
        yield Grid(gpu_columns(None), id="gpus")
        yield ProcessGrid(TITLES, id="processes")
        yield Footer()

    def show(self, scene: Scene) -> None:
        node = scene.nodes.get(self.node_name)
        if node is None:
            self._show_missing(scene)
            return
        glyphs = self.board.look.glyphs
        history, span = self.board.core.history, self.span
        rows = sum(1 + len(gpu.mig) for gpu in node.gpus)
        height = min(_GRAPH_LINES_MOST, (self.size.height - _REST - rows - _PROCESSES) // 2)
        host = self.query_one("#host", Pane)
        host.display = height >= _GRAPH_LINES and node.age_s is not None
        self.query_one("#node", Pane).show(
            lambda width: [*above(scene, width), *node_lines(node, glyphs, width, host=not host.display)]
        )
        if host.display:
            samples = history.host(node.name, span)
            host.show(
                lambda width: host_graphs(node, samples, GraphFrame(width, height, glyphs, node.state != "up", span))
            )
        grid = self.query_one("#gpus", Grid)
        empty = "no GPU"
        if node.age_s is None:
            empty = f"no GPUs known{' yet' if node.connecting else ''}: no reading from this node"
        grid.set_empty(empty)
        wide = self.size.width >= _TRACE_FROM
        active = self.size.width >= _ACTIVITY_FROM and any(sensor(gpu, "sm_activity") is not None for gpu in node.gpus)
        grid.set_columns(gpu_columns(span if wide else None, active=active, index=index_width(node.gpus)))
        trace = partial(_trace, history, span, glyphs) if wide else None
        grid.set_rows([row for gpu in node.gpus for row in gpu_rows(node, gpu, scene, glyphs, trace, active=active)])

        self._show_processes(node, rows, self.size.height - _REST - rows - 2 * height * host.display)
        if self._has_span != (wide or host.display):
            self._has_span = not self._has_span
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Show the key of the time span dim where nothing on the screen has one."""
        if action == "span" and not self._has_span:
            return None
        return super().check_action(action, parameters)

    def _show_missing(self, scene: Scene) -> None:
        """Show that the scene lacks the node: its last values are not current."""
        words = f"this board has no reading of {self.node_name} now"
        self.query_one("#node", Pane).show(lambda width: [*above(scene, width), *named("Missing", words, "bad", width)])
        for pane in ("#host", "#processes"):
            self.query_one(pane).display = False
        grid = self.query_one("#gpus", Grid)
        grid.set_empty("no GPUs known")
        grid.set_rows([])

    def _show_processes(self, node: NodeView, rows: int, room: int) -> None:
        """Show the node's processes below its GPUs where there are ``room`` lines for them."""
        grid, processes = self.query_one("#gpus", Grid), self.query_one("#processes", ProcessGrid)
        processes.display = bool(rows) and room >= _PROCESSES_FROM
        grid.styles.height = HEADER + max(rows, _GPU_LINES) if processes.display else "1fr"
        if processes.display:
            places = [Place(node, gpu) for gpu in node.gpus]
            processes.set_empty(no_process(places))
            processes.set_columns(process_columns(places))
            processes.set_rows(process_rows(places))

    @on(Grid.Chosen, "#gpus")
    def open_gpu(self, event: Grid.Chosen) -> None:
        place = None if self.board.scene is None else self.board.scene.devices.get(event.key)
        if place is not None:
            self.board.open_gpu(place.gpu.uuid)

    def targets(self) -> list[str]:
        cursor = self.query_one("#gpus", Grid).cursor
        return [] if cursor is None else [cursor]

    def action_step(self, by: int) -> None:
        scene = self.board.scene
        if scene is None:
            return
        names = [node.name for node in natural_nodes(scene)]
        if self.node_name in names and 0 <= (at := names.index(self.node_name) + by) < len(names):
            self.node_name = names[at]
            self.show(scene)
