"""Names and numbers in the board's short, fixed forms; ``?`` for unknown (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gpuboard.model.snapshot import GpuView, MigView
from gpuboard.model.units import format_duration

UNKNOWN = "?"
PACK = 4  # cells per group: easier to count by eye
FLAG_MARKS: Mapping[str, str] = {"rogue": "!", "disputed": "d", "overdue": "o", "sick": "+", "idle": "z"}  # worst first


def shortest_model(model: str) -> str:
    """Return a name from ``short_model`` without the memory size: ``H100``."""
    return " ".join(word for word in model.split() if not re.fullmatch(r"[0-9]+G(i?B)?", word)) or model


def age(seconds: float | None) -> str:
    """Return the age of a reading, at least 1 s: 0 and 1 would alternate."""
    return UNKNOWN if seconds is None else format_duration(max(1, round(seconds)))


def gib(size: int | None) -> str:
    """Return bytes as whole GiB without the unit; more than 0 and less than a half is ``<1``."""
    if size is None:
        return UNKNOWN
    return "<1" if 0 < size < 2**29 else str(round(size / 2**30))


def pair(used: int | None, total: int | None, size: int) -> str:
    """Return used and total memory in GiB, ``61/80G``; the slashes in a column are aligned."""
    return f"{gib(used):>{size}}/{gib(total)}G"


def percent(value: float | None) -> str:
    """Return a percentage without decimals."""
    return UNKNOWN if value is None else f"{value:.0f}%"


def flag_mark(flags: Sequence[str]) -> tuple[str, str]:
    """Return the mark of the worst flag and its role; a blank without one where there is no flag."""
    return next(((mark, flag_role(flag)) for flag, mark in FLAG_MARKS.items() if flag in flags), (" ", ""))


def flag_role(flag: str) -> str:
    """Return the role of a flag, the same on every screen."""
    return "bad" if flag in {"rogue", "disputed"} else "dim" if flag == "mig" else "warn"


def reason_of(of: GpuView | MigView, users: Sequence[str] = ()) -> str:
    """Return the reason of a state as it is shown beside the names of ``users``; before it, why a GPU is sick."""
    words = reason_beside(of.reason, users)
    return f"sick ({'; '.join(of.sick)}); {words}" if isinstance(of, GpuView) and of.sick else words


def reason_beside(reason: str, users: Sequence[str]) -> str:
    """Return a reason as it is shown beside the user's name: without that name.

    >>> reason_beside("alice, 3h10m left: ablation", ["alice"]), reason_beside("job 12 of bob in gpu", ["bob"])
    ('3h10m left: ablation', 'job 12 in gpu')
    >>> reason_beside("alice: python (pid 7) and 1 more", ["alice", "bob"])
    'alice: python (pid 7) and 1 more'
    """
    if len(users) != 1:  # whose process or lease it is would be lost
        return reason
    user = users[0]
    for lead in (f"{user}: ", f"{user}, "):
        if reason.startswith(lead):
            return reason.removeprefix(lead)
    return reason.replace(f" of {user}", "", 1) if reason.startswith("job ") else reason
