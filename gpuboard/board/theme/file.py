"""Themes' files: TOML → what it says, the choice among them, the form of a style. No textual.

A file has ``title``, ``dark``, ``ansi`` (the terminal's own colours; optional), ``like`` (a theme to take from what the
file does not say; optional) and the tables ``[colors]`` (textual's base colours), ``[variables]`` (textual's design
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

ATTRIBUTES = ("bold", "dim", "italic", "reverse", "strike", "underline")
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


class BadTheme(Exception):
    """A file that is no theme; says the file, the key and what is wrong."""


def folder() -> Path:
    """Return the folder of our own themes: in the package of a wheel, in the repository's root when run from there."""
    packaged = Path(__file__).parents[1] / "themes"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "themes"


def folders(env: Mapping[str, str]) -> tuple[Path, Path]:
    """Return where themes are: ours, then the user's, which go before ours."""
    return folder(), paths.user_config(env).parent / "themes"


def choose(env: Mapping[str, str], setting: str, kept: str | None, known: Container[str]) -> str:
    """Return the theme to start with: NO_COLOR, then the setting, then the one last chosen, then what fits."""
    if env.get("NO_COLOR"):
        return "plain"
    for name in (setting, kept):
        if name is not None and name in known:
            return name
    return "dark" if many_colors(env) else "terminal"


def many_colors(env: Mapping[str, str]) -> bool:
    """Tell whether the terminal shows 256 colours or more, as far as it says (rich decides by the same variables)."""
    term = env.get("TERM", "")
    return env.get("COLORTERM", "") in {"truecolor", "24bit"} or "256color" in term or "kitty" in term


def read(path: Path) -> ThemeFile:
    """Return what a file says. Raises BadTheme."""
    try:
        return msgspec.convert(parse_toml(files.read(path, _SIZE)), ThemeFile)
    except OSError as error:
        raise BadTheme(f"{path.name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadTheme(f"{path.name}: not UTF-8") from error
    except msgspec.ValidationError as error:
        words = str(error).replace("Object contains unknown field", "unknown key").replace("`$.", "`")
        raise BadTheme(f"{path.name}: {words}") from error
    except ValueError as error:
        raise BadTheme(f"{path.name}: not valid TOML: {error}") from error


def onto(base: ThemeFile, said: ThemeFile) -> ThemeFile:
    """Return ``said`` with what it does not say taken from ``base``."""
    tables: dict[str, Any] = {
        name: {**getattr(base, name), **getattr(said, name)} for name in ("colors", "variables", "states", "roles")
    }
    return ThemeFile(title=said.title, dark=base.dark, ansi=base.ansi, like=said.like, **tables)


def style(text: str, where: str, color: Callable[[str, str], Color]) -> Style:
    """Return the style that ``text`` describes: attributes, a colour, ``on`` a colour. Raises BadTheme.

    ``color`` returns a colour for its name and where it stands.
    """
    attributes: dict[str, Any] = {}
    fore: Color | None = None
    back: Color | None = None
    ground = False
    for word in text.split():
        if word == "on" and not ground:
            ground = True
        elif word in ATTRIBUTES and not ground:
            attributes[word] = True
        elif ground and back is None:
            back = color(word, where)
        elif not ground and fore is None:
            fore = color(word, where)
        else:
            raise BadTheme(f"{where} = {text!r}: write it as: bold #ff7b7b on #000000")
    if ground and back is None:
        raise BadTheme(f"{where} = {text!r}: no colour after `on`")
    return Style(color=fore, bgcolor=back, **attributes)
