"""Send a signal to one's own processes: choose the signal, confirm. Other users' processes are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from gpuboard.board.dialogs.base import Choose, Confirm
from gpuboard.board.dialogs.request_form import places_words
from gpuboard.board.scene import Scene
from gpuboard.board.text.cells import fit
from gpuboard.cluster.snapshot.processes import Running, gpus_of, on_gpus
from gpuboard.model.request import ChosenGpu
from gpuboard.model.units import format_size

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp

SIGNALS = {
    "TERM": "end; a program may save and clean up first",
    "INT": "as ctrl-C does",
    "KILL": "end at once; nothing is saved or cleaned up",
    "USR1": "defined by the program; often: save a checkpoint",
    "STOP": "pause; its GPU memory stays in use",
    "CONT": "continue after a pause",
}
_SINGLY = 8  # processes with a line each in a confirmation
_REASONS = 3  # shown of the processes that get no signal


def running(scene: Scene, uuids: Sequence[str]) -> list[Running]:
    """Return the processes on these GPUs, each once, by node, GPU and memory."""
    places = {place.gpu.uuid: place for uuid in uuids if (place := scene.devices.get(uuid)) is not None}
    return on_gpus((place.node.name, place.gpu) for place in places.values())


def refusal(scene: Scene, one: Running) -> str:
    """Return why we may not send a signal to a process, "" when we may."""
    if one.uid is None or one.user is None or one.started is None:
        return f"process {one.pid} on {one.node} has a hidden owner and may not be yours; nothing was sent"
    if scene.uids.get(one.node) != one.uid:
        return f"process {one.pid} on {one.node} belongs to {one.user}; nothing was sent"
    return ""


def open_signal(board: BoardApp, uuids: Sequence[str]) -> None:
    """Let the user choose a process on these GPUs and a signal."""
    scene = board.scene
    if scene is None or not (found := running(scene, uuids)):
        board.notify(_none_seen(scene, uuids), markup=False)
        return
    if len(found) == 1:
        signal_these(board, found)
        return
    look = board.look

    def line(one: Running) -> Text:
        words = f"{one.pid:>8} {fit(one.user or '?', 10)} {fit(_place(one, scene), 14)} {format_size(one.memory):>8} "
        return Text(words + fit(one.command, 28), look.style("dim" if refusal(scene, one) else ""))

    choose = Choose("Send a signal to", [(str(k), line(one)) for k, one in enumerate(found)])
    board.open_dialog(choose, lambda key: signal_these(board, [found[int(key)]]))


def _place(one: Running, scene: Scene) -> str:
    return f"{one.node}:{gpus_of(one, scene.nodes)}"


def _none_seen(scene: Scene | None, uuids: Sequence[str]) -> str:
    places = [scene.devices[uuid] for uuid in uuids if scene is not None and uuid in scene.devices]
    unread = [ChosenGpu(at.node.name, at.gpu.index, at.gpu.uuid) for at in places if at.gpu.processes is None]
    if unread:
        return f"cannot read the processes on {places_words(unread)}"
    return f"no process on {'this GPU' if len(uuids) == 1 else 'these GPUs'}"


def signal_these(board: BoardApp, found: Sequence[Running]) -> None:
    """Let the user choose a signal for those of the processes that are the user's own, confirm, and send it."""
    scene = board.scene
    if scene is None:
        board.notify("no reading yet; try again in a moment", severity="warning", markup=False)
        return
    refused = [words for one in found if (words := refusal(scene, one))]
    own = [one for one in found if not refusal(scene, one)]
    if not own:
        board.notify(_few(refused), severity="warning", markup=False)
        return
    name = f"process {own[0].pid} on {own[0].node}" if len(own) == 1 else f"{len(own)} processes"

    def sent(failed: Sequence[str]) -> None:
        if len(failed) < len(own):
            count = len(own) - len(failed)
            board.notify(f"signal sent to {name if not failed else f'{count} of {len(own)} processes'}", markup=False)
        if failed:
            board.notify(_few(failed), severity="error", timeout=12, markup=False)

    def chosen(signal: str) -> None:
        operations = board.core.operations
        detail = f"{_described(own, scene)}\n\nSIG{signal}: {SIGNALS[signal]}"
        if refused:
            detail += f"\nNot to {len(refused)} of other users or with a hidden owner."
        confirm = Confirm(f"Send SIG{signal} to {name}?", Text(detail), verb=f"Send {signal}")
        board.open_dialog(confirm, lambda _: board.ask(lambda: operations.signal(own, signal), sent))

    title = f"Signal for {name}" + (f": {fit(own[0].command, 30).rstrip()}" if len(own) == 1 else "")
    board.open_dialog(Choose(title, [(signal, f"{signal:<5} {words}") for signal, words in SIGNALS.items()]), chosen)


def _described(own: Sequence[Running], scene: Scene) -> str:
    """Return what gets the signal: one process in full, a line for each of several, a line per node for many."""
    if len(own) == 1:
        return f"{_place(own[0], scene)}  pid {own[0].pid}\n{own[0].command}"
    if len(own) <= _SINGLY:
        lines = (f"{fit(_place(one, scene), 14)} pid {one.pid:<8} {fit(one.command, 30).rstrip()}" for one in own)
        return "\n".join(lines)
    pids: dict[str, list[str]] = {}
    for one in own:
        pids.setdefault(one.node, []).append(str(one.pid))
    return "\n".join(f"{node}  pids {', '.join(on_node)}" for node, on_node in pids.items())


def _few(reasons: Sequence[str]) -> str:
    more = f"\nand {len(reasons) - _REASONS} more" if len(reasons) > _REASONS else ""
    return "\n".join(reasons[:_REASONS]) + more
