"""Which rank the others wait for, step after step: from the times of collectives, on simulated ranks."""

from __future__ import annotations

import math
import queue
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import msgspec
import pytest

from gpuboard.agent.launch.watch.pace import arrivals, steps, transfers
from gpuboard.launch.runs.folder import RankView, VerdictView
from gpuboard.launch.stalls.pace import (
    FIRST_LOOKS,
    ClockOffset,
    GroupCalls,
    GroupPace,
    PaceReading,
    RankCalls,
    RankPace,
    RankReading,
    better,
    clock,
    first_paces,
    first_steps,
    paces,
)
from gpuboard.launch.stalls.slow import evidence, pace_lines, remedy, slow_text
from gpuboard.launch.stalls.straggler import PaceTiming, PaceWatch, Straggler
from gpuboard.launch.supervisors import Supervisors
from gpuboard.model.snapshot import GpuView, NodeView, Snapshot
from gpuboard.transport.connector import Connector
from tests.unit.test_plan import planned

Work = Callable[[int, int], Sequence[float]]  # rank, step → own time before each collective of the step


def simulated(
    work: Work,
    ranks: int = 3,
    count: int = 50,
    *,
    overlap: bool = False,
    equal: bool = False,
    ahead_s: float = 0.0,
    within_s: float = 0.0,
) -> list[RankCalls]:
    """Return when ranks call collectives, of which each waits for the last rank; with ``overlap`` the step's last one.

    ``equal``: all calls are equal, so that each one looks like a step.

    Ranks 2 and above are on gpu02, whose clock is ``ahead_s`` ahead of what is known, to within ``within_s``.
    """
    noise = random.Random(1)
    now = [1000.0] * ranks
    called: list[list[float]] = [[] for _ in range(ranks)]
    offsets: list[int] = []
    for step in range(count):
        offsets.append(len(called[0]))
        own = [work(rank, step) for rank in range(ranks)]
        for k in range(len(own[0])):
            for rank in range(ranks):
                now[rank] += own[rank][k] * noise.uniform(0.99, 1.01)
                called[rank].append(now[rank])
            if not overlap or k == len(own[0]) - 1:
                now = [max(now) + 0.001] * ranks
    if equal:
        offsets = list(range(len(called[0])))
    return [
        RankCalls(rank, _calls(times, offsets, ahead_s * (rank > 1)), 0.0, within_s, f"gpu0{rank // 2 + 1}")
        for rank, times in enumerate(called)
    ]


def _calls(times: Sequence[float], offsets: list[int], ahead_s: float = 0.0, name: str = "0") -> GroupCalls:
    stamps = [round((at + ahead_s) * 1e6) for at in times]
    gaps = [later - earlier for earlier, later in pairwise(stamps)]
    return GroupCalls(name, 1, stamps[0], gaps, offsets)


def slow(calls: Sequence[RankCalls]) -> tuple[int, ...]:
    """Return the slow ranks of the only process group."""
    (found,) = paces(calls, {})
    return found.slow


def test_a_rank_that_needs_a_third_more_time_is_named_with_what_the_others_wait() -> None:
    (found,) = paces(simulated(lambda rank, _: [0.13 if rank == 1 else 0.1]), {})
    assert (found.slow, found.group, found.steps) == ((1,), "0", 49)
    assert [found.step_s, found.late_s] == pytest.approx([0.131, 0.03], abs=0.002)
    assert [one.own_s for one in found.ranks] == pytest.approx([0.101, 0.131, 0.101], abs=0.002)
    assert found.newest == 50


def _data_dependent(seed: int) -> Work:
    lengths = random.Random(seed)
    return lambda _rank, _step: [lengths.choice([0.1, 0.15, 0.2])]


@pytest.mark.parametrize(
    "work",
    [
        lambda _rank, _step: [0.1],
        lambda rank, _: [0.108 if rank == 1 else 0.1],  # a little slower
        lambda rank, step: [0.15 if step % 3 == rank else 0.1],  # each in turn
        lambda rank, step: [1.1 if rank == 0 and step % 10 == 0 else 0.1],  # rank 0 logs, or saves
        lambda rank, _: [0.1 if rank == 1 else 0.13],  # one is fast: most are not slow
        *(_data_dependent(seed) for seed in range(5)),
    ],
)
def test_nobody_is_named_in_a_healthy_run(work: Work) -> None:
    assert slow(simulated(work)) == ()


def test_too_few_steps_and_a_single_rank_tell_nothing() -> None:
    assert paces(simulated(lambda rank, _: [0.1 + rank], count=20), {}) == []
    assert paces(simulated(lambda _rank, _step: [0.1], ranks=1), {}) == []
    assert paces(simulated(lambda rank, _: [0.1 + rank], count=50), {"0": 35}) == [], "all others were judged before"


def first(work: Work, ranks: int = 3, count: int = 0, **others: bool) -> list[GroupPace]:
    """Return the first judgement of a run, after as few steps as it needs, or ``count``."""
    calls = simulated(work, ranks, count or first_steps(ranks) + 3, **others)
    return first_paces(calls, {rank: RankReading(rank) for rank in range(ranks)})


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 32])
def test_a_rank_that_is_the_last_in_every_step_is_named_after_a_few(ranks: int) -> None:
    def late(rank: int, _: int) -> list[float]:
        return [0.13 if rank == 1 else 0.1]

    (found,) = first(late, ranks)
    assert (found.slow, found.steps) == ((1,), first_steps(ranks))
    assert first(late, ranks, first_steps(ranks) + 2) == [], "one step fewer"
    starved = {rank: RankReading(rank, delayed=0.2 if rank == 1 else 0.0) for rank in range(ranks)}
    (found,) = first_paces(simulated(late, ranks), starved)
    assert found.slow == (), "a fifth of its time it had no CPU"
    (found,) = first(lambda rank, step: [0.13 if rank == 1 and step >= 20 else 0.1], ranks, 23 + first_steps(ranks))
    assert found.slow == (1,), "since some steps"


def test_buckets_that_overlap_with_computing_are_waited_for_in_the_first_steps_too() -> None:
    (found,) = first(lambda rank, _: [0.065 if rank == 1 else 0.05] * 2, overlap=True)
    assert found.slow == (1,)
    assert found.late_s == pytest.approx(0.03, rel=0.1)


NOISE: list[Callable[[random.Random], float]] = [
    lambda noise: noise.uniform(0.1, 0.3),
    lambda noise: noise.choice([0.1, 0.2]),
    lambda noise: 0.05 + noise.expovariate(10.0),
    lambda noise: 0.1 * noise.paretovariate(1.5),
    lambda noise: 1.1 if noise.random() < 0.1 else 0.1,
]


def test_chance_names_a_rank_by_its_first_steps_in_less_than_one_of_10000_runs() -> None:
    """Exactly, for the same rank to be last in all steps of a look; whatever it is late by comes on top."""
    for ranks in range(2, 2000):
        assert FIRST_LOOKS * float(ranks) ** (1 - first_steps(ranks)) <= 1e-4
    named = 0
    for seed in range(20):
        for draw in NOISE:
            for ranks in (2, 3, 8):
                noise = random.Random(seed)
                calls = simulated(lambda _rank, _step, draw=draw, noise=noise: [draw(noise)], ranks, 60)  # type: ignore[misc]
                for end in range(first_steps(ranks) + 3, 60, 4):
                    until = [_until(one, end) for one in calls]
                    named += any(
                        pace.slow for pace in first_paces(until, {rank: RankReading(rank) for rank in range(ranks)})
                    )
    assert named == 0


def _until(one: RankCalls, count: int) -> RankCalls:
    calls = msgspec.structs.replace(one.calls, gaps_us=one.calls.gaps_us[: count - 1], steps=one.calls.steps[:count])
    return msgspec.structs.replace(one, calls=calls)


@pytest.mark.parametrize(
    "work",
    [
        lambda rank, step: [0.1 + 0.1 * (rank == 0 and step < 2)],  # compiles in the first steps
        lambda rank, step: [0.1 + 0.3 * (rank == 0) * math.exp(-step / 8)],  # fills a cache
        lambda rank, step: [0.15 if step // 5 % 3 == rank else 0.1],  # each in turn
        lambda rank, step: [0.1 if rank != 0 or step % 6 else 0.2],  # rank 0 writes a log
        lambda rank, step: [0.13 if rank == 1 and step % 9 else 0.1],  # not always
        lambda rank, _: [0.13 if rank else 0.1],  # all but one
        lambda rank, _: [0.11 if rank == 1 else 0.1],  # too little
    ],
)
def test_nobody_is_named_by_the_first_steps_of_a_healthy_run(work: Work) -> None:
    for count in range(15, 40):
        assert [pace.slow for pace in first(work, 3, count)] == [()], count


def test_two_ranks_of_a_slow_node_are_named_together() -> None:
    assert slow(simulated(lambda rank, _: [0.14 if rank in {2, 3} else 0.1], ranks=8)) == (2, 3)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("buckets", [2, 5, 12])
def test_collectives_that_overlap_with_computing_are_waited_for_once_per_step(buckets: int, equal: bool) -> None:
    """As DistributedDataParallel's buckets: the lag of the slow rank grows until the end of the step."""

    def work(rank: int, _: int) -> list[float]:
        return [each * (1.3 if rank == 1 else 1.0) for each in [0.1, *[0.1 / buckets] * (buckets - 1)]]

    (found,) = paces(simulated(work, overlap=True, equal=equal), {})
    own = 0.1 + 0.1 / buckets * (buckets - 1)
    assert found.slow == (1,)
    assert [found.step_s, found.late_s] == pytest.approx([1.3 * own, 0.3 * own], rel=0.05)


def test_what_one_rank_does_now_and_then_parts_no_steps() -> None:
    calls = simulated(lambda rank, step: [1.1 if rank == 0 and step % 5 == 0 else 0.1], count=120, equal=True)
    (found,) = paces(calls, {})
    assert found.slow == ()
    assert found.step_s == pytest.approx(0.1, abs=0.01)


def test_clocks_of_nodes_are_compared_only_as_far_as_they_are_known() -> None:
    def late(rank: int, _: int) -> list[float]:
        return [0.13 if rank == 3 else 0.1]

    assert slow(simulated(late, ranks=4, within_s=0.002)) == (3,)
    assert slow(simulated(late, ranks=4, within_s=0.02)) == ()
    assert slow(simulated(lambda _rank, _step: [0.1], ranks=4, ahead_s=0.02, within_s=0.02)) == ()
    reading = PaceReading([], received=105.0, replied=105.5)
    there = clock(100.0, reading, 100.6)
    assert [there.ahead_s, there.within_s] == pytest.approx([4.95, 0.05])
    sure = ClockOffset(4.96, 0.002)
    assert better(sure, there, 10.0) == ClockOffset(4.96, 0.003)
    assert better(sure, ClockOffset(4.961, 0.0025), 10.0) == ClockOffset(4.961, 0.0025)
    assert better(sure, ClockOffset(6.0, 0.05), 10.0) == ClockOffset(6.0, 0.05), "the clock was set"


def test_a_rank_that_is_late_because_it_waits_in_another_group_is_not_named() -> None:
    """Ranks 0-1 and 2-3 share a model, 0 and 2, 1 and 3 a part of it; rank 0 is slow."""
    times: list[list[float]] = [[], [], [], []]
    reduced: list[list[float]] = [[], [], [], []]
    now = 1000.0
    for _ in range(50):
        own = [0.14, 0.1, 0.1, 0.1]
        done = [now + max(own[:2]), now + max(own[:2]), now + max(own[2:]), now + max(own[2:])]
        for rank in range(4):
            times[rank].append(now + own[rank])
            reduced[rank].append(done[rank] + 0.001)
        now = max(done) + 0.002
    offsets = list(range(50))
    calls = []
    for rank in range(4):
        calls.append(RankCalls(rank, _calls(times[rank], offsets, name=f"model{rank // 2}"), 0.0, 0.0, "gpu01"))
        calls.append(RankCalls(rank, _calls(reduced[rank], offsets, name=f"data{rank % 2}"), 0.0, 0.0, "gpu01"))
    assert {pace.group: pace.slow for pace in paces(calls, {})} == {
        "model0": (0,), "model1": (), "data0": (0,), "data1": (),
    }  # fmt: skip


def test_steps_are_found_where_some_have_more_calls() -> None:
    gradients, flag = ("all_reduce", [[5000]]), ("broadcast", [[1]])
    step = [gradients, ("all_reduce", [[9000]])]
    assert steps([*step, flag, *step * 5]) == [0, 3, 5, 7, 9, 11]
    assert steps(([gradients] * 20 + [flag]) * 5) == [k for k in range(104) if k % 21 != 20]
    assert steps(([gradients] * 20 + [("all_reduce", [[70, 30]])]) * 5) == [0, 21, 42, 63, 84], "buckets of one step"
    lengths = [("all_reduce", [[k * k]]) for k in range(8)]
    assert steps(lengths) == list(range(8)), "the operations repeat"
    assert len(steps([(str(k * k), []) for k in range(600)])) == 60, "nothing repeats"
    start = [("all_gather", [[9]]), ("broadcast", [[9000]])]
    assert steps([*start, *step * 12])[-12:] == list(range(2, 26, 2)), "few steps after those that start a run"


def test_a_trace_is_read_by_process_group() -> None:
    def entry(seq: int, *, p2p: bool = False) -> dict[str, object]:
        return {
            "is_p2p": p2p, "process_group": ["0", "default_pg"], "pg_id": 0, "collective_seq_id": seq,
            "input_sizes": [[4]],
            "time_created_ns": 1_000_000_000 + 5_000_000 * seq, "profiling_name": "gloo:all_reduce",
        }  # fmt: skip

    trace = {"entries": [entry(1), entry(2), entry(2, p2p=True), entry(3)]}
    assert arrivals(trace) == [
        {"name": "0", "first": 1, "called_us": 1_005_000, "gaps_us": [5000, 5000], "steps": [0, 1, 2]}
    ]
    assert arrivals({"entries": [entry(1), entry(3)]}) == [], "not all are there"


def test_ranks_of_a_pipeline_are_not_judged_as_they_wait_for_messages() -> None:
    """The first stage ends its backward pass last, and waits for the others' meanwhile."""
    calls = simulated(lambda rank, _: [0.13 if rank == 0 else 0.1])
    assert slow(calls) == (0,)
    assert slow([msgspec.structs.replace(one, transfers=True) for one in calls]) == ()

    def entry(seq: int, *, p2p: bool = False) -> dict[str, object]:
        return {"is_p2p": p2p, "process_group": ["8c65e96b", ""], "pg_id": 0, "collective_seq_id": seq}

    def status(**enqueued: int) -> dict[str, object]:
        return {name[1:]: {"last_enqueued_collective": str(count)} for name, count in enqueued.items()}

    steps = [entry(seq) for seq in range(1, 21)]
    assert not transfers({"entries": steps, "pg_status": status(g0=20)})
    assert not transfers({"entries": steps, "pg_status": status(g0=22)}), "now and then"
    assert not transfers({"entries": steps, "pg_status": status(g0=-1)})
    assert not transfers({"entries": []})
    assert transfers({"entries": steps, "pg_status": status(g0=60)}), "gloo counts them together"
    assert transfers({"entries": steps, "pg_status": status(g0=20, g1=40)}), "in a group of their own"
    assert transfers({"entries": [*steps, *[entry(k, p2p=True) for k in range(20)]], "pg_status": status(g0=20)})


def pace(*named: int, newest: int = 100) -> GroupPace:
    """Return the pace of three ranks, of which those named are slow."""
    ranks = [RankPace(rank, 0.14 if rank in named else 0.1, 0.0 if rank in named else 0.04) for rank in range(3)]
    return GroupPace("0", 40, 0.14, ranks, newest, named, 0.04 if named else 0.0)


def test_three_looks_in_a_row_establish_a_slow_rank_and_its_end() -> None:
    watch = PaceWatch()
    assert not watch.due(1000.0)
    for _ in range(FIRST_LOOKS):
        watch.looked_sooner([pace()], 0, 1000.0)
    assert not watch.due(1009.0)
    now, named, looks = 1010.0, [], []
    for found in [[], [pace(1)], [pace(1)], [pace(2)], [pace(1)], [], [pace(1)], [pace(1)], [pace()], [pace(1)],
                  [pace()], [pace()], [pace()]]:  # fmt: skip
        assert watch.due(now)
        looks.append(now)
        watch.looked(found, now)
        named.append(watch.slow is not None)
        while not watch.due(now):
            now += 1.0
    assert named == [False] * 7 + [True] * 5 + [False]
    assert looks[3] - looks[2] == 5.0, "soon again while a rank is suspected"
    for _ in range(10):
        watch.looked([pace()], now)
    assert not watch.due(now + 59.0)
    assert watch.due(now + 60.0)
    assert watch.judged == {"0": 100}


def test_the_first_looks_follow_the_first_steps() -> None:
    watch, looks = PaceWatch(PaceTiming(first_s=1000.0)), []
    watch.due(0.0)
    for now in range(400):
        if watch.due(now):
            looks.append(now)
            calls = max(0, (now - 60) // 5)  # the data is prepared for a minute
            watch.looked_sooner([pace()] if calls >= 12 else [], calls, now)
    gaps = [later - earlier for earlier, later in pairwise(looks)]
    assert max(gap for look, gap in zip(looks, gaps, strict=False) if 75 < look < 125) <= 6, "calls are coming"
    assert len(looks) < 60
    assert gaps[-1] > 20, "less often when there is nothing new"
    assert looks[-1] < 400 - 20, "not for ever"


def test_a_rank_named_by_its_first_steps_is_confirmed_or_withdrawn() -> None:
    for later in (pace(1), pace()):
        watch = PaceWatch()
        watch.due(0.0)
        watch.looked_sooner([], 5, 2.0)
        watch.looked_sooner([pace(1)], 20, 4.0)
        assert watch.slow == pace(1)
        assert watch.newest == [pace(1)], "for `explain`"
        for now in (10.0, 20.0):
            watch.looked([later], now)
            assert (watch.slow, watch.confirmed) == (pace(1), False)
            assert watch.due(now + 5.0), "soon again"
        watch.looked([later], 30.0)
        assert (watch.slow, watch.confirmed) == ((pace(1), True) if later.slow else (None, False))


RANKS = {rank: RankView(rank, f"gpu0{rank // 2 + 1}", rank % 2, rank % 2) for rank in range(3)}


def test_the_verdict_has_what_is_beside_the_slow_rank() -> None:
    readings = {
        rank: RankReading(rank, 0.9 - rank / 10, [0.99, 0.97] if rank == 1 else [0.2, 0.3]) for rank in range(3)
    }
    hot = GpuView(1, "GPU-1", "H100", "", "busy", "", temperature=91, power=310.2, throttle=["hw_thermal"])
    cool = [GpuView(0, f"GPU-{k}", "H100", "", "busy", "", temperature=60 + k, power=650.0) for k in range(2)]
    nodes = [NodeView("gpu01", "up", gpus=[cool[0], hot]), NodeView("gpu02", "up", gpus=[cool[1]])]
    snapshot = Snapshot(1, "", "", nodes)
    found, loads = pace(1), {"gpu01": 2.5, "gpu02": 0.2}
    assert slow_text(found, RANKS) == "slow: the other ranks wait 40 ms of 140 ms in each step for rank 1 (gpu01:1)"
    assert evidence(found, RANKS, readings, loads, snapshot) == [
        "own time per step: 140 ms; the others 100 ms",
        "CPU: 80 %; the others 70 % to 90 % of a core",
        "DataLoader workers and other child processes: 2, each 98 %; the others 25 % of a core",
        "load: gpu01 2.5; the other nodes 0.2 tasks per CPU",
        "GPU gpu01:1: 91 °C (the others 60 to 61), 310 W (the others 650), too hot, slowed down by the hardware",
    ]
    assert remedy(found, RANKS, readings, loads, snapshot).startswith("its GPU runs with lowered clocks")
    assert remedy(found, RANKS, readings, loads, None).startswith("its DataLoader workers are busy")
    idle = {1: RankReading(1, 0.02)}
    assert remedy(found, RANKS, idle, loads, None).startswith("it hardly computes (2 % of a core)")
    assert remedy(found, RANKS, {}, loads, None).startswith("CPUs of gpu01 are scarce")
    assert remedy(found, RANKS, {}, {}, None).startswith("`gpuboard explain --stacks`")
    assert evidence(found, RANKS, {}, {}, None) == ["own time per step: 140 ms; the others 100 ms"]
    assert pace_lines(found, RANKS)[:3] == [
        "140 ms per step, the median of 40 steps:",
        "  rank 0 (gpu01:0): own time 100 ms, waits 40 ms",
        "  rank 1 (gpu01:1): own time 140 ms, waits 0.0 ms, the others wait for it",
    ]


def test_the_verdict_waits_for_a_reading_of_the_gpus() -> None:
    printed: list[str] = []
    asked: list[float] = []
    connector = cast(Connector, None)  # no node is asked here
    supervisors = Supervisors(planned(), {}, connector, queue.SimpleQueue())
    timing = PaceTiming(gpus_s=4.0)
    straggler = Straggler(supervisors, RANKS, read_gpus=lambda: asked.append(1.0), notify=printed.append, timing=timing)

    def standing() -> VerdictView | None:
        return straggler.verdict

    straggler.take_gpus(Snapshot(1, "", "", []))  # preflight's
    for now in (10.0, 20.0, 30.0):
        straggler.watch.looked([pace(1)], now)
    assert not straggler.tick(31.0, [])
    assert (asked, standing(), printed) == ([1.0], None, [])
    hot = GpuView(1, "GPU-1", "H100", "", "busy", "", temperature=91)
    straggler.take_gpus(Snapshot(1, "", "", [NodeView("gpu01", "up", gpus=[hot])]))
    named = standing()
    assert named is not None
    assert (named.kind, named.rank, named.node) == ("slow", 1, "gpu01")
    assert "GPU gpu01:1: 91 °C" in printed[0]
    for now in (40.0, 50.0, 60.0):
        straggler.watch.looked([pace()], now)
    assert straggler.tick(61.0, [])
    assert standing() is None
    assert printed[1:] == ["no rank is slower than the others any more"]
    for now in (70.0, 80.0, 90.0):
        straggler.watch.looked([pace(1)], now)
    assert not straggler.tick(91.0, [])
    assert not straggler.tick(94.0, [])
    assert straggler.tick(95.0, []), "the GPUs could not be read"
    assert "GPU gpu01" not in printed[-1]


def test_the_confirmation_of_a_slow_rank_is_one_line() -> None:
    printed: list[str] = []
    supervisors = Supervisors(planned(), {}, cast(Connector, None), queue.SimpleQueue())
    straggler = Straggler(supervisors, RANKS, read_gpus=None, notify=printed.append)
    straggler.watch.due(0.0)
    straggler.watch.looked_sooner([pace(1)], 20, 4.0)
    assert straggler.tick(4.0, [])
    for now in (10.0, 15.0, 20.0):
        assert not straggler.tick(now, [])
        straggler.watch.looked([pace(1)], now)
    assert straggler.tick(20.0, [])
    assert [line.splitlines()[0] for line in printed] == [
        "slow: the other ranks wait 40 ms of 140 ms in each of the last 40 steps for rank 1 (gpu01:1)",
        "slow: the other ranks wait 40 ms of 140 ms in each step for rank 1 (gpu01:1)",
    ]
    assert [len(line.splitlines()) > 1 for line in printed] == [True, False]
    assert straggler.verdict is not None
    assert "own time per step" in (straggler.verdict.evidence or "")


def test_several_slow_ranks_are_named_with_their_nodes() -> None:
    text = slow_text(pace(0, 1), RANKS)
    assert text == "slow: the other rank waits 40 ms of 140 ms in each step for ranks 0-1 (gpu01)"
