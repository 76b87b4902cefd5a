"""The rows of the picture, a cell per GPU, and the columns they need (pure).

The cells of many nodes are a letter each, with a curve of the whole node. Where there is room, they are wide and of
several lines, and the GPUs of a large node take several rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
from rich.style import Style

from gpuboard.board.arrange import STATE_ORDER, Group, NodeRow, users_of
from gpuboard.board.scene import Scene, without
from gpuboard.board.text.cells import fit, fit_names, fit_runs, width
from gpuboard.board.text.format import (
    FLAG_MARKS,
    PACK,
    UNKNOWN,
    age,
    flag_mark,
    flag_role,
    pair,
    percent,
)
from gpuboard.board.text.gpu_cell import TALLEST, CellSize, Ink, first_line, further_lines, has_readings
from gpuboard.board.text.gpu_row import known, letter_of, units
from gpuboard.board.text.lines import wrapped
from gpuboard.board.text.plots import curve, metered, part_of, per_cell
from gpuboard.board.text.rows import GAP, Cell, Column, Runs
from gpuboard.board.theme.styles import LETTERS
from gpuboard.model.gpu import short_model
from gpuboard.model.snapshot import GpuView, NodeView, judged

_STATE, _FREE = 11, 5  # widths of columns
_EACH = 8  # GPUs in a row where more would be narrow
_LEAST, _ROOMY, _WIDEST = 8, 12, 40  # widths of wide cells: at least; with room for values; at most
_METERS_FROM = 4  # lines of a row from which the host has meters
_KEPT_BELOW = 8  # lines that rows of more than four lines leave free: tall rows are no use where nothing else fits
_NAME_LEAST, _NAME_MOST = 6, 24
_BINS_MOST = 60  # of a node's curve: with 8,000 GPUs a sample lasts 5 s

Item = NodeRow | Group


class Focus(NamedTuple):
    """The user's position in the picture: the node and GPU under the cursor, the marked GPUs."""

    node: str | None = None  # name
    uuid: str | None = None
    marks: Collection[str] = ()


class Drawing(NamedTuple):
    """What the drawing of a row depends on besides its node."""

    ink: Ink
    focus: Focus
    widths: Mapping[str, int]  # of the columns, by key; 0 where there is no room for one


def size_for(scene: Scene, items: Sequence[Item], columns: int, rows: int) -> CellSize:
    """Return the size of cells with which all rows fit, also without a filter.

    It depends on the number of rows and on whether there are readings at all, on no value, so that nothing jumps.
    """
    nodes = scene.snapshot.nodes
    if 2 * max(len(nodes), len(items)) > rows or not any(has_readings(gpu) for node in nodes for gpu in node.gpus):
        return CellSize()
    name, most = _extent(nodes)
    room = columns - name - _STATE - _FREE - 3 * GAP
    for each in dict.fromkeys((most, min(most, _EACH), min(most, PACK))):
        count = max(1, sum(_rows_of(node, each) for node in nodes), len(split(items, each)))
        wide, lines = (room - (each - 1) // PACK) // each, rows // count
        if lines > _METERS_FROM:
            lines = max(_METERS_FROM, (rows - _KEPT_BELOW) // count)
        if lines > 1 and wide >= (_LEAST if each <= _EACH else _ROOMY):
            return CellSize(min(wide, _WIDEST), min(lines, TALLEST), each)
    return CellSize()


def _rows_of(node: NodeView, each: int) -> int:
    return max(1, -(-len(node.gpus) // each))


def split(items: Sequence[Item], each: int | None) -> Sequence[Item]:
    """Return the rows with ``each`` GPUs of a node at most; those in which a filter leaves none are left out."""
    if each is None or all(isinstance(item, Group) or len(item.node.gpus) <= each for item in items):
        return items
    found: list[Item] = []
    for item in items:
        if isinstance(item, Group) or len(item.node.gpus) <= each:
            found.append(item)
            continue
        leads = True
        for first in range(0, len(item.node.gpus), each):
            part = msgspec.structs.replace(item, first=first, last=first + each, leads=leads)
            if part.shown is None or any(gpu.uuid in part.shown for gpu in part.gpus):
                found.append(part if leads else msgspec.structs.replace(part, key=f"{item.key}+{first}"))
                leads = False
    return found


def _extent(nodes: Sequence[NodeView]) -> tuple[int, int]:
    """Return the width of the column of names, and the largest number of GPUs of a node."""
    name = _widest(tuple([node.name for node in nodes]))
    return min(max(name, _NAME_LEAST), _NAME_MOST), max((len(node.gpus) for node in nodes), default=1) or 1


@lru_cache(maxsize=1)
def _widest(names: tuple[str, ...]) -> int:
    return max(map(width, names), default=0)


def columns_for(scene: Scene, items: Sequence[Item], size: CellSize) -> tuple[Column, ...]:
    """Return the columns for these rows; their widths rarely change."""
    name, most = _extent([item.node for item in items if isinstance(item, NodeRow)])
    most = min(most, size.each or most)
    indexes = (f"{i}" if size.wide else f"{i % 10}" for i in range(most))
    titles = "".join(f"{' ' if i and i % PACK == 0 else ''}{word:<{size.width}}" for i, word in enumerate(indexes))
    columns = (
        Column("node", "Node", name),
        Column("connection", "State", _STATE),
        Column("gpus", titles, size.width * most + (most - 1) // PACK),
        Column("free", "Free", _FREE, right=True),
    )
    if size.wide:  # model, CPU and memory are below the name, users and curves in the cells
        return columns
    model, users = Column("model", "Model", 12, drop=2), Column("users", "Users", 0, weight=2, least=8)
    if not any(_host_read(node) for node in scene.snapshot.nodes):
        return (*columns, model, users)
    return (
        *columns,
        Column("utilization", "Util", 4, right=True, drop=3),
        Column("trace", "5 min", 0, weight=1, least=8, drop=1),
        model,
        Column("cpu", "CPU", 4, right=True, drop=4),
        Column("memory", "Memory", 10, drop=5),
        users,
    )


def _host_read(node: NodeView) -> bool:
    return node.cpu_percent is not None or node.memory_total is not None


def below(item: NodeRow, drawing: Drawing) -> list[Cell]:
    """Return the further lines of a node's row: its model, CPU and memory; those of its GPUs' cells."""
    node, size = item.node, drawing.ink.size
    if not node.gpus:
        indent = " " * (drawing.widths["node"] + _STATE + 2 * GAP)
        return [Cell(indent + words, trouble_role(node)) for words in _no_gpus(node, drawing)[1:]]
    room = drawing.widths["node"] + GAP + _STATE
    left = _host(node, drawing, room) if item.leads else []
    meters = _host_read(node) and size.lines >= _METERS_FROM
    lines = []
    for number, cells in enumerate(_gpus(item, drawing, head=False)):
        words = left[number] if number < len(left) else ()
        # a wall beside the node's own meters: those of its GPUs are of something else
        gap = (drawing.ink.look.glyphs.wall, "dim") if meters and number and words else (" " * GAP, "")
        lines.append(Cell((*fit_runs(words, room, ""), gap, *cells)))
    if node.error and item.leads:  # in place of the last line: it needs the room
        lines[-1] = Cell(f"  {_trouble(node)}", trouble_role(node))
    return lines[: size.lines - 1]


def _host(node: NodeView, drawing: Drawing, room: int) -> list[Runs]:
    """Return what stands below a node's name: its model, CPU and memory."""
    model: Runs = ((_model(node), "dim"),)
    if not _host_read(node):
        return [model, (("no readings", "dim"),)]
    cpu, memory = percent(node.cpu_percent), pair(node.memory_used, node.memory_total, 1)
    if drawing.ink.size.lines < _METERS_FROM:
        words = f"CPU {cpu} {memory}"
        return [model, ((words, "unknown" if UNKNOWN in words else "dim"),)]
    glyphs = drawing.ink.look.glyphs
    used = part_of(node.memory_used, node.memory_total)
    parts = [] if node.cpu_percent is None else [("CPU ", node.cpu_percent / 100, cpu.rjust(len(memory)))]
    parts += [] if used is None else [("Mem ", used, memory)]
    lines: list[Runs] = [((name, "dim"), *metered(part, words, room - 5, "dim", glyphs)) for name, part, words in parts]
    return [model, *lines]


def cells_of(item: NodeRow, drawing: Drawing) -> tuple[Cell, ...]:
    node, (ink, focus, widths) = item.node, drawing
    if not item.leads:
        last = item.first + len(item.gpus) - 1
        return (Cell(""), Cell(f"GPU {item.first}-{last}", "dim"), Cell(_gpus(item, drawing, head=True)[0]), Cell(""))
    here = focus.node == node.name and (item.shown is None or focus.uuid is None or focus.uuid in item.shown)
    name = Cell(node.name, "title" if here else "")
    connection = _connection(node)
    if not node.gpus:
        return (name, connection, Cell(_no_gpus(node, drawing)[0], trouble_role(node), rest=True))
    shown = item.parts
    free, total = map(sum, zip(*(units(gpu) for gpu in shown), strict=True)) if shown else (0, 0)
    role = "unknown" if node.state != "up" else "free" if free else "dim"
    count = Cell(f"{free if node.state == 'up' else UNKNOWN}/{total}", role)
    head = (name, connection, Cell(_gpus(item, drawing, head=True)[0]), count)
    if ink.size.wide:
        return head
    if node.error:
        return (*head, Cell(_trouble(node), trouble_role(node), rest=True))
    if "trace" not in widths:
        return (*head, Cell(_model(node)), Cell(_users(shown, ink.scene, widths.get("users", 0))))
    values = [gpu.utilization for gpu in node.gpus if gpu.utilization is not None]
    return (
        *head,
        known(percent(sum(values) / len(values) if values else None)),
        Cell(_trace(node, ink, widths["trace"]), "busy" if node.state == "up" and any(values) else "dim"),
        Cell(_model(node)),
        known(percent(node.cpu_percent)),
        known(pair(node.memory_used, node.memory_total, 4)),
        Cell(_users(shown, ink.scene, widths.get("users", 0))),
    )


def _no_gpus(node: NodeView, drawing: Drawing) -> list[str]:
    """Return why no GPU of a node is known, in as many lines as its row has."""
    room = drawing.widths["gpus"] + GAP + drawing.widths["free"]
    return wrapped(node.error or "no GPU found", room, most=drawing.ink.size.lines) or [""]


def _trace(node: NodeView, ink: Ink, cells: int) -> str:
    """Return the mean utilization of a node's GPUs over the last minutes as a curve."""
    bins = min(per_cell(ink.look.glyphs) * cells, _BINS_MOST)
    if not bins:
        return ""
    values = ink.history.means([gpu.uuid for gpu in node.gpus], bins)
    return curve(values, 1, ink.look.glyphs, 0.0, 100.0)[0].rjust(cells)


def _trouble(node: NodeView) -> str:
    seen = f"read {age(node.age_s)} ago; " if node.state == "unreachable" and node.age_s is not None else ""
    return f"{seen}{node.error}"


def _model(node: NodeView) -> str:
    return _models(tuple([gpu.name for gpu in judged(node)]))


@lru_cache(maxsize=64)
def _models(names: tuple[str, ...]) -> str:
    """Return the most frequent model, and how many others there are."""
    models = Counter(map(short_model, names)).most_common()
    return (models[0][0] if models else "") + (f" +{len(models) - 1}" if len(models) > 1 else "")


def _gpus(item: NodeRow, drawing: Drawing, *, head: bool) -> list[Runs]:
    """Return the first line of the cells of a row's GPUs, or the further ones."""
    ink, focus, _ = drawing
    size, look = ink.size, ink.look
    lines: list[list[tuple[str, str | Style]]] = [[] for _ in range(1 if head else size.lines - 1)]
    for place, gpu in enumerate(item.gpus):
        shown = item.shown is None or gpu.uuid in item.shown
        marked, here = shown and gpu.uuid in focus.marks, shown and gpu.uuid == focus.uuid
        over = look.style("cursor") if here else Style()
        if not shown:
            text = letter_of(gpu)[0].lower() + flag_mark(gpu.flags)[0] if head else ""
            cell = [[(text.ljust(size.width), "dim")]] * len(lines)
        else:
            part = without(gpu, item.hidden)
            cell = [first_line(part, ink, marked=marked)] if head else further_lines(part, ink)
        for line, parts in zip(lines, cell, strict=True):
            if place and place % PACK == 0:
                line.append((" ", ""))
            if not here and not marked:
                line.extend(parts)
                continue
            under = look.style("marked") if marked else Style()
            drawn = len(parts) - size.wide  # without the gap
            line.extend((text, under + look.style(role) + over) for text, role in parts[:drawn])
            line.extend(parts[drawn:])
    return [tuple(line) for line in lines]


def _users(gpus: Sequence[GpuView], scene: Scene, cells: int) -> str:
    """Return the users of GPUs with how many they have; where not all fit, the first ones and how many others."""
    users = Counter(user for gpu in gpus for user in _first_users(gpu, scene)).most_common()
    words = ", ".join(f"{user} {count}" if count > 1 else user for user, count in users)
    return words if width(words) <= cells else fit_names([user for user, _ in users], cells).rstrip()


def _first_users(gpu: GpuView, scene: Scene) -> Sequence[str]:
    """Return the first user of a GPU, or of each of its MIG devices: processes on these are listed for both."""
    return [name for one in gpu.mig for name in users_of(one, scene)[:1]] or users_of(gpu, scene)[:1]


def group_words(group: Group) -> Runs:
    """Return the heading of a group: its name and its GPUs by state."""
    name = fit(group.name, min(width(group.name), _NAME_MOST))
    runs: list[tuple[str, str | Style]] = [(name, "group")]
    for what, states in group.counts.parts:
        runs.append((f"  {what}", "dim"))
        runs += ((f"  {states[state]} {state}", state) for state in STATE_ORDER if states[state])
    return tuple(runs)


def legend(nodes: Sequence[NodeView], states: bool, room: int, words: str = "") -> list[tuple[str, str, str]]:
    """Return letters, if ``states``, and marks, each with its role and meaning; then ``words``, as a meaning.

    Where not all fit into ``room`` cells: of those that the nodes' GPUs have, first the marks, the worst before others;
    the words only where none of those is left out.
    """
    marks = [(mark, flag_role(flag), flag) for flag, mark in FLAG_MARKS.items()]
    signs = [*((letter, state, state) for state, letter in LETTERS.items() if states or state == "mig"), *marks]
    last = [("", "", words)] if words else []
    needed = sum(len(word) + 4 for _, _, word in signs)
    if needed + width(words) <= room:
        return signs + last
    gpus = [gpu for node in nodes for gpu in judged(node)]
    present = {gpu.state for gpu in gpus}.union(*(gpu.flags for gpu in gpus if gpu.flags))
    kept, left = set(), room
    for _, _, word in (*marks, *reversed(signs[: -len(marks)])):
        if word in present and len(word) + 4 <= left:
            left -= len(word) + 4
            kept.add(word)
    fits = bool(words) and width(words) <= left and kept == present.intersection(word for _, _, word in signs)
    if needed <= room and not fits:
        return signs
    return [sign for sign in signs if sign[2] in kept] + last * fits


def _connection(node: NodeView) -> Cell:
    if node.state == "up":
        return Cell("up", "warn" if node.error else "dim")
    if node.connecting:
        return Cell("connecting", "unknown")
    words = f"stale {age(node.age_s)}" if node.state == "stale" else "unreachable"
    return Cell(words, trouble_role(node))


def trouble_role(node: NodeView) -> str:
    if node.connecting:
        return "unknown"
    return "bad" if node.state == "unreachable" else "warn"
