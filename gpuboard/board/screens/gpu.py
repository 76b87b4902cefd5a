"""One GPU in detail: GpuScreen, and GpuPanel, which is beside the cluster on wide terminals."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll

from gpuboard.board.arrange import age_of, natural_nodes
from gpuboard.board.dialogs.signal import running, signal_these
from gpuboard.board.gpu_actions import ActingScreen, GraphScreen
from gpuboard.board.history import FIVE_MINUTES, History, Samples
from gpuboard.board.scene import Place, Scene
from gpuboard.board.text.detail import gpu as gpu_lines
from gpuboard.board.text.detail.graphs import GraphFrame, graph_width
from gpuboard.board.text.detail.sensors import activity_graphs, sensor_lines
from gpuboard.board.text.lines import Runs, above, named, title
from gpuboard.board.text.plots import plotted_until
from gpuboard.board.text.processes import PROCESS_COLUMNS, no_processes, process_rows, with_values
from gpuboard.board.theme.styles import Glyphs
from gpuboard.board.widgets.footer import Footer
from gpuboard.board.widgets.grid import Grid, Row
from gpuboard.board.widgets.pane import Pane
from gpuboard.cluster.snapshot.processes import ended_leases, process_key
from gpuboard.model.snapshot import has_current_values, judged
from gpuboard.model.units import format_duration

_PLOT_LINES, _PLOT_LINES_MOST = 3, 10
_FURTHER_FROM = 46  # lines of the screen from which there are graphs of activity and throughput
_REST = 34  # lines of the screen besides the graphs, seldom more
_PANEL_PLOT_LINES = (2, 6)  # at least, at most
_PANEL_REST = 26  # lines that the panel needs besides, seldom more
_PROCESSES = 12  # rows shown at once; more can be scrolled to
_PANEL_PROCESSES = 6  # lines
_PANEL_GAPS_FROM = 24  # lines of the panel from which its parts have blank lines between them
_PANEL_HEALTH_FROM = 54  # lines of the panel from which it has all health checks


class Known(NamedTuple):
    """What is known of a GPU now."""

    now: Place | None  # None: no node lists it
    values: Place | None  # the newest values; None: never read
    old_s: float | None  # age of the values; None: they are current


class Memory:
    """The last values of one GPU, kept for when it vanishes."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self._last: Place | None = None
        self._at = 0.0

    def look(self, scene: Scene, now: float) -> Known:
        """Return what is known with the newest scene; ``now`` is monotonic."""
        place = scene.place(self.uuid)
        if place is not None and has_current_values(place.node, place.gpu):
            self._last, self._at = place, now
            return Known(place, place, None)
        if self._last is None:
            return Known(place, place, None if place is None else age_of(place.node, place.gpu))
        old_s = now - self._at
        if place is not None and (age_s := age_of(place.node, place.gpu)) is not None:
            old_s = age_s if place.node.state != "up" else max(age_s, old_s)  # the same age as on the other screens
        return Known(place, self._last, old_s)


def notice(known: Known, width: int) -> list[Runs]:
    """Return why the values are not current; no line when they are."""
    if known.old_s is None and known.now is not None:
        return []
    nothing = known.values is None or known.values.gpu.memory_used is None
    age = "" if nothing or known.old_s is None else f" The values shown are {format_duration(known.old_s)} old."
    if known.now is None:
        gone = "No node lists this GPU now." if known.values is not None else "No node lists this GPU."
        return named("Gone", f"{gone}{age}", "bad", width)
    node, gpu = known.now.node, known.now.gpu
    if node.state == "stale":
        return named("Stale", f"{node.name}: no new reading.{age}", "warn", width)
    if node.connecting:
        return named("Connecting", f"{node.name}: {node.error or 'no answer yet'}.{age}", "unknown", width)
    if node.state != "up":
        return named("Unreachable", f"{node.name}: {node.error or 'no answer'}.{age}", "warn", width)
    return named("Lost" if gpu.state == "broken" else "Not read", f"{gpu.error or gpu.reason}.{age}", "bad", width)


class GpuPanel(VerticalScroll, can_focus=False):
    """A GPU in a column beside the cluster."""

    DEFAULT_CSS = "GpuPanel { padding: 0 1; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._pane = Pane()
        self._memory: Memory | None = None
        self._shown: tuple[Scene, str | None, History, Glyphs, float] | None = None
        self._plotted: tuple[tuple[str, float], Samples] | None = None  # samples, and what they are of

    def compose(self) -> ComposeResult:
        yield self._pane

    def on_resize(self) -> None:
        if self._shown is not None:
            self._show(*self._shown)

    def show_gpu(self, scene: Scene, uuid: str | None, history: History, glyphs: Glyphs) -> None:
        """Show a GPU as it is now, or how to choose one."""
        self._shown = scene, uuid, history, glyphs, time.monotonic()
        self._show(*self._shown)

    def _show(self, scene: Scene, uuid: str | None, history: History, glyphs: Glyphs, at: float) -> None:
        if uuid is None:
            self._memory = None
            self._pane.show(lambda width: [[("Move to a GPU to see it here.", "dim")]])
            return
        if self._memory is None or self._memory.uuid != uuid:
            self._memory = Memory(uuid)
        known = self._memory.look(scene, at)
        least, most = _PANEL_PLOT_LINES
        height = max(least, min(most, (self.size.height - _PANEL_REST) // 4))
        whole, roomy = self.size.height >= _PANEL_HEALTH_FROM, self.size.height >= _PANEL_GAPS_FROM
        frame = GraphFrame(0, height, glyphs)
        samples = partial(self._samples, uuid, history)
        self._pane.show(partial(_panel_lines, known, scene, samples, frame, roomy=roomy, whole=whole))

    def _samples(self, uuid: str, history: History, frame: GraphFrame) -> Samples:
        """Return the samples of a GPU as they were when its plots last changed."""
        until = plotted_until(history.newest_at, graph_width(frame), frame.glyphs, span_s=frame.span.seconds)
        if self._plotted is None or self._plotted[0] != (uuid, until):
            self._plotted = (uuid, until), history.of(uuid, frame.span)
        return self._plotted[1]


def _panel_lines(
    known: Known,
    scene: Scene,
    samples: Callable[[GraphFrame], Samples],
    frame: GraphFrame,
    width: int,
    *,
    roomy: bool,
    whole: bool,
) -> list[Runs]:
    """Return the lines of the panel, parted by blank ones if it is ``roomy``; ``whole``: with all checks of health."""
    lines = notice(known, width)
    place = known.now or known.values
    if place is None or known.values is None:
        return lines
    old = known.old_s is not None
    frame = frame._replace(width=width, dim=old)
    lines += gpu_lines.head(place, scene, width)
    gap: list[Runs] = [[]] if roomy else []
    lines += [*gap, *gpu_lines.readings(known.values.gpu, samples(frame), frame)]
    lines += [*gap, title("Processes"), *gpu_lines.processes(known.values, _PANEL_PROCESSES, width)]
    lines += [*gap, *gpu_lines.neighbour_line(place, width)]
    return lines + gpu_lines.health(place.gpu, width, only_bad=not whole)


class GpuScreen(GraphScreen, ActingScreen):
    """One GPU: state and owner, plots of the last minutes, processes, links, health."""

    TITLE_WORDS = "GPU"
    NOTICE = False
    AUTO_FOCUS = ""  # focus on the processes would scroll to them
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012 - as textual declares it
    DEFAULT_CSS = """
    GpuScreen #body { padding: 0 1; }
    GpuScreen Pane { margin-bottom: 1; }
    GpuScreen #notice { margin-bottom: 0; }
    GpuScreen #processes { margin-bottom: 1; padding: 0; }
    GpuScreen #evidence { height: auto; layout: horizontal; }
    GpuScreen #evidence Pane { width: 1fr; margin: 0 2 1 0; }
    GpuScreen.-narrow #evidence { layout: vertical; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back", id="gpu.back"),
        Binding("left_square_bracket,left", "step(-1)", "Previous", id="gpu.previous", priority=True),
        Binding("right_square_bracket,right", "step(1)", "Next", id="gpu.next", priority=True),
        Binding("n", "node", "Node", id="gpu.node"),
        Binding("pageup", "page(-1)", "Page up", id="gpu.page-up", show=False, priority=True),
        Binding("pagedown", "page(1)", "Page down", id="gpu.page-down", show=False, priority=True),
    ]

    def __init__(self, uuid: str) -> None:
        super().__init__()
        self._memory = Memory(uuid)

    @property
    def uuid(self) -> str:
        return self._memory.uuid

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="body", can_focus=False):
            yield Pane(id="notice")
            yield Pane(id="head")
            yield Pane(id="readings")
            yield Grid(PROCESS_COLUMNS, id="processes")
            with Container(id="evidence"):
                yield Pane(id="links")
                yield Pane(id="health")
        yield Footer()

    def on_mount(self) -> None:
        """Give the focus to the processes: arrow keys move among them."""
        self.query_one("#processes", Grid).focus(scroll_visible=False)

    def show(self, scene: Scene) -> None:
        """Draw the GPU as it is now, or with its last known values."""
        known = self._memory.look(scene, time.monotonic())
        self.query_one("#notice", Pane).show(lambda width: [*above(scene, width), *notice(known, width)])
        place, values = known.now or known.values, known.values
        if place is None or values is None:
            return
        old = known.old_s is not None
        span, glyphs = self.span, self.board.look.glyphs
        self.board.core.look(place.node.name, self.uuid)
        samples = self.board.core.history.of(self.uuid, span)
        self.board.core.history.activity.watch(self.uuid)
        roomy = self.size.height >= _FURTHER_FROM
        further = activity_graphs(values.gpu, self.board.core.history.activity.of(self.uuid)) if roomy else []
        only = [one.name for one in further if span != FIVE_MINUTES]
        further = further if span == FIVE_MINUTES else []
        rows = (4 + len(further) + 1) // 2
        height = max(_PLOT_LINES, min(_PLOT_LINES_MOST, (self.size.height - _REST) // rows))
        self.query_one("#head", Pane).show(
            lambda width: [
                *gpu_lines.head(place, scene, width),
                gpu_lines.age_line(place.node, place.gpu),
                *sensor_lines(values.gpu, glyphs, width, old=old, throughput=not further),
            ]
        )
        self.query_one("#readings", Pane).show(
            lambda width: [
                *gpu_lines.readings(values.gpu, samples, GraphFrame(width, height, glyphs, old, span), further),
                *([[(f"Over 5 minutes only: {', '.join(only)}", "dim")]] if only else []),
            ]
        )
        columns = with_values(PROCESS_COLUMNS, values.gpu.processes or (), ended_leases([values.node]))
        self.query_one("#processes", Grid).set_columns(columns)
        self._show_processes(process_rows(values, dim=old), no_processes(values))
        self.query_one("#links", Pane).show(lambda width: [title("Links"), *gpu_lines.links(place, width)])
        self.query_one("#health", Pane).show(lambda width: [title("Health"), *gpu_lines.health(place.gpu, width)])

    def _show_processes(self, rows: list[Row], empty: str) -> None:
        grid = self.query_one("#processes", Grid)
        grid.styles.height = 1 + max(2, min(len(rows), _PROCESSES))
        grid.set_empty(empty)
        grid.set_rows(rows)

    def targets(self) -> list[str]:
        return [self.uuid]

    def action_signal(self) -> None:
        """Send a signal to the process under the cursor."""
        cursor = self.query_one("#processes", Grid).cursor
        found = [] if self.board.scene is None else running(self.board.scene, [self.uuid])
        for one in found:
            if cursor == process_key(one):
                signal_these(self.board, [one])
                return
        self.board.notify("no process selected", markup=False)

    def action_step(self, by: int) -> None:
        """Show the previous or next GPU, by node and index."""
        scene = self.board.scene
        if scene is None:
            return
        uuids = [gpu.uuid for node in natural_nodes(scene) for gpu in judged(node)]
        if self.uuid in uuids and 0 <= (at := uuids.index(self.uuid) + by) < len(uuids):
            self._memory = Memory(uuids[at])
            self.show(scene)

    def action_node(self) -> None:
        scene = self.board.scene
        place = None if scene is None else self._memory.look(scene, time.monotonic()).values
        if place is not None:
            self.board.open_node(place.node.name)

    def action_page(self, by: int) -> None:
        body = self.query_one("#body", VerticalScroll)
        body.scroll_relative(y=by * max(1, body.size.height - 2), animate=False)
