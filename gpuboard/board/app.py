"""The board's app: its core, the newest scene, themes and keys, and how what may take long is done beside the UI."""

from __future__ import annotations

import asyncio
import shlex
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.command import CommandPalette, SearchIcon
from textual.driver import Driver
from textual.events import Event
from textual.filter import LineFilter
from textual.keys import KEY_DISPLAY_ALIASES
from textual.message import Message

from gpuboard.board import keys, preferences
from gpuboard.board.arrange import ViewState
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
from gpuboard.board.terminal.crash import report
from gpuboard.board.terminal.guard import Guard, is_utf8
from gpuboard.board.terminal.key_queue import InOrder
from gpuboard.board.terminal.line_filters import AsciiFilter, ColorlessFilter
from gpuboard.board.terminal.textual_compat import CrashHookApp, SafePalette
from gpuboard.board.theme import themes
from gpuboard.board.theme.styles import ASCII, UNICODE, Look
from gpuboard.errors import GpuboardError
from gpuboard.keeper import client as keeper

if TYPE_CHECKING:
    from gpuboard.board.theme.themes import BoardTheme

T = TypeVar("T")
_KEEP_S = 0.5  # preferences are written this long after the last of several changes
_LAST_S = 0.2  # a home that hangs may hold up the end by this much


class SceneChanged(Message):
    """A new scene; older ones that were not handled yet are dropped."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene = scene

    def can_replace(self, message: Message) -> bool:
        """Only the newest one counts."""
        return isinstance(message, SceneChanged)


class WorkDone(Message):
    """Something that was done beside the UI has ended; ``then`` is called in the UI's thread."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then


class BoardApp(CrashHookApp):
    """The board. ``guard``: of the terminal it is drawn on, if any; it sees to it that leaving takes no time."""

    TITLE = "gpuboard"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS = {Palette}  # noqa: RUF012  # textual's own type
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "leases", "Leases", id="app.leases"),
        Binding("u", "runs", "Runs", id="app.runs"),
        Binding("w", "watches", "Tell me when", id="app.watches"),
        Binding("q", "quit", "Quit", id="app.quit"),
        Binding("ctrl+c", "quit", "Quit", id="app.interrupt", show=False),
        Binding("ctrl+p", "command_palette", "Palette", id="app.palette", priority=True),
        Binding("question_mark,f1", "help", "Help", id="app.help", show=False),  # at the footer's right
        Binding("ctrl+t", "theme", "Theme", id="app.theme", show=False),
        # in dialogs, too
        Binding("ctrl+l", "redraw", "Draw again", id="app.redraw", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", id="app.suspend", show=False, priority=True),
    ]
    CSS = """
    ToastRack { margin-bottom: 2; }
    Toast { max-width: 100%; padding: 0 1; }
    """
    DEFAULT_CSS = """
    App.-ascii { Toast { border-left: ascii $primary; } Input { border: none; } Button { border: none; } }
    CommandPalette > Vertical { margin-top: 1; }
    """

    def __init__(self, core: Core, guard: Guard | None = None) -> None:
        super().__init__()
        self.core = core
        self.guard = guard
        self.scene: Scene | None = None
        self.watches = Watches(self)
        self.follower = Follower(self)
        self._typed = InOrder(self)
        self.keymap: dict[str, str] = {}
        settings, env = core.settings, core.env
        self.preferences, wrong = preferences.load(env)
        self._problems = [wrong] if wrong else []
        utf8 = is_utf8(env) if settings.glyphs == "auto" else settings.glyphs == "unicode"
        self._glyphs = UNICODE if utf8 else ASCII
        self.themes, bad = themes.load_all(env)
        self._problems += [*bad, *themes.unknown(settings.theme, self.themes)]
        self.theme_in_use = themes.choose(env, settings.theme, self.preferences.theme, self.themes)
        self._colorless = bool(env.get("NO_COLOR"))
        self._keeping: threading.Timer | None = None
        self._began = False  # whether it is known that there is something to see, or was said that there is not
        self.may_restart = False  # whether who runs this app starts gpuboard with ``next`` when it has ended
        self.next: list[str] | None = None  # the command and arguments to go on with
        self._crashed = False
        self.look: Look = self.themes[self.theme_in_use].look(self._glyphs)
        for name, theme in self.themes.items():
            theme.textual.name = name
            self.register_theme(theme.textual)
        self.theme = self.theme_in_use
        self.set_class(not utf8, "-ascii")

    def on_mount(self) -> None:
        """Open the cluster view and start to watch."""
        self.keymap, clashes = keys.remap(self.core.settings.keys)
        self.set_keymap(self.keymap)
        self.push_screen(ClusterScreen())
        self.core.start(lambda scene: self.post_message(SceneChanged(scene)))
        self.ask(lambda: keeper.recover(self.core.env), self._warn_each)
        if self.guard is not None:
            loop = asyncio.get_running_loop()
            self.guard.watch(lambda code: loop.call_soon_threadsafe(self.leave, code))
        if problems := [*self._problems, *clashes]:
            more = f"\nand {len(problems) - 4} more" if len(problems) > 4 else ""
            self.notify("\n".join(problems[:4]) + more, severity="warning", timeout=12, markup=False)

    async def on_event(self, event: Event) -> None:
        """Handle an event; what was typed in the order in which it was typed."""
        await self._typed.pass_on(event, super().on_event)

    def on_scene_changed(self, message: SceneChanged) -> None:
        """Hand the newest scene to what is seen: the screen on top, or a dialog and the screen below it."""
        self.scene = message.scene
        self.watches.look(message.scene)
        if not self._began:
            self._began = welcome(self, message.scene)
        for screen in reversed(self.screen_stack):
            if isinstance(screen, BoardScreen) and screen.is_mounted:
                screen.notice(message.scene)
            if isinstance(screen, (BoardScreen, Box)) and screen.is_mounted:
                screen.show(message.scene)
            if isinstance(screen, BoardScreen):
                break

    def on_work_done(self, message: WorkDone) -> None:
        """Go on in the UI's thread with what was done beside it."""
        message.then()

    def ask(
        self,
        work: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[GpuboardError], None] | None = None,
    ) -> None:
        """Do ``work`` in a thread and then call ``then`` with its value in the UI's; errors go to ``failed``.

        Without ``failed`` they become a toast. A thread of our own, daemonic: leaving never waits for what hangs.
        """
        told = failed or self.tell

        def run() -> None:
            try:
                value = work()
            except GpuboardError as error:
                self.post_message(WorkDone(lambda error=error: told(error)))  # type: ignore[misc]
            except Exception as error:  # a bug: said like any other error, so that nobody waits for an answer for ever
                bug = GpuboardError(report(error, self.core.env))
                self.post_message(WorkDone(lambda: told(bug)))
            else:
                self.post_message(WorkDone(lambda: then(value)))

        threading.Thread(target=run, name="ask", daemon=True).start()

    def tell(self, error: GpuboardError) -> None:
        """Show an error as a toast."""
        self.notify(str(error), severity="error", timeout=12, markup=False)

    def tell_once(self, error: GpuboardError) -> None:
        """Show an error of what is done again and again, the first time that it comes."""
        if str(error) not in self._problems:
            self._problems.append(str(error))
            self.tell(error)

    def _warn_each(self, lost: list[str]) -> None:
        for words in lost:
            self.notify(words, severity="warning", timeout=12, markup=False)

    # Themes and what is kept of them

    def use_theme(self, name: str) -> None:
        """Draw with a theme from now on, also after the next start."""
        self.theme_in_use = name
        self.theme = name
        self.remember(theme=name)

    def watch_theme(self, name: str) -> None:
        """Draw everything anew; also while themes are only looked at in the palette."""
        theme: BoardTheme | None = self.themes.get(name)
        if theme is None:
            return
        self.look = theme.look(self._glyphs)
        for screen in self.screen_stack if self.is_running else ():
            if isinstance(screen, BoardScreen) and screen.is_mounted:
                screen.restyle()
            for widget in screen.walk_children():
                widget.refresh()

    def on_command_palette_opened(self) -> None:
        """Show a prompt that every terminal has, instead of a picture of two cells."""
        for icon in self.screen.query(SearchIcon):
            icon.icon = ">"

    def on_command_palette_option_highlighted(self, message: CommandPalette.OptionHighlighted) -> None:
        """Show a theme while it is highlighted."""
        command = getattr(getattr(message.highlighted_event.option, "hit", None), "command", None)
        self.theme = command.name if isinstance(command, UseTheme) else self.theme_in_use

    def on_command_palette_closed(self, message: CommandPalette.Closed) -> None:
        """Go back to the theme in use, unless another was chosen."""
        if not message.option_selected:
            self.theme = self.theme_in_use

    def remember(self, *, theme: str | None = None, view: ViewState | None = None) -> None:
        """Keep a choice for the next start; written a moment later, beside the UI."""
        kept = self.preferences
        new = preferences.Preferences(theme=theme or kept.theme, view=view or kept.view)
        if new == kept:
            return
        self.preferences = new
        if self._keeping is not None:
            self._keeping.cancel()
        self._keeping = threading.Timer(_KEEP_S, self._keep)
        self._keeping.daemon = True
        self._keeping.start()

    def _keep(self) -> None:
        wrong = preferences.save(self.core.env, self.preferences)
        if wrong:
            self.post_message(WorkDone(lambda: self.tell_once(GpuboardError(wrong))))

    # How it is drawn

    def get_driver_class(self) -> type[Driver]:
        """Return what draws on the terminal: textual's choice, made sturdier where that is a plain terminal."""
        from textual.drivers.linux_driver import LinuxDriver

        from gpuboard.board.terminal.driver import TerminalDriver

        usual = super().get_driver_class()
        return TerminalDriver if usual is LinuxDriver else usual

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return what lines pass: textual's own, and ours where there is to be no colour or ASCII alone."""
        if self._colorless or self.theme == "plain":
            found: list[LineFilter] = [ColorlessFilter()]
        else:
            found = [*super().get_line_filters()]
        return [*found, AsciiFilter()] if self._glyphs is ASCII else found

    def get_key_display(self, binding: Binding) -> str:
        """Return how a key is shown: by name where its sign is not ASCII and the terminal's characters are."""
        shown = super().get_key_display(binding)
        if self._glyphs is ASCII and not shown.isascii():
            names = {sign: name for name, sign in KEY_DISPLAY_ALIASES.items()}
            return "".join(names.get(character, character) for character in shown)
        return shown

    # Actions

    def action_help(self) -> None:
        """Open the help screen."""
        from gpuboard.board.screens.help import HelpScreen  # late: it loads the other screens

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(getattr(self.screen, "TITLE_WORDS", "")))

    def action_leases(self) -> None:
        """Open the leases, or go back from them."""
        self._toggle(LeasesScreen)

    def action_watches(self) -> None:
        """Open what is watched, or go back from it; where nothing is, ask what to watch for."""
        self._toggle(WatchesScreen)
        if isinstance(self.screen, WatchesScreen) and not self.watches.all:
            open_watch(self)

    def _toggle(self, kind: type[BoardScreen]) -> None:
        """Go back from a screen of this kind, or to the one that is open below, or open one."""
        if isinstance(self.screen, kind):
            self.pop_screen()
        elif any(isinstance(screen, kind) for screen in self.screen_stack):
            while not isinstance(self.screen, kind):
                self.pop_screen()
        else:
            self.push_screen(kind())

    def pop_screen(self) -> AwaitComplete:
        """Go back by a screen, from the cluster view to nowhere: a footer can be clicked twice before it has gone."""
        return AwaitComplete() if isinstance(self.screen, ClusterScreen) else super().pop_screen()

    def action_runs(self) -> None:
        """Show the runs."""
        self.open_runs()

    def open_runs(self, run: str | None = None) -> None:
        """Show the runs, with the cursor on ``run``; where they are open already, go back to them."""
        from gpuboard.board.screens.runs import RunsScreen  # late: runs and logs are not shown at the start

        if not any(isinstance(screen, RunsScreen) for screen in self.screen_stack):
            self.push_screen(RunsScreen(run))
            return
        while not isinstance(self.screen, RunsScreen):
            self.pop_screen()
        if run is not None:
            self.screen.jump(run)

    def open_gpu(self, uuid: str) -> None:
        """Show one GPU."""
        self.push_screen(GpuScreen(uuid))

    def open_node(self, name: str) -> None:
        """Show one node."""
        self.push_screen(NodeScreen(name))

    def action_theme(self) -> None:
        """Choose a theme; the highlighted one is shown."""
        self.push_screen(SafePalette(providers=[Themes], placeholder="Theme…"))

    def action_command_palette(self) -> None:
        """Open the palette."""
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(SafePalette())

    def action_redraw(self) -> None:
        """Draw the whole screen again, where something else has written on it."""
        self.refresh(layout=True)

    def go_to_node(self, name: str) -> None:
        """Show a node in the cluster view."""
        self._go_to(f"node:{name}")

    def go_to_gpu(self, uuid: str) -> None:
        """Show a GPU in the cluster view."""
        self._go_to(uuid)

    def _go_to(self, key: str) -> None:
        while len(self.screen_stack) > 2 and not isinstance(self.screen, ClusterScreen):
            self.pop_screen()
        if isinstance(self.screen, BoardScreen):
            self.screen.go_to(key)

    async def action_quit(self) -> None:
        """Leave at once; whatever hangs is left behind."""
        self.leave(0)

    def leave(self, code: int) -> None:
        """End the board with an exit code."""
        if self.guard is not None:
            self.guard.leave(code)
        if self._keeping is not None and self._keeping.is_alive():
            self._keeping.cancel()
            last = threading.Thread(target=preferences.save, args=(self.core.env, self.preferences), daemon=True)
            last.start()
            last.join(_LAST_S)
        self.core.close()
        self.exit(code, return_code=code)

    def restart(self, *words: str) -> None:
        """End the board and go on with another command of gpuboard in its place."""
        if not self.may_restart:
            self.notify(f"in a terminal: gpuboard {shlex.join(words)}", timeout=12, markup=False)
            return
        self.next = list(words)
        self.exit(0)

    def on_crash(self, error: Exception) -> None:
        """End with one line that asks to report the bug."""
        if not self._crashed:
            from rich.text import Text

            self._crashed = True  # what follows is a consequence of the first exception
            self.panic(Text(f"gpuboard: {report(error, self.core.env)}"))
