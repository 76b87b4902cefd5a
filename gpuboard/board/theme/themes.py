"""Themes: ours and the user's files → textual's colours and a Look. Everything in a file is checked on load."""

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
# textual's stylesheets use these, and its ANSI colour system lacks them (8.2.8)
_ANSI = dict.fromkeys(("ansi-background", "ansi-foreground", "surface-active", "foreground-disabled"), "ansi_default")
_PART = re.compile(r"(?:auto|(?P<color>.+?))(?: (?:\d|[1-9]\d|100)%)?")  # a variable's value: a colour, 60 % of it


class BoardTheme(msgspec.Struct, frozen=True):
    """A theme that was checked: textual's part, and styles by state and role."""

    title: str
    textual: Theme
    styles: Mapping[str, Style]

    def look(self, glyphs: Glyphs) -> Look:
        """Return what widgets draw with."""
        return Look(self.styles, glyphs)


def load_all(env: Mapping[str, str]) -> tuple[dict[str, BoardTheme], list[str]]:
    """Return every theme by name (the file's, without .toml; the user's before ours), and what is wrong with others."""
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
                said = themefile.read(path)
                base = files.get(said.like) if said.like else None
                if said.like and base is None:
                    raise BadTheme(f"{path.name}: like = {said.like!r} is not one of: {', '.join(files)}")
                theme = check(path.stem, said if base is None else themefile.onto(base, said), path.name)
            except BadTheme as error:
                problems.append(clean(str(error), 240))
                continue
            files.setdefault(path.stem, said)
            found[path.stem] = theme
    return found, problems


def unknown(setting: str, found: Collection[str]) -> list[str]:
    """Return what is wrong with the setting ``theme`` where these themes were found."""
    return [] if setting in {"auto", *found} else [f"no theme {setting!r}; there are: {', '.join(found)}"]


def check(name: str, said: ThemeFile, file: str) -> BoardTheme:
    """Return the theme that a file describes. Raises BadTheme for the first thing in it that is wrong."""
    for table, known in (("colors", _COLORS), ("states", THEMED), ("roles", ROLES)):
        values: dict[str, str] = getattr(said, table)
        for key in values:
            if key not in known:
                raise BadTheme(f"{file}: [{table}] has no key {key!r}; there are: {', '.join(known)}")
        lacking = [key for key in known if key not in values]
        if lacking:
            raise BadTheme(f'{file}: [{table}] lacks {", ".join(lacking)}; or say like = "dark"')
    for key, value in said.colors.items():
        _color(value, f"{file}: colors.{key}")
    variables = (_ANSI if said.ansi else {}) | said.variables
    textual = Theme(name=name, dark=said.dark, ansi=said.ansi, variables=variables, **cast(Any, said.colors))
    known_variables = textual.to_color_system().generate() | _ANSI if said.variables else {}
    for key, value in said.variables.items():
        if key not in known_variables:
            raise BadTheme(f"{file}: variables.{key}: textual has no such variable")
        _variable(key, value, f"{file}: variables.{key}")
    styles = {key: themefile.style(value, f"{file}: states.{key}", _rich_color) for key, value in said.states.items()}
    styles |= {key: themefile.style(value, f"{file}: roles.{key}", _rich_color) for key, value in said.roles.items()}
    return BoardTheme(clean(said.title, 60) or name, textual, styles)


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
