"""The first start on a machine without GPUs: try a simulated cluster, name the nodes, or see why there are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import Button, Static

from gpuboard.board.dialogs.base import YES, Box, Choose, Dialog, Field, button
from gpuboard.cluster.inventory.first_run import EXAMPLE, bare_machine, config_of, keep_nodes, why_bare
from gpuboard.cluster.inventory.nodes import inventory
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp
    from gpuboard.board.scene import Scene
    from gpuboard.model.snapshot import NodeView

_CHECKS = (
    ("Is there an NVIDIA GPU?", "lspci -d 10de:   (AMD and Intel GPUs are not supported)"),
    ("Is the driver installed?", "then nvidia-smi lists the GPUs; CUDA does not include the driver"),
    ("In a container?", "docker run --gpus all …, apptainer exec --nv …"),
    ("In WSL?", "install the driver in Windows; its library is in /usr/lib/wsl/lib"),
    ("After an update?", "a driver updated on a running system needs a reboot"),
)


def welcome(board: BoardApp, scene: Scene) -> bool:
    """Offer choices where there is no GPU; return whether a node has been read or the offer made."""
    core = board.core
    node = bare_machine(core.nodes.values(), core.settings, scene.snapshot)
    if node is not None:
        _offer(board, node)
    return node is not None or any(one.age_s is not None for one in scene.snapshot.nodes)


def _offer(board: BoardApp, node: NodeView) -> None:
    options = [
        ("demo", _option("Try a simulated cluster", "gpuboard demo --board; it changes nothing on this machine")),
        ("nodes", _option("Name the nodes that have GPUs", "hosts that you reach with ssh: gpu01 or gpu[01-04]")),
        ("here", _option("Why are there no GPUs on this machine?", f"{clean(node.name, 40)}: {clean(why_bare(node))}")),
    ]

    def chosen(key: str | None) -> None:
        if key == "demo":
            board.restart("demo", "--board")
        elif key == "nodes":
            board.push_screen(NameNodes(), lambda done: None if done else _offer(board, node))
        elif key == "here":
            board.push_screen(WhyNone(node), lambda _: _offer(board, node))

    board.push_screen(Choose("No GPU here and no nodes configured. What next?", options), chosen)


def _option(title: str, words: str) -> Text:
    return Text.assemble((title, "bold"), f"\n  {words}")


class NameNodes(Dialog[bool]):
    """Asks for the nodes and starts the board again with them."""

    def __init__(self) -> None:
        fields = [
            Field("nodes", "Nodes", "", "or ssh_config:gpu*", "gpu[01-04]", _some),
            Field("keep", "Save", YES, "", toggle=True),
        ]
        super().__init__("Nodes with GPUs, by their ssh host names", fields, verb="Show them")

    def changed(self) -> None:
        self.show_message(
            f"saved in {config_of(self.board.core.env)}" if self.values["keep"] else "for this start only", "dim"
        )

    def commit(self, values: dict[str, str]) -> None:
        """Check the names, save them, and restart."""
        board, text, keep = self.board, values["nodes"], values["keep"]

        def work() -> None:
            inventory(msgspec.structs.replace(board.core.settings, nodes=[]), [text])
            if keep:
                keep_nodes(board.core.env, text)

        def done(_: None) -> None:
            if self.is_open:
                self.dismiss(True)
                board.restart("board", *(() if keep else ("--nodes", text)))

        self.work(work, done)


def _some(text: str) -> str:
    return "" if text else f"such as {EXAMPLE}"


class WhyNone(Box[None]):
    """Why this machine shows no GPU, and what to check."""

    DEFAULT_CSS = """
    WhyNone #words { height: auto; }
    """

    def __init__(self, node: NodeView) -> None:
        super().__init__(f"Why {clean(node.name, 40)} has no GPUs")
        self._node = node

    def inside(self) -> ComposeResult:
        dim = self.board.look.style("dim")
        text = Text(f"{clean(why_bare(self._node))}\n")
        for question, words in _CHECKS:
            text.append(f"\n{question}\n")
            text.append(f"  {words}\n", dim)
        text.append("\nThe board shows the GPUs as soon as the driver finds them.")
        yield Static(text, id="words", markup=False)

    def buttons(self) -> Iterator[Button]:
        yield button("Back", "cancel")

    def on_mount(self) -> None:
        """Enter goes back."""
        self.query_one("#cancel").focus()
