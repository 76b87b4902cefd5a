"""Preferences kept between starts: theme, sort, filters, grouping, span of graphs; ``board.json`` in the state folder.

A bad file is no error: the board starts with the defaults and shows one line about it. The first save renames it to
``board.json.bad``, as it may have saved filters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpuboard import files, paths
from gpuboard.board.arrange import GROUPS, PANES, SORTS, VIEWS, ViewState
from gpuboard.board.filter.language import TEXT_MAX
from gpuboard.board.history import FIVE_MINUTES, SPANS, Span
from gpuboard.cluster.snapshot import processes
from gpuboard.model.decoding import from_json

_SIZE = 4 << 20  # bytes; 50 saved filters for each kind of rows take 1 MiB at most


class SavedFilter(msgspec.Struct, frozen=True):
    """A filter with a name. ``rows``: what it filters, as ``FilteredScreen.FILTERED``."""

    name: str
    text: str
    rows: str = "GPUs"


class ProcessOrder(msgspec.Struct, frozen=True):
    """How the processes of the cluster are listed."""

    sort: str = "node"  # a key of processes.SORTS
    reverse: bool = False
    tree: bool = False  # grouped by run, job or lease


class Preferences(msgspec.Struct, frozen=True):
    """Unknown keys, of later versions, are ignored; missing ones have their defaults."""

    theme: str | None = None  # None: never chosen
    view: ViewState = ViewState()
    span: str = FIVE_MINUTES.name  # of the graphs, one of SPANS
    filters: tuple[SavedFilter, ...] = ()
    columns: tuple[str, ...] = ()  # of the table, as tables/columns.py reads them; none: the usual ones
    processes: ProcessOrder = ProcessOrder()

    @property
    def graphs(self) -> Span:
        """The span of the graphs."""
        return next(span for span in SPANS if span.name == self.span)


def path(env: Mapping[str, str]) -> Path:
    return paths.state_dir(env) / "board.json"


def load(env: Mapping[str, str]) -> tuple[Preferences, str | None]:
    """Return the preferences and what is wrong with the file, or None."""
    file = path(env)
    try:
        kept = from_json(files.read(file, _SIZE), Preferences)
    except FileNotFoundError:
        return Preferences(), None
    except OSError as error:
        return Preferences(), f"{file}: {error.strerror}; using default sort, filter and theme"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Preferences(), f"{file} is not valid; using default sort, filter and theme"
    view = kept.view
    if (
        view.view not in VIEWS
        or view.group not in GROUPS
        or view.pane not in PANES
        or view.sort not in {"", *SORTS}
        or len(view.filter) > TEXT_MAX
    ):
        kept = msgspec.structs.replace(kept, view=ViewState())
    if kept.processes.sort not in processes.SORTS:
        kept = msgspec.structs.replace(kept, processes=ProcessOrder())
    if kept.span not in {span.name for span in SPANS}:
        kept = msgspec.structs.replace(kept, span=FIVE_MINUTES.name)
    filters = {(one.rows, one.name): one for one in kept.filters}  # a name is chosen by: the last of two has it
    if len(filters) < len(kept.filters):
        kept = msgspec.structs.replace(kept, filters=tuple(filters.values()))
    return kept, None


def save(env: Mapping[str, str], kept: Preferences, since: Preferences | None = None) -> str | None:
    """Replace the file atomically; return why that failed, or None.

    ``since``: what this board has loaded or saved before. Where ``kept`` is the same, the value in the file
    stays, which another board may have saved; filters are compared one by one.
    """
    file = path(env)
    there, wrong = load(env)
    try:
        paths.make_private(file.parent)
        if wrong and file.is_file():
            os.replace(file, f"{file}.bad")
        elif since is not None and file.exists():
            kept = _joined(there, kept, since)
        files.write_private(file, msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
    except OSError as error:
        return f"{file}: {error.strerror}; sort, filter and theme were not saved"
    return None


def _joined(there: Preferences, kept: Preferences, since: Preferences) -> Preferences:
    """Return what is in the file with the changes from ``since`` to ``kept``."""
    changed = {name: value for name, value in msgspec.structs.asdict(kept).items() if value != getattr(since, name)}
    if "filters" in changed:
        gone, new = set(since.filters) - set(kept.filters), set(kept.filters) - set(since.filters)
        replaced = {(one.rows, one.name) for one in new}
        others = [one for one in there.filters if one not in gone and (one.rows, one.name) not in replaced]
        changed["filters"] = (*others, *(one for one in kept.filters if one in new))
    return msgspec.structs.replace(there, **changed)
