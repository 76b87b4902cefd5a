"""The board under test: the real app over real agents on simulated nodes, in folders of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.app import App
from textual.events import MouseDown, MouseMove, MouseUp
from textual.notifications import Notification
from textual.pilot import Pilot
from textual.widget import Widget

from gpuboard.board.app import BoardApp
from gpuboard.board.core import Core
from gpuboard.board.scene import Scene
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.simulated import demo_nodes
from gpuboard.config import Settings, StateSettings
from gpuboard.keeper.client import Handover
from gpuboard.keeper.runtime_dir import KeeperError
from gpuboard.leases.output.formats import Allocation
from gpuboard.model.request import Request
from tests.nvml import Gpu, library, write_script
from tests.waiting import next_step

EVERY = "every"  # where textual's Notifications have all toasts, also those that have gone (conftest.py)
# A machine that pauses for some seconds makes no GPU unknown in tests about other things.
PATIENT = Settings(state=StateSettings(stale_min="1m"))
# Readings come when the test wants them. They are due at multiples of it since 1970: at 1m one may come at any moment.
SELDOM = Settings(interval="13d")
Opened = AsyncIterator[tuple[BoardApp, Pilot[int]]]


def environment(folder: Path) -> dict[str, str]:
    """Return an environment whose state, config and home lie in ``folder``."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    dropped = {"XDG_RUNTIME_DIR", "NO_COLOR", "LC_ALL", "LC_CTYPE"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GPUBOARD_") and key not in dropped}
    return kept | {
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CONFIG_HOME": str(home / "config"),
    }


def claims_folder(folder: Path) -> Path:
    """Return a folder for claims in ``folder``, which everybody may reach and use as /var/tmp."""
    claims = folder / "claims"
    claims.mkdir(exist_ok=True)
    claims.chmod(0o1777)
    return claims


def script_gpus(folder: Path, patch: pytest.MonkeyPatch, gpus: Sequence[Gpu]) -> list[Node]:
    """Return this machine as the node gpu01, with ``gpus`` in place of its own; ``folder / "nvml"`` has them."""
    write_script(folder / "nvml", gpus, seed=str(folder))
    patch.setenv("FAKE_NVML", str(folder / "nvml"))
    patch.setenv("LD_LIBRARY_PATH", str(library()))
    return [Node(name="gpu01", host=None, claims_dir=str(claims_folder(folder)))]


def make_core(folder: Path, nodes: Sequence[Node] | None = None, settings: Settings | None = None) -> Core:
    """Return a core over the demo's two nodes (sim01: 4 GPUs, one of them busy; sim02: 2), not yet started."""
    claims = claims_folder(folder)
    found = demo_nodes(claims_dir=str(claims)) if nodes is None else list(nodes)
    chosen = settings or PATIENT
    if chosen.state == StateSettings():
        chosen = msgspec.structs.replace(chosen, state=PATIENT.state)
    return Core(found, chosen, environment(folder))


@asynccontextmanager
async def board(core: Core, size: tuple[int, int] = (120, 40), *, twice: bool = False) -> Opened:
    """Run the app over ``core`` until the first scene in which every node has answered and is settled.

    ``twice``: over a core of ``SELDOM``, after a second reading of every node; no other comes by itself.
    """
    app = BoardApp(core)
    try:
        async with app.run_test(size=size) as pilot:
            if twice:
                await settle(
                    pilot, lambda: app.scene is not None and all(node.gpus for node in app.scene.snapshot.nodes)
                )
                core.fleet.refresh(core.fleet.names, 60)
            await settle(pilot, lambda: ready(app))
            yield app, pilot
            core.close()
            await pilot.pause()  # no scene comes any more while the screens are taken apart
    finally:
        core.close()


def ready(app: BoardApp) -> bool:
    """Tell whether every GPU's state is known and drawn: the cursor is on one."""
    drawn = isinstance(app.screen, ClusterScreen) and app.screen.cursor_uuid is not None
    return app.scene is not None and known(app.scene) and drawn


def agent_pid(core: Core, node: str) -> int:
    hello = core.fleet._feeds[node].facts.hello
    assert hello is not None
    return hello.pid


@contextmanager
def hung(core: Core, node: str) -> Iterator[int]:
    """Stop a node's agent within the block; yield its pid."""
    pid = agent_pid(core, node)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):  # closing the core has ended it
            os.kill(pid, signal.SIGCONT)


def known(scene: Scene) -> bool:
    """Tell whether the state of every GPU is known: two readings of every node."""
    return all(node.gpus and all(gpu.state != "unknown" for gpu in node.gpus) for node in scene.snapshot.nodes)


async def settle(pilot: Pilot[Any], condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Let the app go on until ``condition`` holds. Raises AssertionError with what is on the screen."""
    until, step_s = time.monotonic() + timeout_s, 0.02
    while not condition():
        assert time.monotonic() < until, (
            f"not within {timeout_s:.0f} s, {sizes(pilot)}; on the screen:\n{screen(pilot.app)}"
        )
        await pilot.pause(step_s)
        step_s = next_step(step_s)
    await pilot.pause()


def sizes(pilot: Pilot[Any]) -> str:
    return f"terminal {pilot.app.size}, screen {pilot.app.screen._compositor.size}"


def screen(app: object) -> str:
    """Return what is on the screen as text, a line a row."""
    assert isinstance(app, App)
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def shown(app: BoardApp, *words: str) -> bool:
    """Return whether all ``words`` are on the screen, also those wrapped in a box."""
    text = " ".join(screen(app).replace("│", " ").split())
    return all(word in text for word in words)


def notifications(app: BoardApp) -> list[Notification]:
    """Return all notifications so far; textual drops them after some seconds."""
    return [*vars(app._notifications).get(EVERY, ())]


def toasts(app: BoardApp) -> list[str]:
    """Return all notifications so far, as ``title: message``."""
    return [f"{toast.title}: {toast.message}" for toast in notifications(app)]


def told(app: BoardApp, *words: str) -> bool:
    """Return whether one toast has all ``words``."""
    return any(all(word in toast for word in words) for toast in toasts(app))


def claims(folder: Path) -> list[str]:
    """Return the claims on disk, as ``lease: the GPU's UUID without its cluster``."""
    found = (file.name.removeprefix("gpuboard.").rpartition(".") for file in (folder / "claims").glob("gpuboard.*"))
    return sorted(f"{lease}: {'-'.join(uuid.split('-')[-2:])}" for uuid, _, lease in found)


async def reserved(app: BoardApp, core: Core, pilot: Pilot[int], n: int, model: str) -> Allocation:
    """Reserve for ten minutes as the board does, and wait until the board shows a lease."""
    taken = core.operations.reserve(Request(n=n, model=model), 600, "")
    core.operations.published(taken)
    await settle(pilot, lambda: app.scene and app.scene.by_lease)
    return taken


def keeper_ended(_: Handover) -> None:
    """Stand in for ``Handover.confirm``: it must not be called in the UI's thread, and the keeper has ended."""
    assert threading.current_thread() is not threading.main_thread()
    raise KeeperError("the keeper has ended")


async def drag(pilot: Pilot[Any], widget: Widget, *points: tuple[int, int], release: bool = True) -> None:
    """Press the left button at the first of these points of a widget, move over the others, and release it there.

    The events go to the app as the terminal's do, which makes a click of them.
    """
    app: App[Any] = pilot.app
    kinds = [MouseDown, *[MouseMove] * (len(points) - 1), *[MouseUp] * release]
    for kind, point in zip(kinds, [*points, *points[-1:] * release], strict=True):
        x, y = widget.region.x + point[0], widget.region.y + point[1]
        app.post_message(kind(None, x, y, 0, 0, 1, False, False, False, screen_x=x, screen_y=y))
        await pilot.pause()
