"""Records as `scontrol` prints them: ``Key=value Key=value``, one a line (``-o``) or several lines each. Pure."""

from __future__ import annotations

import re
import time

from gpuboard.model.text import clean

_INDENTED = re.compile(r"\n {2,}")  # a record continues


class Unreadable(ValueError):
    """Output that is truncated, empty or has another format."""


def records(text: str, key: str, command: str, none: str = "") -> list[str]:
    """Return each record that begins with ``Key=``, without that, joined to one line unless values contain line ends.

    ``none``: what the command prints instead of an empty list. Raises Unreadable.
    """
    if "\n  " in text:
        text = _INDENTED.sub(" ", text)
    before, *found = ("\n" + text).split(f"\n{key}=")
    if before.strip() != ("" if found else none):
        shown = clean(before.strip(), 120)
        raise Unreadable(f"`{command}` printed {repr(shown) if shown else 'nothing'} instead of a list")
    if not found and not none:
        raise Unreadable(f"`{command}` printed nothing")
    if found and not found[-1].endswith("\n"):
        raise Unreadable(f"the output of `{command}` is truncated in the middle of a line")
    return found


def value(record: str, key: str) -> str | None:
    """Return the word after the first ``key`` (given with its blank and equals sign); None if there is none."""
    at = record.find(key)
    if at < 0:
        return None
    at += len(key)
    end = record.find(" ", at)
    return record[at:end] if end >= 0 else record[at:].strip()


def moment(text: str) -> float | None:
    """Return epoch seconds for a time printed by Slurm; None for ``Unknown``, ``N/A`` and ``None``.

    gpuboard sets SLURM_TIME_FORMAT=%s and so gets epoch seconds; otherwise the text is this host's local time.
    """
    if text.isascii() and text.isdecimal():
        return float(text) if len(text) < 12 else None
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def user_name(name: str, uid: int) -> str:
    """Return a user's name to show; Slurm prints "nobody" for a uid that is unknown to this host."""
    return clean(name, 64) if name and (name != "nobody" or uid in {99, 65534}) else str(uid)
