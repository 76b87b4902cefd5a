"""Scenes made of real model values: any number of nodes, and whatever else a test wants to look at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from textual.pilot import Pilot

from gpuboard.board.app import KEY_FIRST_S, BoardApp, SceneChanged
from gpuboard.board.core import Core
from gpuboard.board.scene import Scene
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.model.gpu import GpuState
from gpuboard.model.lease import Lease, LeaseGpu, LeaseList
from gpuboard.model.snapshot import GpuView, MigView, NodeView, ProcessView, Snapshot
from tests.board.lab import Opened, environment, settle

GIB = 2**30
AT = "2026-01-31T12:00:00.000Z"
HOSTILE = [
    "[/x][bold]",
    "日本語の名前です",
    "שלום עולם",
    "e\u0301" * 40,
    "👨‍👩‍👧" * 5,
    "🇩🇪" * 9,
    "x" * 10_000,
    "\u202eabc",
]  # as names of nodes, users and GPUs
_PARTS = 4  # of a scene, drawn one after the other: what is beside the rows, and up to 96 rows
STATES = ("free", "reserved", "allocated", "busy", "occupied", "unknown", "broken")


def gpu(node: str, index: int, state: str = "free", **changes: Any) -> GpuView:
    """Return a GPU of a node; its UUID is ``GPU-<node>-<index>``."""
    values: dict[str, Any] = {
        "index": index, "uuid": f"GPU-{node}-{index}", "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": f"00000000:{index:02X}:00.0", "state": state, "reason": "no process, no reservation",
        "memory_used": 0, "memory_total": 80 * GIB, "utilization": 0, "temperature": 31, "power": 70.0,
        "power_limit": 700.0, "processes": [],
    }  # fmt: skip
    return GpuView(**(values | changes))


def busy(node: str, index: int, user: str | None = "bob", **changes: Any) -> GpuView:
    rogue = "rogue" in changes.get("flags", ())
    process = ProcessView(4000 + index, user, "python train.py", 60 * GIB, "compute", rogue=rogue)
    values: dict[str, Any] = {
        "reason": f"{user}: python (pid {4000 + index})", "memory_used": 60 * GIB, "utilization": 90,
        "temperature": 64, "power": 540.0, "processes": [process],
    }  # fmt: skip
    return gpu(node, index, "busy", **(values | changes))


def mig(node: str, index: int, *states: GpuState) -> GpuView:
    """Return a GPU split into a device for each of ``states``; their UUIDs are ``MIG-<node>-<index>-<number>``."""
    devices = [
        MigView(
            uuid=f"MIG-{node}-{index}-{number}", profile="3g.40gb", state=state, reason=f"made {state}",
            memory_used=0, memory_total=40 * GIB,
        )
        for number, state in enumerate(states)
    ]  # fmt: skip
    return gpu(node, index, "mig", reason="in MIG mode", flags=["mig"], utilization=None, mig=devices)


def node(name: str, gpus: Sequence[GpuView] = (), **changes: Any) -> NodeView:
    """Return a node that was read half a second ago."""
    values: dict[str, Any] = {
        "name": name, "state": "up", "age_s": 0.5, "driver": "580.159.04", "cpu_percent": 12.5,
        "memory_used": 97 * GIB, "memory_total": 512 * GIB, "gpus": list(gpus), "connected": True,
    }  # fmt: skip
    return NodeView(**(values | changes))


def unread(name: str, error: str = "ssh: no answer in 5 s") -> NodeView:
    return NodeView(name=name, state="unreachable", error=error)


def awaited(name: str) -> NodeView:
    """Return a node whose first answer is still to come."""
    return NodeView(name=name, state="unreachable", error="no answer yet", connecting=True)


def lease(name: str, owner: str, gpus: Sequence[tuple[str, int]], uid: int = 1001) -> Lease:
    """Return a lease on GPUs given by node and index."""
    taken = [LeaseGpu(node=node, index=index, uuid=f"GPU-{node}-{index}") for node, index in gpus]
    return Lease(
        id=name, owner=owner, uid=uid, host="login1", gpus=taken, since=AT, until="2026-01-31T20:00:00.000Z",
        holder=None, remaining_s=8 * 3600.0,
    )  # fmt: skip


def scene(*nodes: NodeView, leases: Sequence[Lease] = (), at: str = AT, **changes: Any) -> Scene:
    """Return a scene of these nodes. The caller's leases are those of ``uids``, the caller's uid on each node."""
    values: dict[str, Any] = {"uids": {}} | changes
    found = []
    for one in leases:
        mine = one.mine or any(values["uids"].get(gpu.node) == one.uid for gpu in one.gpus)
        found.append(msgspec.structs.replace(one, mine=mine, may_end=mine))
    return Scene(Snapshot(1, at, "lab", list(nodes)), LeaseList(1, at, found), **values)


def crowd(nodes: int, each: int = 8, seed: int = 0) -> Scene:
    """Return a scene of many nodes whose GPUs are in all states; another ``seed`` changes a tenth of the values."""
    made = []
    for number in range(nodes):
        name = f"gpu{number + 1:04d}"
        gpus = []
        for index in range(each):
            kind = number * 7 + index * 3
            turn = seed if kind % 10 == 0 else 0
            if kind % 3:
                busy_by = f"user{(number + index) % 23:02d}"
                used = (20 + (kind + turn) % 60) * GIB
                gpus.append(busy(name, index, busy_by, utilization=(kind + turn * 7) % 101, memory_used=used))
            else:
                gpus.append(gpu(name, index, STATES[(kind + turn) % len(STATES)]))
        made.append(node(name, gpus))
    return scene(*made)


class _Still(Core):
    """A core that reads no node and makes no scenes: the test does."""

    def start(self, changed: Callable[[Scene], object]) -> None:
        """Watch nothing."""


@asynccontextmanager
async def still(
    folder: Path,
    first: Scene,
    size: tuple[int, int] = (120, 40),
    nodes: Sequence[Node] = (),
    settings: Settings | None = None,
    *,
    env: Mapping[str, str] | None = None,
    toasts: bool = False,
) -> Opened:
    """Run the app on scenes that the test makes; it begins with ``first``. ``env``: variables that it has, too.

    ``toasts``: whether notifications are drawn.
    """
    core = _Still(nodes, settings or Settings(), {**environment(folder), **(env or {})})
    app = BoardApp(core)
    try:
        async with app.run_test(size=size, notifications=toasts) as pilot:
            await next_scene(app, pilot, first)
            yield app, pilot
    finally:
        core.close()


@asynccontextmanager
async def at_cluster(
    folder: Path, first: Scene, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[BoardApp, ClusterScreen, Pilot[int]]]:
    """Run the app as ``still`` does, with its cluster view."""
    async with still(folder, first, size) as (app, pilot):
        assert isinstance(app.screen, ClusterScreen)
        yield app, app.screen, pilot


async def next_scene(app: BoardApp, pilot: Pilot[int], shown: Scene) -> None:
    """Hand the app a scene and wait until it is drawn; right after a key it would come later."""
    await settle(pilot, lambda: app.core.key_first.quiet_s > KEY_FIRST_S)
    app.post_message(SceneChanged(shown))
    await settle(pilot, lambda: app.scene is shown)
    for _ in range(_PARTS):
        drawn = asyncio.Event()
        app.screen.call_after_refresh(drawn.set)
        await drawn.wait()
