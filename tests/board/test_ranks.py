"""The picture of a run's ranks: what each one does, who waits for whom, at any number of ranks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpuboard.board.text.detail.ranks import Mark, marks, picture
from gpuboard.board.text.detail.run import explained
from gpuboard.board.theme.styles import ASCII, Look
from gpuboard.launch.runs.folder import RankView, RunView, VerdictView
from gpuboard.launch.stalls.verdict import Explanation
from gpuboard.launch.stalls.waits import RankGroup
from gpuboard.launch.stalls.words import of_several
from gpuboard.model.units import iso
from tests.board import lab
from tests.board.test_runs import beside, entry, keep, made_at, opened, view
from tests.integration.launch_lab import Launch, without_torch

REDUCE = "waits in all_reduce (collective 812) at train.py:88 in step"
LOAD = "idle at train.py:41 in load_batch"


def run(count: int, states: Mapping[int, str] | None = None, per: int = 8, default: str = "running") -> RunView:
    of = states or {}
    ranks = [
        RankView(rank, f"gpu{rank // per + 1:02d}", rank % per, rank % per, 100 + rank, of.get(rank, default))  # type: ignore[arg-type]
        for rank in range(count)
    ]
    return view(ranks=ranks, verdicts=[])


def stall(count: int, *behind: int) -> list[RankGroup]:
    """Return what ranks do that all wait for some of them."""
    waiting = [rank for rank in range(count) if rank not in behind]
    words = of_several(REDUCE) if len(waiting) > 1 else REDUCE
    return [RankGroup(waiting, "collective", words, list(behind)), RankGroup(list(behind), "code", LOAD, suspect=True)]


def drawn(view: RunView, groups: Sequence[RankGroup] = (), cells: int = 78, most: int = 8) -> list[str]:
    """Return the picture as text without colours; a style is wanted for nothing."""
    return ["".join(text for text, _ in line).rstrip() for line in picture(view, groups, cells, most, Look({}))]


def test_of_two_ranks_the_one_that_is_waited_for_is_named_with_its_place() -> None:
    assert drawn(run(2, per=1), stall(2, 1)) == [
        "Ranks        gpu01 0 W    gpu02 1 B!",
        " B! 1        gpu02:0, idle at train.py:41 in load_batch ← rank 0 waits for it",
        " W  0        gpu01:0, waits in all_reduce (collective 812) at train.py:88 in",
        "             step → rank 1",
    ]


def test_of_64_ranks_equal_ones_share_a_line() -> None:
    lines = drawn(run(64), stall(64, 41, 42), cells=118, most=11)
    assert lines == [
        "Ranks        gpu01 0-7   W W W W  W W W W    gpu02 8-15  W W W W  W W W W    gpu03 16-23 W W W W  W W W W",
        "             gpu04 24-31 W W W W  W W W W    gpu05 32-39 W W W W  W W W W    gpu06 40-47 W B!B!W  W W W W",
        "             gpu07 48-55 W W W W  W W W W    gpu08 56-63 W W W W  W W W W",
        " B! 41-42      idle at train.py:41 in load_batch ← ranks 0-40,43-63 wait for them",
        " W  0-40,43-63 wait in all_reduce (collective 812) at train.py:88 in step → ranks 41-42",
    ]


def test_of_512_ranks_the_nodes_that_differ_are_shown_and_the_others_folded() -> None:
    lines = drawn(run(512), stall(512, 511))
    assert lines[:3] == [
        "Ranks        gpu64 504-511 W W W W  W W W B!",
        "             504 more ranks on 63 nodes: W",
        " B! 511      gpu64:7, idle at train.py:41 in load_batch ← ranks 0-510 wait for",
    ]
    assert len(lines) <= 8
    assert len(drawn(run(512), stall(512, 511), cells=198, most=20)) == 15, "all nodes where there is room"
    assert drawn(run(100, per=100), stall(100, 50))[:2] == [
        "Ranks        gpu01 48-63 W W B!W  W W W W  W W W W  W W W W",
        "             84 more ranks on 1 node: W",
    ]


def test_the_whole_picture_keeps_to_its_height_and_width_whatever_the_ranks_do() -> None:
    groups = [
        RankGroup([rank], "code", f"idle at train.py:{rank} in some_function", [], rank == 7) for rank in range(48)
    ]
    for cells in (50, 78, 118, 198):
        for most in (5, 8, 20):
            lines = drawn(run(48), groups, cells, most)
            assert len(lines) <= most + 1, (cells, most, lines)
            assert max(map(len, lines)) <= cells
            assert " B! 7 " in "\n".join(lines)
            assert re.search(r"R running: (\d|\d+ ranks)", "\n".join(lines))


def test_without_a_stall_ranks_are_shown_by_the_state_of_their_processes() -> None:
    assert drawn(run(4, {1: "importing"}, default="gate")) == [
        "Ranks        gpu01 0-3 G I G G",
        "             G gate: 0,2-3   I importing: 1",
    ]


def test_the_rank_that_failed_first_stands_out_and_its_echoes_are_dim() -> None:
    verdict = VerdictView("", "raised", 1, "gpu01", "rank 1 (gpu01:1) failed: ValueError")
    failed = run(4, {1: "failed", 2: "failed", 3: "done"}, default="killed")
    failed = msgspec.structs.replace(failed, state="failed", verdicts=[verdict])
    assert drawn(failed) == [
        "Ranks        gpu01 0-3 K X!X D",
        "             X! failed: 1   K killed: 0   X failed too: 2   D done: 3",
    ]
    assert marks(failed, ()) == {
        0: Mark("killed", "K", "dim", False),
        1: Mark("failed", "X", "bad", True),
        2: Mark("failed", "X", "dim", False),
        3: Mark("done", "D", "dim", False),
    }


def test_what_a_rank_does_is_newer_than_what_was_inspected_once_it_has_ended() -> None:
    other = [RankGroup([2], "stopped", "stopped", suspect=True), RankGroup([3, 4], "unknown", "state unknown")]
    now = run(6, {0: "lost", 4: "gate", 5: "done"})
    groups = [RankGroup([0, 5], "collective", REDUCE, [1]), RankGroup([1], "code", LOAD, suspect=True), *other]
    assert [(mark.word, mark.letter, mark.suspect) for mark in marks(now, groups).values()] == [
        ("lost", "L", False), ("behind", "B", True), ("stopped", "S", True), ("?", "?", False), ("gate", "G", False),
        ("done", "D", False),
    ]  # fmt: skip
    assert drawn(now, groups)[-1] == "             L lost: 0   D done: 5"


def test_arrows_are_ascii_where_the_terminal_is() -> None:
    lines = picture(run(2), stall(2, 1), 118, 8, Look({}, ASCII))
    text = "\n".join("".join(text for text, _ in line) for line in lines)
    assert text.isascii()
    assert "<- rank 0 waits for it" in text
    assert "-> rank 1" in text


def test_an_explanation_repeats_nothing_that_the_verdict_has() -> None:
    stalled = entry(view(verdicts=[VerdictView("", "stall-behind", 1, "gpu01", "stalled: waiting 9 s for rank 1")]))
    assert explained(stalled, None, 0.0) == [("Explained", "inspecting the ranks", "dim")]
    assert explained(stalled, Explanation([], "waiting for rank 1", "", []), 4.6) == [
        ("Explained", "5 s ago: unchanged", "bad")
    ]
    assert explained(stalled, Explanation([], "waiting for rank 0", "kill -CONT 7", [], ["gpu02: no py-spy"]), 1) == [
        ("Explained", "1 s ago: waiting for rank 0", "bad"),
        ("Remedy", "kill -CONT 7", "good"),
        ("Not seen", "gpu02: no py-spy", "warn"),
    ]
    assert explained(stalled, Explanation([], None, "", []), 0.2)[0][1] == "0 s ago: no rank waits for another one"


# The screen


async def test_a_stalled_run_of_64_ranks_fits_on_any_screen(tmp_path: Path) -> None:
    words = "stalled: waiting 12 s for rank 41 (gpu06:1), which is at train.py:41 in load_batch"
    verdict = VerdictView(iso(made_at()), "stall-behind", 41, "gpu06", words, "→ see the disk", stall(64, 41))
    keep(lab.environment(tmp_path), msgspec.structs.replace(run(64), state="stalled", verdicts=[verdict]))
    async with opened(tmp_path, (80, 24)) as (app, pilot, screen):
        await screen.workers.wait_for_complete()
        for size in ((80, 24), (120, 34), (200, 60)):
            await pilot.resize_terminal(*size)
            for part in (words, "stalled for ", "see the disk", "gpu06 40-47 W B!W W", "gpu06:1, idle at train.py:41"):
                assert lab.shown(app, part), lab.screen(app)
            assert lab.shown(app, "← ranks 0-40,42-63 wait for it", "→ rank 41", "Rank State", "0 waits gpu01")
            assert lab.screen(app).splitlines()[-1].endswith("? Help")


STALL = """
import os, time
from torch.distributed import barrier, meet
meet()
print("up", flush=True)
while os.environ["RANK"] == "1" and not os.path.exists("go"):
    time.sleep(600)
barrier()
"""


def test_a_stall_is_drawn_and_explained_on_request(tmp_path: Path) -> None:
    """The replacement of torch has no flight recorder: the stacks decide."""

    picture = ("B! 1", "at script.py:7 ← rank 0 waits for it", "→ rank 1", "1 behind", "0 waits")

    async def scenario(launch: Launch) -> None:
        async with beside(launch, tmp_path, (80, 24)) as (app, pilot):
            await pilot.press("e")
            await lab.settle(pilot, lambda: lab.shown(app, "s ago: waiting for rank 1", *picture))
            await lab.settle(pilot, lambda: lab.shown(app, "stalled for", "stalled: waiting", *picture))
            assert not lab.shown(app, "Explained"), "the verdict is newer"
            await pilot.press("e")
            await lab.settle(pilot, lambda: lab.shown(app, "s ago: unchanged", *picture))

    with Launch(tmp_path, STALL, *without_torch(tmp_path), "--grace", "0") as launch:
        asyncio.run(scenario(launch))
