"""The board's app: its core, the newest scene, and how work that may take long is done beside the UI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar, TypeVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.message import Message

from gpuboard.board.cluster import ClusterScreen
from gpuboard.board.core import Core
from gpuboard.board.dialogs import Box
from gpuboard.board.look import DARK, Look
from gpuboard.board.scene import Scene
from gpuboard.board.screen import BoardScreen
from gpuboard.errors import GpuboardError

T = TypeVar("T")


class SceneChanged(Message):
    """A new scene; older ones that were not handled yet are dropped."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene = scene

    def can_replace(self, message: Message) -> bool:
        """Only the newest one counts."""
        return isinstance(message, SceneChanged)


class Done(Message):
    """Something that was done beside the UI has ended; ``then`` is called in the UI's thread."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then


class BoardApp(App[int]):
    """The board."""

    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit", id="app.quit"),
        Binding("question_mark", "help", "Help", id="app.help"),
    ]

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core
        self.scene: Scene | None = None
        self.look: Look = DARK

    def on_mount(self) -> None:
        """Open the cluster view and start to watch."""
        self.push_screen(ClusterScreen())
        self.core.start(lambda scene: self.post_message(SceneChanged(scene)))

    def on_scene_changed(self, message: SceneChanged) -> None:
        """Hand the newest scene to what is seen: the screen on top, or a dialog and the screen below it."""
        self.scene = message.scene
        for screen in reversed(self.screen_stack):
            if isinstance(screen, (BoardScreen, Box)):
                screen.show(message.scene)
            if isinstance(screen, BoardScreen):
                break

    def on_done(self, message: Done) -> None:
        """Go on in the UI's thread with what was done beside it."""
        message.then()

    def ask(
        self,
        work: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[GpuboardError], None] | None = None,
    ) -> None:
        """Do ``work`` in a thread and then call ``then`` with its value in the UI's; errors of ours go to ``failed``.

        Without ``failed`` they become a toast. A thread of our own, daemonic: leaving never waits for what hangs.
        """

        def run() -> None:
            try:
                value = work()
            except GpuboardError as error:
                told = failed or self.tell
                self.post_message(Done(lambda error=error: told(error)))  # type: ignore[misc]
            except Exception as error:  # a bug: shown, the board lives on
                bug = GpuboardError(f"this is a bug: {type(error).__name__}: {error}")
                self.post_message(Done(lambda: self.tell(bug)))
            else:
                self.post_message(Done(lambda: then(value)))

        threading.Thread(target=run, name="ask", daemon=True).start()

    def tell(self, error: GpuboardError) -> None:
        """Show an error as a toast."""
        self.notify(str(error), severity="error", timeout=12, markup=False)

    async def action_quit(self) -> None:
        """Leave at once; whatever hangs is left behind."""
        self.core.close()
        self.exit(0)
