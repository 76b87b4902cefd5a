"""The board's app: core, newest scene, screens, themes and keys, and work in background threads."""

from __future__ import annotations

import asyncio
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.command import CommandPalette, SearchIcon
from textual.driver import Driver
from textual.events import Event, Key, Resize
from textual.filter import ANSIToTruecolor, LineFilter
from textual.keys import KEY_DISPLAY_ALIASES
from textual.message import Message

from gpuboard.board import keys, preferences
from gpuboard.board.command_palette import Palette, Themes, UseTheme
from gpuboard.board.core import Core
from gpuboard.board.dialogs.base import Box
from gpuboard.board.following import Follower
from gpuboard.board.scene import Scene
from gpuboard.board.screens.base import BoardScreen
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.gpu import GpuScreen
from gpuboard.board.screens.leases import LeasesScreen
from gpuboard.board.screens.node import NodeScreen
from gpuboard.board.screens.watches import Watches, WatchesScreen, open_watch
from gpuboard.board.screens.welcome import welcome
from gpuboard.board.terminal import screenshot
from gpuboard.board.terminal.crash import report as crash_report
from gpuboard.board.terminal.gc import Passes
from gpuboard.board.terminal.guard import Guard, is_utf8
from gpuboard.board.terminal.key_queue import InOrder
from gpuboard.board.terminal.line_filters import AsciiFilter, ColorlessFilter
from gpuboard.board.terminal.textual_compat import CrashHookApp, SafePalette, one_frame, screen_text
from gpuboard.board.theme import themes
from gpuboard.board.theme.styles import ASCII, UNICODE, Look
from gpuboard.errors import GpuboardError
from gpuboard.keeper import client as keeper

if TYPE_CHECKING:
    from rich.terminal_theme import TerminalTheme

    from gpuboard.board.theme.themes import BoardTheme

T = TypeVar("T")
KEY_FIRST_S = 0.05  # a scene that comes sooner after a key waits this long: the key's effect is drawn first
_SAVE_S = 0.5  # debounce: preferences are written this long after the last change
_LAST_SAVE_S = 0.2  # limit for the write at exit: the home may be on a file system that hangs


class SceneChanged(Message):
    """A new scene; it replaces older ones that still wait."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene = scene

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, SceneChanged)


class WorkDone(Message):
    """Background work has ended; ``then`` is called in the UI's thread."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then


class BoardApp(CrashHookApp):
    """The board. ``guard``: of its terminal, if it has one; ends the process in time."""

    TITLE = "gpuboard"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS = {Palette}  # noqa: RUF012  # textual's own type
    REFUSED: ClassVar[frozenset[str]] = frozenset()  # actions that this board cannot do, and does not offer
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "leases", "Leases", id="app.leases"),
        Binding("u", "runs", "Runs", id="app.runs"),
        Binding("P", "processes", "Processes", id="app.processes"),
        Binding("v", "overview", "Overview", id="app.overview"),
        Binding("w", "watches", "Watches", id="app.watches"),
        Binding("q", "quit", "Quit", id="app.quit"),
        Binding("ctrl+c", "quit", "Quit", id="app.interrupt", show=False),
        Binding("ctrl+p", "command_palette", "Palette", id="app.palette", priority=True),
        Binding("question_mark,f1", "help", "Help", id="app.help", show=False),  # the footer shows it at its right
        Binding("ctrl+t", "theme", "Theme", id="app.theme", show=False),
        # priority: in dialogs, too
        Binding("ctrl+l", "redraw", "Redraw", id="app.redraw", show=False, priority=True),
        Binding("ctrl+s", "save('svg')", "Save screen as SVG", id="app.save-svg", show=False, priority=True),
        Binding("alt+s", "save('txt')", "Save screen as text", id="app.save-text", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", id="app.suspend", show=False, priority=True),
    ]
    CSS = """
    ToastRack { margin-bottom: 2; }
    Toast { max-width: 100%; padding: 0 1; }
    """
    DEFAULT_CSS = """
    App.-ascii { Toast { border-left: ascii $primary; } Input { border: none; } Button { border: none; } }
    CommandPalette > Vertical { margin-top: 1; }
    CommandPalette SearchIcon { color: $foreground; }
    """

    def __init__(self, core: Core, guard: Guard | None = None) -> None:
        super().__init__()
        self.core = core
        self.guard = guard
        self.scene: Scene | None = None
        self.watches = Watches(self)
        self.follower = Follower(self)
        self._keys = InOrder(self)
        self._passes = Passes(lambda: core.key_first.quiet_s)
        self.keymap: dict[str, str] = {}
        settings, env = core.settings, core.env
        self.preferences, wrong = preferences.load(env)
        self._saved = self.preferences
        self._problems = [wrong] if wrong else []
        utf8 = is_utf8(env) if settings.glyphs == "auto" else settings.glyphs == "unicode"
        self._glyphs = UNICODE if utf8 else ASCII
        self.themes, bad = themes.load_all(env)
        self._problems += [*bad, *themes.unknown(settings.theme, self.themes)]
        self.theme_in_use = themes.choose(env, settings.theme, self.preferences.theme, self.themes)
        self._colorless = bool(env.get("NO_COLOR"))
        self._save_timer: threading.Timer | None = None
        self._welcomed = False  # whether a node has been read, or the welcome has been shown
        self.may_restart = False  # whether the caller starts gpuboard with ``next`` after this app
        self.next: list[str] | None = None  # the command and arguments to continue with
        self._crashed = False
        self._ansi: tuple[str, TerminalTheme] | None = None  # theme, its numbered colours
        self._theme = self.themes[self.theme_in_use]  # the one on show: textual's own attribute is slow to read
        self.look: Look = self._theme.look(self._glyphs)
        for name, theme in self.themes.items():
            theme.textual.name = name
            self.register_theme(theme.textual)
        self.theme = self.theme_in_use
        self.set_class(not utf8, "-ascii")

    def on_mount(self) -> None:
        """Open the cluster view and connect to the nodes."""
        self.keymap, clashes = keys.remap(self.core.settings.keys)
        self.set_keymap(self.keymap)
        self.push_screen(ClusterScreen())
        self.core.start(lambda scene: self.post_message(SceneChanged(scene)))
        self.core.record(lambda words: self.post_message(WorkDone(lambda: self._warn_each([words]))))
        self.ask(lambda: keeper.recover(self.core.env), self._warn_each)
        if self.guard is not None:
            loop = asyncio.get_running_loop()
            self.guard.watch(lambda code: loop.call_soon_threadsafe(self.leave, code))
        if problems := [*self._problems, *clashes]:
            more = f"\nand {len(problems) - 4} more" if len(problems) > 4 else ""
            self.notify("\n".join(problems[:4]) + more, severity="warning", timeout=12, markup=False)

    async def on_event(self, event: Event) -> None:
        """Handle an event; keys and pastes one after the other."""
        if isinstance(event, Key):
            self.core.key_first.key()
        await self._keys.pass_on(event, super().on_event)

    def on_resize(self, event: Resize) -> None:
        """Pass a new size on to the screens below the top one, too; textual lays them out without the event."""
        for screen in self.screen_stack[:-1]:
            if isinstance(screen, BoardScreen) and screen.is_mounted:
                screen.post_message(Resize(event.size, event.virtual_size, event.container_size))

    def on_scene_changed(self, message: SceneChanged) -> None:
        """Take the newest scene and show it, or, where a key has just been pressed, once that has been drawn."""
        self.scene = message.scene
        self.watches.look(message.scene)
        if not self._welcomed:
            self._welcomed = welcome(self, message.scene)
        if self.core.key_first.quiet_s < KEY_FIRST_S:
            # By a message: a timer's callback would also run while the app takes its screens apart.
            self.set_timer(KEY_FIRST_S, lambda: self.post_message(WorkDone(self._show_scene)))
        else:
            self._show_scene()

    def _show_scene(self) -> None:
        """Show the newest scene on the visible screens: the top one, or a dialog and the screen below it."""
        if self.scene is None or not self.is_running:  # a screen that is being taken apart has lost its widgets
            return
        # a key that has just been pressed is drawn between the parts of a scene
        with nullcontext() if self.core.key_first.pressed else one_frame(self.screen):
            self._show_on_screens(self.scene)
        if self._passes.is_due:
            self.call_after_refresh(self._passes.make)

    def _show_on_screens(self, scene: Scene) -> None:
        for screen in reversed(self.screen_stack):
            if isinstance(screen, BoardScreen) and screen.is_mounted:
                screen.notice(scene)
            if isinstance(screen, (BoardScreen, Box)) and screen.is_mounted:
                screen.show(scene)
            if isinstance(screen, BoardScreen):
                break

    def on_work_done(self, message: WorkDone) -> None:
        message.then()

    def ask(
        self, work: Callable[[], T], then: Callable[[T], None], failed: Callable[[GpuboardError], None] | None = None
    ) -> None:
        """Run ``work`` in a thread, then call ``then`` with its value in the UI's thread; errors go to ``failed``.

        Without ``failed`` they become a toast. The thread is a daemon: quitting never waits for work that hangs.
        """
        report_error = failed or self.show_error

        def run() -> None:
            try:
                value = work()
            except GpuboardError as error:
                self.post_message(WorkDone(lambda error=error: report_error(error)))  # type: ignore[misc]
            except Exception as error:  # a bug: reported like any error, so that the caller does not wait forever
                bug = GpuboardError(crash_report(error, self.core.env))
                self.post_message(WorkDone(lambda: report_error(bug)))
            else:
                self.post_message(WorkDone(lambda: then(value)))

        threading.Thread(target=run, name="ask", daemon=True).start()

    def show_error(self, error: GpuboardError) -> None:
        self.notify(str(error), severity="error", timeout=12, markup=False)

    def show_error_once(self, error: GpuboardError) -> None:
        """Show an error of repeated work, the first time it occurs."""
        if str(error) not in self._problems:
            self._problems.append(str(error))
            self.show_error(error)

    def _warn_each(self, warnings: list[str]) -> None:
        for warning in warnings:
            self.notify(warning, severity="warning", timeout=12, markup=False)

    # Themes and preferences

    @property
    def ansi_theme(self) -> TerminalTheme:
        """The terminal's numbered colours, looked up once a theme: textual wants them for every line that it draws."""
        if self._ansi is None or self._ansi[0] != self.theme:
            self._ansi = self.theme, super().ansi_theme
        return self._ansi[1]

    def use_theme(self, name: str) -> None:
        self.theme_in_use = name
        self.theme = name
        self.remember(theme=name)

    def watch_theme(self, name: str) -> None:
        """Redraw everything; also while themes are previewed in the palette."""
        theme: BoardTheme | None = self.themes.get(name)
        if theme is None:
            return
        self._theme = theme
        self.look = theme.look(self._glyphs)
        for screen in self.screen_stack if self.is_running else ():
            if isinstance(screen, BoardScreen) and screen.is_mounted:
                screen.restyle()
            for widget in screen.walk_children():
                widget.refresh()

    def on_command_palette_opened(self) -> None:
        """Show a prompt of ASCII instead of an emoji of two cells."""
        for icon in self.screen.query(SearchIcon):
            icon.icon = ">"

    def on_command_palette_option_highlighted(self, message: CommandPalette.OptionHighlighted) -> None:
        """Preview the highlighted theme."""
        command = getattr(getattr(message.highlighted_event.option, "hit", None), "command", None)
        self.theme = command.name if isinstance(command, UseTheme) else self.theme_in_use

    def on_command_palette_closed(self, message: CommandPalette.Closed) -> None:
        if not message.option_selected:
            self.theme = self.theme_in_use

    def remember(self, **changes: Any) -> None:
        """Change fields of the preferences, also for the next start; saved after a debounce, in the background."""
        old, new = self.preferences, msgspec.structs.replace(self.preferences, **changes)
        if new == old:
            return
        self.preferences = new
        if self._save_timer is not None:
            self._save_timer.cancel()
        self._save_timer = threading.Timer(_SAVE_S, self._save)
        self._save_timer.daemon = True
        self._save_timer.start()

    def _save(self) -> None:
        kept = self.preferences
        wrong = preferences.save(self.core.env, kept, self._saved)
        self._saved = self._saved if wrong else kept
        if wrong:
            self.post_message(WorkDone(lambda: self.show_error_once(GpuboardError(wrong))))

    # Drawing

    def get_driver_class(self) -> type[Driver]:
        """Return textual's choice of driver, with our own in place of the one for a plain terminal."""
        from textual.drivers.linux_driver import LinuxDriver

        from gpuboard.board.terminal.driver import TerminalDriver

        default = super().get_driver_class()
        return TerminalDriver if default is LinuxDriver else default

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return the filters for drawn lines: textual's, or no colour; and ASCII where the terminal needs it."""
        if self._colorless or self._theme.textual.name == "plain":
            found: list[LineFilter] = [ColorlessFilter()]
        else:
            found = [*super().get_line_filters()]
        return [*found, AsciiFilter()] if self._glyphs is ASCII else found

    def own_line_filters(self) -> Sequence[LineFilter]:
        """Return the filters for lines of which the theme gives all styles: an exact one needs no translation."""
        found = self.get_line_filters()
        if not self._theme.exact:
            return found
        return [one for one in found if not isinstance(one, ANSIToTruecolor)]

    def get_key_display(self, binding: Binding) -> str:
        """Return how a key is shown: by name on ASCII terminals where its sign is not ASCII."""
        shown = super().get_key_display(binding)
        if self._glyphs is ASCII and not shown.isascii():
            names = {sign: name for name, sign in KEY_DISPLAY_ALIASES.items()}
            return "".join(names.get(character, character) for character in shown)
        return shown

    # Actions

    def action_help(self) -> None:
        from gpuboard.board.screens.help import HelpScreen  # late: it loads the other screens

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(getattr(self.screen, "TITLE_WORDS", "")))

    def action_leases(self) -> None:
        self._toggle(LeasesScreen)

    def action_overview(self) -> None:
        from gpuboard.board.screens.overview import OverviewScreen  # late: it is not shown at the start

        self._toggle(OverviewScreen)

    def action_processes(self) -> None:
        from gpuboard.board.screens.processes import ProcessesScreen  # late: not shown at the start

        self._toggle(ProcessesScreen)

    def action_watches(self) -> None:
        """Open the watches, or close them; without any, ask for the first."""
        self._toggle(WatchesScreen)
        if isinstance(self.screen, WatchesScreen) and not self.watches.all:
            open_watch(self)

    def _toggle(self, kind: type[BoardScreen]) -> None:
        """Close a screen of this kind if it is on top, return to it if it is open below, else open one."""
        if isinstance(self.screen, kind):
            self.pop_screen()
        elif not self._return_to(kind):
            self.push_screen(kind())

    def _return_to(self, kind: type[BoardScreen]) -> bool:
        """Close the screens above one of this kind; return whether there is one."""
        is_open = any(isinstance(screen, kind) for screen in self.screen_stack)
        while is_open and not isinstance(self.screen, kind):
            self.pop_screen()
        return is_open

    def pop_screen(self) -> AwaitComplete:
        """Close the top screen, but never the cluster view: a footer can be clicked twice before it is redrawn."""
        return AwaitComplete() if isinstance(self.screen, ClusterScreen) else super().pop_screen()

    def action_runs(self) -> None:
        self.open_runs()

    def open_runs(self, run: str | None = None) -> None:
        """Show the runs, with the cursor on ``run``; return to the screen if it is open below."""
        from gpuboard.board.screens.runs import RunsScreen  # late: runs and logs are not shown at the start

        if not self._return_to(RunsScreen):
            self.push_screen(RunsScreen(run))
        elif run is not None and isinstance(self.screen, RunsScreen):
            self.screen.jump(run)

    def open_dialog(self, box: Box[T], then: Callable[[T], object] = lambda _: None) -> None:
        """Open a dialog, which no older message covers; ``then`` gets its result unless it is cancelled or no."""

        def closed(result: T | None) -> None:
            if result:
                then(result)

        self.clear_notifications()
        self.push_screen(box, closed)

    def open_gpu(self, uuid: str) -> None:
        self.push_screen(GpuScreen(uuid))

    def open_node(self, name: str) -> None:
        self.push_screen(NodeScreen(name))

    def action_theme(self) -> None:
        self.push_screen(SafePalette(providers=[Themes], placeholder="Theme…"))

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(SafePalette())

    def action_save(self, kind: str) -> None:
        """Save the screen, without the messages over it, in a file of the current folder, as ``svg`` or ``txt``."""
        self.clear_notifications()
        self.call_after_refresh(self._save_screen, kind)

    def _save_screen(self, kind: str) -> None:
        title = getattr(self.screen, "TITLE_WORDS", "") or "dialog"
        picture = screenshot.plain(self.export_screenshot(title="gpuboard")) if kind == "svg" else screen_text(self)
        self.ask(
            lambda: screenshot.save(picture, title, kind, self.core.env, time.time()),
            lambda path: self.notify(str(path), title="Saved", timeout=12, markup=False),
        )

    def action_redraw(self) -> None:
        """Redraw the whole screen: another program may have written on it."""
        self.refresh(layout=True)

    def go_to(self, key: str) -> None:
        """Show a node (``node:NAME``) or a GPU (its UUID) in the cluster view; cancel open dialogs."""
        while len(self.screen_stack) > 2 and not isinstance(self.screen, ClusterScreen):
            if isinstance(self.screen, Box):
                self.screen.action_cancel()
            else:
                self.pop_screen()
        if isinstance(self.screen, BoardScreen):
            self.screen.go_to(key)

    async def action_quit(self) -> None:
        """End the board at once; work that hangs is abandoned."""
        self.leave(0)

    def leave(self, code: int) -> None:
        if self.guard is not None:
            self.guard.leave(code)
        self._save_rest()
        self.core.close()
        self.exit(code, return_code=code)

    def restart(self, *words: str) -> None:
        """End the board and continue with another gpuboard command."""
        if not self.may_restart:
            self.notify(f"in a terminal: gpuboard {shlex.join(words)}", timeout=12, markup=False)
            return
        self.next = list(words)
        self._save_rest()
        self.exit(0)

    def _save_rest(self) -> None:
        """Save preferences that were changed just now."""
        if self._save_timer is not None and self._save_timer.is_alive():
            self._save_timer.cancel()
            last = threading.Thread(
                target=preferences.save, args=(self.core.env, self.preferences, self._saved), daemon=True
            )
            last.start()
            last.join(_LAST_SAVE_S)

    def on_crash(self, error: Exception) -> None:
        """End with one line that asks to report the bug."""
        if not self._crashed:
            from rich.text import Text

            self._crashed = True  # what follows is a consequence of the first exception
            self.panic(Text(f"gpuboard: {crash_report(error, self.core.env)}"))
