"""Send a signal to one's own process: choose process and signal, confirm. Other users' processes are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from gpuboard.board.dialogs.base import Choose, Confirm
from gpuboard.board.dialogs.request_form import places_words
from gpuboard.board.scene import Scene
from gpuboard.board.text.cells import fit
from gpuboard.model.request import ChosenGpu
from gpuboard.model.snapshot import ProcessView
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


class Running(NamedTuple):
    """A process with its node and GPUs."""

    node: str
    gpus: str  # "gpu01:0,2"
    process: ProcessView


def running(scene: Scene, uuids: Sequence[str]) -> list[Running]:
    """Return the processes on these GPUs, each once, by node and pid."""
    found: dict[tuple[str, int], tuple[list[int], ProcessView]] = {}
    for uuid in uuids:
        if uuid in scene.devices:
            node, gpu = scene.devices[uuid].node, scene.devices[uuid].gpu
            for process in gpu.processes or ():
                found.setdefault((node.name, process.pid), ([], process))[0].append(gpu.index)
    return [
        Running(node, f"{node}:{','.join(map(str, sorted(set(indexes))))}", process)
        for (node, _), (indexes, process) in sorted(found.items(), key=lambda item: item[0])
    ]


def refusal(scene: Scene, one: Running) -> str:
    """Return why we may not send a signal to a process, "" when we may."""
    process = one.process
    if process.uid is None or process.user is None or process.started is None:
        return f"process {process.pid} on {one.node} has a hidden owner and may not be yours; nothing was sent"
    if scene.uids.get(one.node) != process.uid:
        return f"process {process.pid} on {one.node} belongs to {process.user}; nothing was sent"
    return ""


def open_signal(board: BoardApp, uuids: Sequence[str]) -> None:
    """Let the user choose a process on these GPUs and a signal."""
    scene = board.scene
    if scene is None or not (found := running(scene, uuids)):
        board.notify(_none_seen(scene, uuids), markup=False)
        return
    if len(found) == 1:
        signal_one(board, found[0])
        return
    look = board.look

    def line(one: Running) -> Text:
        process = one.process
        words = f"{process.pid:>8} {fit(process.user or '?', 10)} {fit(one.gpus, 14)} {format_size(process.memory):>8} "
        return Text(words + fit(process.command, 28), look.style("dim" if refusal(scene, one) else ""))

    def chosen(key: str | None) -> None:
        if key is not None:
            signal_one(board, found[int(key)])

    board.push_screen(Choose("Send a signal to", [(str(k), line(one)) for k, one in enumerate(found)]), chosen)


def _none_seen(scene: Scene | None, uuids: Sequence[str]) -> str:
    places = [scene.devices[uuid] for uuid in uuids if scene is not None and uuid in scene.devices]
    unread = [ChosenGpu(at.node.name, at.gpu.index, at.gpu.uuid) for at in places if at.gpu.processes is None]
    if unread:
        return f"cannot read the processes on {places_words(unread)}"
    return f"no process on {'this GPU' if len(uuids) == 1 else 'these GPUs'}"


def signal_one(board: BoardApp, one: Running) -> None:
    """Let the user choose a signal for this process, confirm, and send it."""
    if board.scene is None or (words := refusal(board.scene, one)):
        board.notify(
            words if board.scene else "no reading yet; try again in a moment", severity="warning", markup=False
        )
        return
    process, name = one.process, f"process {one.process.pid} on {one.node}"

    def sent(_: None) -> None:
        board.notify(f"signal sent to {name}", markup=False)

    def send(signal: str) -> None:
        started = process.started
        assert started is not None
        operations = board.core.operations
        board.ask(lambda: operations.signal(one.node, process.pid, started, signal), sent)

    def chosen(signal: str | None) -> None:
        if signal is None:
            return
        detail = Text(f"{one.node}  pid {process.pid}\n{process.command}\n\nSIG{signal}: {SIGNALS[signal]}")
        verb = f"Send {signal}"
        board.push_screen(
            Confirm(f"Send SIG{signal} to {name}?", detail, verb=verb), lambda yes: send(signal) if yes else None
        )

    options = [(signal, f"{signal:<5} {words}") for signal, words in SIGNALS.items()]
    board.push_screen(Choose(f"Signal for {name}: {fit(process.command, 30).rstrip()}", options), chosen)
