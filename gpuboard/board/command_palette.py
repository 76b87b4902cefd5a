"""The command palette (ctrl-p): the actions of screen and app, nodes and GPUs by name, saved filters, themes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from gpuboard.board.dialogs.saved_filters import saved
from gpuboard.board.screens.base import BoardScreen, FilteredScreen
from gpuboard.board.widgets.on_board import OnBoard

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp

_JUMPS = 12  # nodes and GPUs offered, at most


class UseTheme:
    """The command that changes the theme; the app previews the theme while the command is highlighted."""

    def __init__(self, board: BoardApp, name: str) -> None:
        self.board = board
        self.name = name

    def __call__(self) -> None:
        self.board.use_theme(self.name)


class _Command(NamedTuple):
    title: str
    note: str  # its keys, or its status
    run: Callable[[], object]
    shown: bool = True  # also before anything is typed


class Themes(OnBoard, Provider):
    """Every theme, with a preview of the highlighted one; escape ends the preview."""

    def commands(self) -> Iterator[_Command]:
        used = self.board.theme_in_use
        # the one in use first: the list opens with it highlighted, so the preview changes nothing
        for name in sorted(self.board.themes, key=lambda name: (name != used, name)):
            note = "in use" if name == used else ""
            yield _Command(f"Theme: {self.board.themes[name].title}", note, UseTheme(self.board, name))

    async def discover(self) -> Hits:
        """Offer the commands that are shown before anything is typed."""
        for command in self.commands():
            if command.shown:
                yield DiscoveryHit(_prompt(Content(command.title), command.note), command.run, command.title)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in self.commands():
            if (score := matcher.match(command.title)) > 0:
                prompt = _prompt(_highlighted(command.title, query), command.note)
                yield Hit(score, prompt, command.run, command.title)


class Palette(Themes):
    """Every action of the screen below the palette, then the themes; nodes and GPUs by name."""

    def commands(self) -> Iterator[_Command]:
        """Yield an entry for every active binding; several keys of one action are one entry."""
        found: dict[str, _Command] = {}
        for active in self.screen.active_bindings.values():
            binding = active.binding
            if not binding.id or not binding.description or not active.enabled or binding.id == "app.palette":
                continue
            key = self.board.get_key_display(binding)
            if binding.id in found:
                known = found[binding.id]
                found[binding.id] = known._replace(note=f"{known.note} {key}")
                continue
            # in the namespace of the declaring node: a screen's action is not found on the app
            run = partial(self.board.run_action, binding.action, active.node)
            found[binding.id] = _Command(binding.description, key, run, binding.show or binding.id.startswith("app."))
        yield from found.values()
        screen = self.screen
        if isinstance(screen, BoardScreen):
            for key, words in screen.orders().items():
                yield _Command(f"Sort by {words}", "", partial(screen.order_by, key), False)
        if isinstance(screen, FilteredScreen):
            for one in saved(self.board, screen.FILTERED):
                yield _Command(f"Filter: {one.name}", one.text, partial(screen.use_filter, one.text))
        yield from super().commands()

    async def search(self, query: str) -> Hits:
        """Offer the commands that match, and the nodes and GPUs whose name contains the text."""
        for place in self._places(query.strip().lower()):
            yield place
        async for hit in super().search(query):
            yield hit

    def _places(self, words: str) -> Iterator[Hit]:
        """Yield nodes, and GPUs as ``gpu07:3`` or by UUID; names that begin with the text come first."""
        scene = self.board.scene
        left = _JUMPS
        for node in scene.snapshot.nodes if scene is not None else ():
            name = node.name.lower()
            if words in name:
                left -= 1
                go = partial(self.board.go_to, f"node:{node.name}")
                yield _jump(f"Go to {node.name}", words, go, name.startswith(words))
            if name == words.partition(":")[0] or words.startswith(("gpu-", "mig-")):
                for gpu in node.gpus:
                    place = f"{node.name}:{gpu.index}"
                    if place.lower().startswith(words) or gpu.uuid.lower().startswith(words):
                        left -= 1
                        go = partial(self.board.go_to, gpu.uuid)
                        yield _jump(f"Go to {place} {gpu.name}", words, go, True)
            if left <= 0:
                return


def _jump(title: str, words: str, run: Callable[[], object], begins: bool) -> Hit:
    return Hit(0.9 if begins else 0.5, _highlighted(title, words), run, title)


def _highlighted(title: str, words: str) -> Content:
    """Return ``title`` with the typed part underlined. Never markup: names come from the nodes."""
    at = title.lower().find(words.strip().lower())
    content = Content(title)
    return content if at < 0 else content.stylize("underline", at, at + len(words.strip()))


def _prompt(title: Content, note: str) -> Content:
    return title if not note else Content.assemble(title, ("  " + note, "dim not bold"))
