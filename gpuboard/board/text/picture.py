"""The rows of the dense picture, one cell per GPU, and the columns they need (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rich.style import Style

from gpuboard.board.arrange import STATE_ORDER, Group, NodeRow, users_of
from gpuboard.board.scene import Scene
from gpuboard.board.text.cells import fit, width
from gpuboard.board.text.format import UNKNOWN, age, flag_mark, pair, percent, short_model
from gpuboard.board.text.rows import Cell, Column, Runs
from gpuboard.board.theme.styles import LETTERS, Look
from gpuboard.model.snapshot import GpuView, NodeView

CELL = 2  # a letter and the mark of a flag
PACK = 4  # cells per group: easier to count by eye
MIG = LETTERS["mig"]
_NAME_LEAST, _NAME_MOST = 6, 24
_WORST = frozenset("!d")  # marks that call for action

Item = NodeRow | Group


class Focus(NamedTuple):
    """The user's position in the picture: the row and GPU under the cursor, the marked GPUs."""

    row: str | None = None  # key
    uuid: str | None = None
    marks: Collection[str] = ()


def columns_for(items: Sequence[Item]) -> tuple[Column, ...]:
    """Return the columns for these rows; their widths rarely change."""
    nodes = [item.node for item in items if isinstance(item, NodeRow)]
    name = max((width(node.name) for node in nodes), default=0)
    most = max((len(node.gpus) for node in nodes), default=1) or 1
    titles = "".join(f"{' ' if i and i % PACK == 0 else ''}{i % 10} " for i in range(most))
    return (
        Column("node", "Node", min(max(name, _NAME_LEAST), _NAME_MOST)),
        Column("connection", "State", 11),
        Column("gpus", titles, CELL * most + (most - 1) // PACK),
        Column("free", "Free", 5, right=True),
        Column("model", "Model", 12, drop=2),
        Column("cpu", "CPU", 4, right=True, drop=3),
        Column("memory", "Memory", 10, drop=4),
        Column("users", "Users", 0, weight=1, least=8),
    )


def cells_of(item: NodeRow, scene: Scene, focus: Focus, look: Look) -> tuple[Cell, ...]:
    """Return a node's row."""
    node = item.node
    name = Cell(node.name, "title" if focus.row == item.key else "")
    connection = _connection(node)
    if not node.gpus:
        words = node.error or "no GPU found"
        return (name, connection, Cell(words, trouble_role(node), rest=True))
    shown = [gpu for gpu in node.gpus if item.shown is None or gpu.uuid in item.shown]
    free, total = map(sum, zip(*(units(gpu) for gpu in shown), strict=True)) if shown else (0, 0)
    known = node.state == "up"
    count = Cell(f"{free if known else UNKNOWN}/{total}", ("free" if free else "dim") if known else "unknown")
    head = (name, connection, Cell(_gpus(item, focus, look)), count)
    if node.error:
        seen = f"read {age(node.age_s)} ago; " if node.state == "unreachable" and node.age_s is not None else ""
        return (*head, Cell(f"{seen}{node.error}", trouble_role(node), rest=True))
    models = Counter(short_model(gpu.name) for gpu in node.gpus).most_common()
    model = models[0][0] + (f" +{len(models) - 1}" if len(models) > 1 else "")
    return (
        *head,
        Cell(model),
        _maybe(percent(node.cpu_percent)),
        _maybe(pair(node.memory_used, node.memory_total, 4)),
        Cell(_users(shown, scene)),
    )


def _gpus(item: NodeRow, focus: Focus, look: Look) -> Runs:
    runs: list[tuple[str, str | Style]] = []
    for place, gpu in enumerate(item.node.gpus):
        if place and place % PACK == 0:
            runs.append((" ", ""))
        letter, state = letter_of(gpu)
        mark = flag_mark(gpu.flags)
        if item.shown is not None and gpu.uuid not in item.shown:
            runs.append((letter.lower() + mark, "dim"))
            continue
        role = "bad" if mark in _WORST else "warn"
        if gpu.uuid != focus.uuid and gpu.uuid not in focus.marks:
            runs += [(letter, state), (mark, role)]
            continue
        marked = gpu.uuid in focus.marks
        if marked and mark == " ":
            mark = look.glyphs.marked
        under = look.style("marked") if marked else Style()
        over = look.style("cursor") if gpu.uuid == focus.uuid else Style()
        runs += [(letter, under + look.style(state) + over), (mark, under + look.style(role) + over)]
    return tuple(runs)


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


def letter_of(gpu: GpuView) -> tuple[str, str]:
    """Return a GPU's letter and the state that gives its colour; in MIG mode those of its best device."""
    if not gpu.mig or gpu.state == "broken":
        return LETTERS.get(gpu.state, UNKNOWN), gpu.state
    states = {device.state for device in gpu.mig}
    return MIG, next((state for state in STATE_ORDER if state in states), "unknown")


def units(gpu: GpuView) -> tuple[int, int]:
    """Return the free and all allocatable units of a GPU: the GPU itself, or its MIG devices."""
    if gpu.mig:
        return sum(device.state == "free" for device in gpu.mig), len(gpu.mig)
    return int(gpu.state == "free"), 1


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
