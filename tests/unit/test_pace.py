"""How many connections are set up at once: more where they are fast, fewer where slow; those that hang do not count."""

from __future__ import annotations

import asyncio
import contextlib

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.snapshot.views import NodeFacts
from gpuboard.config import Settings
from gpuboard.shellprobe.connector import NodeConnector
from gpuboard.transport.ssh.pace import AT_ONCE, LEAST, Pace


async def attempt(pace: Pace, under_way: list[int], *, starts: bool = False, hangs: bool = False) -> None:
    turn = await pace.enter()
    under_way.append(under_way[-1] + 1)
    succeeded = False
    try:
        turn.starting = starts
        if hangs:
            await asyncio.Event().wait()
        for _ in range(5):
            await asyncio.sleep(0)
            turn.progress()
        succeeded = True
    finally:
        under_way.append(under_way[-1] - 1)
        pace.leave(turn, succeeded=succeeded)


async def test_fast_successes_raise_the_number_up_to_the_limit() -> None:
    pace, under_way = Pace(64, 60.0), [0]
    await asyncio.gather(*(attempt(pace, under_way) for _ in range(300)))
    assert max(under_way[:AT_ONCE]) <= AT_ONCE
    assert AT_ONCE < max(under_way) <= 64
    assert pace.at_once == 64


async def test_slow_successes_lower_the_number() -> None:
    pace, under_way = Pace(64, 0.0), [0]  # every success is slow
    pace.near_s = 0.0
    await asyncio.gather(*(attempt(pace, under_way) for _ in range(40)))
    assert pace.at_once == LEAST
    assert max(under_way) <= AT_ONCE


async def test_a_slow_network_does_not_lower_the_number() -> None:
    pace = Pace(64, 0.0)
    for _ in range(20):
        turn = await pace.enter()
        await asyncio.sleep(0.01)
        turn.progress()  # the first reply takes about half of it: the network is slow
        await asyncio.sleep(0.01)
        pace.leave(turn, succeeded=True)
    assert pace.at_once > AT_ONCE


async def test_attempts_that_hang_do_not_count() -> None:
    for starts in (False, True):  # in the handshake, or in their shells' start-up files
        pace, under_way = Pace(64), [0]
        hung = [asyncio.create_task(attempt(pace, under_way, starts=starts, hangs=True)) for _ in range(32)]
        await asyncio.wait_for(asyncio.gather(*(attempt(pace, under_way) for _ in range(300))), 120)
        assert not any(task.done() for task in hung)
        assert max(under_way) <= 64
        for task in hung:
            task.cancel()
        await asyncio.wait(hung)


async def test_a_cancelled_attempt_frees_its_turn() -> None:
    pace = Pace(1, 60.0)
    first = await pace.enter()
    waiting = [asyncio.create_task(pace.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    pace.leave(first, succeeded=True)  # the second one's turn, after it was cancelled
    waiting[1].cancel()
    for task in waiting[:2]:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    pace.leave(await asyncio.wait_for(waiting[2], 60), succeeded=True)


def test_nodes_that_answer_one_after_the_other_are_all_reached() -> None:
    names = [f"gpu{number:02d}" for number in range(5)]
    fleet = Fleet([Node(name, name) for name in names], Settings(), interval_s=None, connector=_Nowhere(Settings()))

    def answer(_: float, silent: list[str]) -> None:
        fleet._feeds[silent[0]].facts = NodeFacts(name=silent[0], error="it answers")

    try:
        fleet.wait_all(2.5, answer)  # one about each second
        assert [node.error for node in fleet.snapshot().nodes] == ["it answers"] * len(names)
        fleet._feeds["gpu04"].facts = NodeFacts(name="gpu04")
        fleet.wait_all(0.5)
        assert not fleet._feeds["gpu04"].answered, "one that does not come is not waited for without end"
    finally:
        fleet.close()


class _Nowhere(NodeConnector):
    """Reaches no node."""
