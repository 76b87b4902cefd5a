"""Texts to copy: UUIDs, lines for a shell, ssh commands. Quoted: names come from nodes and config files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpuboard.board.dialogs.base import Choose
from gpuboard.board.dialogs.request_form import picks_of, places_words
from gpuboard.board.dialogs.reserve import lines
from gpuboard.board.scene import Place, Scene
from gpuboard.errors import GpuboardError
from gpuboard.model.lease import Lease

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp
    from gpuboard.cluster.inventory.nodes import Node

_SHOWN = 300  # characters of the copied text in the toast
_NODES = 5  # nodes whose ssh commands are offered
_Text = tuple[str, str, Callable[[], str]]  # a text to copy: key, title, and what returns it


def uuids_line(scene: Scene, uuids: Sequence[str]) -> str:
    """Return the UUIDs of these GPUs, by node and index, with commas between them."""
    return ",".join(uuid for uuid, _ in _places(scene, uuids))


def export_line(scene: Scene, uuids: Sequence[str], *, by_uuid: bool) -> str:
    """Return the line that makes these GPUs visible to CUDA, on their node. Raises GpuboardError."""
    places = _places(scene, uuids)
    nodes = list(dict.fromkeys(place.node.name for _, place in places))
    if len(nodes) > 1:
        raise GpuboardError(f"CUDA_VISIBLE_DEVICES is for one node; these GPUs are on {len(nodes)}: {', '.join(nodes)}")
    mig = [(uuid == place.gpu.uuid, place.gpu.index) for uuid, place in places if "mig" in place.gpu.flags]
    if any(parent for parent, _ in mig) or (mig and not by_uuid):
        raise GpuboardError(f"{nodes[0]}:{mig[0][1]} is in MIG mode; CUDA takes the UUID of one of its devices")
    simulated = places[0][1].node.source == "simulated"  # its indexes mean nothing on a real machine
    label = "  # SIMULATED" if simulated else ""
    if by_uuid:
        return f"export CUDA_VISIBLE_DEVICES={shlex.quote(uuids_line(scene, uuids))}{label}"
    indexes = ",".join(str(place.gpu.index) for _, place in places)
    # CUDA's default order is fastest first; with PCI_BUS_ID indexes are NVML's.
    return f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={indexes}{label}"


def ssh_line(node: Node) -> str:
    """Return the ssh command for a node. Raises GpuboardError for this machine."""
    if node.host is None:
        raise GpuboardError(f"{node.name} is this machine; no ssh is needed")
    return f"ssh {shlex.quote(node.host)}"


def copy(board: BoardApp, text: str) -> None:
    """Copy text to the terminal's clipboard (OSC 52) and show it."""
    board.copy_to_clipboard(text)
    shown = text if len(text) <= _SHOWN else text[:_SHOWN] + board.look.glyphs.ellipsis
    board.notify(shown, title="Copied", timeout=8, markup=False)


def open_copy(board: BoardApp, uuids: Sequence[str]) -> None:
    """Offer texts about these GPUs to copy."""
    scene = board.scene
    if scene is None or not any(uuid in scene.devices for uuid in uuids):
        board.notify("no GPU selected", markup=False)
        return
    places = _places(scene, uuids)
    options: list[_Text] = [
        ("uuids", "UUIDs", partial(uuids_line, scene, uuids)),
        ("export", "export CUDA_VISIBLE_DEVICES=… by index", partial(export_line, scene, uuids, by_uuid=False)),
        ("export-uuid", "export CUDA_VISIBLE_DEVICES=… by UUID", partial(export_line, scene, uuids, by_uuid=True)),
    ]
    names = [name for name in dict.fromkeys(place.node.name for _, place in places) if name in board.core.nodes]
    options += [(f"ssh {n}", f"ssh command for {n}", partial(ssh_line, board.core.nodes[n])) for n in names[:_NODES]]
    held = {lease.id: lease for uuid, _ in places for lease in scene.leases_on(uuid) if lease.mine}
    options += [line for lease in held.values() for line in _shell_lines(lease)]
    title = f"Copy for {picks_of(uuids, scene)[0]}"
    _offer(board, title if len(title) < 70 else f"Copy for {len(places)} GPUs", options)


def copy_lease(board: BoardApp, lease: Lease) -> None:
    """Offer texts about a lease to copy."""
    gpus = places_words(lease.gpus)
    options = _shell_lines(lease) if lease.mine else []
    options += [
        ("id", f"its id: {lease.id}", lambda: lease.id),
        ("gpus", f"its GPUs: {gpus}", lambda: gpus),
        ("uuids", "UUIDs", lambda: ",".join(gpu.uuid for gpu in lease.gpus)),
    ]
    _offer(board, f"Copy for lease {lease.id}", options)


def _shell_lines(lease: Lease) -> list[_Text]:
    """Return the lines that set a lease's variables in a shell, one per node."""
    return [(line, line, partial(str, line)) for line in lines(lease.id, [gpu.node for gpu in lease.gpus])]


def _offer(board: BoardApp, title: str, options: Sequence[_Text]) -> None:
    makers = {key: make for key, _, make in options}

    def chosen(key: str) -> None:
        try:
            copy(board, makers[key]())
        except GpuboardError as error:
            board.notify(str(error), severity="warning", markup=False)

    board.open_dialog(Choose(title, [(key, words) for key, words, _ in options]), chosen)


def _places(scene: Scene, uuids: Sequence[str]) -> list[tuple[str, Place]]:
    found = [(uuid, scene.devices[uuid]) for uuid in uuids if uuid in scene.devices]
    return sorted(found, key=lambda item: (item[1].node.name, item[1].gpu.index, item[0]))
