"""The last minutes of GPUs: what is kept, what is a gap, what is forgotten."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpuboard.board.history import DAY, FIVE_MINUTES, HOUR, SPAN_S, Cluster, History, HostSamples, Samples
from gpuboard.model.gpu import Sensors
from gpuboard.model.snapshot import GpuView, NodeView, Snapshot
from gpuboard.model.state import AWAITS_SECOND
from tests.board.made import GIB, crowd, gpu, mig, node


def shot(*nodes: NodeView) -> Snapshot:
    return Snapshot(1, "", "lab", list(nodes))


def one(**changes: Any) -> GpuView:
    return gpu("n", 0, **changes)


def test_samples_come_back_oldest_first() -> None:
    history = History()
    for second in range(3):
        shown = one(utilization=10 * second, memory_used=second * 20 * GIB, temperature=30 + second, power=70.6)
        assert history.add(shot(node("n", [shown])), 100.0 + second)
    assert history.of("GPU-n-0") == Samples(
        (100.0, 101.0, 102.0), (0, 10, 20), (0.0, 0.248, 0.5), (30, 31, 32), (71, 71, 71), (0, 10, 20)
    )
    assert history.of("GPU-x") == Samples()


def test_earlier_activity_is_put_before_what_is_kept() -> None:
    earlier, later = History(), History()
    for history, seconds in ((earlier, range(1000, 1400)), (later, range(1350, 1450))):
        for at in seconds:
            history.add(shot(node("n", [one(sensors=Sensors(sm_activity=at % 100))])), float(at))
    later.activity.load(earlier.activity)
    assert later.activity.of("GPU-n-0") == tuple((at, Sensors(sm_activity=at % 100)) for at in range(1150, 1450))


def test_activity_is_kept_for_all_of_few_gpus_and_of_many_for_those_on_show() -> None:
    few, many = History(), History()
    many.activity.watch("GPU-gpu0001-3")
    for second in range(400):
        read = Sensors(sm_activity=second % 100)
        stale = node("m", [gpu("m", 0, sensors=read)], state="stale")
        assert few.add(shot(node("n", [one(sensors=read), gpu("n", 1)]), stale), 1000.0 + second)
    big = crowd(20).snapshot
    assert many.add(big, 1000.0)
    past = few.activity.of("GPU-n-0")
    assert (len(past), past[0], past[-1]) == (
        300, (1100.0, Sensors(sm_activity=0)), (1399.0, Sensors(sm_activity=99))
    )  # fmt: skip
    assert few.activity.of("GPU-n-1") == ()  # reports nothing
    assert {read for _, read in few.activity.of("GPU-m-0")} == {None}  # not current
    assert many.activity.of("GPU-gpu0001-3") == ((1000.0, None),)
    assert many.activity.of("GPU-gpu0001-4") == ()
    for number in range(64):
        many.activity.watch(f"GPU-x-{number}")
    assert many.activity.of("GPU-gpu0001-3") == ()  # the one shown longest ago makes room
    few.add(shot(node("n", [one(sensors=Sensors(sm_activity=7))])), 1200.0)  # the clock was set back
    assert few.activity.of("GPU-n-0")[-1] == (1200.0, Sensors(sm_activity=7))


def test_unknown_stays_unknown() -> None:
    history = History()
    history.add(shot(node("n", [one(utilization=None, memory_used=None, temperature=None, power=None)])), 1.0)
    assert history.of("GPU-n-0") == Samples((1.0,), (None,), (None,), (None,), (None,), (None,))


def test_old_values_are_gaps() -> None:
    history = History()
    shots = [
        shot(node("n", [one()])),
        shot(node("n", [one()], state="stale")),
        shot(node("n", [one(error="GPU is lost")])),
        shot(node("n", [one(delay_s=8.0)])),
        shot(node("m", [gpu("m", 0)])),
        shot(node("n", [one()])),
    ]
    for second, snapshot in enumerate(shots):
        history.add(snapshot, float(second))
    assert history.of("GPU-n-0").temperature == (31, None, None, None, None, 31)


def test_values_beyond_sense_are_bounded() -> None:
    history = History()
    history.add(shot(node("n", [one(utilization=10**9, memory_used=10**30, temperature=-4, power=1e300)])), 0.0)
    assert history.of("GPU-n-0") == Samples((0.0,), (100,), (1.0,), (0,), (2581,), (100,))


def test_no_more_than_five_minutes_are_returned() -> None:
    history = History()
    for second in range(1000):
        history.add(shot(node("n", [one(utilization=second % 100)])), float(second))
    samples = history.of("GPU-n-0")
    assert samples.times == tuple(float(second) for second in range(700, 1000))
    assert samples.utilization == tuple(second % 100 for second in range(700, 1000))
    assert samples.times[-1] - samples.times[0] < SPAN_S


def test_a_gpu_that_was_away_for_long_has_no_old_values() -> None:
    history = History()
    history.add(shot(node("n", [one()])), 0.0)
    for second in range(1, 320):
        history.add(shot(node("n", [gpu("n", 1)])), float(second))
    history.add(shot(node("n", [one()])), 320.0)
    assert history.of("GPU-n-0").temperature == (None,) * 299 + (31,)


def test_many_gpus_that_are_gone_are_forgotten() -> None:
    history = History()
    for second in range(300):
        history.add(shot(node("n", [one(), gpu("n", 1 + second)])), float(second))
    assert history.of("GPU-n-1") == Samples()
    assert history.of("GPU-n-300").utilization[-2:] == (None, 0)
    assert history.of("GPU-n-0").utilization == (0,) * 300


def test_an_hour_has_the_means_and_peaks_of_half_minutes() -> None:
    history = History()
    for second in range(95):
        busy = one(
            utilization=100 * (second % 2), memory_used=second * GIB // 2, temperature=second, power=4.0 * second
        )
        history.add(shot(node("n", [busy])), 600.0 + second)
    assert history.of("GPU-n-0", HOUR) == Samples(
        (600.0, 630.0, 660.0, 690.0),
        (50, 50, 50, 40),
        (0.18, 0.368, 0.556, 0.584),
        (29, 59, 89, 94),
        (58, 180, 296, 369),
        (100, 100, 100, 100),
    )
    assert history.of("GPU-n-0", DAY).times == (600.0,)


def test_a_day_has_the_means_and_peaks_of_five_minutes() -> None:
    history = History()
    for second in range(0, 86400 + 3600, 10):
        value = None if second % 600 < 300 else 80 if second % 60 < 30 else 40
        history.add(shot(node("n", [one(utilization=value)])), float(second))
    samples = history.of("GPU-n-0", DAY)
    assert samples.times == tuple(float(at) for at in range(3600 - 300, 86400 + 3600, 300))
    assert list(samples.utilization) == [60, *[None, 60] * 144]
    assert list(samples.peak) == [80, *[None, 80] * 144]
    assert len(history.of("GPU-n-0", HOUR).times) == 121
    assert len(history.of("GPU-n-0", FIVE_MINUTES).times) == 30


def test_a_value_of_zero_is_not_unknown() -> None:
    history = History()
    idle = {"cpu_percent": 0.0, "memory_used": 0, "load1": 0.0, "net_received": 0.0, "net_sent": 0.0}
    for second in range(310):
        history.add(shot(node("n", [one(temperature=0, power=0.0)], **idle)), float(second))
    for span in (FIVE_MINUTES, HOUR, DAY):
        assert {value for values in history.of("GPU-n-0", span)[1:] for value in values} == {0}
        assert {value for values in history.host("n", span)[1:] for value in values} == {0}


def test_a_pause_of_the_board_is_a_gap_not_a_value() -> None:
    history = History()
    for at in (0.0, 1.0, 1000.0, 1001.0):
        history.add(shot(node("n", [one(utilization=50)])), at)
    assert history.of("GPU-n-0", HOUR)[:2] == ((0.0, 990.0), (50, 50))


def test_the_cluster_has_the_mean_of_the_read_gpus_and_those_that_are_free() -> None:
    history = History()
    history.add(
        shot(
            node("n", [one(utilization=90, state="busy"), gpu("n", 1, utilization=40), gpu("n", 2, "unknown")]),
            node("m", [gpu("m", 0, utilization=100)], state="unreachable"),
            node("o", [mig("o", 0, "free", "busy")]),
        ),
        5.0,
    )
    both = Cluster((5.0,), (130 / 3,), (3.0,), (5,))  # a GPU in MIG mode counts as its devices
    assert History().newest() == Cluster()
    assert history.cluster() == history.newest() == both
    assert history.cluster(HOUR) == history.cluster(DAY) == both._replace(times=(0.0,))
    history.add(shot(node("n", [one(state="unknown")], state="unreachable")), 31.0)
    assert history.cluster(HOUR) == Cluster((0.0, 30.0), (130 / 3, None), (3.0, None), (5, 0))
    assert history.newest() == Cluster((31.0,), (None,), (None,), (0,))
    history.add(shot(node("o", [mig("o", 0, "free", "busy", "busy", "free", "free")])), 36.0)  # as many as now
    assert history.cluster().free == (4.5, None, 3.0)
    history.add(shot(node("o", [gpu("o", 0)])), 41.0)
    assert history.cluster().free == (2.5, None, 0.6, 1.0)


def test_free_gpus_are_not_counted_before_their_second_reading() -> None:
    history = History()
    waits = gpu("n", 0, "unknown", reason=AWAITS_SECOND)
    for second, free in enumerate((waits, gpu("n", 0), waits)):
        history.add(shot(node("n", [free, gpu("n", 1, "busy", utilization=50)])), 100.0 + second)
    past = history.cluster()
    assert (past.free, past.known, past.utilization) == ((None, 1.0, 0.0), (0, 2, 1), (25.0, 25.0, 25.0))


def test_the_last_bucket_of_an_earlier_board_is_kept_for_the_day() -> None:
    first, later = History(), History()
    for second in range(0, 400, 10):
        first.add(shot(node("n", [one(utilization=60)])), float(second))
    later.load(first.past._replace(records=((), *first.past.records[1:])), 20000.0)  # samples are not on disk
    assert later.of("GPU-n-0", DAY)[:2] == ((0.0, 300.0), (60, 60))
    assert later.of("GPU-n-0", HOUR) == Samples()


def test_a_node_has_samples_of_its_own() -> None:
    history = History()
    host = {"cpu_percent": 40.0, "memory_used": 256 * GIB, "memory_total": 512 * GIB, "load1": 16.0}
    for second in range(60):
        traffic = {"net_received": 4e8 * (second % 2), "net_sent": 4e8 * (second % 2)}
        history.add(shot(node("n", [one(utilization=90)], **host, **traffic)), 30.0 + second)
    history.add(shot(node("n", [one()], state="stale", **host)), 90.0)
    assert history.host("n", HOUR) == HostSamples(
        (30.0, 60.0, 90.0), (40, 40, None), (0.5, 0.5, None), (16, 16, None), (3.92e8, 3.92e8, None), (40, 40, None)
    )
    assert history.host("n").network[:2] == (0, 8e8)
    assert history.host("m") == HostSamples()
    assert history.cluster(HOUR).utilization == (90, 90, None)  # of GPUs alone


def test_a_clock_that_is_set_back_drops_what_is_later_than_now() -> None:
    history = History()
    for second in range(100):
        history.add(shot(node("n", [one(utilization=second)])), 1000.0 + second)
    assert history.add(shot(node("n", [one(utilization=7)])), 1050.5)
    assert history.of("GPU-n-0").utilization == (*range(51), 7)
    assert history.of("GPU-n-0", HOUR).times == (990.0, 1020.0, 1050.0)


def test_the_first_sample_is_of_the_first_gpus() -> None:
    history = History()
    assert [history.add(shot(node("n", gpus)), now) for now, gpus in ((0.0, []), (0.1, [one()]))] == [False, True]


def test_scenes_that_come_often_are_not_all_kept() -> None:
    history = History()
    taken = [tick / 20 for tick in range(2000) if history.add(shot(node("n", [one()])), tick / 20)]
    assert (len(taken), taken[:3], taken[-1]) == (100, [0.0, 1.0, 2.0], 99.0)


def test_scenes_a_little_early_or_late_are_all_kept() -> None:
    history = History()
    assert all(history.add(shot(node("n", [one()])), second + 0.2 * (second % 2)) for second in range(100))


def test_a_large_cluster_is_sampled_less_often() -> None:
    history, large = History(), crowd(1000).snapshot
    assert [history.add(large, float(second)) for second in range(11)] == [s % 5 == 0 for s in range(11)]
    assert len(history.of("GPU-gpu0001-0").times) == 3


@given(st.lists(st.one_of(st.none(), st.integers(0, 100)), min_size=1, max_size=40), st.integers(1, 400))
def test_what_went_in_comes_out(values: list[int | None], start: int) -> None:
    history = History()
    for second, value in enumerate(values):
        history.add(shot(node("n", [one(utilization=value)])), float(start + second))
    assert history.of("GPU-n-0").utilization == tuple(values)


def test_means_are_of_several_gpus_in_bins_that_shift() -> None:
    history = History()
    for second in range(0, 340, 2):
        values = [40 if second < 320 else None, 80] if second >= 240 else [0, 20]
        history.add(shot(node("n", [gpu("n", k, utilization=value) for k, value in enumerate(values)])), float(second))
    assert history.means(["GPU-n-0", "GPU-n-1", "GPU-x"], 15) == [10.0] * 10 + [60.0] * 4 + [80.0]
    assert history.means(["GPU-n-0"], 15)[-1] is None
    assert history.means(["GPU-x"], 3) == [None] * 3


def test_a_single_bin_without_a_sample_is_bridged_and_a_vanished_gpu_is_a_gap() -> None:
    history = History()
    for second in (0, 40, 60, 80, 200, 280, 299):
        gpus = [gpu("n", 0, utilization=second)] if second < 200 else []
        history.add(shot(node("n", [*gpus, gpu("n", 1, utilization=1)])), float(second))
    assert history.means(["GPU-n-0"], 15) == [0, 0, 40, 60, 80, *[None] * 10]
    assert history.means(["GPU-n-1"], 15)[9:] == [None, 1, None, None, None, 1]
