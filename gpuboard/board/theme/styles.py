"""The look: a letter and a style for every state, styles by role, and the terminal's glyphs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from rich.style import Style

LETTERS = {
    "free": "F", "reserved": "R", "allocated": "A", "busy": "B", "occupied": "O", "mig": "M",
    "unknown": "?", "broken": "X",
}  # fmt: skip
THEMED = tuple(state for state in LETTERS if state != "mig")  # a GPU in MIG mode is drawn dim
ROLES = ("dim", "title", "cursor", "marked", "good", "warn", "bad", "mine", "group")


class Glyphs(msgspec.Struct, frozen=True):
    """Characters for bars and trees."""

    meter: str  # a full cell, a half one, and the track of an empty one
    line: str  # horizontal, of rulers and time lines
    ellipsis: str
    marked: str  # a selected row
    up: str  # sorted upwards
    down: str

    @property
    def ascii(self) -> bool:
        """Whether the terminal shows ASCII only."""
        return self.line.isascii()

    @property
    def wall(self) -> str:
        """A vertical line."""
        return "|" if self.ascii else "│"


UNICODE = Glyphs(meter="━╸─", line="─", ellipsis="…", marked="●", up="▲", down="▼")
ASCII = Glyphs(meter="=-.", line="-", ellipsis="~", marked="*", up="^", down="v")


class Look(msgspec.Struct, frozen=True):
    """Styles and glyphs for all widgets. ``styles``: one for each of ``THEMED`` and ``ROLES``."""

    styles: Mapping[str, Style]
    glyphs: Glyphs = UNICODE

    def style(self, role: str) -> Style:
        """Return the style of a state or role; an unknown one is drawn plain."""
        style = self.styles.get("dim" if role == "mig" else role)
        if style is None and role.endswith(_PLOT):
            return self.style(role.removesuffix(_PLOT)) + _NOT_UNDERLINED
        return style or _PLAIN


def plot_role(state: str) -> str:
    """Return the role of meters and curves in a state: dim where it is unknown, else without a line below them."""
    return "dim" if state == "unknown" else state + _PLOT


_PLOT = " plot"
_PLAIN = Style()
_NOT_UNDERLINED = Style(underline=False)
