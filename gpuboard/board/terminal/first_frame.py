"""The first frame: this machine's GPUs in the board's layout, written while textual is imported (0.2 s).

It is drawn with the board's header, picture and theme, which need no textual. The board's own first frame covers every
cell of it. No textual.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.color import Color, ColorParseError, ColorSystem
from rich.style import Style

from gpuboard.board import preferences
from gpuboard.board.arrange import NodeRow, ViewState, arrange, arrange_nodes, pane_of
from gpuboard.board.core import Core
from gpuboard.board.history import History, Span
from gpuboard.board.overview.facts import Gatherer
from gpuboard.board.scene import Place, Scene
from gpuboard.board.terminal.guard import Guard, is_utf8
from gpuboard.board.text import single_node
from gpuboard.board.text.ascii import to_ascii
from gpuboard.board.text.cells import fit_runs
from gpuboard.board.text.gpu_cell import Ink
from gpuboard.board.text.gpu_row import with_devices
from gpuboard.board.text.lines import banner_lines
from gpuboard.board.text.overview import LEAST, free_lines, overview
from gpuboard.board.text.picture import Drawing, Focus, below, cells_of, columns_for, group_words, size_for, split
from gpuboard.board.text.rows import (
    MARK_WIDTH,
    Cell,
    Column,
    Line,
    Runs,
    Styled,
    header_runs,
    laid_over,
    line_of,
    lines_of,
    row_runs,
    runs_of,
    share,
)
from gpuboard.board.theme import file as themefile
from gpuboard.board.theme.styles import ASCII, UNICODE, Glyphs, Look
from gpuboard.board.widgets.header import header

_WAIT_S = 5.0  # for the first reading; the import of textual ends long before
_EDGE = 1  # free cells at the picture's left, and at its right for the scroll bar
_BELOW = 2  # lines: status and keys


class FirstFrame:
    """Waits in a thread for the node's first reading and writes one frame, unless ``end`` is called before."""

    def __init__(self, core: Core, guard: Guard) -> None:
        self._core = core
        self._guard = guard
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._shown: Scene | None = None

    def start(self) -> None:
        threading.Thread(target=self._wait, name="first-frame", daemon=True).start()

    def end(self) -> Scene | None:
        """Stop; return the scene of the written frame, or None."""
        self._over.set()
        with self._lock:
            return self._shown

    def _wait(self) -> None:
        self._core.fleet.wait(_WAIT_S)
        if self._over.is_set():
            return
        try:
            scene = self._core.scene()
            frame = draw(scene, self._core, shutil.get_terminal_size())
        except Exception:  # a bug: the board runs into it, too, and reports it
            return
        with self._lock:
            if not self._over.is_set() and self._guard.enter(frame):
                self._shown = scene


def draw(scene: Scene, core: Core, size: tuple[int, int]) -> str:
    """Return the output that draws ``scene`` on a terminal of ``size`` (columns, lines) like the board's start."""
    columns, rows = size
    kept, _ = preferences.load(core.env)
    glyphs = core.settings.glyphs
    unicode = is_utf8(core.env) if glyphs == "auto" else glyphs == "unicode"
    look, base = look_for(core, kept.theme, UNICODE if unicode else ASCII)
    top: list[Runs] = [*header(scene, columns, tall=rows >= 24), *banner_lines(scene, columns)]
    lines = [fit_runs(runs_of(Cell(runs), base, look), columns, base, ellipsis=look.glyphs.ellipsis) for runs in top]
    if kept.view.view == "picture" and not kept.view.filter:
        pane, taken = pane_of(kept.view, columns, rows)
        body = _Body(scene, kept.view, columns - (taken if pane == "right" else 0), base, look, explained=taken > 0)
        left = rows - len(top) - _BELOW - (taken if pane == "below" else 0)
        drawn = (body.single_node if len(scene.snapshot.nodes) == 1 else body.picture)(core.history, left)
        lines += body.with_overview(drawn, Gatherer(core.history, core.events), kept.graphs, left)
    lines = lines[:rows] + [[(" " * columns, base)]] * (rows - len(lines))
    system = _colors(core.env)
    written = (
        "".join(style.render(text if unicode else to_ascii(text), color_system=system) for text, style in line)
        for line in lines
    )
    return "".join(f"\x1b[{y};1H{line}" for y, line in enumerate(written, 1))


class _Body(NamedTuple):
    """The rows, as the board's widgets draw them with the cursor on the first GPU."""

    scene: Scene
    view: ViewState
    columns: int
    base: Style
    look: Look
    explained: bool  # whether the pane will have the reason for the state of the cursor's GPU

    def single_node(self, history: History, rows: int) -> list[Styled]:
        """Return the lines of a single node: host, GPUs, processes."""
        arranged = arrange(self.scene, self.view)
        items, places = with_devices(arranged), [row for row in arranged if isinstance(row, Place)]
        tall = single_node.tall_for(self.scene.snapshot.nodes[0], len(items), rows)
        width = self.columns - _EDGE
        titles = single_node.columns_for(tall)
        widths = share(titles, width - MARK_WIDTH)
        named = {titles[index].key: size for index, size in widths.items()}
        layout = single_node.Layout(self.scene, history, named, tall, self.look.glyphs)
        made = [single_node.row_of(item, layout) for item in items]
        first = next((row for row in made if not row.group), None)
        found: list[Styled] = []
        for row in made:
            line = line_of(row)
            parts = lines_of(line, tall)
            drawn = [self._row(part, titles, widths, width, marking=True) for part in parts]
            found += [laid_over(part, self.look.style("cursor")) for part in drawn] if row is first else drawn
        host = [runs_of(Cell(runs), self.base, self.look) for runs in self._host()]
        below = [[(" " * MARK_WIDTH, self.base), *runs] for runs in self._processes(places, width - MARK_WIDTH)]
        size = width - MARK_WIDTH, rows
        reason = single_node.reason_lines(items, None if first is None else first.key, self.scene, size)
        further = [] if self.explained else [runs_of(Cell(runs), self.base, self.look) for runs in reason]
        lines = [*host, self._titles(titles, widths, width, indent=MARK_WIDTH), *found, *further, *below]
        return [fit_runs(runs, self.columns, self.base, ellipsis="") for runs in lines[:rows]]

    def _host(self) -> Sequence[Runs]:
        return single_node.host_lines(self.scene.snapshot.nodes[0], self.look.glyphs, self.columns)

    def _processes(self, places: Sequence[Place], width: int) -> list[Styled]:
        titles = single_node.process_columns(places)
        widths = share(titles, width)
        rows = [line_of(row) for row in single_node.process_rows(places)]
        return [self._titles(titles, widths, width), *(self._row(row, titles, widths, width) for row in rows)]

    def picture(self, history: History, rows: int) -> list[Styled]:
        items = arrange_nodes(self.scene, self.view)
        first = next((item for item in items if isinstance(item, NodeRow)), None)
        if first is None:
            return []
        shown = (gpu.uuid for gpu in first.node.gpus if first.shown is None or gpu.uuid in first.shown)
        focus = Focus(first.node.name, next(shown, None))
        width = self.columns - 2 * _EDGE
        size = size_for(self.scene, items, width, rows - 1)
        titles = columns_for(self.scene, items, size)
        widths = share(titles, width)
        named = {column.key: widths.get(index, 0) for index, column in enumerate(titles)}
        drawing = Drawing(Ink(self.scene, history, self.look, size), focus, named)
        found = [self._titles(titles, widths, width)]
        for item in split(items, size.each):
            if isinstance(item, NodeRow):
                further = below(item, drawing) if size.wide else []
                line = Line(cells_of(item, drawing), False, item.node.state != "up", below=tuple(further))
            else:
                line = Line((Cell(group_words(item)),), True, False)
            found += (self._row(part, titles, widths, width) for part in lines_of(line, size.lines))
        edge = (" " * _EDGE, self.base)
        return [
            fit_runs([edge, *fit_runs(runs, width, self.base, ellipsis="")], self.columns, self.base) for runs in found
        ]

    def with_overview(self, drawn: Sequence[Styled], gatherer: Gatherer, span: Span, rows: int) -> list[Styled]:
        """Return the lines of the rows, and below them the overview, where there is room for it."""
        free = free_lines(self.scene, self.view, self.columns, rows)
        if free < LEAST:
            return [*drawn]
        lines = overview(gatherer.facts(self.scene, span), self.columns, free, self.look.glyphs)
        blank = [(" " * self.columns, self.base)]
        above = [*drawn, *[blank] * (rows - free - len(drawn))][: rows - free]
        below = [runs_of(Cell(tuple(line)), self.base, self.look) for line in lines]
        return [*above, *(fit_runs(runs, self.columns, self.base, ellipsis="") for runs in below)]

    def _titles(self, titles: Sequence[Column], widths: dict[int, int], width: int, *, indent: int = 0) -> Styled:
        sort = (self.view.sort, self.view.reverse) if self.view.sort and indent else None
        return header_runs(titles, widths, sort, indent=indent, width=width, base=self.base, look=self.look)

    def _row(
        self,
        line: Line,
        titles: Sequence[Column],
        widths: dict[int, int],
        width: int,
        *,
        marking: bool = False,
    ) -> Styled:
        return row_runs(line, titles, widths, marking=marking, width=width, base=self.base, look=self.look)


def look_for(core: Core, kept: str | None, glyphs: Glyphs) -> tuple[Look, Style]:
    """Return the board's Look and the style of its background; plain for an invalid theme."""
    files = {path.stem: path for folder in themefile.folders(core.env) for path in folder.glob("*.toml")}
    name = themefile.choose(core.env, core.settings.theme, kept, files)
    try:
        theme = themefile.read(files[name])
        if theme.like:
            theme = themefile.onto(themefile.read(files[theme.like]), theme)
        styles = {role: themefile.style(text, role, _color) for role, text in (theme.states | theme.roles).items()}
        base = Style(color=_color(theme.colors["foreground"], ""), bgcolor=_color(theme.colors["background"], ""))
    except (themefile.BadTheme, KeyError):
        return Look({}, glyphs), Style()
    if name == "plain":
        return Look({role: style.without_color for role, style in styles.items()}, glyphs), Style()
    return Look(styles, glyphs), base


def _color(text: str, _: str) -> Color:
    """Return a colour; names that only textual has become the terminal's default until it is imported."""
    try:
        return Color.parse(text.removeprefix("ansi_"))
    except ColorParseError:
        return Color.default()


def _colors(env: Mapping[str, str]) -> ColorSystem:
    """Return the terminal's colour system, as rich will."""
    if env.get("COLORTERM", "") in {"truecolor", "24bit"}:
        return ColorSystem.TRUECOLOR
    return ColorSystem.EIGHT_BIT if themefile.many_colors(env) else ColorSystem.STANDARD
