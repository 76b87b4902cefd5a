"""The base class of the board's screens."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, cast

from rich.text import Text
from textual.screen import Screen
from textual.widgets import Static

from gpuboard.board.scene import Scene

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp


class Notice(Static):
    """Lines at the top of a screen: the scene's label, and what is wrong with the cluster as a whole."""

    DEFAULT_CSS = """
    Notice { dock: top; height: auto; padding: 0 1; display: none; }
    """


class BoardScreen(Screen[None]):
    """A full screen that shows scenes. Every binding has an id, for remapping, help and palette."""

    TITLE_WORDS = ""  # its title in the help screen
    NOTICE = True  # whether to mount a Notice; False: the screen shows these lines itself
    INSTEAD_OF: ClassVar[frozenset[str]] = frozenset()  # ids of app actions whose keys this screen uses itself

    @property
    def board(self) -> BoardApp:
        """The app, typed."""
        return cast("BoardApp", self.app)

    def on_mount(self) -> None:
        if self.NOTICE and self.is_attached:  # false where it was closed before it was drawn
            self.mount(Notice(), before=0)

    def notice(self, scene: Scene) -> None:
        """Update the notice for ``scene``. Called before each ``show``."""
        for widget in self.query(Notice):
            lines = [Text(scene.label, self.board.look.style("warn"))] if scene.label else []
            lines += [Text(words, self.board.look.style("bad")) for words in scene.banners]
            widget.display = bool(lines)
            widget.update(Text("\n").join(lines))

    @abstractmethod
    def show(self, scene: Scene) -> None:
        """Draw ``scene``. Called for every new scene while this screen is on top, and when it returns there."""

    def on_screen_resume(self) -> None:
        """Show the newest scene after another screen was on top."""
        if self.board.scene is not None:
            self.notice(self.board.scene)
            self.show(self.board.scene)

    def restyle(self) -> None:
        """Redraw everything with the new ``app.look``."""
        self.on_screen_resume()

    def go_to(self, key: str) -> None:
        """Put the cursor on a node (``node:NAME``) or a GPU (its UUID), if this screen has a row for it."""
