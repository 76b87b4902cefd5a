"""The command palette (ctrl-p): every action of the screen and the app, the themes, and every node and GPU by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from rich.text import Text
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.markup import escape

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp

_JUMPS = 12  # at most so many nodes and GPUs are offered


class UseTheme:
    """The command that changes the theme; while it is highlighted in the palette, the theme is shown."""

    def __init__(self, board: BoardApp, name: str) -> None:
        self.board = board
        self.name = name

    def __call__(self) -> None:
        """Use the theme from now on."""
        self.board.use_theme(self.name)


class _Command(NamedTuple):
    title: str
    run: Callable[[], object]
    help: str
    shown: bool  # also before anything was typed


class _Commands(Provider):
    """What both providers of commands share: list and search are the same for them."""

    @property
    def board(self) -> BoardApp:
        """The app, typed."""
        return cast("BoardApp", self.app)

    def commands(self) -> Iterator[_Command]:
        """Yield what is offered."""
        raise NotImplementedError

    async def discover(self) -> Hits:
        """Offer the commands that are shown before anything was typed."""
        for command in self.commands():
            if command.shown:
                yield DiscoveryHit(Text(command.title), command.run, command.title, escape(command.help))

    async def search(self, query: str) -> Hits:
        """Offer the commands that match."""
        matcher = self.matcher(query)
        for command in self.commands():
            if (score := matcher.match(command.title)) > 0:
                yield Hit(
                    score, matcher.highlight(escape(command.title)), command.run, command.title, escape(command.help)
                )


class Actions(_Commands):
    """Everything that has a key on the screen below the palette, by its description."""

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
                found[binding.id] = known._replace(help=f"{known.help}, {key}")
                continue
            # by the node that declared it: a screen's action is looked for there, not in the app
            run = partial(self.board.run_action, binding.action, active.node)
            everywhere = binding.id.startswith("app.")
            found[binding.id] = _Command(binding.description, run, f"key: {key}", binding.show or everywhere)
        yield from found.values()


class Themes(_Commands):
    """Every theme; the highlighted one is shown at once, escape brings the old one back."""

    def commands(self) -> Iterator[_Command]:
        """Yield an entry for each theme."""
        for name, theme in self.board.themes.items():
            now = " (in use)" if name == self.board.theme_in_use else ""
            yield _Command(f"Theme: {theme.title}{now}", UseTheme(self.board, name), name, True)


class Places(Provider):
    """Nodes by name, GPUs as ``gpu07:3`` or by UUID."""

    async def search(self, query: str) -> Hits:
        """Offer the nodes and GPUs whose name holds what was typed; names that begin with it come first."""
        board = cast("BoardApp", self.app)
        words = query.strip().lower()
        scene = board.scene
        if scene is None or not words:
            return
        left = _JUMPS
        for node in scene.snapshot.nodes:
            name = node.name.lower()
            if words in name:
                left -= 1
                yield self._hit(f"Go to {node.name}", partial(board.go_to_node, node.name), name.startswith(words))
            elif name.startswith(words.partition(":")[0]) or words.startswith(("gpu-", "mig-")):
                for gpu in node.gpus:
                    place = f"{node.name}:{gpu.index}"
                    if place.lower().startswith(words) or gpu.uuid.lower().startswith(words):
                        left -= 1
                        title = f"Go to {place} {gpu.name}"
                        yield self._hit(title, partial(board.go_to_gpu, gpu.uuid), True)
            if left <= 0:
                return

    def _hit(self, title: str, run: Callable[[], object], begins: bool) -> Hit:
        return Hit(0.9 if begins else 0.5, Text(title), run, title)
