"""Themes: built-in and user files → textual's colours and a Look. Files are fully checked on load."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, cast

import msgspec
from rich.color import Color as RichColor
from rich.style import Style
from textual.color import Color, ColorParseError
from textual.theme import Theme

from gpuboard.board.theme import file as themefile
from gpuboard.board.theme.file import ATTRIBUTES, BadTheme, ThemeFile, choose
from gpuboard.board.theme.styles import ROLES, THEMED, Glyphs, Look
from gpuboard.model.text import clean

__all__ = ["BadTheme", "BoardTheme", "check", "choose", "load_all", "unknown"]

_COLORS = (
    "primary", "secondary", "accent", "success", "warning", "error", "foreground", "background", "surface", "panel",
)  # fmt: skip
# used by textual's stylesheets but missing in its ANSI colour system (8.2.8)
_ANSI = dict.fromkeys(("ansi-background", "ansi-foreground", "surface-active", "foreground-disabled"), "ansi_default")
_PART = re.compile(r"(?:auto|(?P<color>.+?))(?: (?:\d|[1-9]\d|100)%)?")  # a variable's value: a colour, 60 % of it


class BoardTheme(msgspec.Struct, frozen=True):
    """A checked theme: textual's part, and styles by state and role."""

    title: str
    textual: Theme
    styles: Mapping[str, Style]
    exact: bool = False  # no colour of it is the terminal's own

    def look(self, glyphs: Glyphs) -> Look:
        return Look(self.styles, glyphs)


def load_all(env: Mapping[str, str]) -> tuple[dict[str, BoardTheme], list[str]]:
    """Return every theme by name (the file's, without .toml; user themes override ours), and errors of bad files."""
    found: dict[str, BoardTheme] = {}
    problems: list[str] = []
    files: dict[str, ThemeFile] = {}
    for place in themefile.folders(env):
        try:
            listed = sorted(place.glob("*.toml"))
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
            continue
        for path in listed:
            try:
                theme_file = themefile.read(path)
                base = files.get(theme_file.like) if theme_file.like else None
                if theme_file.like and base is None:
                    raise BadTheme(f"{path.name}: like = {theme_file.like!r} is not one of: {', '.join(files)}")
                theme = check(path.stem, theme_file if base is None else themefile.onto(base, theme_file), path.name)
            except BadTheme as error:
                problems.append(clean(str(error), 240))
                continue
            files.setdefault(path.stem, theme_file)
            found[path.stem] = theme
    return found, problems


def unknown(setting: str, found: Collection[str]) -> list[str]:
    """Return the error if the setting ``theme`` is not one of these themes."""
    return [] if setting in {"auto", *found} else [f"theme = {setting!r} is not one of: auto, {', '.join(found)}"]


def check(name: str, theme_file: ThemeFile, file: str) -> BoardTheme:
    """Return the theme of a file. Raises BadTheme for its first error."""
    for table, known in (("colors", _COLORS), ("states", THEMED), ("roles", ROLES)):
        values: dict[str, str] = getattr(theme_file, table)
        for key in values:
            if key not in known:
                raise BadTheme(f"{file}: [{table}] has no key {key!r}; there are: {', '.join(known)}")
        lacking = [key for key in known if key not in values]
        if lacking:
            raise BadTheme(f'{file}: [{table}] lacks {", ".join(lacking)}; or add like = "dark"')
    for key, value in theme_file.colors.items():
        _color(value, f"{file}: colors.{key}")
    variables = (_ANSI if theme_file.ansi else {}) | theme_file.variables
    textual = Theme(
        name=name, dark=theme_file.dark, ansi=theme_file.ansi, variables=variables, **cast(Any, theme_file.colors)
    )
    known_variables = textual.to_color_system().generate() | _ANSI if theme_file.variables else {}
    for key, value in theme_file.variables.items():
        if key not in known_variables:
            raise BadTheme(f"{file}: variables.{key}: textual has no such variable")
        _variable(key, value, f"{file}: variables.{key}")
    styles = {
        key: themefile.style(value, f"{file}: states.{key}", _rich_color) for key, value in theme_file.states.items()
    }
    styles |= {
        key: themefile.style(value, f"{file}: roles.{key}", _rich_color) for key, value in theme_file.roles.items()
    }
    of_terminal = theme_file.ansi or any(
        "ansi" in value for value in (*theme_file.colors.values(), *variables.values())
    )
    exact = not of_terminal and all(map(_is_exact, styles.values()))
    return BoardTheme(clean(theme_file.title, 60) or name, textual, styles, exact)


def _is_exact(style: Style) -> bool:
    """Return whether textual draws a style as it is: it translates the terminal's colours, and dim to a colour."""
    colors = [color for color in (style.color, style.bgcolor) if color is not None]
    return not style.dim and all(color.triplet is not None for color in colors)


def _color(text: str, where: str) -> Color:
    try:
        return Color.parse(text)
    except (ColorParseError, ValueError) as error:
        raise BadTheme(f"{where} = {text!r} is not a colour; write #57d38c, ansi_green or a CSS name") from error


def _rich_color(text: str, where: str) -> RichColor:
    return _color(text, where).rich_color


def _variable(key: str, value: str, where: str) -> None:
    if key.endswith(("-style", "-style-hover")):
        for word in value.split():
            if word not in {*ATTRIBUTES, "none", "not"}:
                raise BadTheme(f"{where} = {value!r}: {word!r} is not one of: none, {', '.join(ATTRIBUTES)}")
        return
    part = _PART.fullmatch(value)
    if part is None or part["color"]:
        _color(part["color"] if part else value, where)
