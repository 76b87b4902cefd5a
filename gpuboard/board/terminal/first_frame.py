"""The first frame: this machine's GPUs in the board's layout, written while textual is imported (0.2 s).

It is drawn with the board's header, picture and theme, which need no textual. The board's own first frame covers every
cell of it. No textual.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping

from rich.color import Color, ColorParseError, ColorSystem
from rich.style import Style

from gpuboard.board import preferences
from gpuboard.board.arrange import NodeRow, ViewState, arrange_nodes
from gpuboard.board.core import Core
from gpuboard.board.scene import Scene
from gpuboard.board.terminal.guard import Guard, is_utf8
from gpuboard.board.text.ascii import to_ascii
from gpuboard.board.text.cells import fit_runs
from gpuboard.board.text.picture import Focus, cells_of, columns_for, group_words
from gpuboard.board.text.rows import Cell, Line, Runs, Styled, header_runs, row_runs, runs_of, share
from gpuboard.board.theme import file as themefile
from gpuboard.board.theme.styles import ASCII, UNICODE, Glyphs, Look
from gpuboard.board.widgets.header import header

_WAIT_S = 5.0  # for the first reading; the import of textual ends long before
_SIDE, _SIDE_FROM = 64, 160  # width of ClusterScreen's side panel, and least width of a terminal that has it
_EDGE = 1  # free cells at the picture's left, and at its right for the scroll bar


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
    top: list[Runs] = [*header(scene, columns, tall=rows >= 24), *(((f" {words}", "bad"),) for words in scene.banners)]
    lines = [fit_runs(runs_of(Cell(runs), base, look), columns, base, ellipsis=look.glyphs.ellipsis) for runs in top]
    if kept.view.view == "picture" and not kept.view.filter:
        lines += _picture(scene, kept.view, columns, base, look)
    lines = lines[:rows] + [[(" " * columns, base)]] * (rows - len(lines))
    system = _colors(core.env)
    drawn = (
        "".join(style.render(text if unicode else to_ascii(text), color_system=system) for text, style in line)
        for line in lines
    )
    return "".join(f"\x1b[{y};1H{line}" for y, line in enumerate(drawn, 1))


def _picture(scene: Scene, view: ViewState, columns: int, base: Style, look: Look) -> list[Styled]:
    """Return the picture's lines with the cursor on the first GPU."""
    items = arrange_nodes(scene, view)
    first = next((item for item in items if isinstance(item, NodeRow)), None)
    if first is None:
        return []
    shown = (gpu.uuid for gpu in first.node.gpus if first.shown is None or gpu.uuid in first.shown)
    focus = Focus(first.key, next(shown, None))
    width = columns - 2 * _EDGE - (_SIDE if columns >= _SIDE_FROM else 0)
    titles = columns_for(items)
    widths = share(titles, width)
    found = [header_runs(titles, widths, None, indent=0, width=width, base=base, look=look)]
    for item in items:
        if isinstance(item, NodeRow):
            line = Line(cells_of(item, scene, focus, look), False, item.node.state != "up", False, False)
        else:
            line = Line((Cell(group_words(item)),), True, False, False, False)
        found.append(row_runs(line, titles, widths, marking=False, over=Style(), width=width, base=base, look=look))
    edge = (" " * _EDGE, base)
    return [fit_runs([edge, *fit_runs(runs, width, base, ellipsis="")], columns, base) for runs in found]


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
