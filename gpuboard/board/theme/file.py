"""Theme files: reading TOML, choosing a theme, parsing styles. No textual.

A file has ``title``, ``dark``, ``ansi`` (the terminal's own colours; optional), ``like`` (a theme that supplies
missing keys; optional) and the tables ``[colors]`` (textual's base colours), ``[variables]`` (textual's design
variables), ``[states]`` and ``[roles]``: styles, written ``bold #ff7b7b on #000000``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.color import Color
from rich.style import Style

from gpuboard import files, paths
from gpuboard.config import parse_toml
from gpuboard.model.decoding import convert

ATTRIBUTES = ("bold", "dim", "italic", "reverse", "strike", "underline")
_SIZE = 64 * 1024  # bytes; no valid theme is longer


class ThemeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a theme file, not yet checked."""

    title: str = ""
    dark: bool = True
    ansi: bool = False
    like: str = ""
    colors: dict[str, str] = {}
    variables: dict[str, str] = {}
    states: dict[str, str] = {}
    roles: dict[str, str] = {}


class BadTheme(Exception):
    """An invalid theme file; the message names the file, the key and the error."""


def folder() -> Path:
    """Return the folder of built-in themes: in an installed package, or in the root of a source checkout."""
    packaged = Path(__file__).parents[1] / "themes"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "themes"


def folders(env: Mapping[str, str]) -> tuple[Path, Path]:
    """Return the folders of themes: built-in, then the user's, which override them."""
    return folder(), paths.user_config(env).parent / "themes"


def choose(env: Mapping[str, str], setting: str, kept: str | None, known: Container[str]) -> str:
    """Return the theme to start with: by NO_COLOR, else the setting, else the last choice, else the terminal."""
    if env.get("NO_COLOR"):
        return "plain"
    for name in (setting, kept):
        if name is not None and name in known:
            return name
    return "dark" if many_colors(env) else "terminal"


def many_colors(env: Mapping[str, str]) -> bool:
    """Return whether the terminal shows 256 colours or more, by the variables that rich uses, too."""
    term = env.get("TERM", "")
    return env.get("COLORTERM", "") in {"truecolor", "24bit"} or "256color" in term or "kitty" in term


def read(path: Path) -> ThemeFile:
    """Read a theme file. Raises BadTheme."""
    try:
        return convert(parse_toml(files.read(path, _SIZE)), ThemeFile)
    except OSError as error:
        raise BadTheme(f"{path.name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadTheme(f"{path.name}: not UTF-8") from error
    except msgspec.ValidationError as error:
        words = str(error).replace("Object contains unknown field", "unknown key").replace("`$.", "`")
        raise BadTheme(f"{path.name}: {words}") from error
    except ValueError as error:
        raise BadTheme(f"{path.name}: not valid TOML: {error}") from error


def onto(base: ThemeFile, theme: ThemeFile) -> ThemeFile:
    """Return ``theme`` with its missing keys from ``base``."""
    tables: dict[str, Any] = {
        name: {**getattr(base, name), **getattr(theme, name)} for name in ("colors", "variables", "states", "roles")
    }
    return ThemeFile(title=theme.title, dark=base.dark, ansi=base.ansi, like=theme.like, **tables)


def style(text: str, where: str, color: Callable[[str, str], Color]) -> Style:
    """Return the style for ``text``: attributes, a colour, ``on`` a colour (read by ``color``).

    An attribute after ``not`` is off also on a line that has it: ``not dim``. Raises BadTheme.
    """
    attributes: dict[str, Any] = {}
    fore: Color | None = None
    back: Color | None = None
    ground = off = False
    for word in text.split():
        if word == "on" and not ground:
            ground = True
        elif word == "not" and not ground and not off:
            off = True
        elif word in ATTRIBUTES and not ground:
            attributes[word], off = not off, False
        elif ground and back is None:
            back = color(word, where)
        elif not ground and fore is None:
            fore = color(word, where)
        else:
            raise BadTheme(f"{where} = {text!r}: write it as: bold #ff7b7b on #000000")
    if ground and back is None:
        raise BadTheme(f"{where} = {text!r}: no colour after `on`")
    if off:
        raise BadTheme(f"{where} = {text!r}: no attribute after `not`")
    return Style(color=fore, bgcolor=back, **attributes)
