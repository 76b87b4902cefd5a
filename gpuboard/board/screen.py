"""What all screens of the board have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual.screen import Screen

from gpuboard.board.scene import Scene

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp


class BoardScreen(Screen[None]):
    """A full screen that shows scenes. Every binding has an id: it can be remapped, and help and palette list it."""

    TITLE_WORDS = ""  # what the help screen calls it
    INSTEAD_OF: ClassVar[frozenset[str]] = frozenset()  # ids of the app's actions whose keys this screen needs itself

    @property
    def board(self) -> BoardApp:
        """The app, typed."""
        return cast("BoardApp", self.app)

    def show(self, scene: Scene) -> None:
        """Draw ``scene``. Called at every new one while this screen is on top, and when it comes back."""
        raise NotImplementedError

    def on_screen_resume(self) -> None:
        """Catch up with what happened while another screen was on top."""
        if self.board.scene is not None:
            self.show(self.board.scene)

    def restyle(self) -> None:
        """Draw anew what was drawn with an older ``app.look``."""
        if self.board.scene is not None:
            self.show(self.board.scene)

    def go_to(self, key: str) -> None:
        """Put the cursor on a node (``node:NAME``) or a GPU (its UUID), on a screen that has a row for it."""
