"""The overview as text: framed boxes beside and below each other (pure).

Which boxes there are, and their sizes, depend on the room only.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple, TypeVar

from gpuboard.board.arrange import NodeRow, ViewState
from gpuboard.board.overview.facts import OverviewFacts
from gpuboard.board.overview.people import Person, totals
from gpuboard.board.overview.upcoming import UpcomingEnd
from gpuboard.board.scene import Scene
from gpuboard.board.text.cells import fit, fit_runs, width
from gpuboard.board.text.lines import Runs, wrapped
from gpuboard.board.text.picture import size_for, split
from gpuboard.board.text.plots import plot, plotted, plotted_until, time_axis
from gpuboard.board.text.single_node import tall_for
from gpuboard.board.theme.styles import Glyphs, plot_role
from gpuboard.model.units import format_duration, seconds_of
from gpuboard.nodesets import fold
from gpuboard.recording.events import ClusterEvent

T = TypeVar("T")
_Run = tuple[str, str]
LEAST = 8  # lines of a panel that is worth its room
_SHORTEST = 7  # lines of a box, where there are two rows of them
_NARROWEST = 12  # cells of any box


class _Size(NamedTuple):
    """The width of a box in cells, and its share of what is left."""

    least: int
    weight: int


BOXES = ("events", "people", "past", "next")  # the most important first
_ORDER = ("past", "people", "next", "events")  # as they are shown
_SIZES = {"past": _Size(32, 3), "people": _Size(30, 2), "next": _Size(40, 1), "events": _Size(44, 5)}
_PROCESSES = 10  # lines for the processes of a single node, titles included
_NEXT_LEAST = 36  # cells of what ends next without its id
_NAME = 10  # cells of a user's name beside a bar
_SOON_S = 900.0  # what ends before that stands out
KIND = 11  # cells of an event's kind
_ROOMY = 60  # cells of events from which their kinds take as many as the longest would
EVENT_ROLES = {
    "lost": "bad", "broken": "bad", "error": "bad", "xid": "bad", "sick": "warn", "rogue": "bad",
    "unreachable": "bad", "stale": "warn", "back": "good", "recovered": "good",
}  # fmt: skip


def overview(facts: OverviewFacts, cells: int, lines: int, glyphs: Glyphs, names: Sequence[str] = BOXES) -> list[Runs]:
    """Return exactly ``lines`` lines of ``cells`` cells, with those boxes of ``names`` that fit."""
    if cells < _NARROWEST:
        return [Runs()] * lines
    found: list[Runs] = []
    for height, row in layout(names, cells, lines):
        boxes = [_box(name, facts, size, height, glyphs) for name, size in zip(row, _widths(row, cells), strict=True)]
        found += [[run for line in beside for run in line] for beside in zip(*boxes, strict=True)]
    return found


def free_lines(scene: Scene, view: ViewState, cells: int, height: int) -> int:
    """Return how many of ``height`` lines the rows of the cluster view leave; the same with a filter and without.

    It depends on what GPUs there are, on no reading, so that nothing jumps.
    """
    nodes = scene.snapshot.nodes
    if not nodes or view.group not in {"none", "node"}:  # the number of headings depends on what GPUs do
        return 0
    if view.view != "picture":
        if len(nodes) > height:
            return 0
        gpus = sum(max(1, len(node.gpus) + sum(len(gpu.mig) for gpu in node.gpus)) for node in nodes)
        return height - 1 - gpus - (len(nodes) if view.group == "node" else 0)
    if len(nodes) == 1:
        rows = max(1, sum(1 + len(gpu.mig) for gpu in nodes[0].gpus))
        return height - 2 - rows * tall_for(nodes[0], rows, height) - max(_PROCESSES, rows + 2)
    items = [NodeRow(node.name, node, None) for node in nodes]
    size = size_for(scene, items, cells - 2, height - 1)
    return height - 1 - len(split(items, size.each)) * size.lines


def layout(names: Sequence[str], cells: int, lines: int) -> list[tuple[int, Sequence[str]]]:
    """Return the rows of boxes: height and names, as few rows as hold all; where that is impossible, the first ones."""
    for rows in range(1, max(1, lines // _SHORTEST) + 1):
        found = _in_rows(names, cells, rows)
        if found is not None:
            break
    else:
        rows = max(1, lines // _SHORTEST)
        return layout([name for name in BOXES if name in names][: len(names) - 1], cells, lines)
    heights = [lines // rows + (number < lines % rows) for number in range(rows)]
    return list(zip(heights, found, strict=True))


def _in_rows(names: Sequence[str], cells: int, rows: int) -> list[list[str]] | None:
    """Return the names in their order in ``rows`` rows of boxes of their least widths; None if they do not fit."""
    ordered = [name for name in _ORDER if name in names]
    found: list[list[str]] = []
    for name in ordered:
        if found and sum(_SIZES[one].least for one in (*found[-1], name)) <= cells:
            found[-1].append(name)
        else:
            found.append([name])
    return found if len(found) <= rows else None


def _widths(names: Sequence[str], cells: int) -> list[int]:
    """Return the widths of boxes beside each other: their least one, then what is left by weight."""
    sizes = [min(_SIZES[name].least, cells // len(names)) for name in names]
    left, weights = cells - sum(sizes), sum(_SIZES[name].weight for name in names)
    for number, name in enumerate(names):
        part = left * _SIZES[name].weight // weights
        left, weights = left - part, weights - _SIZES[name].weight
        sizes[number] += part
    return sizes


def _box(name: str, facts: OverviewFacts, cells: int, height: int, glyphs: Glyphs) -> list[Runs]:
    inner, most = cells - 4, height - 2
    if name == "past":
        return framed("Cluster", past_note(facts), past_lines(facts, inner, most, glyphs), cells, height)
    if name == "people":
        sums = totals(facts.people)
        note = f"{sums.held} held  {sums.idle} idle" if facts.people else ""
        return framed("People", note, people_lines(facts.people, facts.order, inner, most, glyphs), cells, height)
    if name == "next":
        return framed("Ends next", "", ending_lines(facts.endings, facts.now, inner, most), cells, height)
    return framed("Events", "", event_lines(facts, inner, most), cells, height)


def framed(title: str, note: str, lines: Sequence[Runs], cells: int, height: int) -> list[Runs]:
    """Return a box of exactly that size with a title in its border; lines that do not fit are left out."""
    return _framed(title, note, tuple(map(tuple, lines[: height - 2])), cells, height)


@lru_cache(maxsize=32)  # few boxes change with every scene
def _framed(title: str, note: str, lines: tuple[tuple[_Run, ...], ...], cells: int, height: int) -> list[Runs]:
    inner = cells - 4
    shown = fit(title, min(width(title), max(0, cells - 6)))
    rest = cells - 5 - width(shown)
    tail: Runs = [("─" * max(0, rest), "dim"), ("╮", "dim")]
    if note and width(note) + 4 <= rest:
        tail = [("─" * (rest - width(note) - 3), "dim"), (f" {note} ", "dim"), ("─╮", "dim")]
    top: Runs = [("╭─ ", "dim"), (f"{shown} ", "title"), *tail]
    return [
        fit_runs(top, cells, "dim"),
        *(_beside(fit_runs(line, inner, "")) for line in lines),
        *[_beside([(" " * inner, "")])] * (height - 2 - len(lines)),
        fit_runs([("╰" + "─" * (cells - 2) + "╯", "dim")], cells, "dim"),
    ]


def _beside(line: Runs) -> Runs:
    return [("│ ", "dim"), *line, (" │", "dim")]


def past_note(facts: OverviewFacts) -> str:
    newest = facts.newest
    if not newest.times:
        return ""
    used, known = newest.utilization[-1], newest.free[-1] is not None
    return f"{'?' if used is None else f'{used:.0f}%'} utilized  {facts.free if known else '?'} free"


def past_lines(facts: OverviewFacts, cells: int, most: int, glyphs: Glyphs) -> list[Runs]:
    """Return plots of utilization and of free GPUs over the span, on one time axis."""
    if most < 3:
        return []
    span_s, newest_at = facts.span.seconds, max(facts.newest.times, default=0.0)
    past = facts.past(plotted_until(newest_at, cells, glyphs, span_s=span_s))
    low = (most - 3) // 2 if most >= 7 else 0  # lines of free GPUs; the border has their number, too
    total = max([1, *past.known])
    high = most - 2 - (low + 1 if low else 0)
    used = plot(plotted(past.times, past.utilization, cells, glyphs, span_s=span_s), high, glyphs, high=100.0)
    lines: list[Runs] = [[("Utilization %", "dim")], *([(axis, "dim"), (line, "busy")] for axis, line in used)]
    if low:
        free = plot(plotted(past.times, past.free, cells, glyphs, span_s=span_s), low, glyphs, high=float(total))
        lines += [[("Free GPUs", "dim")], *([(axis, "dim"), (line, "free")] for axis, line in free)]
    return [*lines, [(time_axis(cells, glyphs, span_s), "dim")]]


def people_lines(people: Sequence[Person], order: str, cells: int, most: int, glyphs: Glyphs) -> list[Runs]:
    """Return the people with a bar of what they use, hold and leave idle; those that do not fit are counted."""
    if not people:
        return [[("No GPU is held or used.", "dim")]]
    bar = max(0, cells - _NAME - 1 - 3 * 5)
    name = _NAME if bar >= 4 else cells - 3 * 5
    bar = bar if bar >= 4 else 0
    titles = [(f" {word:>4}", "title" if word.lower() == order else "dim") for word in ("Held", "Used", "Idle")]
    lines: list[Runs] = [[("User".ljust(cells - 3 * 5), "dim"), *titles]]
    shown = _below_titles(people, most)
    largest = max(max(one.held, one.used) for one in people)
    for one in shown:
        parts: Runs = [(fit(one.name, name), "")]
        if bar:
            parts += [(" ", ""), *_share(one, bar, largest, glyphs)]
        parts.append((f"{one.held or '-':>5}", "" if one.held else "dim"))
        parts.append((f"{one.used or '-':>5}", "bad" if one.rogue else "" if one.used else "dim"))
        parts.append((f"{one.idle or '-':>5}", "warn" if one.idle else "dim"))
        lines.append(parts)
    if len(shown) < len(people):
        left = totals(people[len(shown) :])
        counts = "".join(f"{number or '-':>5}" for number in (left.held, left.used, left.idle))
        lines.append([(fit(f"and {len(people) - len(shown)} more", cells - 15), "dim"), (counts, "dim")])
    return lines


def _below_titles(rows: Sequence[T], most: int) -> Sequence[T]:
    """Return the rows that fit into ``most`` lines, with a line for titles and, where not all fit, one for the rest."""
    return rows if len(rows) < most else rows[: max(0, most - 2)]


def _share(one: Person, cells: int, largest: int, glyphs: Glyphs) -> Runs:
    """Return a bar: GPUs in use, held, and idle."""
    full, track = glyphs.meter[0], glyphs.meter[2]
    total = max(one.held, one.used)
    length = max(1, round(total * cells / largest)) if largest else 0
    idle = round(length * one.idle / total) if total else 0
    idle = max(1, idle) if one.idle else 0
    used = min(length - idle, max(1, round(length * one.used / total))) if one.used else 0
    runs = [
        (full * used, "busy"), (full * (length - idle - used), plot_role("reserved")), (full * idle, "warn"),
        (track * (cells - length), "dim"),
    ]  # fmt: skip
    return [run for run in runs if run[0]]


def ending_lines(endings: Sequence[UpcomingEnd], now: float, cells: int, most: int) -> list[Runs]:
    """Return what ends next, the first one first; those that do not fit are counted."""
    if not endings:
        return [[(line, "dim")] for line in wrapped("No lease, and no job with a time limit.", cells)]
    name = min(10, cells - _NEXT_LEAST) if cells - _NEXT_LEAST >= 6 else 0  # else the id is left out
    title = f"What{' ' * (name - 4)} " if name else ""
    lines: list[Runs] = [[(f"{'In':>6}  {'User':<9} {'GPUs':>4} {title}Where", "dim")]]
    shown = _below_titles(endings, most)
    for one in shown:
        left_s = one.until - now
        left = "now" if left_s < 1 else format_duration(left_s)
        role = "mine" if one.mine else ""
        lines.append([
            *fit_runs([(left, "warn" if left_s < _SOON_S else role)], 6, "", right=True), ("  ", ""),
            *fit_runs([(one.user, role)], 9, ""),
            *fit_runs([(f"{one.gpus}", role)], 5, "", right=True), (" ", ""),
            (f"{fit(one.name, name)} " if name else "", "dim"),
            (one.place, role),
        ])  # fmt: skip
    if len(shown) < len(endings):
        lines.append([(f"and {len(endings) - len(shown)} more", "dim")])
    return lines


def event_lines(facts: OverviewFacts, cells: int, most: int) -> list[Runs]:
    """Return the newest events, the newest first."""
    lines: list[Runs] = [[(line, "warn")] for line in (wrapped(facts.problem, cells, most=2) if facts.problem else ())]
    if not facts.events:
        return [*lines, *([(line, "dim")] for line in wrapped(facts.no_events, cells))]
    shown = facts.events[-most:] if most > 0 else ()
    where = min(max(map(width, map(places, shown)), default=0), max(10, cells // 4))
    kind = max([len(event.kind) for event in shown], default=0) if cells < _ROOMY else KIND
    for event in reversed(shown):
        lines.append([
            (f"{event_time(event, facts.now):<6}", "dim"),
            (fit(event.kind, kind) + " ", EVENT_ROLES.get(event.kind, "")),
            (fit(places(event), where) + " ", ""),
            (event_words(event), ""),
        ])  # fmt: skip
    return lines


def event_time(event: ClusterEvent, now: float, today: str = "%H:%M", before: str = "%m-%d") -> str:
    """Return an event's local time, ``14:02``; of one before today the date, ``01-31``."""
    at = datetime.fromtimestamp(seconds_of(event.at))
    return at.strftime(today if at.date() == datetime.fromtimestamp(now).date() else before)


def event_words(event: ClusterEvent) -> str:
    return ": ".join(filter(None, (event.user, event.words)))


def places(event: ClusterEvent) -> str:
    """Return where an event was: ``gpu01:0-3``, ``gpu[01-20]``."""
    return f"{_folded(event.nodes)}{':' * bool(event.gpus)}{event.gpus}"


@lru_cache(4096)
def _folded(nodes: tuple[str, ...]) -> str:
    if len(nodes) < 2:
        return "".join(nodes)
    if all(name.isascii() and name.replace("-", "").replace(".", "").replace("_", "").isalnum() for name in nodes):
        return fold(nodes)
    return f"{nodes[0]} +{len(nodes) - 1}"
