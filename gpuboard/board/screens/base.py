"""What all screens of the board have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from rich.text import Text
from textual.screen import Screen
from textual.widgets import Static

from gpuboard.board.scene import Scene

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp


class Notice(Static):
    """What stands above everything: that it is invented, and what is wrong with the cluster as a whole."""

    DEFAULT_CSS = """
    Notice { dock: top; height: auto; padding: 0 1; display: none; }
    """


class BoardScreen(Screen[None]):
    """A full screen that shows scenes. Every binding has an id: it can be remapped, and help and palette list it."""

    TITLE_WORDS = ""  # what the help screen calls it
    NOTICE = True  # whether a Notice is to be mounted; False: the screen says the same itself
    INSTEAD_OF: ClassVar[frozenset[str]] = frozenset()  # ids of the app's actions whose keys this screen needs itself

    @property
    def board(self) -> BoardApp:
        """The app, typed."""
        return cast("BoardApp", self.app)

    def on_mount(self) -> None:
        """Make room for what stands above everything."""
        if self.NOTICE and self.is_attached:  # not where it was closed before it was drawn
            self.mount(Notice(), before=0)

    def notice(self, scene: Scene) -> None:
        """Say above everything what ``scene`` calls for. Called before each ``show``."""
        for widget in self.query(Notice):
            lines = [Text("SIMULATED", self.board.look.style("warn"))] if scene.simulated else []
            lines += [Text(words, self.board.look.style("bad")) for words in scene.banners]
            widget.display = bool(lines)
            widget.update(Text("\n").join(lines))

    def show(self, scene: Scene) -> None:
        """Draw ``scene``. Called at every new one while this screen is on top, and when it comes back."""
        raise NotImplementedError

    def on_screen_resume(self) -> None:
        """Catch up with what happened while another screen was on top."""
        if self.board.scene is not None:
            self.notice(self.board.scene)
            self.show(self.board.scene)

    def restyle(self) -> None:
        """Draw anew what was drawn with an older ``app.look``."""
        if self.board.scene is not None:
            self.notice(self.board.scene)
            self.show(self.board.scene)

    def go_to(self, key: str) -> None:
        """Put the cursor on a node (``node:NAME``) or a GPU (its UUID), on a screen that has a row for it."""
