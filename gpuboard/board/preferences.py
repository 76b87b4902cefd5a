"""What is kept between starts: theme, sort, filter and grouping, in the state folder's ``board.json``.

Whatever is wrong with the file is no error: the board starts with what it can read and says in a line what it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpuboard import files, paths
from gpuboard.board.arrange import GROUPS, SORTS, VIEWS, ViewState
from gpuboard.board.filter.query import TEXT_MAX

_SIZE = 64 * 1024  # bytes: what is longer was not written by us


class Preferences(msgspec.Struct, frozen=True):
    """Keys of later versions are passed over, lacking ones have their defaults."""

    theme: str | None = None  # None: never chosen
    view: ViewState = ViewState()


def path(env: Mapping[str, str]) -> Path:
    """Return where the file is."""
    return paths.state_dir(env) / "board.json"


def load(env: Mapping[str, str]) -> tuple[Preferences, str | None]:
    """Return what was kept, and what is wrong with the file, if anything is."""
    file = path(env)
    try:
        kept = msgspec.json.decode(files.read(file, _SIZE), type=Preferences)
    except FileNotFoundError:
        return Preferences(), None
    except OSError as error:
        return Preferences(), f"{file}: {error.strerror}; sort, filter and theme start anew"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Preferences(), f"{file} cannot be understood; sort, filter and theme start anew"
    view = kept.view
    if (
        view.view not in VIEWS
        or view.group not in GROUPS
        or view.sort not in {"", *SORTS}
        or len(view.filter) > TEXT_MAX
    ):
        kept = msgspec.structs.replace(kept, view=ViewState())
    return kept, None


def save(env: Mapping[str, str], kept: Preferences) -> str | None:
    """Write the file; return why that failed, if it did. Of two boards the last one wins, the file is always whole."""
    file = path(env)
    try:
        paths.make_private(file.parent)
        files.write_private(file, msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
    except OSError as error:
        return f"{file}: {error.strerror}; sort, filter and theme are not kept"
    return None
