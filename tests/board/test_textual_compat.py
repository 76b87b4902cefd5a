"""textual's private attributes that the board uses do what it relies on, in this release of textual."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from rich.segment import Segment
from rich.style import Style
from textual import _time, timer
from textual._compositor import Compositor
from textual.app import App, ComposeResult
from textual.command import CommandList
from textual.containers import Container, VerticalScroll
from textual.drivers import web_driver
from textual.drivers.headless_driver import HeadlessDriver
from textual.events import Key, Paste
from textual.filter import LineFilter, Monochrome
from textual.geometry import Region, Size
from textual.screen import ModalScreen, Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Label
from textual.worker import WorkerState

import gpuboard.board
import gpuboard.board.web.driver
from gpuboard.board.terminal import textual_compat as compat
from tests.board.pty_lab import Terminal
from tests.waiting import until


async def test_the_driver_s_app() -> None:
    app: App[int] = App()
    assert compat.app_of(HeadlessDriver(app)) is app


SMALL = """
from textual.app import App
from gpuboard.board.terminal.textual_compat import ContinueHookDriver, write_to_terminal

class Driver(ContinueHookDriver):
    def on_continue(self):
        pass

class Small(App):
    def on_ready(self):
        write_to_terminal(self, f"\\x1b]9;{getattr(self._driver, 'reads_keys', 'headless')}\\x07")
        self.exit(self._driver)

write_to_terminal(Small(), "\\x1b]9;does not run\\x07")
Small().run(headless=True)
print(f"\\x1b]9;{Small(Driver).run().reads_keys}\\x07")
"""


def test_an_app_writes_sequences_and_reads_keys_while_it_has_a_terminal() -> None:
    with contextlib.closing(Terminal([sys.executable, "-c", SMALL], os.environ)) as terminal:
        terminal.ends(60)
        assert re.findall(rb"\x1b]9;(.+?)\x07", terminal.written) == [b"True", b"False"], terminal.text


async def test_the_text_of_a_screen_with_what_is_below_a_dialog() -> None:
    app: App[int] = App()
    async with app.run_test(size=(20, 3)) as pilot:
        await app.screen.mount(Label("hidden\nbelow"))
        dialog: ModalScreen[None] = ModalScreen()
        await app.push_screen(dialog)
        await dialog.mount(Label("above [x]", markup=False))
        await pilot.pause()
        assert compat.screen_text(app) == "above [x]\nbelow\n\n"


async def test_a_change_is_drawn_at_once() -> None:
    drawn: list[str] = []

    class Changed(Widget):
        text = "before"

        def render(self) -> str:
            drawn.append(self.text)
            return self.text

    app: App[int] = App()
    async with app.run_test() as pilot:
        await app.screen.mount(changed := Changed())
        await pilot.pause()
        changed.text = "after"
        changed.refresh()
        assert drawn[-1] == "before"
        compat.draw_now(changed)
        assert drawn[-1] == "after"


class Letters(Widget):
    """Lines of one letter each, of which it notes those that are drawn."""

    DEFAULT_CSS = "Letters { padding: 1 2; height: 8; background: red; }"

    def __init__(self) -> None:
        super().__init__()
        self.letters = "abcdef"
        self.drawn: list[int] = []

    def render_line(self, y: int) -> Strip:
        self.drawn.append(y)
        return Strip([Segment(self.letters[y], self.visual_style.rich_style)])


async def test_only_the_given_lines_are_drawn_with_the_next_frame() -> None:
    app: App[int] = App()
    async with app.run_test() as pilot:
        letters = Letters()
        compat.draw_lines(letters, [0])  # nobody shows it yet
        await app.screen.mount(letters)
        await pilot.pause()
        assert letters.drawn == [*range(6)]
        for text, lines in (("Abcdef", [0]), ("ABCDEF", [*range(1, 6)])):  # few lines, and many
            letters.letters = text
            letters.drawn.clear()
            compat.draw_lines(letters, lines)
            await pilot.pause()
            assert letters.drawn == lines
            kept = letters.render_lines(Region(0, 0, *letters.size))
            letters.refresh()
            assert letters.render_lines(Region(0, 0, *letters.size)) == kept  # as if all had been drawn
            await pilot.pause()
        letters.display = False
        await pilot.pause()
        letters.letters = "aBCDEF"
        compat.draw_lines(letters, [0])
        await pilot.pause()
        letters.display = True
        await pilot.pause()
        assert compat.screen_text(app).split()[0] == "a"


async def test_the_changes_of_a_frame_are_drawn_in_one_go() -> None:
    app: App[int] = App()
    async with app.run_test() as pilot:
        letters, others = Letters(), Letters()
        await app.screen.mount(letters, others)
        await pilot.pause()
        for one in (letters, others):
            one.drawn.clear()
        with compat.one_frame(app.screen):
            compat.draw_lines(letters, [1])
            compat.draw_lines(others, [2])
            assert letters.drawn == others.drawn == []
        assert (letters.drawn, others.drawn) == ([1], [2])  # at once
        assert app.screen.message_queue_size == 0  # nothing wakes it
        with pytest.raises(ZeroDivisionError), compat.one_frame(app.screen):
            raise ZeroDivisionError
        compat.draw_lines(letters, [3])
        assert app.screen.message_queue_size == 1
        await pilot.pause()
        assert letters.drawn == [1, 3]


async def test_the_lines_of_a_widget_that_has_not_changed_are_kept() -> None:
    class Counted(Widget):
        text, filters = "one", 0

        def render_line(self, y: int) -> Strip:
            return Strip([Segment(self.text, Style())])

        def get_line_filters(self) -> list[LineFilter]:
            return [Monochrome()] * self.filters

    app: App[int] = App()
    async with app.run_test() as pilot:
        await app.screen.mount(counted := Counted())
        await pilot.pause()

        def lines(height: int = 2) -> list[Strip]:
            return counted.render_lines(Region(0, 0, counted.size.width, height))

        def text(drawn: list[Strip]) -> str:
            return drawn[0].text.rstrip()

        first = lines()
        assert lines() is first
        assert len(lines(3)) == 3  # another part of it
        counted.text = "two"
        counted.refresh(Region(0, 0, 3, 1))
        assert text(lines()) == "two"
        counted.text = "three"
        counted.refresh()
        assert text(lines()) == "three"
        before = lines()
        counted.filters = 1
        assert lines() is not before
        counted.text = "four"
        counted.styles.width = 9
        await pilot.pause()
        assert (text(lines()), lines()[0].cell_length) == ("four", 9)


async def test_a_frame_asks_only_what_is_seen_on_its_lines() -> None:
    asked: list[Widget] = []

    class Asked(Container):
        def render_lines(self, crop: Region) -> list[Strip]:
            asked.append(self)
            return super().render_lines(crop)

    class Short(Letters):
        def render_lines(self, crop: Region) -> list[Strip]:
            return [line.crop(0, 9) for line in super().render_lines(crop)]

    class Layers(Screen[None]):
        CSS = """
        Layers { layers: low high; }
        #covered { height: 4; }
        #seen { height: 8; padding: 1 4; layout: horizontal; }
        #seen Letters { width: 1fr; }
        #scrolled { height: 5; overflow-y: scroll; }
        #scrolled Letters { height: 9; }
        #above { layer: high; offset: 10 3; width: 7; height: 4; }
        """

        def compose(self) -> ComposeResult:
            yield Asked(Letters(), id="covered")
            yield Asked(Letters(), Short(), id="seen")
            yield VerticalScroll(Letters(), id="scrolled")
            yield Container(id="above")

    app: App[int] = App()
    async with app.run_test(size=(40, 24)) as pilot:
        screen = Layers()
        await app.push_screen(screen)
        screen.query_one("#scrolled").scroll_to(y=2, animate=False)
        await pilot.pause()
        compositor, whole = screen._compositor, app.size.region
        assert isinstance(compositor, compat.LineCompositor)
        drawn = Compositor._render_chops(compositor, whole, lambda y: True)
        assert compositor._render_chops(whole, lambda y: True) == drawn
        for lines in itertools.combinations(range(24), 2):
            crop = Region(0, lines[0], 40, lines[1] - lines[0] + 1)
            found = compositor._render_chops(crop, lines.__contains__)
            assert [found[y] for y in lines] == [drawn[y] for y in lines]
        seen = screen.query_one("#seen")  # its padding is
        for lines, widgets in (((0, 3), []), ((0, 5), [seen]), ((4, 11), [seen]), ((12, 14), [])):
            asked.clear()
            compositor._render_chops(whole, lines.__contains__)
            assert asked == widgets


async def test_a_timer_comes_also_where_the_clock_has_passed_its_time_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    app: App[int] = App()
    come: list[type[timer.Timer]] = []
    async with app.run_test():
        assert type(app.set_timer(60)) is compat.SureTimer
        for kind in (timer.Timer, compat.SureTimer):
            one = kind(app, 0.01, callback=partial(come.append, kind), repeat=0)
            looks, now = itertools.count(), _time.get_time
            with monkeypatch.context() as late:
                late.setattr(_time, "get_time", lambda: now() + (1.0 if next(looks) else 0.0))  # noqa: B023
                await one._run()
    assert come == [compat.SureTimer]  # textual's own does not: else SureTimer is not needed


async def test_a_widget_s_own_height_is_right_after_two_changes_with_a_layout_between_them() -> None:
    class Grown(Widget):
        DEFAULT_CSS = "Grown { height: auto; }"
        lines = 1

        def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
            return self.lines

    app: App[int] = App()
    async with app.run_test() as pilot:
        grown = Grown()
        await app.screen.mount(grown)
        for grown.lines in (2, 3):
            compat.lay_out(grown)
            app.screen._refresh_layout()
        await pilot.pause()
        assert grown.size.height == 3


async def test_a_screen_closes_but_is_not_closing_before_it_runs() -> None:
    app: App[int] = App()
    async with app.run_test():
        screen: Screen[None] = Screen()
        assert not compat.is_closing(screen)
        await app.push_screen(screen)
        assert not compat.is_closing(screen)
        await app.pop_screen()
        assert compat.is_closing(screen)


class Leaving(Screen[None]):
    """Looks, while it is removed, at what it still has."""

    def __init__(self, seen: list[tuple[bool, bool, bool]]) -> None:
        super().__init__()
        self.seen = seen

    def compose(self) -> ComposeResult:
        yield Label()

    def look(self) -> None:
        self.seen.append((self.is_attached, bool(self.query(Label)), compat.is_open(self)))

    def on_unmount(self) -> None:
        self.look()


async def test_a_screen_is_open_until_its_widgets_are_removed() -> None:
    seen: list[tuple[bool, bool, bool]] = []
    app: App[int] = App()
    async with app.run_test() as pilot:
        below, above = Leaving(seen), Leaving(seen)
        assert not compat.is_open(below)
        await app.push_screen(below)
        await app.push_screen(above)
        below.look()
        above.look()
        done = app.pop_screen()
        above.look()  # closed, and not removed yet
        await done
        above.look()
        assert (compat.is_open(app), compat.is_open(below)) == (True, True)
        await pilot.pause()
    below.look()
    assert not compat.is_open(app)
    whole, closed, apart, gone = (True, True, True), (True, True, False), (True, False, False), (False, False, False)
    assert seen == [whole, whole, closed, apart, gone, apart, gone]


def test_the_first_unhandled_exception_goes_to_the_hook() -> None:
    class Crashing(compat.CrashHookApp):
        crashes: list[Exception] = []  # noqa: RUF012

        def on_mount(self) -> None:
            raise KeyError("first")

        def on_crash(self, error: Exception) -> None:
            self.crashes.append(error)
            self.exit(1)

    async def story() -> None:
        async with Crashing().run_test():
            pass

    with pytest.raises(KeyError, match="first"):  # run_test raises it, too
        asyncio.run(story())
    assert [str(error) for error in Crashing.crashes[:1]] == ["'first'"]


async def test_a_page_key_before_the_palette_has_a_size_does_nothing() -> None:
    app: App[int] = App()
    async with app.run_test() as pilot:
        app.push_screen(compat.SafePalette())
        for key in ("pagedown", "pageup"):
            app.post_message(Key(key, None))
        await pilot.pause()
        await pilot.press("down", "pagedown")
        assert isinstance(app.screen, compat.SafePalette)


async def test_a_palette_closed_before_its_search_begins_ends_nothing() -> None:
    app: App[int] = App()
    async with app.run_test() as pilot:
        palette = compat.SafePalette()
        await app.push_screen(palette)
        await pilot.pause()
        await palette.query_one(CommandList).remove()
        search = palette._gather_commands("quit")
        await search.wait()
        assert search.state is WorkerState.SUCCESS
        assert app.is_running


COLOURED = "\x1b[200~\x1b[31mquit\x1b[0m: Kill\x7f\x9b?\tyes\r\nno\x1b\x1b[201~x\x1b[A\x1b[200~y\x1b[201~"
PASTED = ["[31mquit[0m: Kill?\tyes\r\nno", "x", "up", "y"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, len(COLOURED)])  # characters that one read returns
def test_escapes_in_a_paste_are_no_keys(size: int) -> None:
    parser = compat.PasteParser()
    read = [COLOURED[start : start + size] for start in range(0, len(COLOURED), size)]
    found = [event for data in read for event in parser.feed(data)]
    assert [event.text if isinstance(event, Paste) else cast("Key", event).key for event in found] == PASTED


@pytest.mark.parametrize(
    "sequence", ["\x1b[1114112u", "\x1b[99999999999999999999u", "\x1b[97::;;u", "\x1b[27;5;1114112~"]
)
def test_a_key_with_an_impossible_number_is_passed_over(sequence: str) -> None:
    parser = compat.PasteParser()
    assert [cast("Key", event).key for event in parser.feed(f"a{sequence}b")] == ["a", "b"]


def test_the_driver_of_a_browser_uses_that_parser() -> None:
    assert vars(web_driver)["XTermParser"] is compat.PasteParser
    assert "= XTermParser(" in inspect.getsource(web_driver)


def test_an_escape_is_undecided_until_its_time_has_passed() -> None:
    parser = compat.PasteParser()
    undecided = [parser.is_undecided]
    assert not [*parser.feed("\x1b")]
    undecided.append(parser.is_undecided)
    assert [cast("Key", event).key for event in until(lambda: [*parser.tick()])] == ["escape"]
    assert [*undecided, parser.is_undecided] == [False, True, False]


def test_no_other_module_uses_private_attributes_of_textual() -> None:
    drivers, widgets = "_driver|_app|_key_thread|_loop|_must_signal_resume", "_compositor|_bindings|_layout_updates"
    private = re.compile(rf"\.(_exception|_closing|_pruning|{drivers}|{widgets})\b")
    files = [*Path(gpuboard.board.__file__).parent.rglob("*.py")]
    found = {file.name for file in files if private.search(file.read_text())}
    assert found == {"textual_compat.py"}
    attached = {file.name for file in files if ".is_attached" in file.read_text()}
    assert attached == {"textual_compat.py"}  # the others ask ``is_open``
