"""Themes: ours and the user's TOML files → textual's colours and a Look. Everything in a file is checked on load.

A file has ``title``, ``dark``, ``ansi`` (the terminal's own colours; optional), ``like`` (a theme to take from what the
file does not say; optional) and the tables ``[colors]`` (textual's base colours), ``[variables]`` (textual's design
variables), ``[states]`` and ``[roles]``: styles, written ``bold #ff7b7b on #000000``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from rich.style import Style
from textual.color import Color, ColorParseError
from textual.theme import Theme

from gpuboard import paths
from gpuboard.board.look import ROLES, Glyphs, Look
from gpuboard.model.state import STATES
from gpuboard.model.text import clean

_ATTRIBUTES = ("bold", "dim", "italic", "reverse", "strike", "underline")
_COLORS = (
    "primary", "secondary", "accent", "success", "warning", "error", "foreground", "background", "surface", "panel",
)  # fmt: skip
# textual's stylesheets use these, and its ANSI colour system lacks them (8.2.8)
_ANSI = dict.fromkeys(("ansi-background", "ansi-foreground", "surface-active", "foreground-disabled"), "ansi_default")
_PART = re.compile(r"(?:auto|(?P<color>.+?))(?: (?:\d|[1-9]\d|100)%)?")  # a variable's value: a colour, 60 % of it
_SIZE = 64 * 1024  # bytes: no theme is longer


class ThemeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a theme's file says, before it is checked."""

    title: str = ""
    dark: bool = True
    ansi: bool = False
    like: str = ""
    colors: dict[str, str] = {}
    variables: dict[str, str] = {}
    states: dict[str, str] = {}
    roles: dict[str, str] = {}


class BoardTheme(msgspec.Struct, frozen=True):
    """A theme that was checked: textual's part, and styles by state and role."""

    title: str
    textual: Theme
    styles: Mapping[str, Style]

    def look(self, glyphs: Glyphs) -> Look:
        """Return what widgets draw with."""
        return Look(self.styles, glyphs)


class BadTheme(Exception):
    """A file that is no theme; says the file, the key and what is wrong."""


def folder() -> Path:
    """Return the folder of our own themes: in the package of a wheel, in the repository's root when run from there."""
    packaged = Path(__file__).with_name("themes")
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "themes"


def load_all(env: Mapping[str, str]) -> tuple[dict[str, BoardTheme], list[str]]:
    """Return every theme by name (the file's, without .toml; the user's before ours), and what is wrong with others."""
    found: dict[str, BoardTheme] = {}
    problems: list[str] = []
    files: dict[str, ThemeFile] = {}
    for place in (folder(), paths.user_config(env).parent / "themes"):
        try:
            listed = sorted(place.glob("*.toml"))
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
            continue
        for path in listed:
            try:
                said = _read(path)
                base = files.get(said.like) if said.like else None
                if said.like and base is None:
                    raise BadTheme(f"{path.name}: like = {said.like!r} is not one of: {', '.join(files)}")
                theme = check(path.stem, said if base is None else _onto(base, said), path.name)
            except BadTheme as error:
                problems.append(clean(str(error), 240))
                continue
            files.setdefault(path.stem, said)
            found[path.stem] = theme
    return found, problems


def check(name: str, said: ThemeFile, file: str) -> BoardTheme:
    """Return the theme that a file describes. Raises BadTheme for the first thing in it that is wrong."""
    for table, known in (("colors", _COLORS), ("states", STATES), ("roles", ROLES)):
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
    styles = {key: _style(value, f"{file}: states.{key}") for key, value in said.states.items()}
    styles |= {key: _style(value, f"{file}: roles.{key}") for key, value in said.roles.items()}
    return BoardTheme(clean(said.title, 60) or name, textual, styles)


def choose(env: Mapping[str, str], setting: str, kept: str | None, known: Mapping[str, BoardTheme]) -> str:
    """Return the theme to start with: NO_COLOR, then the setting, then the one last chosen, then what fits."""
    if env.get("NO_COLOR"):
        return "plain"
    for name in (setting, kept):
        if name is not None and name in known:
            return name
    return "dark" if _many_colors(env) else "terminal"


def _many_colors(env: Mapping[str, str]) -> bool:
    """Tell whether the terminal shows 256 colours or more, as far as it says (rich decides by the same variables)."""
    term = env.get("TERM", "")
    return env.get("COLORTERM", "") in {"truecolor", "24bit"} or "256color" in term or "kitty" in term


def _read(path: Path) -> ThemeFile:
    try:
        if path.stat().st_size > _SIZE:
            raise BadTheme(f"{path.name}: larger than {_SIZE // 1024} kB")
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), ThemeFile)
    except OSError as error:
        raise BadTheme(f"{path.name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadTheme(f"{path.name}: not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise BadTheme(f"{path.name}: not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        words = str(error).replace("Object contains unknown field", "unknown key").replace("`$.", "`")
        raise BadTheme(f"{path.name}: {words}") from error


def _onto(base: ThemeFile, said: ThemeFile) -> ThemeFile:
    """Return ``said`` with what it does not say taken from ``base``."""
    tables: dict[str, Any] = {
        name: {**getattr(base, name), **getattr(said, name)} for name in ("colors", "variables", "states", "roles")
    }
    return ThemeFile(title=said.title, dark=base.dark, ansi=base.ansi, like=said.like, **tables)


def _color(text: str, where: str) -> Color:
    try:
        return Color.parse(text)
    except (ColorParseError, ValueError) as error:
        raise BadTheme(f"{where} = {text!r} is not a colour; write #57d38c, ansi_green or a CSS name") from error


def _variable(key: str, value: str, where: str) -> None:
    if key.endswith(("-style", "-style-hover")):
        for word in value.split():
            if word not in {*_ATTRIBUTES, "none", "not"}:
                raise BadTheme(f"{where} = {value!r}: {word!r} is not one of: none, {', '.join(_ATTRIBUTES)}")
        return
    part = _PART.fullmatch(value)
    if part is None or part["color"]:
        _color(part["color"] if part else value, where)


def _style(text: str, where: str) -> Style:
    """Return the style that ``text`` describes: attributes, a colour, ``on`` a colour."""
    attributes: dict[str, Any] = {}
    fore = back = None
    ground = False
    for word in text.split():
        if word == "on" and not ground:
            ground = True
        elif word in _ATTRIBUTES and not ground:
            attributes[word] = True
        elif ground and back is None:
            back = _color(word, where)
        elif not ground and fore is None:
            fore = _color(word, where)
        else:
            raise BadTheme(f"{where} = {text!r}: write it as: bold #ff7b7b on #000000")
    if ground and back is None:
        raise BadTheme(f"{where} = {text!r}: no colour after `on`")
    return Style(color=fore.rich_color if fore else None, bgcolor=back.rich_color if back else None, **attributes)
