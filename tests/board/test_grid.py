"""The grid: cursor and marks by key, only what changed is drawn again, columns that stay aligned."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.screen import Screen

from gpuboard.board.text.rows import header_runs
from gpuboard.board.theme import themes
from gpuboard.board.theme.styles import UNICODE, Look
from gpuboard.board.widgets.grid import Cell, Column, Grid, LazyRows, Row
from tests.board.lab import drag, settle
from tests.board.made import HOSTILE

COLUMNS = (
    Column("name", "Name", 8),
    Column("number", "Number", 7, right=True),
    Column("words", "Words", 0, weight=1, least=10, drop=1),
)


@pytest.mark.parametrize("indent", [0, 2])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("key", ["name", "util", "power", "user"])
def test_the_mark_of_the_order_covers_no_letter(key: str, indent: int, reverse: bool) -> None:
    columns = (
        Column("power", "Power", 5, right=True), Column("name", "Name", 4), Column("util", "Util", 4, right=True),
        Column("user", "User", 8),
    )  # fmt: skip
    widths = {index: column.width for index, column in enumerate(columns)}
    look = Look({}, UNICODE)

    def titles(sort: tuple[str, bool] | None) -> str:
        runs = header_runs(columns, widths, sort, indent=indent, width=40, base=Style(), look=look)
        return "".join(text for text, _ in runs)

    mark = UNICODE.down if reverse else UNICODE.up
    drawn = titles((key, reverse))
    assert drawn.count(mark) == 1
    assert drawn.replace(mark, " ") == titles(None)


class GridApp(App[None]):
    """A grid and what it says."""

    CSS = "Screen { overflow: hidden; }"
    look: ClassVar[Look] = themes.load_all({"HOME": "/nonexistent"})[0]["dark"].look(UNICODE)
    own_line_filters = App.get_line_filters

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, object]] = []

    def compose(self) -> ComposeResult:
        yield Grid(COLUMNS, empty="Nothing here.\nPress a to add.", marks=True)

    def on_grid_moved(self, message: Grid.Moved) -> None:
        self.messages.append(("moved", message.key))

    def on_grid_chosen(self, message: Grid.Chosen) -> None:
        self.messages.append(("chosen", message.key))

    def on_grid_marked(self, message: Grid.Marked) -> None:
        self.messages.append(("marked", sorted(message.keys)))

    def on_grid_sorted(self, message: Grid.Sorted) -> None:
        self.messages.append(("sorted", message.key))


@asynccontextmanager
async def opened(size: tuple[int, int] = (40, 11)) -> AsyncIterator[tuple[GridApp, Grid, Pilot[None]]]:
    """Open a grid with room for ten rows."""
    app = GridApp()
    async with app.run_test(size=size) as pilot:
        grid = app.query_one(Grid)
        grid.focus()
        await pilot.pause()
        yield app, grid, pilot


def rows(*keys: str, words: str = "some words") -> list[Row]:
    return [Row(key, (Cell(key), Cell(str(len(key))), Cell(words))) for key in keys]


def many(count: int, made: list[int] | None = None) -> Sequence[Row]:
    """Return ``count`` rows k0, k1, …; ``made`` records which cells are made."""

    def cells(number: int) -> Sequence[Cell]:
        if made is not None:
            made.append(number)
        return (Cell(f"k{number}"), Cell(str(number)), Cell("words"))

    return LazyRows(range(count), lambda number: f"k{number}", lambda number: Row(f"k{number}", lambda: cells(number)))


def lines(grid: Grid) -> list[str]:
    return [grid.render_line(y).text.rstrip() for y in range(grid.size.height)]


async def test_rows_are_drawn_in_columns() -> None:
    async with opened() as (_, grid, pilot):
        grid.set_rows([*rows("alpha", "b"), Row("g", (Cell("A group over all columns"),), group=True), *rows("c")])
        grid.set_sort("number", reverse=True)
        await pilot.pause()
        assert lines(grid)[:5] == [
            " Name     ▼Number Words",
            " alpha          5 some words",
            " b              1 some words",
            " A group over all columns",
            " c              1 some words",
        ]


async def test_a_narrow_grid_drops_columns_and_a_wide_one_shares_what_is_left() -> None:
    async with opened() as (_, grid, pilot):
        grid.set_rows(rows("alpha", words="w" * 80))
        await pilot.pause()
        assert lines(grid)[1] == " alpha          5 " + "w" * 20 + "…"  # 39: a scroll bar's place is kept
        await pilot.resize_terminal(25, 11)
        await pilot.pause()
        assert lines(grid)[1] == " alpha          5"
        grid.set_rows([Row("alpha", (Cell("alpha"), Cell("11/16"), Cell("")))])
        for size, shown in ((19, "      11/16"), (17, "      11/…"), (14, "      …")):
            await pilot.resize_terminal(size, 11)
            await pilot.pause()
            assert lines(grid)[1] == " alpha" + shown


async def test_without_rows_it_shows_what_to_do() -> None:
    async with opened() as (app, grid, pilot):
        assert lines(grid)[2:4] == ["  Nothing here.", "  Press a to add."]
        grid.set_rows(rows("a"))
        grid.set_rows([])
        await pilot.pause()
        assert lines(grid)[1:4] == ["", "  Nothing here.", "  Press a to add."]
        assert app.messages == [("moved", "a"), ("moved", None)]


async def drawn_lines(grid: Grid, pilot: Pilot[None]) -> list[int]:
    """Draw the whole grid once more; return a list that gets every line that is drawn from then on."""
    drawn: list[int] = []
    render_line = grid.render_line
    grid.render_line = lambda y: (drawn.append(y), render_line(y))[1]  # type: ignore[method-assign,func-returns-value]
    grid.refresh()
    await pilot.pause()
    assert drawn
    drawn.clear()
    return drawn


async def test_only_visible_rows_are_made_and_only_changed_lines_drawn() -> None:
    async with opened() as (_, grid, pilot):
        made: list[int] = []
        grid.set_rows(many(8000, made))
        await pilot.pause()
        assert set(made) == set(range(10))
        drawn = await drawn_lines(grid, pilot)
        grid.set_rows(many(8000))
        await pilot.pause()
        assert drawn == []
        changed = [*many(8000)]
        changed[3] = Row("k3", (Cell("k3"), Cell("new"), Cell("words")))
        changed[5000] = Row("k5000", (Cell("not seen"), Cell("new"), Cell("words")))
        grid.set_rows(changed)
        await pilot.pause()
        assert drawn == [4]  # below the header


async def test_of_many_rows_some_are_drawn_first_and_none_waits_for_good() -> None:
    def numbered(words: str) -> list[Row]:
        return rows(*(f"k{number}" for number in range(60)), words=words)

    async with opened((40, 61)) as (app, grid, pilot):
        grid.set_rows(numbered("old"))
        await settle(pilot, lambda: all("old" in line for line in lines(grid)[1:]))
        frames: list[int] = []
        display = app._display
        app._display = lambda *update: (frames.append(sum("new" in line for line in lines(grid))), display(*update))[1]  # type: ignore[method-assign,func-returns-value]
        grid.set_rows(numbered("new"))
        await settle(pilot, lambda: all("new" in line for line in lines(grid)[1:]))
        assert frames[:3] == [24, 48, 60]
        for number in range(4):  # without a frame between them
            grid.set_rows(numbered(f"words {number}"))
        assert not any("new" in line for line in lines(grid))
        await settle(pilot, lambda: all(line.endswith("words 3") for line in lines(grid)[1:]))
        grid.in_parts = False
        frames.clear()
        grid.set_rows(numbered("new"))
        await settle(pilot, lambda: all("new" in line for line in lines(grid)[1:]))
        assert frames[:1] == [60]


async def test_of_a_tall_row_only_the_changed_line_is_drawn() -> None:
    def tall(*below: str) -> list[Row]:
        return [Row("a", (Cell("a"), Cell("state"), Cell("words")), below=lambda: [Cell(text) for text in below])]

    async with opened() as (_, grid, pilot):
        grid.set_tall(3)
        grid.set_rows(tall("curve", "reason"))
        await pilot.pause()
        drawn = await drawn_lines(grid, pilot)
        grid.set_rows(tall("other curve", "reason"))
        await pilot.pause()
        assert drawn == [2]  # below the header and the row's first line
        assert lines(grid)[2:4] == [" other curve", " reason"]


async def test_keys_move_the_cursor() -> None:
    async with opened() as (app, grid, pilot):
        grid.set_rows(many(100))
        await pilot.pause()
        await pilot.press("down", "down", "up", "pagedown", "end", "home", "pagedown", "pageup", "enter")
        await pilot.pause()
        moves = ["k0", "k1", "k2", "k1", "k11", "k99", "k0", "k10", "k0"]
        assert app.messages == [*(("moved", key) for key in moves), ("chosen", "k0")]


async def test_the_cursor_skips_headings_and_shows_the_one_above() -> None:
    async with opened() as (_, grid, pilot):
        heading = Row("h", (Cell("Heading"),), group=True)
        grid.set_rows([heading, *rows("a"), Row("i", (Cell("Other"),), group=True), *rows("b"), *many(30)])
        assert grid.cursor == "a"
        await pilot.press("down")
        assert grid.cursor == "b"
        await pilot.press("up")
        assert grid.cursor == "a"
        await pilot.press("up")
        assert grid.cursor == "a"
        await pilot.press("end")
        await pilot.press("home")
        await pilot.pause()
        assert lines(grid)[1] == " Heading"


async def test_space_and_shift_mark() -> None:
    async with opened() as (_, grid, pilot):
        grid.set_rows(many(10))
        await pilot.press("space", "down", "shift+down", "space", "shift+up")
        await pilot.pause()
        assert sorted(grid.marks) == ["k0", "k2", "k3", "k4"]
        assert [line[:3] for line in lines(grid)[1:6]] == ["●k0", " k1", "●k2", "●k3", "●k4"]
        assert grid.cursor == "k3"


async def test_the_mouse_does_all_of_it() -> None:
    async with opened() as (app, grid, pilot):
        grid.set_rows(many(100))
        await pilot.pause()
        app.messages.clear()
        await pilot.click(Grid, offset=(15, 0))  # a header
        await pilot.click(Grid, offset=(5, 3))  # a row
        await pilot.click(Grid, offset=(0, 4))  # the column of marks
        await pilot.click(Grid, offset=(20, 6), control=True)
        await pilot.click(Grid, offset=(20, 6), button=3)
        await pilot.click(Grid, offset=(20, 7), times=2)
        await pilot.pause()
        assert app.messages == [
            ("sorted", "number"), ("moved", "k2"), ("moved", "k3"), ("marked", ["k3"]), ("moved", "k5"),
            ("marked", ["k3", "k5"]), ("marked", ["k3"]), ("moved", "k6"), ("chosen", "k6"),
        ]  # fmt: skip
        app.messages.clear()
        grid.scroll_relative(y=50, animate=False)
        await pilot.click(Grid, offset=(5, 1))
        await pilot.pause()
        assert app.messages == [("moved", "k50")]


async def test_dragging_selects_from_where_the_button_was_pressed_to_where_it_is() -> None:
    async with opened() as (app, grid, pilot):
        grid.set_rows(many(100))
        grid.marks = {"k7"}
        await drag(pilot, grid, (5, 3), (5, 4), (9, 5), release=False)
        assert (grid.cursor, sorted(grid.marks)) == ("k4", ["k2", "k3", "k4", "k7"])
        await drag(pilot, grid, (5, 3), (5, 4), (9, 5), (5, 4), (5, 2))  # back, and to the other side
        assert (grid.cursor, sorted(grid.marks)) == ("k1", ["k1", "k2", "k3", "k4", "k7"])
        await pilot.hover(Grid, offset=(5, 8))
        assert grid.cursor == "k1"  # it is over
        assert app.mouse_captured is None
        assert {"chosen", "sorted"}.isdisjoint(kind for kind, _ in app.messages)


async def test_a_click_stays_a_click_however_the_hand_trembles() -> None:
    async with opened() as (app, grid, pilot):
        grid.set_rows(many(20))
        await drag(pilot, grid, (5, 3), (7, 3), (6, 3))
        assert (grid.cursor, grid.marks) == ("k2", frozenset())
        await drag(pilot, grid, (5, 0), (5, 1), (5, 4))  # a header is no row
        assert grid.marks == frozenset()
        await drag(pilot, grid, (5, 3), (5, 4))
        await drag(pilot, grid, (5, 8))  # nor does the drag before keep a click from being one
        assert (grid.cursor, sorted(grid.marks)) == ("k7", ["k2", "k3"])
        plain = Grid(COLUMNS)
        await app.mount(plain)
        plain.set_rows(many(20))
        await pilot.pause()
        await drag(pilot, plain, (5, 1), (5, 3))
        assert plain.marks == frozenset()  # nothing can be selected in it


async def test_dragging_past_an_edge_scrolls_on_and_headings_are_passed() -> None:
    async with opened((40, 14)) as (app, grid, pilot):
        rows = many(40)
        grid.styles.height = 11  # so that the pointer can be below it
        grid.set_rows([*rows[:12], Row("heading", (Cell("G"),), group=True), *rows[12:]])
        await drag(pilot, grid, (5, 9), (5, 10), release=False)
        assert grid.scroll_offset.y == 0
        await drag(pilot, grid, (5, 9), (5, 10), (5, 11), release=False)  # below the last line
        await settle(pilot, lambda: grid.cursor == "k39" and grid.scroll_offset.y == 31)
        assert grid.marks == {row.key for row in rows[8:]}
        await drag(pilot, grid, (5, 10), (5, 0), release=False)  # where the header is
        await settle(pilot, lambda: grid.cursor == "k0" and grid.scroll_offset.y == 0)
        assert grid.marks == {row.key for row in rows}
        await drag(pilot, grid, (5, 1))
        assert app.mouse_captured is None


async def test_a_drag_ends_when_its_row_goes_or_another_screen_comes() -> None:
    async with opened() as (app, grid, pilot):
        rows = many(20)
        grid.set_rows(rows)
        await drag(pilot, grid, (5, 3), (5, 4), release=False)
        grid.set_rows(rows[5:])
        await drag(pilot, grid, (5, 8), release=False)
        await pilot.pause()
        assert grid.marks == {"k2", "k3"}  # those that have gone stay selected
        await drag(pilot, grid, (5, 1), (5, 2), release=False)
        assert grid.app.mouse_captured is grid
        await app.push_screen(Screen())
        assert app.mouse_captured is None
        await app.pop_screen()
        await pilot.pause()
        await drag(pilot, grid, (5, 8))
        assert grid.marks == {"k2", "k3", "k5", "k6"}


async def test_the_wheel_scrolls_and_leaves_the_cursor() -> None:
    async with opened() as (_, grid, pilot):
        grid.set_rows(many(100))
        await pilot.pause()
        await pilot._post_mouse_events([events.MouseScrollDown], Grid, offset=(5, 5))
        await pilot.pause()
        assert grid.scroll_offset.y > 0
        assert grid.cursor == "k0"
        scrolled = grid.scroll_offset.y
        grid.set_rows(many(100))
        assert grid.scroll_offset.y == scrolled  # a refresh does not drag the person back


async def test_rows_that_go_take_the_scroll_position_along() -> None:
    async with opened() as (_, grid, pilot):
        grid.set_rows(many(100))
        await pilot.pause()
        grid.scroll_relative(y=90, animate=False)
        await pilot.pause()
        grid.set_rows(many(12))
        await pilot.pause()
        assert [line[1:3] for line in lines(grid)[1:]] == ["k2", "k3", "k4", "k5", "k6", "k7", "k8", "k9", "k1", "k1"]
        grid.set_rows(many(3))
        await pilot.pause()
        assert [line[1:] for line in lines(grid)[1:5]] == [f"k{n}             {n} words" for n in range(3)] + [""]


async def test_cursor_marks_and_place_on_the_screen_stay_when_rows_are_sorted() -> None:
    async with opened() as (app, grid, pilot):
        grid.set_rows(many(100))
        await pilot.pause()
        await pilot.press("down", "down", "space")
        await pilot.pause()
        assert (grid.cursor, lines(grid).index(" k3             3 words")) == ("k3", 4)
        app.messages.clear()
        grid.set_rows(list(reversed([*many(100)])))
        await pilot.pause()
        assert (grid.cursor, lines(grid).index(" k3             3 words")) == ("k3", 7)  # as far up as the rows go
        grid.set_rows([*(row for row in many(100) if row.key not in {"k0", "k1"}), *many(2)])
        await pilot.pause()
        assert grid.cursor == "k3"
        assert grid.marks == {"k2"}
        assert app.messages == []


async def test_the_first_rows_stay_visible_while_the_cursor_is_among_them() -> None:
    async with opened() as (_, grid, pilot):
        found = []
        for first in (95, 98, 94, 80):  # k99 is the fifth row, the second, the sixth, the twentieth
            grid.set_rows([*[*many(100)][first:], *many(first)])
            if first == 95:
                grid.cursor = "k99"
                grid.to_top()
            await pilot.pause()
            found.append((grid.scroll_offset.y, grid.cursor))
        assert found == [(0, "k99"), (0, "k99"), (0, "k99"), (14, "k99")]
        grid.to_top()
        await pilot.pause()
        assert (grid.scroll_offset.y, grid.cursor) == (0, "k80")


async def test_a_cursor_whose_row_vanished_waits_on_the_nearest_and_returns() -> None:
    async with opened() as (_, grid, pilot):
        grid.set_rows(rows("a", "b", "c", "d", "e"))
        grid.cursor = "c"
        found = []
        for keys in ("abe", "e", "", "abcde"):
            grid.set_rows(rows(*keys))
            found.append(grid.cursor)
        assert found == ["b", "e", None, "c"]
        grid.set_rows(rows("x", "y"))
        await pilot.press("down")
        grid.set_rows(rows("a", "c", "y"))
        assert grid.cursor == "y"  # the person has moved since


async def test_a_cursor_may_be_set_before_its_row_comes() -> None:
    async with opened() as (_, grid, _):
        grid.set_rows(rows("a", "b"))
        grid.cursor = "z"
        assert grid.cursor == "a"
        grid.set_rows(rows("a", "b", "z"))
        assert grid.cursor == "z"


async def test_hostile_text_leaves_columns_aligned() -> None:
    async with opened() as (_, grid, pilot):
        grid.set_rows([Row(str(n), (Cell(text), Cell("42"), Cell(text))) for n, text in enumerate(HOSTILE)])
        await pilot.pause()
        for y in range(1, len(HOSTILE) + 1):
            strip = grid.render_line(y)
            assert cell_len(strip.text) == strip.cell_length == 39
            before, number, _ = strip.text.partition("42")
            assert number
            assert cell_len(before) == 15
