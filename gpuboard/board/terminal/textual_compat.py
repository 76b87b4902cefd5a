"""Every use of textual's private attributes, each with its test in tests/board/test_textual_compat.py.

Checked with textual 8.2; a new release can rename them without notice, so look here first when an upgrade fails.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import StringIO
from typing import Any, cast
from weakref import WeakSet

from rich.console import Console
from textual import message_pump
from textual import screen as screen_module
from textual import widget as widget_module
from textual._compositor import Compositor
from textual._styles_cache import StylesCache
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.app import App
from textual.command import CommandList, CommandPalette
from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key
from textual.filter import LineFilter
from textual.geometry import Region
from textual.keys import Keys
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget
from textual.worker import Worker

_FEW_LINES = 4  # more are made as textual does
_collecting: WeakSet[Screen[Any]] = WeakSet()  # within ``one_frame``
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - set(map(ord, "\t\n\r")))


def app_of(driver: Driver) -> App[Any]:
    """Return the app that a driver serves."""
    return driver._app


def write_to_terminal(app: App[Any], sequence: str) -> None:
    """Write a control sequence to the terminal of ``app`` (tests have none), as textual's bell and clipboard do."""
    if app._driver is not None:
        app._driver.write(sequence)


def screen_text(app: App[Any]) -> str:
    """Return what is on the screen as text, a line a row; textual's own screenshots are SVG only."""
    console = Console(file=StringIO(), width=app.size.width, height=app.size.height, force_terminal=True, record=True)
    console.print(app.screen._compositor.render_update(full=True, screen_stack=app._background_screens))
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines())


def is_closing(pump: MessagePump) -> bool:
    """Return whether a widget, screen or app handles no further messages. ``is_running`` is false before it starts."""
    return pump._closing


def is_open(node: DOMNode) -> bool:
    """Return whether a screen or widget is shown, or hidden by another screen; for the app, whether it runs.

    textual removes the widgets of a screen before the screen, whose ``is_attached`` stays true until then.
    """
    if isinstance(node, App):
        return node.is_running
    return node.is_attached and not cast("Widget", node)._pruning and node.screen in node.app.screen_stack


def lay_out(widget: Widget) -> None:
    """Lay out a widget whose own height has changed; without this, textual keeps a height from a moment ago.

    It numbers the layouts of a widget to keep its heights, but not a second request while the first is not handled.
    """
    widget._layout_updates += 1
    widget.refresh(layout=True)


def draw_lines(widget: Widget, lines: Iterable[int]) -> None:
    """Draw whole lines of a widget with the next frame, where its size and its styles stay as they are.

    textual's ``refresh`` wakes the widget, which sends the screen a message, and has sizes and styles found again: a
    twentieth of the CPU time of a small board.
    """
    width = widget.size.width
    regions = [Region(0, y, width, 1) for y in lines]
    if not widget.is_attached or not widget._is_mounted:
        widget.refresh(*regions)
        return
    widget._set_dirty(*regions)
    screen = widget.screen
    if widget.display and screen in screen._compositor:
        screen._dirty_widgets.add(widget)
        if screen not in _collecting:
            screen.check_idle()


def draw_now(widget: Widget) -> None:
    """Draw what has changed of a widget at once: the effect of a key. textual waits for the next of 60 times a second.

    Not after scrolling, for which textual lays out the screen, nor while it waits for another layout.
    """
    if widget.is_attached:
        widget.screen._dirty_widgets.add(widget)
        _draw_frame(widget.screen)


@contextmanager
def one_frame(screen: Screen[Any]) -> Iterator[None]:
    """Draw what changes on a screen meanwhile in one go, at the end."""
    _collecting.add(screen)
    try:
        yield
    finally:
        _collecting.discard(screen)
    _draw_frame(screen)


def _draw_frame(screen: Screen[Any]) -> None:
    if not screen._layout_required:
        screen._on_timer_update()


class SureTimer(Timer):
    """A timer whose only time comes, however late.

    textual's passes over a time that is past when its task looks at the clock, also over the only one. On a busy
    machine an app could wait forever for the timer, of 8 ms, that passes a new size on to its screens.
    """

    def __init__(self, *args: Any, repeat: int | None = None, skip: bool = True, **options: Any) -> None:
        super().__init__(*args, repeat=repeat, skip=skip and repeat != 0, **options)


setattr(message_pump, "Timer", SureTimer)  # noqa: B010  # widgets and screens make theirs there


class LineCache(StylesCache):
    """Returns the lines of a widget at once where nothing of it has changed, and makes only those that have.

    For every frame textual wants all lines of all widgets, and goes through styles and lines also of those that have
    not changed: a tenth of the board's time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: tuple[Region, list[LineFilter], list[Strip]] | None = None
        self._how: tuple[tuple[Any, ...], dict[str, Any]] = (), {}  # the arguments of the last ``render``

    def render_widget(self, widget: Widget, crop: Region) -> list[Strip]:
        filters = [*widget.get_line_filters()]
        kept, changed = self._kept, self._dirty_lines
        if kept is None or not self._cache or kept[:2] != (crop, filters):
            strips = super().render_widget(widget, crop)
        elif not changed:
            return kept[2]
        elif len(changed) <= _FEW_LINES and not widget.hover_style._link_id:  # textual styles a link in a further pass
            strips = [*kept[2]]
            arguments, options = self._how
            for y in changed.intersection(crop.line_range):
                [strips[y - crop.y]] = self.render(*arguments, **{**options, "crop": Region(crop.x, y, crop.width, 1)})
        else:
            strips = super().render_widget(widget, crop)
        self._kept = crop, filters, strips
        return strips

    def render(self, *arguments: Any, **options: Any) -> list[Strip]:
        self._how = arguments, options
        return super().render(*arguments, **options)


setattr(widget_module, "StylesCache", LineCache)  # noqa: B010  # every widget makes its own


class LineCompositor(Compositor):
    """Asks for the lines of a frame only the widgets that are seen there.

    textual asks every widget between the first and the last of them, also containers that their contents cover.
    """

    def _render_chops(self, crop: Region, is_rendered_line: Callable[[int], bool]) -> Sequence[Mapping[int, Strip]]:
        cuts = self.cuts
        lines = {y: dict[int, Strip | None].fromkeys(cuts[y][:-1]) for y in crop.line_range if is_rendered_line(y)}
        empty = {y: len(line) for y, line in lines.items()}  # how many parts of it no widget has filled yet
        for widget, (region, clip) in self.visible_widgets.items():  # from the front to the back
            shown = region.intersection(clip)
            wanted = [y for y in empty if shown.y <= y < shown.bottom]
            if not wanted or not shown.width:
                continue
            strips = widget.render_lines(shown.translate(-region.offset))
            left, right = shown.column_span
            for y in wanted:
                places = [cut for cut in cuts[y] if left <= cut <= right]
                parts = strips[y - shown.y].divide([cut - left for cut in places[1:]])
                for place, part in zip(places, parts, strict=False):  # a line may be shorter than its widget
                    if lines[y][place] is None:
                        lines[y][place] = part
                        empty[y] -= 1
                if not empty[y]:
                    del empty[y]
            if not empty:
                break
        return cast("Sequence[Mapping[int, Strip]]", [lines.get(y, {}) for y in range(len(cuts))])


setattr(screen_module, "Compositor", LineCompositor)  # noqa: B010  # every screen makes its own


class CrashHookApp(App[int]):
    """An app that handles its own unhandled exceptions: textual prints a page with the values of local variables."""

    @abstractmethod
    def on_crash(self, error: Exception) -> None:
        """Hook: end the app. Called at every unhandled exception, always with the first one."""

    def _fatal_error(self) -> None:
        if self._exception is not None:
            self.on_crash(self._exception)


class SafePalette(CommandPalette):
    """A palette that ignores keys for its list while the list has no size; textual's fails at a page key then.

    It may be closed before its search for commands has begun, or ended; textual's ends the app then.
    """

    def _action_command_list(self, action: str) -> None:
        if self.query_one(CommandList).scrollable_content_region:
            super()._action_command_list(action)

    def run_worker(self, work: Any, *args: Any, **options: Any) -> Worker[Any]:
        """Start the search; its end without a list is no error."""

        async def search() -> None:
            try:
                await work()
            except NoMatches:
                if self.query(CommandList):
                    raise

        return super().run_worker(search, *args, **options)


class PasteParser(XTermParser):
    """A parser of the terminal's input that removes control characters from pasted text.

    textual's takes an ESC in a paste for the start of a sequence, and what follows for keys: ``q`` ends the board.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._is_paste = False
        self._part = ""  # the beginning of a marker at the end of the input so far; in a paste it is held back

    @property
    def is_undecided(self) -> bool:
        """Whether ``tick`` must be called again soon: an ESC is a key unless the rest of a sequence follows."""
        return self._timeout_time is not None

    def feed(self, data: str) -> Iterable[Message]:
        """Return the messages for ``data``; an empty one is the end of the input."""
        if not data:
            return super().feed(data)
        kept = self._without_controls(data)
        return super().feed(kept) if kept else ()

    def _without_controls(self, data: str) -> str:
        kept = ""
        while data:
            marker = BRACKETED_PASTE_END if self._is_paste else BRACKETED_PASTE_START
            before = self._part
            text, found, data = (before + data).partition(marker)
            sizes = range(0 if found else len(marker) - 1, 0, -1)
            self._part = next((marker[:size] for size in sizes if text.endswith(marker[:size])), "")
            if self._is_paste:
                kept += text.removesuffix(self._part).translate(_CONTROLS) + found
            else:
                kept += (text + found)[len(before) :]
            self._is_paste ^= bool(found)
        return kept

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[Key]:
        """Return the keys of a sequence; a key with an impossible number is ignored.

        textual's raises an error, which ends the thread that reads keys.
        """
        try:
            return [*super()._sequence_to_key_events(sequence, alt)]
        except (ValueError, OverflowError):
            return [Key(Keys.Ignore, sequence)]


class ContinueHookDriver(LinuxDriver):
    """A driver with a hook for a SIGCONT after a SIGSTOP; textual takes each SIGCONT for the end of its own suspend."""

    @property
    def reads_keys(self) -> bool:
        """Whether the thread that reads keys runs; it has ended once the app leaves the terminal."""
        return self._key_thread is not None and self._key_thread.is_alive()

    @abstractmethod
    def on_continue(self) -> None:
        """Hook: called in the event loop when the process goes on and textual had not suspended it."""

    def _sigcont_application(self, *arguments: object) -> None:
        if self._must_signal_resume:
            super()._sigcont_application(*arguments)
        else:
            with suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self.on_continue)
