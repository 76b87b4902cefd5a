"""Every screen and dialog at every size, in ASCII, and under keys pressed faster than screens are drawn."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from rich.cells import cell_len
from textual.containers import VerticalScroll
from textual.events import Key, Resize
from textual.geometry import Size
from textual.keys import _character_to_key
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widget import Widget

from gpuboard.board.app import BoardApp
from gpuboard.board.dialogs.base import Box, Confirm, Dialog, Field
from gpuboard.board.preferences import SavedFilter
from gpuboard.board.scene import Scene
from gpuboard.board.screens.welcome import NameNodes, WhyNone
from gpuboard.board.theme.styles import ASCII
from gpuboard.board.widgets.log_view import LogView
from gpuboard.board.widgets.pane import Pane
from gpuboard.config import Settings
from gpuboard.launch.runs.folder import RankView
from gpuboard.model.snapshot import ProcessView, Snapshot
from gpuboard.model.units import seconds_of
from tests.board import made
from tests.board.lab import board, environment, make_core, screen, settle
from tests.board.test_runs import keep, view

HOSTILE = "[/x]\u202e\u0301äß漢字💥é" * 3
ME = 1001  # the viewer's uid on every node


FIELDS = [Field(f"f{number}", f"Field {number}") for number in range(11)]  # as many as there are in any dialog


class Long(Dialog[None]):
    """A dialog that needs more lines than a terminal has."""

    def changed(self) -> None:
        self.show_message("one line\n" * 40)

    def commit(self, values: dict[str, str]) -> None:
        """Do nothing."""


class Place(NamedTuple):
    """A screen or dialog: what opens it from the cluster view, what closes it again, a word on it that comes last."""

    opened: tuple[str, ...] | Callable[[BoardApp], object]
    word: str
    closed: tuple[str, ...] = ("escape",)


PLACES = {
    "picture": Place((), "gpu1", ()),
    "filter": Place(("slash", "1"), "match", ("escape",)),
    "table": Place(("t",), "Reason", ("t",)),
    "GPU": Place(("enter",), "Utilization"),
    "node": Place(("n",), "Connection"),
    "overview": Place(("v",), "People"),
    "leases": Place(("l",), "k3f9"),
    "time line": Place(("l", "t"), "k3f9"),
    "renew": Place(("l", "n"), "Will end", ("escape", "escape")),
    "release": Place(("l", "d"), "Release k3f9?", ("escape", "escape")),
    "runs": Place(("u",), "step 1"),
    "stop": Place(("u", "s"), "Stop run", ("escape", "escape")),
    "log": Place(("u", "o"), "epoch 39", ("escape", "escape")),
    "watches": Place(("w", "escape"), "No watches."),
    "watch": Place(("w",), "Available now", ("escape", "escape")),
    "processes": Place(("P",), "train.py"),
    "order": Place(("P", "s"), "command", ("escape", "escape")),
    "signals": Place(("P", "K"), "CONT", ("escape", "escape")),
    "reserve": Place(("r",), "Try:"),
    "launch": Place(("x",), "Will use"),
    "copy": Place(("y",), "UUIDs"),
    "signal": Place(("K",), "Send a signal"),
    "columns": Place(("C",), "Columns of the table", ("escape", "t")),
    "saved filters": Place(("F",), "free H100"),
    "save filter": Place(("slash", "a", "enter", "ctrl+o"), "Will save", ("escape", "escape")),
    "help": Place(("question_mark",), "cluster.view"),
    "palette": Place(("ctrl+p",), "Reserve"),
    "themes": Place(("ctrl+t",), "Theme: Plain"),
    "name nodes": Place(lambda app: app.push_screen(NameNodes()), "saved in"),
    "long question": Place(lambda app: app.push_screen(Confirm("Sure?", "one line\n" * 40, verb="Do it")), "one line"),
    "long message": Place(lambda app: app.push_screen(Long("Long", FIELDS, verb="Do it")), "one line"),
    "no GPU": Place(lambda app: app.push_screen(WhyNone(made.node("lap", error="NVML: no driver"))), "lspci"),
}  # fmt: skip
AFTER = {"u": "step 1", "F": "free H100"}  # what is on the screen before the next key is pressed
SIZES = [(80, 24), (160, 48)]
STORM = [(20, 5), (300, 90), (1, 1), (200, 2), (40, 12), (20, 5)]
SCREENS = {
    "picture", "filter", "table", "GPU", "node", "overview", "leases", "time line", "runs", "log", "watches",
    "processes", "help", "palette", "themes",
}  # fmt: skip
DIALOGS = [name for name in PLACES if name not in SCREENS]


def everything(extra: str = "") -> Scene:
    """Return a scene with something for every screen; ``extra`` is added to all that comes from nodes."""
    values = {"type": "compute", "started": 1.0, "memory": 30 * made.GIB}
    train = ProcessView(pid=41, user="alice", command=f"python train.py {extra}", uid=ME, lease="k3f9", **values)  # type: ignore[arg-type]
    miner = ProcessView(pid=42, user=f"mallory{extra}", command=f"./miner {extra}", uid=7, rogue=True, **values)  # type: ignore[arg-type]
    reason = f"alice: python (pid 41) {extra}"
    gpus = [
        made.busy("gpu1", 0, "alice", reason=reason, name=f"H100 {extra}", processes=[train, miner], flags=["rogue"]),
        made.gpu("gpu1", 1, "reserved", reason=f"reserved by alice {extra}", flags=["idle"]),
        made.mig("gpu1", 2, "free", "busy"),
        made.gpu("gpu1", 3, "broken", reason=f"GPU lost {extra}", memory_used=None, utilization=None, processes=None),
        made.gpu("gpu1", 4),
    ]
    old = made.node("gpu3", [made.busy("gpu3", 0, None)], state="stale", age_s=42.0, error=f"no new reading {extra}")
    nodes = [made.node("gpu1", gpus, hostname=f"gpu1{extra}"), made.unread("gpu2", f"ssh: refused {extra}"), old]
    leases = [
        made.lease("k3f9", "alice", [("gpu1", 0), ("gpu1", 1)], ME),
        made.lease("m2c7", f"carol{extra}", [("gpu3", 0)], 8),
    ]
    plain = made.scene(*nodes, leases=leases, uids={"gpu1": ME}, banners=(extra,) if extra else ())
    named: Snapshot = msgspec.structs.replace(plain.snapshot, cluster=f"lab{extra}")
    return Scene(named, plain.leases, uids=plain.uids, banners=plain.banners)


@pytest.fixture(autouse=True)
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the leases alive, and what is drawn from the clock the same."""
    monkeypatch.setattr(time, "time", lambda: seconds_of(made.AT) + 60.0)


@asynccontextmanager
async def everywhere(
    folder: Path, glyphs: str, size: tuple[int, int], extra: str = ""
) -> AsyncIterator[tuple[BoardApp, Pilot[int]]]:
    env = environment(folder)
    ranks = [RankView(rank, "gpu1", rank, rank, 100 + rank, "running", f"step {rank} {extra}") for rank in range(2)]
    run = keep(env, view(target=f"train.py {extra}", ranks=ranks, lease="k3f9"))
    (run / "rank-0.out").write_text("".join(f"epoch {number} {extra}\n" for number in range(40)))
    first = everything(extra)
    async with made.still(folder, first, size, settings=Settings(glyphs=glyphs)) as (app, pilot):
        app.remember(filters=(SavedFilter("free H100", "state:free model:H100"),))
        yield app, pilot


async def enter(app: BoardApp, pilot: Pilot[int], place: Place) -> None:
    if callable(place.opened):
        place.opened(app)
    else:
        for key in place.opened:
            await pilot.press(key)
            await settle(pilot, lambda key=key: key not in AFTER or AFTER[key] in screen(app))  # type: ignore[misc]
    await settle(pilot, lambda: place.word in screen(app) and logs_are_read(app))


def logs_are_read(app: BoardApp) -> bool:
    """Return whether all logs on the screen have been read, for the room that the empty ones, of one row, leave."""
    views = [view for one in app.screen_stack for view in one.query(LogView) if view._file is not None and view.size]
    return all(
        view.size.height == 1 if view.gone else view._shown is not None and view._shown[0] == view.window
        for view in views
    )


@asynccontextmanager
async def shown(app: BoardApp, pilot: Pilot[int], place: Place) -> AsyncIterator[None]:
    """Open a place from the cluster view, and close it again with its keys."""
    below = app.screen
    await enter(app, pilot, place)
    yield
    await pilot.press(*place.closed)
    await settle(pilot, lambda: app.screen is below)


def is_visible(widget: Widget) -> bool:
    """Return whether all of a widget is on the screen, inside the dialog and the part that it scrolls with."""
    around = [
        parent for parent in widget.ancestors if isinstance(parent, (Screen, VerticalScroll)) or parent.id == "box"
    ]
    inside = (parent.region.contains_region(widget.region) for parent in around if isinstance(parent, Widget))
    return bool(widget.region) and all(inside)


def fits(app: BoardApp, size: tuple[int, int]) -> bool:
    """Return whether the screen is drawn within a terminal of this size, in ASCII where characters are, no pane cut."""
    text = screen(app)
    lines = text.splitlines()
    right = text.isascii() or app.look.glyphs is not ASCII
    whole = all(pane.size.height == pane.count for pane in app.screen.query(Pane) if pane.size)
    return (app.screen.size, len(lines)) == (size, size[1]) and max(map(cell_len, lines)) <= size[0] and right and whole


async def check(app: BoardApp, pilot: Pilot[int], name: str, size: tuple[int, int]) -> None:
    """Check that nothing is outside, and in a dialog that title and buttons are visible and keys lead to every line."""
    await settle(pilot, lambda: fits(app, size))
    assert app.focused is None or app.focused.region.overlaps(app.screen.region), (name, app.focused)
    if not isinstance(app.screen, Box):
        return
    for part in app.screen.query("#title, Button"):
        assert is_visible(part), (name, part, screen(app))
    for area in app.screen.query(VerticalScroll):
        assert is_visible(area) or not area.display, (name, area, screen(app))
        while area.display and area.scroll_y < area.max_scroll_y:
            before = area.scroll_y
            await pilot.press("pagedown")
            assert area.scroll_y > before, (name, area, screen(app))
        while area.scroll_y:
            await pilot.press("pageup")
    first = app.focused
    for widget in (app.screen.focus_chain[-1], first):
        app.screen.set_focus(widget)
        await pilot.pause()
        assert widget is None or is_visible(widget), (name, widget, screen(app))


async def test_every_screen_and_dialog_is_whole_in_ascii_and_closed_by_escape(tmp_path: Path) -> None:
    async with everywhere(tmp_path, "ascii", SIZES[0], HOSTILE) as (app, pilot):
        for size in SIZES:
            await pilot.resize_terminal(*size)
            for name, place in PLACES.items():
                async with shown(app, pilot, place):
                    await check(app, pilot, name, size)


@pytest.mark.parametrize("part", [0, 1])
async def test_every_screen_and_dialog_is_after_a_storm_of_sizes_as_when_it_was_opened(
    tmp_path: Path, part: int
) -> None:
    opened, other = SIZES[::-1] if part else SIZES
    async with everywhere(tmp_path, "unicode", opened) as (app, pilot):
        cluster = screen(app)
        for name, place in [*PLACES.items()][part::2]:
            async with shown(app, pilot, place):
                await check(app, pilot, name, opened)  # leaves each field once
                fresh = screen(app)
                for columns, rows in STORM:
                    app.post_message(Resize(Size(columns, rows), Size(columns, rows)))
                await settle(pilot, lambda: app.screen._compositor.size == STORM[-1])
                await pilot.resize_terminal(*other)
                await check(app, pilot, name, other)
                await pilot.resize_terminal(*opened)
                await settle(pilot, lambda fresh=fresh: screen(app) == fresh)  # type: ignore[misc]
            await settle(pilot, lambda: screen(app) == cluster)


async def test_node_data_that_is_not_ascii_is_shown_as_question_marks(tmp_path: Path) -> None:
    async with everywhere(tmp_path, "ascii", (200, 60), HOSTILE) as (app, pilot):
        await pilot.press("t")
        await settle(pilot, lambda: "[/x]????" in screen(app))


async def test_keys_faster_than_screens_are_drawn_end_nothing(tmp_path: Path) -> None:
    keys = [
        "up", "down", "left", "right", "enter", "escape", "space", "tab", "pagedown", "home", "end", "slash",
        "question_mark", "f1", "ctrl+p", "ctrl+t", *"abdefghijlmnorstuvwxyzGNS[]1", "backspace", "shift+down", "ctrl+l",
    ]  # fmt: skip
    dice = random.Random(0)
    pressed = [dice.choice(keys) for _ in range(150)]
    async with board(make_core(tmp_path), size=(100, 30)) as (app, pilot):
        for start in range(0, len(pressed), 10):
            for key in pressed[start : start + 10]:
                named = _character_to_key(key) if len(key) == 1 else key
                app.post_message(Key(named, key if len(key) == 1 else None))
            await pilot.pause()
            assert app.is_running, pressed[: start + 10]
