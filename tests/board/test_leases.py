"""The leases screen: what is shown of whom, and what ends, lasts longer or is refused."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from gpuboard.board.app import BoardApp, SceneChanged
from gpuboard.board.dialogs.base import Choose, Confirm
from gpuboard.board.dialogs.reserve import ReserveDialog
from gpuboard.board.scene import Scene
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.leases import LeasesScreen, RenewDialog
from gpuboard.cluster.simulated import demo_nodes
from gpuboard.errors import NoSuchLease
from gpuboard.model.lease import LeaseGpu, LeaseHolder
from gpuboard.model.request import Request
from gpuboard.model.units import iso
from tests.agent import Agent
from tests.board import lab, made, other
from tests.board.test_runs import keep, view


@asynccontextmanager
async def with_leases(
    folder: Path, wanted: Sequence[tuple[int, float, str]], size: tuple[int, int]
) -> AsyncIterator[tuple[BoardApp, Pilot[int]]]:
    """Open the leases screen with leases of this user: GPUs, seconds, purpose. Releases them at the end."""
    core = lab.make_core(folder)
    async with lab.board(core, size) as (app, pilot):
        for n, for_s, purpose in wanted:
            core.operations.published(core.operations.reserve(Request(n=n, model="H100"), for_s, purpose))
        await pilot.press("l")
        await lab.settle(pilot, lambda: app.scene and len(app.scene.by_lease) == len(wanted) and grid(app) is not None)
        try:
            yield app, pilot
        finally:
            for lease in core.scene().by_lease:
                with contextlib.suppress(NoSuchLease):  # the test has just released it
                    core.operations.release(lease)


def grid(app: BoardApp) -> str | None:
    return app.screen.grid.cursor if isinstance(app.screen, LeasesScreen) else None


def row(app: BoardApp, word: str) -> str:
    [line] = [line for line in lab.screen(app).splitlines()[1:-4] if word in line]
    return line


async def test_shows_every_lease_and_the_time_line_beside_or_in_place_of_them(tmp_path: Path) -> None:
    async with with_leases(tmp_path, [(1, 3600, "[b]grid[/b]"), (2, 8 * 3600, "")], (80, 24)) as (app, pilot):
        assert app.scene is not None
        first, second = sorted(app.scene.leases.leases, key=lambda lease: lease.until)
        for size in ((120, 40), (200, 60), (80, 24)):
            await pilot.resize_terminal(*size)
            text = lab.screen(app)
            assert " 2 leases · 3 GPUs · 2 yours" in text
            assert all(words in row(app, first.id) for words in ("root", "sim01:", "59m"))
            assert all(words in row(app, second.id) for words in ("root", "sim01:", "7h59m"))
            assert text.index(first.id) < text.index(second.id)
            assert "[b]grid[/b]" in text
            assert ("━" in row(app, first.id)) == (size[0] >= 150)
            assert "Flags" not in text, "no lease has one"
        await pilot.press("t")
        await pilot.pause()
        bars = [row(app, lease.id).count("━") for lease in (first, second)]
        assert bars[0] * 6 < bars[1] <= 43
        assert len(re.findall(r"\d\d:00|[A-Z][a-z]{2} \d+", row(app, "Owner"))) >= 3  # midnight is the day's name
        await pilot.press("t")
        await pilot.pause()
        assert "━" not in row(app, first.id)


async def test_the_time_line_comes_and_goes_by_its_key_at_every_width(tmp_path: Path) -> None:
    async with with_leases(tmp_path, [(1, 3600, "")], (40, 24)) as (app, pilot):
        assert app.scene is not None
        [lease] = app.scene.leases.leases
        for width in (40, 60, 80, 149, 150, 240):
            await pilot.press("escape")  # opened again, it is shown where it has room
            await pilot.resize_terminal(width, 24)
            await pilot.press("l")
            await lab.settle(pilot, lambda: grid(app) is not None)
            shown = width >= 150
            for _ in range(3):
                assert ("━" in row(app, lease.id)) == shown
                if shown:
                    assert row(app, "Lease").rstrip()[-1].isdigit(), "its ruler is whole"
                await pilot.press("t")
                await pilot.pause()
                shown = not shown


async def test_releases_when_that_is_meant_by_the_mouse_or_by_keys(tmp_path: Path) -> None:
    async with with_leases(tmp_path, [(2, 3600, ""), (1, 7200, "")], (80, 24)) as (app, pilot):
        await pilot.click("#leases", offset=(3, 2))
        chosen = (grid(app) or "").split()[0]
        await pilot.press("d")
        await lab.settle(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.click("#yes")
        await lab.settle(pilot, lambda: len(lab.claims(tmp_path)) == 2)
        assert chosen not in "".join(lab.claims(tmp_path))
        await lab.settle(pilot, lambda: (grid(app) or chosen).split()[0] != chosen)
        lease = (grid(app) or "").split()[0]
        for keys in (("d", "enter"), ("d", "escape"), ("d", "n")):
            await pilot.press(*keys)
            await lab.settle(pilot, lambda: isinstance(app.screen, LeasesScreen))
        assert len(lab.claims(tmp_path)) == 2
        await pilot.press("d")
        await lab.settle(pilot, lambda: isinstance(app.screen, Confirm))
        assert f"Release {lease}?" in lab.screen(app)
        await pilot.press("y")
        await lab.settle(pilot, lambda: lab.claims(tmp_path) == [])
        await lab.settle(pilot, lambda: "No GPU is reserved." in lab.screen(app))
        await lab.settle(pilot, lambda: any(note.startswith(f"Released: {lease}: sim01:") for note in lab.toasts(app)))


async def test_a_lease_that_a_run_uses_is_released_after_a_second_question(tmp_path: Path) -> None:
    async with with_leases(tmp_path, [(2, 3600, "")], (80, 24)) as (app, pilot):
        lease = (grid(app) or "").split()[0]
        keep(app.core.env, view("rabc2345", lease=lease))
        for answer in ("enter", "y"):
            assert len(lab.claims(tmp_path)) == 2
            await pilot.press("d")
            await lab.settle(pilot, lambda: lab.shown(app, f"Release {lease}?"))
            await pilot.press("y")
            await lab.settle(pilot, lambda: lab.shown(app, f"Release {lease} although run rabc2345 uses it?"))
            assert lab.shown(app, "Run rabc2345 uses it: train.py --lr 3e-4", "The run goes on without a reservation")
            await pilot.press(answer)
            await lab.settle(pilot, lambda: isinstance(app.screen, LeasesScreen))
        await lab.settle(pilot, lambda: lab.claims(tmp_path) == [])


async def test_renews(tmp_path: Path) -> None:
    async with with_leases(tmp_path, [(1, 3600, "")], (80, 24)) as (app, pilot):
        await pilot.press("n")
        await lab.settle(pilot, lambda: isinstance(app.screen, RenewDialog) and app.screen.is_mounted)
        entry = app.screen.query_one("#field-for", Input)
        entry.value = "25h"
        await pilot.press("enter")
        await lab.settle(pilot, lambda: "longer than the 1d allowed" in lab.screen(app))
        entry.value = "10m"
        await lab.settle(pilot, lambda: re.search(r"Will end .*, sooner than now", lab.screen(app)))
        entry.value = "3h"
        await lab.settle(pilot, lambda: "Will end " in lab.screen(app) and "sooner" not in lab.screen(app))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: isinstance(app.screen, LeasesScreen))
        await lab.settle(pilot, lambda: app.scene and next(iter(app.scene.by_lease.values())).remaining_s > 10700)
        await lab.settle(pilot, lambda: any(note.startswith("Renewed: ") for note in lab.toasts(app)))


async def test_jumps_to_the_gpus_and_copies_the_line(tmp_path: Path) -> None:
    async with with_leases(tmp_path, [(2, 3600, "")], (80, 24)) as (app, pilot):
        assert app.scene is not None
        [lease] = app.scene.leases.leases
        await pilot.press("y")
        await lab.settle(pilot, lambda: isinstance(app.screen, Choose) and app.screen.is_mounted)
        assert app.screen.query_one(OptionList).option_count == 4
        await pilot.press("enter")
        await lab.settle(pilot, lambda: isinstance(app.screen, LeasesScreen) and app.clipboard)
        assert app.clipboard == f'eval "$(gpuboard env {lease.id} --node sim01)"'
        await pilot.press("enter")
        await lab.settle(pilot, lambda: isinstance(app.screen, ClusterScreen))
        assert isinstance(app.screen, ClusterScreen)
        assert app.screen.cursor_uuid == lease.gpus[0].uuid


async def test_a_lease_of_slurm_without_known_gpus_leads_to_its_node(tmp_path: Path) -> None:
    held = [made.lease(name, "alice", []) for name in ("aaaaaa", "bbbbbb", "cccccc")]
    held[0] = replace(held[0], nodes=["gpu02"])  # shards
    held[1] = replace(held[1], nodes=["gpu02"], gpus=[LeaseGpu("gpu02", None, "")])
    nodes = [made.node(name, [made.gpu(name, 0)]) for name in ("gpu01", "gpu02")]
    async with made.at_cluster(tmp_path, made.scene(*nodes, leases=held)) as (app, cluster, pilot):
        for down in ([], ["down"]):
            app.go_to("node:gpu01")
            await pilot.press("l", *down, "enter")
            await lab.settle(pilot, lambda: app.screen is cluster)
            assert cluster.cursor_uuid == "GPU-gpu02-0"
        await pilot.press("slash", *"gpu01", "enter", "l", "end", "enter")
        assert lab.toasts(app) == [": none of the GPUs and nodes of lease cccccc is on this board"]
        app.go_to("")
        assert (app.screen, cluster.cursor_uuid, cluster.view.filter) == (cluster, "GPU-gpu01-0", "gpu01")


async def test_without_leases_it_shows_how_to_get_one(tmp_path: Path) -> None:
    async with lab.board(lab.make_core(tmp_path), (80, 24)) as (app, pilot):
        await pilot.press("l")
        await lab.settle(pilot, lambda: "No GPU is reserved." in lab.screen(app))
        for key in ("d", "n", "y"):
            await pilot.press(key)
        await lab.settle(pilot, lambda: len(lab.toasts(app)) == 3)
        assert set(lab.toasts(app)) == {": no lease selected; r reserves"}
        await pilot.press("r")
        await lab.settle(pilot, lambda: isinstance(app.screen, ReserveDialog))
        await pilot.press("escape", "l")
        await lab.settle(pilot, lambda: isinstance(app.screen, ClusterScreen))


def crowd() -> Scene:
    """Return a scene with leases of two people, one idle, one with a rogue process, and a node that was not read."""
    now = time.time()
    idle = made.gpu("gpu01", 0, "reserved", leases=["aaaaaa"], flags=["idle"])
    rogue = made.busy("gpu01", 1, "eve", leases=["bbbbbb"], flags=["rogue"])
    scene = made.scene(
        made.node("gpu01", [idle, rogue]),
        made.unread("gpu02"),
        leases=[
            replace(lease, since=iso(now - 1800), until=iso(now + 5400), remaining_s=5400.0, nodes=["gpu01"])
            for lease in (
                replace(made.lease("aaaaaa", "alice", [("gpu01", 0)]), holder=LeaseHolder(9, None)),
                replace(made.lease("bbbbbb", "bob", [("gpu01", 1)], 1002), holder=LeaseHolder(4194304, False)),
            )
        ],
        uids={"gpu01": 1001},
    )
    scene.leases.unread.append("gpu02")
    return scene


async def test_idle_and_rogue_ones_are_marked_with_names_and_others_are_left_alone(tmp_path: Path) -> None:
    core = lab.make_core(tmp_path, [])
    app = BoardApp(core)
    async with app.run_test(size=(120, 40)) as pilot:
        await lab.settle(pilot, lambda: isinstance(app.screen, ClusterScreen) and app.scene is not None)
        core.close()  # from now on scenes come from the test alone
        await pilot.press("l")
        app.post_message(SceneChanged(crowd()))
        await lab.settle(pilot, lambda: grid(app) is not None)
        text = lab.screen(app)
        assert "Not read, so leases there are not listed: gpu02" in text
        assert "Flags" in text
        assert "idle" in row(app, "aaaaaa")
        assert "alice from login1, pid 9; " in text
        assert all(words in row(app, "bbbbbb") for words in ("rogue: eve", "pid 4194304 ended"))
        assert "2 leases · 2 GPUs · 1 yours · 1 idle · 1 with a rogue process" in text
        await pilot.press("end")
        await lab.settle(pilot, lambda: (grid(app) or "").startswith("bbbbbb"))
        assert "rogue on gpu01:1: eve's process 4001  python train.py" in lab.screen(app)
        await pilot.press("d", "n")
        await lab.settle(pilot, lambda: len(lab.toasts(app)) == 2)
        assert isinstance(app.screen, LeasesScreen)
        assert lab.toasts(app) == [
            ": lease bbbbbb belongs to bob; only the owner or root can release it",
            ": lease bbbbbb belongs to bob; only the owner can renew it",
        ]


async def test_gpus_and_purpose_are_whole_beside_the_time_line(tmp_path: Path) -> None:
    places = [(node, index) for node in ("gpu01", "gpu02") for index in range(4)]
    gpus = [made.busy(*place) for place in places]
    nodes = [made.node("gpu01", gpus[:4]), made.node("gpu02", gpus[4:])]
    one = replace(made.lease("k3f9", "alice", places), purpose="llama-8b pretraining")
    async with made.still(tmp_path, made.scene(*nodes, leases=[one]), (160, 48)) as (app, pilot):
        await pilot.press("l")
        await lab.settle(pilot, lambda: grid(app) is not None)
        assert all(words in row(app, "k3f9") for words in ("gpu01:0-3@gpu02:0-3", "llama-8b pretraining"))


async def test_titles_and_keys_sort_and_sort_reversed(tmp_path: Path) -> None:
    leases = [made.lease(f"{owner[0] * 6}", owner, [("gpu01", index)]) for index, owner in enumerate(("eve", "bob"))]
    nodes = made.node("gpu01", [made.gpu("gpu01", 0), made.gpu("gpu01", 1)])
    async with made.still(tmp_path, made.scene(nodes, leases=leases), (80, 24)) as (app, pilot):
        await pilot.press("l")
        await lab.settle(pilot, lambda: grid(app) is not None)
        title = (row(app, "Owner").index("Owner"), 0)

        def order() -> tuple[str, bool]:
            text = lab.screen(app)
            return re.findall(r"\w+[▲▼]|[▲▼]\w+", text)[0], text.index(" bob ") < text.index(" eve ")

        found = [order()]
        for _ in range(3):
            await pilot.click("#leases", offset=title)
            await pilot.pause()
            found.append(order())
        await pilot.press("S")
        await pilot.pause()
        found.append(order())
        assert found == [("▲Left", True), ("Owner▲", True), ("Owner▼", False), ("Owner▲", True), ("Owner▼", False)]
        await pilot.press("s")
        await lab.settle(pilot, lambda: lab.shown(app, "Sort by", "owner ▼"))
        await pilot.press("end", "enter")
        await lab.settle(pilot, lambda: order() == ("GPUs▲", False))


@other.needs_root
async def test_root_may_end_other_users_leases(tmp_path: Path) -> None:
    nodes = demo_nodes(claims_dir=str(tmp_path / "claims"))
    core = lab.make_core(tmp_path, nodes)
    async with lab.board(core, (80, 24)) as (app, pilot):
        own = Agent(None, node="sim02", simulate=nodes[1].simulate, claims_dir=str(tmp_path / "claims"))
        with other.somebody(tmp_path, nodes[0]) as agent, own:
            assert app.scene is not None
            other.take(own, "abcdef", [app.scene.nodes["sim02"].gpus[0].uuid])  # the same id
            other.take(agent, "abcdef", [app.scene.nodes["sim01"].gpus[0].uuid])
            await pilot.press("l", "slash", *"nobody", "enter")
            await lab.settle(pilot, lambda: grid(app) == "abcdef nobody")
            await pilot.press("d")
            await lab.settle(pilot, lambda: "Its owner is nobody; as root you may release it." in lab.screen(app))
            await pilot.press("y")
            await lab.settle(pilot, lambda: lab.told(app, "Released: abcdef: sim01:0"))
            assert lab.claims(tmp_path) == ["abcdef: sim02-0"]
