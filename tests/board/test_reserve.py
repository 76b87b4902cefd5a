"""The dialog that reserves, against real agents: claims appear on disk, or nothing does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from gpuboard.board.app import BoardApp
from gpuboard.board.core import Core
from gpuboard.board.dialogs.reserve import ReserveDialog, open_reserve
from gpuboard.board.operations import Attempt
from gpuboard.cluster.simulated import demo_nodes
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError, Interrupted
from gpuboard.keeper.client import Handover
from gpuboard.leases.output.formats import Allocation
from gpuboard.model.request import Request
from tests.board import lab, other
from tests.nvml import Gpu
from tests.waiting import Stopwatch, until


def uuids(app: BoardApp, node: str, *indexes: int) -> list[str]:
    assert app.scene is not None
    return [gpu.uuid for gpu in app.scene.nodes[node].gpus if gpu.index in indexes]


def value(app: BoardApp, key: str) -> str:
    return app.screen.query_one(f"#field-{key}", Input).value


async def fill(pilot: Pilot[int], key: str, text: str) -> None:
    entry = pilot.app.screen.query_one(f"#field-{key}", Input)
    entry.focus()
    await pilot.pause()  # the focus selects what is there
    entry.value = text[:-1]
    entry.cursor_position = len(text)
    await pilot.press(*text[-1:])


async def open_for(app: BoardApp, pilot: Pilot[int], which: Sequence[str]) -> ReserveDialog:
    open_reserve(app, which)
    await lab.settle(pilot, lambda: isinstance(app.screen, ReserveDialog) and app.screen.is_mounted)
    assert isinstance(app.screen, ReserveDialog)
    return app.screen


async def test_the_toast_has_the_messages_about_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = lab.make_core(tmp_path, lab.script_gpus(tmp_path, monkeypatch, [Gpu(remap=(1, 0))]))
    async with lab.board(core) as (app, pilot):
        await open_for(app, pilot, uuids(app, "gpu01", 0))
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve gpu01 GPU 0"))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: lab.told(app, "gpu01:0 is sick: row"))
        end_all(core)


def end_all(core: Core) -> None:
    for lease in core.scene().leases.leases:
        core.operations.release(lease.id)


async def test_reserves_the_selected_gpus(tmp_path: Path, core: Core) -> None:
    async with lab.board(core) as (app, pilot):
        await pilot.press("r")
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve sim01 GPU 0"))
        await fill(pilot, "for", "90m")
        await fill(pilot, "purpose", "a [b]test[/b]")
        await pilot.press("enter")
        await lab.settle(pilot, lambda: app.scene and app.scene.by_lease and len(app.screen_stack) == 2)
        assert app.scene is not None
        [lease] = app.scene.leases.leases
        assert (lease.holder, lease.purpose) == (None, "a [b]test[/b]")
        assert ([gpu.index for gpu in lease.gpus], lease.mine) == ([0], True)
        assert 5300 < lease.remaining_s <= 5400
        assert lab.claims(tmp_path) == [f"{lease.id}: sim01-0"]
        await lab.settle(pilot, lambda: lab.told(app, f"Reserved: {lease.id}"))
        [note] = [note for note in lab.notifications(app) if note.title == f"Reserved: {lease.id}"]
        assert note.message.endswith(f'eval "$(gpuboard env {lease.id} --node sim01)"')
        assert (tmp_path / "home/state/gpuboard/leases" / f"{lease.id}.json").exists()
        core.operations.release(lease.id)
        assert lab.claims(tmp_path) == []


async def test_the_policy_picks_the_best_n_and_explains_it(tmp_path: Path, core: Core) -> None:
    async with lab.board(core, (80, 24)) as (app, pilot):
        await open_for(app, pilot, [])
        await fill(pilot, "gpus", "2")
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve sim01 GPUs 2-3", "linked by 18 NVLinks"))
        await fill(pilot, "model", "l40")
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve sim02 GPUs 0-1", "2 of 2 free"))
        await pilot.click("#commit")
        await lab.settle(pilot, lambda: len(lab.claims(tmp_path)) == 2)
        assert [claim.split()[1] for claim in lab.claims(tmp_path)] == ["sim02-0", "sim02-1"]
        await lab.settle(pilot, lambda: not isinstance(app.screen, ReserveDialog))
        end_all(core)


async def test_a_refusal_has_reasons_and_an_alternative(tmp_path: Path, core: Core) -> None:
    async with lab.board(core) as (app, pilot):
        await open_for(app, pilot, [])
        await fill(pilot, "gpus", "4")
        await fill(pilot, "nodes", "1")
        await lab.settle(pilot, lambda: lab.shown(app, "No:", "Try: at most 2 nodes"))
        assert "--" not in lab.screen(app)
        await pilot.press("enter")
        await fill(pilot, "gpus", "5")
        await lab.settle(pilot, lambda: lab.shown(app, "Impossible here:"))
        await pilot.press("enter")
        commit = app.screen.query_one("#commit")
        assert commit.disabled
        await fill(pilot, "gpus", "2")
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve") and not commit.disabled)
        await fill(pilot, "gpus", "5")
        await lab.settle(pilot, lambda: lab.shown(app, "Impossible here:") and commit.disabled)
        await fill(pilot, "gpus", "x:y")
        await fill(pilot, "gpus", "1")
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve") and not commit.disabled)
        await pilot.press("escape")
        assert lab.claims(tmp_path) == []


async def test_checks_what_is_typed(tmp_path: Path) -> None:
    core = lab.make_core(tmp_path, settings=Settings(max_lease="2h"))
    async with lab.board(core) as (app, pilot):
        dialog = await open_for(app, pilot, uuids(app, "sim01", 0))
        assert value(app, "for") == "2h"
        wrong = {
            "gpus": {"": "write 2 or gpu01:0,3", "0": "from 1 to", "x:y": "write 2 or gpu01:0,3"},
            "memory": {"40": "write 40GiB"},
            "nodes": {"0": "a number from 1", "two": "a number from 1"},
            "for": {"": "write 30m", "8": "write 30m", "3h": "longer than the 2h"},
        }
        for key, texts in wrong.items():
            good = value(app, key)
            for text, words in texts.items():
                await fill(pilot, key, text)
                await pilot.pause()
                assert words in dialog.wrong()[key]
                assert dialog.query_one("#commit").disabled
                await pilot.press("enter")
            dialog.query_one(f"#field-{key}", Input).value = good
            await pilot.pause()
            assert dialog.wrong() == {}
        await fill(pilot, "gpus", "nowhere:0")
        await lab.settle(pilot, lambda: lab.shown(app, "no node 'nowhere' in scope"))
        await pilot.press("enter", "escape")
        assert lab.claims(tmp_path) == []


@other.needs_root
async def test_after_a_conflict_the_next_best_set_is_offered(tmp_path: Path) -> None:
    nodes = demo_nodes(claims_dir=str(tmp_path / "claims"))
    core = lab.make_core(tmp_path, nodes, lab.SELDOM)  # what the board shows is older than the race
    async with lab.board(core, twice=True) as (app, pilot):
        with other.somebody(tmp_path, nodes[0]) as agent:
            await open_for(app, pilot, uuids(app, "sim01", 0, 2))
            await lab.settle(pilot, lambda: lab.shown(app, "Will reserve sim01 GPUs 0,2"))
            other.take(agent, "abcdef", uuids(app, "sim01", 2))
            await pilot.press("enter")
            await lab.settle(pilot, lambda: lab.shown(app, "Not reserved: sim01:2 is reserved", "nobody"))
            assert lab.claims(tmp_path) == ["abcdef: sim01-2"]
            await lab.settle(pilot, lambda: lab.shown(app, "Will reserve sim01 GPUs 0,3"))
            assert value(app, "gpus") == "sim01:0,3"
            await pilot.press("enter")
            await lab.settle(pilot, lambda: len(lab.claims(tmp_path)) == 3)
            assert {claim.split()[1] for claim in lab.claims(tmp_path)} == {"sim01-0", "sim01-2", "sim01-3"}
            await lab.settle(pilot, lambda: not isinstance(app.screen, ReserveDialog))
        core.fleet.refresh(core.fleet.names, 60)
        [mine] = [lease for lease in core.scene().leases.leases if lease.id != "abcdef"]
        core.operations.release(mine.id)


@other.needs_root
async def test_no_other_set_is_left_after_a_conflict(tmp_path: Path) -> None:
    nodes = demo_nodes(claims_dir=str(tmp_path / "claims"))
    core = lab.make_core(tmp_path, nodes, lab.SELDOM)
    async with lab.board(core, twice=True) as (app, pilot):
        with other.somebody(tmp_path, nodes[0]) as agent:
            await open_for(app, pilot, [])
            await fill(pilot, "gpus", "3")
            await fill(pilot, "model", "H100")
            await lab.settle(pilot, lambda: lab.shown(app, "Will reserve sim01 GPUs 0,2-3"))
            other.take(agent, "abcdef", uuids(app, "sim01", 2))
            await pilot.press("enter")
            await lab.settle(pilot, lambda: lab.shown(app, "Not reserved: sim01:2 is reserved", "Try: 2 GPUs"))
            assert lab.claims(tmp_path) == ["abcdef: sim01-2"]
            await pilot.press("escape")


@contextlib.asynccontextmanager
async def half_taken(tmp_path: Path, core: Core, app: BoardApp, pilot: Pilot[int]) -> AsyncIterator[int]:
    """Reserve over two nodes, the second of which hangs within the block; yield its pid. Nothing is left afterwards."""
    await open_for(app, pilot, [])
    await fill(pilot, "gpus", "5")
    await lab.settle(pilot, lambda: lab.shown(app, "Will reserve sim01 GPUs 0,2-3 and sim02 GPUs 0-1"))
    with lab.hung(core, "sim02") as pid:
        await pilot.press("enter")
        await lab.settle(pilot, lambda: len(lab.claims(tmp_path)) == 3)
        yield pid
    await lab.settle(pilot, lambda: core.operations._reserving == set() and lab.claims(tmp_path) == [])


async def test_closing_the_dialog_or_going_elsewhere_releases_the_reservation(tmp_path: Path, core: Core) -> None:
    async with lab.board(core) as (app, pilot):
        async with half_taken(tmp_path, core, app, pilot) as agent:
            await pilot.press("escape")
            assert not isinstance(app.screen, ReserveDialog)
            await lab.settle(pilot, lambda: lab.claims(tmp_path) == [])
            os.kill(agent, 0)  # raises where the agent has gone
        app.clear_notifications()
        async with half_taken(tmp_path, core, app, pilot):
            app.go_to("node:sim01")  # as the palette does
            await lab.settle(pilot, lambda: len(app.screen_stack) == 2 and lab.claims(tmp_path) == [])
            assert lab.told(app, "Cancelled: nothing is reserved")


async def test_a_keeper_that_fails_at_the_end_is_reported(
    tmp_path: Path, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handover, "confirm", lab.keeper_ended)
    async with lab.board(core) as (app, pilot):
        await open_for(app, pilot, [])
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve"))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: lab.told(app, "Not reserved: the keeper has ended"))
        await lab.settle(pilot, lambda: lab.claims(tmp_path) == [])
        assert len(app.screen_stack) == 2


async def test_an_answer_that_comes_while_the_dialog_is_removed_is_reported(
    tmp_path: Path, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = threading.Event()
    lost = GpuboardError("sim01: connection lost")
    shown: list[GpuboardError] = []

    def reserve(*_: object) -> Allocation:
        removed.wait(60)
        raise lost

    async with lab.board(core) as (app, pilot):

        async def answered(_: ReserveDialog) -> None:  # its widgets have gone before it
            removed.set()
            while not shown and app.return_code is None:
                await asyncio.sleep(0)

        monkeypatch.setattr(ReserveDialog, "on_unmount", answered, raising=False)
        monkeypatch.setattr(core.operations, "reserve", reserve)
        monkeypatch.setattr(app, "show_error", shown.append)
        await open_for(app, pilot, [])
        await lab.settle(pilot, lambda: lab.shown(app, "Will reserve"))
        await pilot.press("enter")
        await lab.settle(pilot, lambda: lab.shown(app, "Reserving"))
    assert shown == [lost]


async def test_quitting_releases_a_reservation_in_progress(tmp_path: Path, core: Core) -> None:
    async with lab.board(core) as (app, pilot), half_taken(tmp_path, core, app, pilot):
        before = Stopwatch()
        core.close()
        assert before.stop() < 3.0
        await lab.settle(pilot, lambda: lab.claims(tmp_path) == [])


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Core]:
    """A core that knows all nodes, without a board."""
    made = lab.make_core(tmp_path)
    with contextlib.closing(made):
        settled(made)
        yield made


def settled(core: Core) -> None:
    core.start(lambda _: None)
    until(lambda: lab.known(core.scene()), "all nodes are known")


def test_a_lease_that_was_never_shown_ends_with_the_board(started: Core, tmp_path: Path) -> None:
    kept = started.operations.reserve(Request(n=1), 600, "kept")
    started.operations.published(kept)
    unseen = started.operations.reserve(Request(n=1), 600, "unseen")
    assert {claim.split(":")[0] for claim in lab.claims(tmp_path)} == {kept.lease.id, unseen.lease.id}
    started.close()
    until(lambda: len(lab.claims(tmp_path)) <= 1, "one is released")
    assert lab.claims(tmp_path) == [f"{kept.lease.id}: sim02-0"]
    again = lab.make_core(tmp_path, list(started.nodes.values()))
    with contextlib.closing(again):
        settled(again)
        again.operations.release(kept.lease.id)
    assert lab.claims(tmp_path) == []


def test_a_reservation_cancelled_after_it_was_made_is_released(started: Core, tmp_path: Path) -> None:
    attempt = Attempt()
    allocation = started.operations.reserve(Request(n=1), 600, "", attempt)
    attempt.cancel()
    started.operations.published(allocation)
    started.close()
    until(lambda: lab.claims(tmp_path) == [], "it is released")


def test_a_reservation_cancelled_before_it_starts_takes_nothing(started: Core, tmp_path: Path) -> None:
    attempt = Attempt()
    attempt.cancel()
    with pytest.raises(Interrupted):
        started.operations.reserve(Request(n=1), 600, "", attempt)
    started.operations.close()
    with pytest.raises(Interrupted):
        started.operations.reserve(Request(n=1), 600, "")
    assert lab.claims(tmp_path) == []


def test_one_set_of_connections(started: Core) -> None:
    links = [feed.link for feed in started.fleet._feeds.values()]
    found: Allocation = started.operations.reserve(Request(n=5), 600, "")
    started.operations.published(found)
    started.operations.renew(found.lease.id, 1200)
    assert started.scene().by_lease[found.lease.id].remaining_s > 1100
    started.operations.release(found.lease.id)
    assert [feed.link for feed in started.fleet._feeds.values()] == links
    assert all(link is not None and link.over is None for link in links)
