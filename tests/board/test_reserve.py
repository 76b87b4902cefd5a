"""The dialog that reserves, against real agents: claims appear on disk, or nothing does."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpuboard.board.app import BoardApp
from gpuboard.board.reserve import ReserveDialog, open_reserve
from tests.board import lab


def uuids(app: BoardApp, node: str, *indexes: int) -> list[str]:
    assert app.scene is not None
    return [gpu.uuid for gpu in app.scene.nodes[node].gpus if gpu.index in indexes]


def test_reserves_the_marked_gpus(tmp_path: Path) -> None:
    async def main() -> None:
        core = lab.make_core(tmp_path)
        async with lab.board(core) as (app, pilot):
            open_reserve(app, uuids(app, "sim01", 0, 2))
            await lab.settle(pilot, lambda: "Takes sim01:0,2" in lab.screen(app))
            await pilot.press("enter")
            await lab.settle(pilot, lambda: not isinstance(app.screen, ReserveDialog))
            await lab.settle(pilot, lambda: app.scene and app.scene.by_lease)
            assert app.scene is not None
            [lease] = app.scene.leases.leases
            assert (lease.holder, [gpu.index for gpu in lease.gpus], app.scene.is_mine(lease)) == (None, [0, 2], True)
            assert 7.9 * 3600 < lease.remaining_s <= 8 * 3600
            assert lab.claims(tmp_path) == [f"{lease.id}: sim01-0", f"{lease.id}: sim01-2"]
            assert lease.id in {note.title.split()[-1] for note in app._notifications}
            core.operations.release(lease.id)
            assert lab.claims(tmp_path) == []

    asyncio.run(main())
