"""Between what the dialog shows and Enter: another gpuboard takes a GPU, or a process moves in. Scripted NVML."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboard.board.app import BoardApp
from gpuboard.board.core import Core
from gpuboard.board.dialogs.reserve import ReserveDialog, open_reserve
from tests.board import lab
from tests.nvml import GIB, Gpu, write_script


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Core:
    return lab.make_core(tmp_path, lab.script_gpus(tmp_path, monkeypatch, [Gpu()] * 4), lab.SELDOM)


def gpuboard(folder: Path, *args: str) -> str:
    env = lab.environment(folder) | {"GPUBOARD_CLAIMS_DIR": str(folder / "claims")}
    env |= {name: os.environ[name] for name in ("FAKE_NVML", "LD_LIBRARY_PATH")}
    command = [sys.executable, "-m", "gpuboard", *args]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout


def picks(app: BoardApp, *indexes: int) -> list[str]:
    assert app.scene is not None
    return [gpu.uuid for gpu in app.scene.nodes["gpu01"].gpus if gpu.index in indexes]


async def test_another_gpuboard_was_quicker(tmp_path: Path, core: Core) -> None:
    async with lab.board(core, twice=True) as (app, pilot):
        open_reserve(app, picks(app, 0, 1))
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve gpu01 GPUs 0-1"))
        allocate = ("allocate", "--gpus", "1", "--detach", "--for", "1h", "--purpose", "quick", "--format", "json")
        await asyncio.to_thread(gpuboard, tmp_path, *allocate)
        await pilot.press("enter")
        await lab.settle(
            pilot, lambda: lab.shown(app, "Not reserved: gpu01:1 is reserved", "quick", "Will reserve gpu01 GPUs 0,2")
        )
        assert len(list((tmp_path / "claims").glob("gpuboard.GPU-*"))) == 1
        await pilot.press("enter")
        await lab.settle(pilot, lambda: not isinstance(app.screen, ReserveDialog))
        assert len(list((tmp_path / "claims").glob("gpuboard.GPU-*"))) == 3
        await asyncio.to_thread(gpuboard, tmp_path, "release", "--mine")
        assert list((tmp_path / "claims").glob("gpuboard.GPU-*")) == []


async def test_a_process_moved_in(tmp_path: Path, core: Core) -> None:
    async with lab.board(core, twice=True) as (app, pilot):
        open_reserve(app, picks(app, 2))
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve gpu01 GPU 2"))
        gpus = [Gpu(), Gpu(), Gpu(used=3 * GIB, processes=(("compute", os.getpid(), 3 * GIB),)), Gpu()]
        write_script(tmp_path / "nvml", gpus, seed=str(tmp_path))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: lab.shown(app, "Not reserved: gpu01:2 is busy", str(os.getpid())))
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve gpu01 GPU 0"))
        assert list((tmp_path / "claims").glob("gpuboard.GPU-*")) == []
        await pilot.press("escape")
