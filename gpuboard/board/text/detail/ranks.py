"""The ranks of a run as a picture: a cell per rank by node, and below it who waits for whom and where each one is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from rich.style import Style

from gpuboard.board.text.cells import fit_runs, width
from gpuboard.board.text.format import PACK, UNKNOWN
from gpuboard.board.text.lines import NAME, wrapped
from gpuboard.board.text.rows import Runs
from gpuboard.board.theme.styles import Look
from gpuboard.launch.runs.folder import RankView, RunView
from gpuboard.launch.stalls.waits import RankGroup, rank_words
from gpuboard.model.text import clean
from gpuboard.model.units import ranges

# What a rank does → its letter in the picture and a role of Look
RANK_LETTERS = {
    "waiting": (".", "dim"),
    "importing": ("I", ""),
    "gate": ("G", "dim"),
    "running": ("R", "good"),
    "waits": ("W", "warn"),
    "behind": ("B", "bad"),
    "stopped": ("S", "bad"),
    "blocked": ("U", "bad"),  # in uninterruptible sleep
    "failed": ("X", "bad"),
    "done": ("D", "dim"),
    "killed": ("K", "dim"),
    "lost": ("L", "bad"),
    UNKNOWN: ("?", "unknown"),
}
_DOING = {
    "init": "waits",
    "collective": "waits",
    "data": "running",
    "code": "running",
    "unknown": UNKNOWN,
    "ended": "done",
}
T = TypeVar("T")
Run = tuple[str, str | Style]
_ENDED = frozenset({"failed", "done", "killed", "lost"})
_ROW = 16  # cells per row
_GAP = 3  # between nodes that are side by side
_NAME_MOST, _RANKS_MOST = 16, 9  # cells


class Mark(NamedTuple):
    """A rank in the picture. ``suspect``: others wait for it, or it failed first."""

    word: str  # what it does
    letter: str
    role: str
    suspect: bool


def marks(view: RunView, groups: Sequence[RankGroup]) -> dict[int, Mark]:
    """Return what every rank does: as inspected (``groups``) while it has not ended, else as the head reports it."""
    found = {rank: group for group in groups for rank in group.ranks}
    first = None if groups else next((v.rank for v in view.verdicts if v.rank is not None), None)
    return {rank.rank: _mark(rank, found.get(rank.rank), first) for rank in view.ranks}


def _mark(rank: RankView, group: RankGroup | None, first: int | None) -> Mark:
    word = clean(rank.state)
    suspect = group.suspect if group else rank.rank == first
    if group is not None and word not in _ENDED and (group.doing != "unknown" or word == "running"):
        word = _DOING.get(group.doing, group.doing)
    if suspect and word == "running":
        word = "behind"
    letter, role = RANK_LETTERS.get(word, (UNKNOWN, "unknown"))
    if word == "failed" and first is not None and not suspect:
        role = "dim"
    return Mark(word, letter, "bad" if suspect else role, suspect)


def picture(view: RunView, groups: Sequence[RankGroup], cells: int, most: int, look: Look) -> list[Runs]:
    """Return the ranks of a run as lines of ``cells`` cells, about ``most`` of them."""
    if not view.ranks:
        return []
    found = marks(view, groups)
    below = _legend(view, groups, found, cells, most - 2, look=look)
    return [*_nodes(view, found, cells, max(2, most - len(below)), look), *below]


# The cells


class _Block(NamedTuple):
    """Ranks of a node side by side; many on one node take several blocks."""

    node: str
    ranks: tuple[int, ...]


def _nodes(view: RunView, found: Mapping[int, Mark], cells: int, most: int, look: Look) -> list[Runs]:
    """Return a block per node, in as many columns as fit; blocks of equal ranks are folded if there are too many."""
    nodes: dict[str, list[int]] = {}
    for rank in sorted(view.ranks, key=lambda rank: rank.rank):
        nodes.setdefault(clean(rank.node), []).append(rank.rank)
    blocks = [_Block(node, tuple(part)) for node, ranks in nodes.items() for part in _parts(ranks, _ROW)]
    name = min(max(map(width, nodes)), _NAME_MOST)
    label = min(max(len(ranges(block.ranks)) for block in blocks), _RANKS_MOST)
    wide = max(len(block.ranks) for block in blocks)
    size = name + 1 + label + 1 + 2 * wide + (wide - 1) // PACK
    columns = max(1, (cells - NAME + _GAP) // (size + _GAP))
    folded: list[_Block] = []
    if len(blocks) > columns * most:
        usual = Counter(found.values()).most_common(1)[0][0]
        mixed = [block for block in blocks if any(found[rank] != usual for rank in block.ranks)]
        shown = set(mixed[: (most - 1) * columns])
        folded = [block for block in blocks if block not in shown]
        blocks = [block for block in blocks if block in shown]
    lines: list[Runs] = []
    for row in _parts(blocks, columns):
        runs: list[Run] = [(("" if lines else "Ranks").ljust(NAME), "dim")]
        for block in row:
            runs += fit_runs([(block.node, "")], name + 1, "", ellipsis=look.glyphs.ellipsis)
            runs += fit_runs([(ranges(block.ranks), "dim")], label + 1, "", ellipsis=look.glyphs.ellipsis)
            runs += fit_runs(_cells(block, found, look), size - name - label - 2 + _GAP, "")
        lines.append(tuple(runs))
    if folded:
        lines.append(_fold(folded, found, first=not lines))
    return lines


def _parts(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _cells(block: _Block, found: Mapping[int, Mark], look: Look) -> Runs:
    runs: list[Run] = []
    for place, rank in enumerate(block.ranks):
        if place and place % PACK == 0:
            runs.append((" ", ""))
        runs += _cell(found[rank], look)
    return tuple(runs)


def _cell(mark: Mark, look: Look) -> list[Run]:
    if mark.suspect:
        return [(f"{mark.letter}!", look.style(mark.role) + Style(reverse=True, bold=True))]
    return [(f"{mark.letter} ", mark.role)]


def _fold(blocks: Sequence[_Block], found: Mapping[int, Mark], *, first: bool) -> Runs:
    ranks = [rank for block in blocks for rank in block.ranks]
    counts = Counter(found[rank] for rank in ranks).most_common()
    nodes = len({block.node for block in blocks})
    runs: list[Run] = [("Ranks".ljust(NAME) if first else " " * NAME, "dim")]
    runs.append((f"{len(ranks)} {'' if first else 'more '}ranks on {nodes} node{'' if nodes == 1 else 's'}: ", ""))
    for number, (mark, count) in enumerate(counts):
        runs += [
            (", " if number else "", ""),
            (f"{count} {mark.letter}" if len(counts) > 1 else mark.letter, mark.role),
        ]
    return tuple(runs)


# Who waits for whom


def _legend(
    view: RunView, groups: Sequence[RankGroup], found: Mapping[int, Mark], cells: int, most: int, *, look: Look
) -> list[Runs]:
    """Return what the letters mean: groups of inspected ranks one by one, as far as they fit, the others by state."""
    live = [group for group in groups if any(_inspected(found[rank], group) for rank in group.ranks if rank in found)]
    live.sort(key=lambda group: (not group.suspect, -len(group.ranks)))
    names = [_who(group.ranks) for group in live]
    wide = max([NAME - 4, *(len(name) + 1 for name in names)])
    places = {rank.rank: f"{clean(rank.node)}:{rank.index}" for rank in view.ranks}
    lines: list[Runs] = []
    left = set(found)
    for group, name in zip(live, names, strict=True):
        mark = next(found[rank] for rank in group.ranks if rank in found)
        where = f"{places.get(group.ranks[0], UNKNOWN)}, " if len(group.ranks) == 1 else ""
        words = wrapped(f"{where}{clean(group.words, 400)}{_relation(group, groups, look)}", max(10, cells - wide - 4))
        rest = left.difference(rank for rank in group.ranks if rank in left and _inspected(found[rank], group))
        if lines and len(lines) + len(words) + bool(rest) > most:
            break
        left = rest
        role = mark.role if mark.suspect else ""
        for number, line in enumerate(words):
            head: list[Run] = [("    " + " " * wide, "")]
            if not number:
                head = [(" ", ""), *_cell(mark, look), (f" {name.ljust(wide)}", role)]
            lines.append((*head, (line, role)))
    return [*lines, *_states(sorted(left), found, cells, look)] if left else lines


def _inspected(mark: Mark, group: RankGroup) -> bool:
    return group.suspect or mark.word not in _ENDED


def _who(ranks: Sequence[int], words: Callable[[Sequence[int]], str] = ranges) -> str:
    text = words(ranks)
    return text if len(text) <= 2 * _RANKS_MOST else f"{len(ranks)} ranks"


def _relation(group: RankGroup, groups: Sequence[RankGroup], look: Look) -> str:
    """Return for which ranks a group waits, or which ranks wait for it."""
    if group.waits_for:
        return f" {'->' if look.glyphs.ascii else '→'} {_who(group.waits_for, rank_words)}"
    mine = set(group.ranks)
    waiting = [rank for other in groups if mine.intersection(other.waits_for) for rank in other.ranks]
    if not waiting:
        return ""
    verb, it = "waits" if len(waiting) == 1 else "wait", "it" if len(mine) == 1 else "them"
    return f" {'<-' if look.glyphs.ascii else '←'} {_who(waiting, rank_words)} {verb} for {it}"


def _states(ranks: Sequence[int], found: Mapping[int, Mark], cells: int, look: Look) -> list[Runs]:
    """Return ranks by what they do, as many as fit on a line."""
    by_mark: dict[Mark, list[int]] = {}
    for rank in ranks:
        by_mark.setdefault(found[rank], []).append(rank)
    failed = any(mark.suspect for mark in by_mark)
    lines: list[Runs] = []
    runs: list[Run] = []
    used = 0
    for mark, same in sorted(by_mark.items(), key=lambda item: (not item[0].suspect, -len(item[1]))):
        too = " too" if mark.word == "failed" and failed and not mark.suspect else ""
        words = f" {mark.word}{too}: {_who(same)}"
        if runs and used + _GAP + 2 + len(words) > cells - NAME:
            lines.append(tuple(runs))
            runs, used = [], 0
        cell = _cell(mark, look) if mark.suspect else [(mark.letter, mark.role)]
        runs += [(" " * (_GAP if runs else NAME), ""), *cell, (words, mark.role)]
        used += _GAP + 2 + len(words)
    return [*lines, tuple(runs)]
