"""Records as `scontrol` prints them: ``Key=value Key=value``, one a line (``-o``) or several lines each. Pure."""

from __future__ import annotations

import re
import time

from gpuboard.model.text import clean

_INDENTED = re.compile(r"\n {2,}")  # a record goes on


class Unreadable(ValueError):
    """Output that is not what the command prints: cut off, empty, or something else altogether."""


def records(text: str, key: str, command: str, none: str = "") -> list[str]:
    """Return what follows ``Key=`` in each record that begins with it, each on one line, unless its values have lines.

    ``none``: what the command prints where there are none. Raises Unreadable.
    """
    if "\n  " in text:
        text = _INDENTED.sub(" ", text)
    before, *found = ("\n" + text).split(f"\n{key}=")
    if before.strip() != ("" if found else none):
        shown = clean(before.strip(), 120)
        said = f"it says {shown!r}" if shown else "it is empty"
        raise Unreadable(f"`{command}` printed no list that can be read; {said}")
    if not found and not none:
        raise Unreadable(f"`{command}` printed nothing")
    if found and not found[-1].endswith("\n"):
        raise Unreadable(f"the output of `{command}` ends in the middle of a line")
    return found


def value(record: str, key: str) -> str | None:
    """Return the word behind the first ``key`` (with its blank and its equals sign), None where it is not there."""
    at = record.find(key)
    if at < 0:
        return None
    at += len(key)
    end = record.find(" ", at)
    return record[at:end] if end >= 0 else record[at:].strip()


def moment(text: str) -> float | None:
    """Return epoch seconds for a time of Slurm's; None where none is said (Unknown, N/A, None).

    It is seconds where SLURM_TIME_FORMAT=%s was set, which gpuboard does, else this host's local time.
    """
    if text.isascii() and text.isdecimal():
        return float(text) if len(text) < 12 else None
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def user_name(name: str, uid: int) -> str:
    """Return a user's name as it is shown; Slurm writes "nobody" where this host does not know the uid."""
    return clean(name, 64) if name and (name != "nobody" or uid in {99, 65534}) else str(uid)
