"""The dense picture: a row a node, a cell a GPU, with a letter and a colour for its state and a mark for its flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType

from gpuboard.board.arrange import STATE_ORDER, Group, NodeRow, users_of
from gpuboard.board.cells import fit, width
from gpuboard.board.grid import HEADER, RIGHT, Cell, Column, Grid, LazyRows, Row
from gpuboard.board.look import LETTERS
from gpuboard.board.rows import GAP, Runs
from gpuboard.board.scene import Scene
from gpuboard.board.words import UNKNOWN, age, flag_mark, pair, percent, short_model
from gpuboard.model.snapshot import GpuView, NodeView

_CELL = 2  # a letter and the mark of a flag
_PACK = 4  # so many cells stand together: eyes count them
MIG = "M"
_NAME_LEAST, _NAME_MOST = 6, 24
_SORTS = {"node": "node", "connection": "age", "gpus": "state", "model": "model", "users": "user"}  # by column
_WORST = frozenset("!d")  # marks of what somebody has to look at

Item = NodeRow | Group


class Picture(Grid):
    """Every GPU of every node.

    The cursor is on a GPU, or on a node of which none is known: keys are UUIDs, or ``node:NAME`` of such nodes.
    """

    ROW_CURSOR = False
    DEFAULT_CSS = "Picture { padding: 0 0 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "left", "Left", id="picture.left", show=False),
        Binding("right", "right", "Right", id="picture.right", show=False),
        Binding("shift+left", "mark_left", "Select to the left", id="picture.mark-left", show=False),
        Binding("shift+right", "mark_right", "Select to the right", id="picture.mark-right", show=False),
    ]

    def __init__(self, *, empty: str = "", id: str | None = None) -> None:
        super().__init__((), empty=empty, marks=True, mark_column=False, id=id)
        self._uuid: str | None = None  # the GPU under the cursor
        self._wish: str | None = None  # where the person put the cursor: a key
        self._column = 0  # the place of that GPU in its row: up and down keep to it
        self._items: Sequence[Item] = ()
        self._scene: Scene | None = None

    @property
    def cursor(self) -> str | None:
        """The UUID of the GPU under the cursor, or ``node:NAME`` in a row without GPUs."""
        return self._uuid or (f"node:{self.node.name}" if self.node else None)

    @cursor.setter
    def cursor(self, key: str | None) -> None:
        self._wish = key
        index = None if key is None else self._index_with(key)
        if index is not None:
            self._go(index)

    @property
    def node(self) -> NodeView | None:
        """The node under the cursor."""
        item = self._items[self._at] if self._at < len(self._items) else None
        return item.node if isinstance(item, NodeRow) else None

    def set_sort(self, key: str | None, reverse: bool = False) -> None:
        """Show in the header which of our columns, if any, stands for what the rows are sorted by."""
        super().set_sort(next((column for column, sort in _SORTS.items() if sort == key), None), reverse)

    def can_mark(self, key: str) -> bool:
        """Return whether ``key`` is a GPU's."""
        return not key.startswith("node:")

    def show(self, scene: Scene, items: Sequence[Item]) -> None:
        """Show rows of a scene as ``arrange_nodes`` makes them."""
        self._scene, self._items = scene, items
        self._lay_out()
        for key in (self._wish, self._uuid):
            if key is not None and (index := self._index_with(key)) is not None:
                self._wanted = items[index].key
                break
        self.set_rows(LazyRows(items, lambda item: item.key, self._row))

    # Where GPUs are

    def _index_with(self, key: str) -> int | None:
        """Return the row that a GPU is shown in, or the one of that key."""
        if self._at < len(self._items) and self._holds(self._items[self._at], key):
            return self._at  # nearly always: 1,000 nodes need not be looked through
        return next((index for index, item in enumerate(self._items) if self._holds(item, key)), None)

    def _holds(self, item: Item, key: str) -> bool:
        if isinstance(item, Group):
            return False
        if key.startswith("node:"):
            return key == f"node:{item.node.name}"
        return any(gpu.uuid == key for gpu in item.node.gpus) if item.shown is None else key in item.shown

    def _reachable(self) -> list[tuple[int, str]]:
        """Return place and UUID of the GPUs in the cursor's row that the cursor can go to."""
        item = self._items[self._at] if self._at < len(self._items) else None
        if not isinstance(item, NodeRow):
            return []
        return [
            (place, gpu.uuid)
            for place, gpu in enumerate(item.node.gpus)
            if item.shown is None or gpu.uuid in item.shown
        ]

    def _settle(self) -> None:
        """Stay on the GPU the person chose, else on the one nearest to where it stood."""
        reachable = self._reachable()
        uuids = {uuid for _, uuid in reachable}
        if self._wish in uuids:
            self._uuid = self._wish
        elif self._uuid not in uuids:
            nearest = min(reachable, key=lambda found: abs(found[0] - self._column), default=None)
            self._uuid = nearest[1] if nearest else None

    def _go(self, index: int, step: int = 1) -> None:
        super()._go(index, step)
        self._wish = self.cursor

    def _hop(self, uuid: str) -> None:
        """Put the cursor on another GPU of its row."""
        self._wish = uuid
        self._column = next((place for place, other in self._reachable() if other == uuid), self._column)
        self._settle()
        self._touch({self._at})
        self._tell()

    def _step(self, step: int) -> bool:
        """Go to the GPU beside; False at the end of the row."""
        reachable = [uuid for _, uuid in self._reachable()]
        at = reachable.index(self._uuid) + step if self._uuid in reachable else -1
        if not 0 <= at < len(reachable):
            return False
        self._hop(reachable[at])
        return True

    # What keys and mouse do

    def action_left(self) -> None:
        """One GPU to the left."""
        self._step(-1)

    def action_right(self) -> None:
        """One GPU to the right."""
        self._step(1)

    def action_mark(self) -> None:
        """Mark the GPU or take its mark away, and go on to the next, in the row below after the last."""
        self._toggle(self.cursor)
        if not self._step(1) and self._at + 1 < len(self._items):
            self._column = 0
            self.action_down()

    def action_mark_left(self) -> None:
        """Mark to the left."""
        self._extend(self.action_left)

    def action_mark_right(self) -> None:
        """Mark to the right."""
        self._extend(self.action_right)

    def on_click(self, event: events.Click) -> None:
        """A click on a GPU moves there, with ctrl or right marks, twice opens; on a node twice opens; a title sorts."""
        event.prevent_default()  # what Grid would do
        at = event.get_content_offset(self)
        if at is None:
            return
        event.stop()
        if at.y < HEADER:
            if (column := _SORTS.get(self.column_at(at.x) or "")) is not None:
                self.post_message(self.Sorted(self, column))
            return
        index = at.y - HEADER + self.scroll_offset.y
        item = self._items[index] if index < len(self._items) else None
        if not isinstance(item, NodeRow):
            return
        place = self._place_at(at.x)
        gpus = item.node.gpus
        if place is not None and place < len(gpus) and (item.shown is None or gpus[place].uuid in item.shown):
            self._column, self._wish = place, gpus[place].uuid
            self._go(index)
            if event.ctrl or event.button == RIGHT:
                self._toggle(self.cursor)
            elif event.chain == 2:
                self.action_choose()
            return
        self._go(index)
        if event.chain == 2:
            self.post_message(self.Chosen(self, f"node:{item.node.name}"))

    def _place_at(self, x: int) -> int | None:
        """Return which GPU of its row stands at ``x``."""
        left = 0
        for index, size in self._widths.items():
            if self.columns[index].key == "gpus":
                pack, inside = divmod(x - left, _CELL * _PACK + 1)
                return pack * _PACK + min(inside // _CELL, _PACK - 1) if left <= x < left + size else None
            left += size + GAP
        return None

    # How it looks

    def _lay_out(self) -> None:
        """Choose the columns' widths by what is there; they hardly ever change."""
        nodes = [item.node for item in self._items if isinstance(item, NodeRow)]
        name = max((width(node.name) for node in nodes), default=0)
        most = max((len(node.gpus) for node in nodes), default=1) or 1
        titles = "".join(f"{' ' if i and i % _PACK == 0 else ''}{i % 10} " for i in range(most))
        self.set_columns(
            (
                Column("node", "Node", min(max(name, _NAME_LEAST), _NAME_MOST)),
                Column("connection", "State", 10),
                Column("gpus", titles, _CELL * most + (most - 1) // _PACK),
                Column("free", "Free", 5, right=True),
                Column("model", "Model", 12, drop=2),
                Column("cpu", "CPU", 4, right=True, drop=3),
                Column("memory", "Memory", 10, drop=4),
                Column("users", "Users", 0, weight=1, least=8),
            )
        )

    def _row(self, item: Item) -> Row:
        if isinstance(item, Group):
            return Row(item.key, (Cell(group_words(item)),), group=True)
        return Row(item.key, partial(self._cells, item), dim=item.node.state != "up")

    def _cells(self, item: NodeRow) -> Sequence[Cell]:
        node = item.node
        here = self._at < len(self._items) and self._items[self._at].key == item.key
        name = Cell(node.name, "title" if here else "")
        connection = _connection(node)
        if not node.gpus:
            words = node.error or "no GPU found"
            return (name, connection, Cell(words, "bad" if node.state == "unreachable" else "warn", rest=True))
        shown = [gpu for gpu in node.gpus if item.shown is None or gpu.uuid in item.shown]
        free, total = map(sum, zip(*(units(gpu) for gpu in shown), strict=True)) if shown else (0, 0)
        known = node.state == "up"
        count = Cell(f"{free if known else UNKNOWN}/{total}", ("free" if free else "dim") if known else "unknown")
        head = (name, connection, Cell(self._gpus(item)), count)
        if node.error:
            return (*head, Cell(node.error, "bad" if node.state == "unreachable" else "warn", rest=True))
        models = Counter(short_model(gpu.name) for gpu in node.gpus).most_common()
        model = models[0][0] + (f" +{len(models) - 1}" if len(models) > 1 else "")
        return (
            *head,
            Cell(model),
            _maybe(percent(node.cpu_percent)),
            _maybe(pair(node.memory_used, node.memory_total, 4)),
            Cell(self._users(shown)),
        )

    def _gpus(self, item: NodeRow) -> Runs:
        runs: list[tuple[str, str | Style]] = []
        for place, gpu in enumerate(item.node.gpus):
            if place and place % _PACK == 0:
                runs.append((" ", ""))
            letter, state = letter_of(gpu)
            mark = flag_mark(gpu.flags)
            if item.shown is not None and gpu.uuid not in item.shown:
                runs.append((letter.lower() + mark, "dim"))
                continue
            role = "bad" if mark in _WORST else "warn"
            if gpu.uuid != self._uuid and gpu.uuid not in self.marks:
                runs += [(letter, state), (mark, role)]
                continue
            marked = gpu.uuid in self.marks
            if marked and mark == " ":
                mark = self._look.glyphs.marked
            under = self._look.style("marked") if marked else Style()
            over = self._look.style("cursor") if gpu.uuid == self._uuid else Style()
            runs += [(letter, under + self._look.style(state) + over), (mark, under + self._look.style(role) + over)]
        return tuple(runs)

    def _users(self, gpus: Sequence[GpuView]) -> str:
        assert self._scene is not None  # rows come with their scene
        users = Counter(user for gpu in gpus for user in users_of(gpu, self._scene)[:1])
        return ", ".join(f"{user} {count}" if count > 1 else user for user, count in users.most_common())


def group_words(group: Group) -> Runs:
    """Return the heading of a group: its name, and how many GPUs it has in each state."""
    name = fit(group.name, min(width(group.name), _NAME_MOST))
    count = f"{group.total} GPU{'s' * (group.total != 1)}"
    runs: list[tuple[str, str | Style]] = [(f"{name}  ", "group"), (count, "dim")]
    runs += ((f"  {group.states[state]} {state}", state) for state in STATE_ORDER if group.states.get(state))
    if group.states.get("mig"):
        runs.append((f"  {group.states['mig']} in MIG mode", "dim"))
    return tuple(runs)


def letter_of(gpu: GpuView) -> tuple[str, str]:
    """Return the letter of a GPU and the state it is coloured by; in MIG mode that of its best device."""
    if not gpu.mig or gpu.state in {"broken", "unknown"}:
        if "mig" in gpu.flags and gpu.state == "free":
            return MIG, "dim"  # without devices there is nothing to be had
        return LETTERS.get(gpu.state, UNKNOWN), gpu.state
    states = {device.state for device in gpu.mig}
    return MIG, next((state for state in STATE_ORDER if state in states), "unknown")


def units(gpu: GpuView) -> tuple[int, int]:
    """Return how many of what can be had of a GPU are free, and how many there are: itself, or its MIG devices."""
    if gpu.mig:
        return sum(device.state == "free" for device in gpu.mig), len(gpu.mig)
    return int(gpu.state == "free" and "mig" not in gpu.flags), 1


def _connection(node: NodeView) -> Cell:
    if node.state == "up":
        return Cell("up", "warn" if node.error else "dim")
    word = "silent" if node.state == "stale" else "down"
    return Cell(word if node.age_s is None else f"{word} {age(node.age_s)}", "warn" if word == "silent" else "bad")


def _maybe(words: str) -> Cell:
    return Cell(words, "unknown" if UNKNOWN in words else "")
