"""Durations and sizes as people type them (``30s|15m|8h|2d``, ``40GiB``), and durations, sizes and times as printed."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from datetime import UTC, datetime

from gpuboard.model.text import quoted

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE_MAX = 2**60  # bytes: beyond any memory, and safe in every number format
_FIRST, _LAST = 0.0, 253370764799.0  # 1970 to 9998: valid in every local time too


def is_whole(text: str) -> bool:
    """Return whether ``text`` is a whole number in ASCII digits only: no sign, blank or underscore."""
    return bool(re.fullmatch(r"[0-9]{1,18}", text, re.ASCII))


def parse_whole(text: str, least: int, most: int) -> int:
    """Return a whole number from ``least`` to ``most``. Raises ValueError for anything else."""
    if not is_whole(text) or not least <= int(text) <= most:
        raise ValueError(f"{quoted(text)} is not a whole number from {least} to {most}")
    return int(text)


def parse_number(text: str) -> float:
    """Return a number in ASCII digits, perhaps with a decimal point. Raises ValueError, also for ``nan``, ``1e9``."""
    if not re.fullmatch(r"-?[0-9]{1,18}(?:[.][0-9]{1,18})?", text, re.ASCII):
        raise ValueError(f"{quoted(text)} is not a number")
    return float(text)


def parse_duration(text: str) -> float:
    """Return seconds. Accepts ``30s``, ``15m``, ``8h``, ``2d``, ``1w`` and sums such as ``1h30m``.

    Raises ValueError for anything else, a bare number too: 30 of what?
    """
    if not re.fullmatch(r"(?:[0-9]{1,18}(?:[.][0-9]{1,18})?[smhdw]){1,16}", text.strip(), re.ASCII):
        raise ValueError(f"{quoted(text)} is not a duration; write 30s, 15m, 8h, 2d or 1h30m")
    parts = re.findall(r"([0-9.]+)([smhdw])", text)
    seconds = sum(float(amount) * _SECONDS[unit] for amount, unit in parts)
    if not 0 < seconds <= 366 * 86400:
        raise ValueError(f"{quoted(text)} is not between one second and a year")
    return seconds


def parse_size(text: str) -> int:
    """Return bytes. Accepts ``40GiB``, ``40G`` and ``40GB`` (10^9), ``512MiB``, ``100B``.

    Raises ValueError for anything else, a bare number too: 40 of what?
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:[.][0-9]{1,18})?)\s*([a-zA-Z]{1,3})", text.strip(), re.ASCII)
    size = float(match[1]) * _BYTES.get(match[2].lower(), math.inf) if match else math.inf
    if not size <= _SIZE_MAX:  # 0 of an unknown unit is not a number
        raise ValueError(f"{quoted(text)} is not a size; write 40GiB, 512MiB or 40GB")
    return int(size)


def format_duration(seconds: float) -> str:
    """Return a duration in at most two units: ``45s``, ``12m``, ``1h05m``, ``2d03h``."""
    total = int(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def format_size(size: int | None) -> str:
    """Return a size in GiB with one decimal below 10 (``3.4 GiB``, ``80 GiB``); ``?`` when unknown."""
    if size is None:
        return "?"
    gib = size / 2**30
    return f"{gib:.1f} GiB" if gib < 10 else f"{gib:.0f} GiB"


def compact_size(size: int | None) -> str:
    """Return a size in five cells at most: ``614M`` (MiB), ``3.4G``, ``80G``, ``1.2T``; ``?`` when unknown."""
    if size is None:
        return "?"
    for unit, letter in ((2**40, "T"), (2**30, "G")):
        if size >= unit:
            amount = size / unit
            return f"{amount:.1f}{letter}" if amount < 10 else f"{amount:.0f}{letter}"
    return f"{size / 2**20:.0f}M"


def iso(epoch: float) -> str:
    """Return epoch seconds as ISO 8601 in UTC with milliseconds: ``2026-01-31T12:00:00.000Z``.

    Times from nodes may be out of range; they are clamped.
    """
    epoch = min(max(epoch, _FIRST), _LAST)
    return datetime.fromtimestamp(epoch, UTC).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def seconds_of(text: str) -> float:
    """Return the epoch seconds of an ISO 8601 time, as :func:`iso` writes it. Raises ValueError.

    >>> seconds_of(iso(1.5))
    1.5
    """
    try:
        return datetime.fromisoformat(text).timestamp()
    except OverflowError as error:  # at the ends of the calendar
        raise ValueError(str(error)) from None


def day_time(epoch: float) -> str:
    """Return epoch seconds as local month, day, hour and minute: ``01-31 14:00``."""
    return datetime.fromtimestamp(min(max(epoch, _FIRST), _LAST)).strftime("%m-%d %H:%M")


def ranges(numbers: Collection[int]) -> str:
    """Return numbers as ``0-2,5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
