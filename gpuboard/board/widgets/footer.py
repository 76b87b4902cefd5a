"""The last line: the keys of the active screen, none of them cut, and help at the right, which lists all keys.

textual's own footer has a widget per key, which takes a fifth of the start-up time, and it cuts keys that do not fit.
"""

from __future__ import annotations

from typing import NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from gpuboard.board.text.cells import width
from gpuboard.board.widgets.on_board import OnBoard

_HELP = "app.help"
_REPLAY = "replay."  # the app's keys come after the screen's, where on most terminals there is no room
_LATER = frozenset({"gpus.signal", "gpus.copy", "cluster.group"})  # shown after those that lead to other screens


class FooterEntry(NamedTuple):
    """One key: its position and width in cells, its text, and the key that a click presses."""

    x: int
    cells: int
    key: str
    words: str
    pressed: str
    enabled: bool


class Footer(OnBoard, Widget):
    """The keys of the active screen's bindings; a click presses one."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES = {"footer--key", "footer--words"}  # noqa: RUF012  # textual's own type
    DEFAULT_CSS = """
    Footer {
        dock: bottom; height: 1; background: $footer-background;
        .footer--key { color: $footer-key-foreground; background: $footer-background; text-style: bold; }
        .footer--words { color: $footer-description-foreground; background: $footer-background; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[FooterEntry] = []  # as drawn

    def on_mount(self) -> None:
        """Subscribe to the bindings: they change with the focus and with remapped keys."""
        self.screen.bindings_updated_signal.subscribe(self, self._changed)
        self._arrange()

    def on_resize(self) -> None:
        self._arrange()

    def _changed(self, screen: Screen[object]) -> None:
        if screen is self.screen:
            self._arrange()

    def _arrange(self) -> None:
        """Place the keys that fit, the way back first, and help at the right edge."""
        shown: dict[str, tuple[str, str, str, bool]] = {}  # by action; only the first of several keys is shown
        help_entry: tuple[str, str, str, bool] | None = None
        own = getattr(self.screen, "TITLE_WORDS", "")  # a screen does not offer to open itself
        bindings = [
            (binding, enabled)
            for _, binding, enabled, _ in self.screen.active_bindings.values()
            if binding.description != own
        ]
        for binding, enabled in sorted(bindings, key=lambda one: _rank(one[0])):
            entry = (self.app.get_key_display(binding), binding.description, binding.key, enabled)
            if binding.id == _HELP:
                help_entry = help_entry or entry
            elif binding.show:
                shown.setdefault(binding.action, entry)
        room = self.size.width
        entries: list[FooterEntry] = []
        if help_entry is not None:
            cells = width(help_entry[0]) + 1 + width(help_entry[1])
            room -= cells + 3
            entries.append(FooterEntry(self.size.width - cells - 1, cells, *help_entry))
        x = 1
        for entry in shown.values():
            cells = width(entry[0]) + 1 + width(entry[1])
            if x + cells > room:
                break
            entries.append(FooterEntry(x, cells, *entry))
            x += cells + 2
        entries.sort()
        if entries != self.entries:
            self.entries = entries
            self.refresh()

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        key, words = self.get_component_rich_style("footer--key"), self.get_component_rich_style("footer--words")
        segments: list[Segment] = []
        at = 0
        for entry in self.entries:
            plain = words if entry.enabled else words + Style(dim=True)
            segments += [
                Segment(" " * (entry.x - at), base),
                Segment(entry.key, key if entry.enabled else plain),
                Segment(f" {entry.words}", plain),
            ]
            at = entry.x + entry.cells
        return Strip([*segments, Segment(" " * max(0, self.size.width - at), base)], max(at, self.size.width)).crop(
            0, self.size.width
        )

    def on_click(self, event: events.Click) -> None:
        for entry in self.entries:
            if entry.x <= event.x < entry.x + entry.cells:
                if entry.enabled:
                    self.app.simulate_key(entry.pressed)
                else:
                    self.app.bell()


def _rank(binding: Binding) -> int:
    """Return the place of a key among the others; those of one rank stay in the order of the bindings."""
    name = binding.id or ""
    return 0 if binding.key == "escape" else 1 if name.startswith(_REPLAY) else 3 if name in _LATER else 2
