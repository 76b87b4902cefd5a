"""The rows of the picture, a cell per GPU, and the columns they need (pure).

The cells of many nodes are a letter each. Where there is room, they are wide and of several lines: state and
utilization, user, memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rich.style import Style

from gpuboard.board.arrange import STATE_ORDER, Group, NodeRow, users_of
from gpuboard.board.scene import Scene
from gpuboard.board.text.cells import fit, width
from gpuboard.board.text.format import UNKNOWN, age, flag_mark, gib, pair, percent, short_model
from gpuboard.board.text.gpu_row import letter_of, owner, units
from gpuboard.board.text.plots import meter
from gpuboard.board.text.rows import GAP, Cell, Column, Runs
from gpuboard.board.theme.styles import Look
from gpuboard.model.snapshot import GpuView, NodeView

PACK = 4  # cells per group: easier to count by eye
_STATE, _FREE = 11, 5  # widths of columns
_WIDE_LEAST, _WIDE_MOST = 8, 18  # of a cell with meters: a shorter one shows neither a user nor a level
_TALLEST = 4  # the last line is blank
_METER_LEAST = 4  # beside a value
_VALUE = 4  # width of a value: 100%
_NAME_LEAST, _NAME_MOST = 6, 24
_WORST = frozenset("!d")  # marks that call for action

Item = NodeRow | Group


class Focus(NamedTuple):
    """The user's position in the picture: the row and GPU under the cursor, the marked GPUs."""

    row: str | None = None  # key
    uuid: str | None = None
    marks: Collection[str] = ()


class CellSize(NamedTuple):
    """The size of a GPU's cell: by default a letter and the mark of a flag."""

    width: int = 2
    lines: int = 1

    @property
    def wide(self) -> bool:
        """Whether it has meters."""
        return self.lines > 1


class Drawing(NamedTuple):
    """What the drawing of a row depends on besides its node."""

    scene: Scene
    focus: Focus
    look: Look
    size: CellSize
    name: int  # width of the column of names


def size_for(scene: Scene, items: Sequence[Item], columns: int, rows: int) -> CellSize:
    """Return the size of cells with which all rows fit, also without a filter.

    Except for the headings of groups it depends on no reading, so that nothing jumps.
    """
    nodes = scene.snapshot.nodes
    lines = min(_TALLEST, rows // max(1, len(nodes), len(items)))
    if lines < 2:
        return CellSize()
    name, most = _extent(nodes)
    room = columns - name - _STATE - _FREE - 3 * GAP - (most - 1) // PACK
    return CellSize(min(room // most, _WIDE_MOST), lines) if room // most >= _WIDE_LEAST else CellSize()


def _extent(nodes: Sequence[NodeView]) -> tuple[int, int]:
    """Return the width of the column of names, and the largest number of GPUs of a node."""
    name = max((width(node.name) for node in nodes), default=0)
    return min(max(name, _NAME_LEAST), _NAME_MOST), max((len(node.gpus) for node in nodes), default=1) or 1


def columns_for(items: Sequence[Item], size: CellSize) -> tuple[Column, ...]:
    """Return the columns for these rows; their widths rarely change."""
    name, most = _extent([item.node for item in items if isinstance(item, NodeRow)])
    indexes = (f"{i}" if size.wide else f"{i % 10}" for i in range(most))
    titles = "".join(f"{' ' if i and i % PACK == 0 else ''}{word:<{size.width}}" for i, word in enumerate(indexes))
    columns = (
        Column("node", "Node", name),
        Column("connection", "State", _STATE),
        Column("gpus", titles, size.width * most + (most - 1) // PACK),
        Column("free", "Free", _FREE, right=True),
    )
    if size.wide:  # model, CPU and memory are below the name, users in the cells
        return columns
    return (
        *columns,
        Column("model", "Model", 12, drop=2),
        Column("cpu", "CPU", 4, right=True, drop=3),
        Column("memory", "Memory", 10, drop=4),
        Column("users", "Users", 0, weight=1, least=8),
    )


def below(item: NodeRow, drawing: Drawing) -> list[Cell]:
    """Return the further lines of a node's row: its model, CPU and memory; users and memory of its GPUs."""
    node = item.node
    memory = pair(node.memory_used, node.memory_total, 1)
    left = [_model(node), f"CPU {percent(node.cpu_percent)} {memory}" if node.gpus else "", ""]
    if not node.gpus:
        return []
    lines = []
    for number in range(1, drawing.size.lines):
        words = fit(left[number - 1], drawing.name + GAP + _STATE) + " " * GAP
        role = "unknown" if UNKNOWN in words else "dim"
        lines.append(Cell(((words, role), *_gpus(item, drawing, number))))
    if node.error:  # in place of the last line: it needs the room
        lines[-1] = Cell(f"  {_trouble(node)}", trouble_role(node))
    return lines


def cells_of(item: NodeRow, drawing: Drawing) -> tuple[Cell, ...]:
    """Return a node's row."""
    node, scene, focus = item.node, drawing.scene, drawing.focus
    name = Cell(node.name, "title" if focus.row == item.key else "")
    connection = _connection(node)
    if not node.gpus:
        words = node.error or "no GPU found"
        return (name, connection, Cell(words, trouble_role(node), rest=True))
    shown = [gpu for gpu in node.gpus if item.shown is None or gpu.uuid in item.shown]
    free, total = map(sum, zip(*(units(gpu) for gpu in shown), strict=True)) if shown else (0, 0)
    known = node.state == "up"
    count = Cell(f"{free if known else UNKNOWN}/{total}", ("free" if free else "dim") if known else "unknown")
    head = (name, connection, Cell(_gpus(item, drawing, 0)), count)
    if drawing.size.wide:
        return head
    if node.error:
        return (*head, Cell(_trouble(node), trouble_role(node), rest=True))
    return (
        *head,
        Cell(_model(node)),
        _maybe(percent(node.cpu_percent)),
        _maybe(pair(node.memory_used, node.memory_total, 4)),
        Cell(_users(shown, scene)),
    )


def _trouble(node: NodeView) -> str:
    seen = f"read {age(node.age_s)} ago; " if node.state == "unreachable" and node.age_s is not None else ""
    return f"{seen}{node.error}"


def _model(node: NodeView) -> str:
    models = Counter(short_model(gpu.name) for gpu in node.gpus).most_common()
    return (models[0][0] if models else "") + (f" +{len(models) - 1}" if len(models) > 1 else "")


def _gpus(item: NodeRow, drawing: Drawing, line: int) -> Runs:
    """Return one line of the cells of a node's GPUs."""
    _, focus, look, size, _ = drawing
    runs: list[tuple[str, str | Style]] = []
    for place, gpu in enumerate(item.node.gpus):
        if place and place % PACK == 0:
            runs.append((" ", ""))
        if line == _TALLEST - 1:
            continue  # blank, also under the cursor
        if item.shown is not None and gpu.uuid not in item.shown:
            text = letter_of(gpu)[0].lower() + flag_mark(gpu.flags) if not line else ""
            runs.append((text.ljust(size.width), "dim"))
            continue
        marked = gpu.uuid in focus.marks
        parts = _cell(gpu, drawing, line, marked=marked)
        if gpu.uuid != focus.uuid and not marked:
            runs += parts
            continue
        under = look.style("marked") if marked else Style()
        over = look.style("cursor") if gpu.uuid == focus.uuid else Style()
        gap = parts.pop() if size.wide else None
        runs += [(text, under + look.style(role) + over) for text, role in parts]
        runs += [gap] if gap is not None else []
    return tuple(runs)


def _cell(gpu: GpuView, drawing: Drawing, line: int, *, marked: bool) -> list[tuple[str, str]]:
    """Return one line of a GPU's cell, as texts with their roles; the last one is the gap of a wide cell."""
    scene, _, look, size, _ = drawing
    letter, state = letter_of(gpu)
    mark = flag_mark(gpu.flags)
    sign = [
        (letter, state),
        (look.glyphs.marked if marked and mark == " " else mark, "bad" if mark in _WORST else "warn"),
    ]
    if not size.wide:
        return sign
    gap, room = (" ", ""), size.width - 1
    if line == 0:
        words = percent(gpu.utilization)
        part = None if gpu.utilization is None else gpu.utilization / 100
        return [*sign, *_meter(part, words, room - 2, state, look), gap]
    if line == 1:
        users, role = owner(gpu, scene)
        return [(fit(users, room), role), gap]
    part = gpu.memory_used / gpu.memory_total if gpu.memory_used is not None and gpu.memory_total else None
    return [*_meter(part, f"{gib(gpu.memory_used)}G", room, state, look), gap]


def _meter(part: float | None, words: str, room: int, role: str, look: Look) -> list[tuple[str, str]]:
    """Return a meter with its value where both fit into ``room``, else the meter alone."""
    if part is None:
        return [(UNKNOWN.ljust(room), "unknown")]
    cells = room - _VALUE - 1
    if cells < _METER_LEAST:
        full, rest = meter(part, room, look.glyphs)
        return [(full, role), (rest, "dim")]
    full, rest = meter(part, cells, look.glyphs)
    return [(full, role), (rest, "dim"), (f"{words:>{_VALUE + 1}}", "")]


def _users(gpus: Sequence[GpuView], scene: Scene) -> str:
    users = Counter(user for gpu in gpus for user in users_of(gpu, scene)[:1])
    return ", ".join(f"{user} {count}" if count > 1 else user for user, count in users.most_common())


def group_words(group: Group) -> Runs:
    """Return the heading of a group: its name and its GPUs by state."""
    name = fit(group.name, min(width(group.name), _NAME_MOST))
    runs: list[tuple[str, str | Style]] = [(name, "group")]
    for what, states in group.counts.parts:
        runs.append((f"  {what}", "dim"))
        runs += ((f"  {states[state]} {state}", state) for state in STATE_ORDER if states[state])
    return tuple(runs)


def _connection(node: NodeView) -> Cell:
    if node.state == "up":
        return Cell("up", "warn" if node.error else "dim")
    if node.connecting:
        return Cell("connecting", "unknown")
    words = f"stale {age(node.age_s)}" if node.state == "stale" else "unreachable"
    return Cell(words, trouble_role(node))


def trouble_role(node: NodeView) -> str:
    """Return the role for an error of a node."""
    if node.connecting:
        return "unknown"
    return "bad" if node.state == "unreachable" else "warn"


def _maybe(words: str) -> Cell:
    return Cell(words, "unknown" if UNKNOWN in words else "")
