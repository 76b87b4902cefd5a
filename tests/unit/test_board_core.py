"""The thread that makes the board's scenes reports errors and continues."""

from __future__ import annotations

import queue
from pathlib import Path

from gpuboard.board.core import Core
from gpuboard.board.scene import Scene
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.model.snapshot import Snapshot


def test_a_bug_is_shown_instead_of_an_old_picture_and_the_next_scene_comes(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    simulated = {"cluster": "c", "count": 2}
    core = Core([Node(name="sim", host=None, simulate=simulated, claims_dir=str(tmp_path))], Settings(), env)
    wrong = [ValueError("a \x1b[31mcase without a test")]
    right = core.fleet.snapshot

    def snapshot() -> Snapshot:
        if wrong:
            raise wrong.pop()
        return right()

    core.fleet.snapshot = snapshot  # type: ignore[method-assign]
    scenes: queue.Queue[Scene] = queue.Queue()
    core.start(scenes.put)
    try:
        first = scenes.get(timeout=60)
        assert first.snapshot.nodes == []
        assert "this is a bug: ValueError" in first.banners[0]
        assert first.banners[0].isprintable()
        while not (scene := scenes.get(timeout=60)).places:
            continue
        assert [node.name for node in scene.snapshot.nodes] == ["sim"]
    finally:
        core.close()
