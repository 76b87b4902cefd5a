"""A run as text: its state, why it ended, and the remedy. No textual."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from gpuboard.board.scene import Scene
from gpuboard.board.text.format import UNKNOWN
from gpuboard.launch.runs.folder import lived_s
from gpuboard.launch.runs.index import RunDetail, RunEntry
from gpuboard.launch.stalls.waits import rank_words
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration, seconds_of

if TYPE_CHECKING:
    from gpuboard.launch.stalls.verdict import Explanation

# States of runs → roles of Look
RUN_STYLES = {
    UNKNOWN: "unknown",
    "failed": "bad",
    "running": "good",
    "stopped": "warn",
    "stalled": "bad",
    "stopping": "warn",
}
_DOUBT = "?"  # after the last known state of a run whose node gives no newer one
_ENDED = frozenset({"failed", "done", "killed", "lost"})
_LINES = 12  # of a verdict's evidence

Entry = tuple[str, str, str]  # name, text, role of Look


class Stop(msgspec.Struct, frozen=True):
    """A stop requested in this board. ``at`` is monotonic; ``grace_s`` None: the run's own."""

    at: float
    grace_s: float | None


def about(entry: RunEntry, detail: RunDetail | None, stop: Stop | None, scene: Scene | None, now: float) -> list[Entry]:
    """Return the details of a run, the worst first. ``now``: epoch seconds."""
    view = entry.view
    lines = [_headline(entry, stop, now)]
    stalled = entry.live and any(verdict.groups for verdict in view.verdicts)
    if entry.read_s is not None:
        node, age = clean(view.node or ""), format_duration(entry.read_s)
        words = (
            f"no answer from {node}: {entry.unread}; last read {age} ago" if entry.unread else f"{node}, read {age} ago"
        )
        lines.append(("Node", words, "warn" if entry.unread else "dim"))
    elif entry.elsewhere:
        age = format_duration(max(0.0, now - entry.written))
        why = f"{clean(view.node or view.head.host)}: {entry.unread}" if entry.unread else ""
        words = why or f"launched on {clean(view.head.host)}; only there can gpuboard check that it runs"
        lines.append(("Elsewhere", f"{words}; written {age} ago", "warn"))
    for verdict in view.verdicts:
        name = "Why" if verdict.attempt == view.attempt else f"Attempt {verdict.attempt}"
        mild = view.state == "stopped" or verdict.kind in {"slow", "node-silent"}
        lines.append((name, clean(verdict.text, 600), "warn" if mild else "bad"))
        if verdict.kind == "preflight" and verdict.evidence:
            lines.append(("Remedy", clean(verdict.evidence, 400), "good"))
        elif verdict.groups and entry.live:  # the picture of the ranks shows the rest
            remedies = [line for line in verdict.evidence.splitlines() if line.startswith("→ ")]
            lines += [("Remedy", clean(line[2:], 400), "good") for line in remedies]
        else:
            lines += [("", clean(line, 400), "") for line in verdict.evidence.splitlines()[:_LINES]]
    refused = any(verdict.kind == "preflight" for verdict in view.newest)
    for check in detail.checks if detail else ():
        if refused and check.status == "fail":
            continue  # its verdict is above
        where = f" on {clean(check.node)}" if check.node else ""
        what = "; ".join(clean(part, 300) for part in (check.evidence, check.cause) if part)
        lines.append(("Preflight", f"{check.name}{where}: {what}", "bad" if check.status == "fail" else "warn"))
        if check.remedy:
            lines.append(("Remedy", clean(check.remedy, 300), "good"))
    shown = {verdict.text for verdict in view.verdicts}
    last = detail.words[-1] if detail and detail.words else ""
    if last and stop is None and not stalled and (entry.live or not shown) and last not in shown:
        lines.append(("Head", last, "dim"))
    lines.append(("Target", clean(view.target, 600), ""))
    lines.append(("Lease", _lease(view.lease, scene, live=entry.live), ""))
    where = f"{clean(view.node)}:" if view.node is not None else ""
    lines.append(("Folder", where + clean(view.folder), ""))
    return lines


def explained(entry: RunEntry, found: Explanation | None, age_s: float) -> list[Entry]:
    """Return what an explanation adds to the picture of the ranks; None: the ranks are being inspected."""
    if found is None:
        return [("Explained", "inspecting the ranks", "dim")]
    age = f"{age_s:.0f} s ago"
    if found.verdict is None:
        return [("Explained", f"{age}: no rank waits for another one", "good"), *_unseen(found)]
    known = any(found.verdict.removeprefix("waiting ") in verdict.text for verdict in entry.view.verdicts)
    lines = [("Explained", f"{age}: {'unchanged' if known else clean(found.verdict, 600)}", "bad")]
    if found.remedy and not known:
        lines.append(("Remedy", clean(found.remedy, 400), "good"))
    return [*lines, *_unseen(found)]


def _unseen(found: Explanation) -> list[Entry]:
    return [("Not seen", clean(line, 400), "warn") for line in found.missing]


def countdown(entry: RunEntry, detail: RunDetail | None, stop: Stop, monotonic: float) -> Entry:
    """Return the progress of a stop."""
    grace_s = stop.grace_s if stop.grace_s is not None else detail.grace_s if detail else None
    since = max(0.0, monotonic - stop.at)
    left = [rank.rank for rank in entry.view.ranks if rank.state not in _ENDED]
    who = f"; {rank_words(left)} still running" if left else "; every rank has ended"
    if grace_s is None:
        words = f"requested {since:.0f} s ago"
    elif since < grace_s:
        words = f"SIGTERM sent {since:.0f} s ago, SIGKILL in {grace_s - since:.0f} s"
    else:
        words = f"SIGKILL sent {since - grace_s:.0f} s ago"
    return ("Stopping", words + who, "warn")


def state_of(entry: RunEntry, stop: Stop | None) -> str:
    """Return a run's state; ``stopping`` after a stop in this board, ``?`` when it cannot be read.

    The last known state of one whose head cannot be checked now is followed by ``?``.
    """
    if entry.unreadable:
        return UNKNOWN
    if stop is not None and entry.live:
        return "stopping"
    return clean(entry.view.state) + (_DOUBT if entry.elsewhere else "")


def style_of(state: str) -> str:
    """Return the role of Look for what :func:`state_of` returns."""
    return RUN_STYLES.get(state, "unknown" if state.endswith(_DOUBT) else "")


def first_rank(entry: RunEntry) -> int | None:
    """Return the rank whose log matters most: the first to fail, else the first one; None without ranks."""
    named = [verdict.rank for verdict in entry.view.newest if verdict.rank is not None]
    known = {rank.rank for rank in entry.view.ranks}
    return next((rank for rank in named if rank in known), min(known, default=None))


def ended_words(entry: RunEntry) -> str:
    """Return a run's end as text: target, duration, and why it ended."""
    view = entry.view
    lived = lived_s(view, entry.written)
    ran = f" ran {format_duration(lived)}" if lived is not None else ""
    count = len(view.ranks)
    lines = [f"{clean(view.target, 80)}{ran}, {count} rank{'' if count == 1 else 's'}"]
    if view.exit_code:
        lines[0] += f", exit code {view.exit_code}"
    lines += [clean(verdict.text, 300) for verdict in view.newest[:2]]
    if more := len(view.verdicts) - len(view.newest[:2]):
        lines.append(f"and {more} more; u shows the run")
    return "\n".join(lines)


def _headline(entry: RunEntry, stop: Stop | None, now: float) -> Entry:
    view, state = entry.view, state_of(entry, stop)
    since = [verdict.at for verdict in view.verdicts if verdict.groups]
    lasted = f" for {format_duration(max(0.0, now - seconds_of(since[0])))}" if state == "stalled" and since else ""
    counts = Counter(clean(rank.state) for rank in view.ranks)
    ranks = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    code = f", exit code {view.exit_code}" if view.exit_code is not None else ""
    return (
        f"Run {clean(view.id, 12)}"[:12],
        f"{state}{lasted}{code}; ranks: {ranks or 'none'}",
        style_of(state) or "title",
    )


def _lease(lease: str | None, scene: Scene | None, *, live: bool) -> str:
    if lease is None:
        return "none"
    held = scene.by_lease.get(lease) if scene is not None else None
    if held is None:
        return clean(lease) if live else f"{clean(lease)}, ended"  # a live run's: not in a snapshot yet
    count = len(held.gpus)
    return f"{clean(lease)}, {count} GPU{'' if count == 1 else 's'}, {format_duration(held.remaining_s)} left"
