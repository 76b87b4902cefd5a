"""Events: what has happened between two snapshots, damped and merged."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpuboard.board.overview.damper import CALM_S, MOST, WINDOW_S, Damper
from gpuboard.board.overview.events import Baseline, look, merged
from gpuboard.model.lease import Lease, LeaseList
from gpuboard.model.snapshot import GpuView, NodeView, ProcessView, Snapshot, XidView
from gpuboard.model.units import iso, seconds_of
from gpuboard.recording.events import ClusterEvent
from tests.board import made

replace = msgspec.structs.replace


class Watch:
    """Looks at one made snapshot after another, a second apart."""

    def __init__(self) -> None:
        self.seen = Baseline()
        self.now = seconds_of(made.AT)

    def look(
        self,
        *nodes: NodeView,
        leases: Sequence[Lease] = (),
        unread: Sequence[str] = (),
        outdated: Sequence[str] = (),
        **changes: object,
    ) -> list[ClusterEvent]:
        self.now += 1
        snapshot = replace(Snapshot(1, iso(self.now), "lab", list(nodes)), **changes)
        found, self.seen = look(self.seen, snapshot, LeaseList(1, "", [*leases], [*unread], [*outdated]))
        return found


def short(events: Sequence[ClusterEvent]) -> list[tuple[str, ...]]:
    return [(event.kind, *event.nodes, event.gpus, event.user, event.words) for event in events]


def node(name: str, *gpus: GpuView, **changes: object) -> NodeView:
    return made.node(name, gpus, **changes)


def lost(name: str, index: int) -> GpuView:
    return made.gpu(name, index, "broken", reason="GPU lost: fallen off the bus")


def test_what_was_already_so_is_no_event() -> None:
    watch = Watch()
    rogue = made.busy("gpu01", 1, "mallory", flags=["rogue"])
    first = node("gpu01", lost("gpu01", 0), rogue)
    assert watch.look(first, made.awaited("gpu02"), made.unread("gpu03")) == []
    # the second node is read for the first time, and its GPU was broken before
    assert watch.look(first, node("gpu02", lost("gpu02", 0)), made.unread("gpu03")) == []
    assert watch.look(first, node("gpu02", lost("gpu02", 0)), made.unread("gpu03", "no route to host")) == []


def test_a_gpu_is_lost_and_recovers_once_each() -> None:
    watch = Watch()
    watch.look(node("gpu01", made.gpu("gpu01", 0)))
    assert short(watch.look(node("gpu01", lost("gpu01", 0)))) == [("lost", "gpu01", "0", "", "fallen off the bus")]
    assert watch.look(node("gpu01", lost("gpu01", 0))) == []
    assert watch.look(node("gpu01", made.gpu("gpu01", 0, "unknown", reason="NVML: Unknown Error"))) == []
    assert watch.look(node("gpu01", lost("gpu01", 0))) == []
    assert short(watch.look(node("gpu01", made.gpu("gpu01", 0)))) == [("recovered", "gpu01", "0", "", "now free")]


def test_a_gpu_that_the_node_no_longer_lists_is_lost() -> None:
    watch = Watch()
    watch.look(node("gpu01", made.gpu("gpu01", 0), made.gpu("gpu01", 1)))
    assert short(watch.look(node("gpu01", made.gpu("gpu01", 0)))) == [
        ("lost", "gpu01", "1", "", "the node no longer lists it")
    ]
    assert watch.look(node("gpu01", made.gpu("gpu01", 0))) == []


def test_other_reasons_to_look_at_a_gpu() -> None:
    watch = Watch()
    xids = [XidView(31, made.AT, 60.0)]
    gpu = made.gpu("gpu01", 2, "busy", xids=xids, sick=["1 uncorrected ECC error since the driver was loaded"])
    watch.look(node("gpu01", gpu))
    more = replace(
        gpu,
        error="NVML hangs",
        xids=[XidView(79, "2026-01-31T12:00:01.000Z", 0.2), XidView(31, made.AT, 61.0)],
        sick=["2 uncorrected ECC errors since the driver was loaded", "PCIe x8 of x16: narrower than before",
              "XID 79: fallen off the bus"],
    )  # fmt: skip
    found = short(watch.look(node("gpu01", more)))
    assert found[:2] == [
        ("error", "gpu01", "2", "", "NVML hangs"), ("xid", "gpu01", "2", "", "XID 79: fallen off the bus")
    ]  # fmt: skip
    assert ("sick", "gpu01", "2", "", "PCIe x8 of x16: narrower than before") in found
    older = [XidView(xid.code, xid.at, xid.age_s + 1) for xid in more.xids or ()]
    assert watch.look(node("gpu01", replace(more, xids=older))) == []


def test_a_call_that_hangs_is_one_event_while_its_age_grows() -> None:
    watch = Watch()
    watch.look(node("gpu01", made.gpu("gpu01", 0)))
    words = "NVML hangs: a call on this GPU does not return"
    found = []
    for age_s in range(2, 60):
        reason = f"{words}; last reading is {age_s} s old"
        hung = made.gpu("gpu01", 0, "unknown", reason=reason, error=words, delay_s=float(age_s))
        found += watch.look(node("gpu01", hung))
    assert short(found) == [("error", "gpu01", "0", "", words)]
    assert watch.look(node("gpu01", made.gpu("gpu01", 0))) == []


def test_a_rogue_user_is_one_event_however_many_processes() -> None:
    watch = Watch()
    mine = made.busy("gpu01", 0, "alice")
    watch.look(node("gpu01", mine))
    rogues = [ProcessView(70 + n, "mallory", "./miner --pool", None, "compute", rogue=True) for n in range(3)]
    worse = replace(mine, flags=["rogue"], processes=[*(mine.processes or ()), *rogues])
    assert short(watch.look(node("gpu01", worse))) == [("rogue", "gpu01", "0", "mallory", "miner")]
    assert watch.look(node("gpu01", replace(worse, utilization=1))) == []
    other = ProcessView(90, "eve", "./miner2", None, "compute", rogue=True)
    both = replace(worse, flags=["rogue"], processes=[*(worse.processes or ()), other])
    assert short(watch.look(node("gpu01", both))) == [("rogue", "gpu01", "0", "eve", "miner2")]


def test_a_node_is_unreachable_and_back() -> None:
    watch = Watch()
    up = node("gpu01", made.gpu("gpu01", 0))
    watch.look(up)
    gone = replace(up, state="unreachable", error="ssh: connection reset", gpus=[made.gpu("gpu01", 0, "unknown")])
    assert short(watch.look(gone)) == [("unreachable", "gpu01", "", "", "ssh: connection reset")]
    assert watch.look(replace(gone, error="ssh: no answer in 5 s")) == []
    watch.now += 120
    found = watch.look(node("gpu01", lost("gpu01", 0)))  # what it was before the break counts
    assert short(found) == [
        ("back", "gpu01", "", "", "after 2m"), ("lost", "gpu01", "0", "", "fallen off the bus")
    ]  # fmt: skip


def test_leases_end_before_or_at_their_time() -> None:
    watch = Watch()
    up = node("gpu01", made.gpu("gpu01", 0), made.gpu("gpu01", 1))
    lease = made.lease("k3f0", "alice", [("gpu01", 0), ("gpu01", 1)])
    watch.look(up, leases=[lease])
    assert watch.look(up, leases=[lease]) == []
    assert watch.look(up, leases=[], unread=["gpu01"]) == []
    assert short(watch.look(up)) == [("ended", "gpu01", "0-1", "alice", "lease k3f0: 2 GPUs, 7h59m before its end")]
    watch.look(up, leases=[lease])
    watch.now = seconds_of(lease.until)
    assert short(watch.look(up)) == [("expired", "gpu01", "0-1", "alice", "lease k3f0: 2 GPUs")]


def test_a_lease_stands_while_its_ledger_does_not_answer() -> None:
    watch = Watch()
    up = node("gpu01", made.gpu("gpu01", 0))
    lease = replace(made.lease("k3f0", "alice", [("gpu01", 0)]), job="15", ledger="slurm")
    watch.look(up, leases=[lease])
    assert watch.look(up, outdated=["slurm"]) == []
    assert [event.kind for event in watch.look(up)] == ["ended"]


def test_unchanged_nodes_are_not_searched() -> None:
    class Untouched(list[GpuView]):
        def __iter__(self) -> object:  # type: ignore[override]
            raise AssertionError("searched")

    watch = Watch()
    nodes = [node(f"gpu{number:04d}", made.gpu("x", 0)) for number in range(1000)]
    watch.look(*nodes)
    same = [replace(one, gpus=Untouched(one.gpus)) for one in nodes]
    watch.seen = replace(watch.seen, nodes={one.name: one for one in same})
    assert watch.look(*(replace(one, age_s=1.5) for one in same)) == []


def test_a_flapping_node_is_listed_a_few_times_and_then_counted() -> None:
    damper = Damper()
    kinds = ("unreachable", "back")
    found = []
    for second in range(300):
        found += damper.listed([ClusterEvent(made.AT, kinds[second % 2], ("gpu07",))], float(second))
    assert [event.kind for event in found] == [*kinds * (MOST // 2)]
    assert damper.listed([ClusterEvent(made.AT, "unreachable", ("gpu08",))], 300.0)  # another node is not affected
    (last,) = damper.listed([], 299 + CALM_S)
    assert (last.kind, last.words) == ("back", "296 changes since the event before")
    assert damper.listed([], 300 + 2 * CALM_S) == []
    assert damper.listed([ClusterEvent(made.AT, "unreachable", ("gpu07",))], 299 + CALM_S + WINDOW_S) != []


def test_a_single_change_that_was_held_back_has_no_count() -> None:
    damper = Damper()
    for second in range(MOST):
        assert damper.listed([ClusterEvent(made.AT, "sick", ("gpu07",), words="hot")], float(second))
    assert damper.listed([ClusterEvent(made.AT, "sick", ("gpu07",), words="hot")], float(MOST)) == []
    (last,) = damper.listed([], MOST + WINDOW_S)
    assert last.words == "hot"


def test_a_node_that_goes_on_flapping_is_listed_once_per_window() -> None:
    damper = Damper()
    found = []
    for number in range(1, 2 * int(WINDOW_S) // 20):
        event = ClusterEvent(made.AT, "unreachable" if number % 2 else "back", ("gpu07",))
        found += damper.listed([event], 20.0 * number)
    assert [event.words for event in found] == [""] * MOST + [f"{int(WINDOW_S) // 20} changes since the event before"]


def test_alike_events_of_one_moment_are_one() -> None:
    nodes = [f"gpu{number:02d}" for number in range(20)]
    down = [
        ClusterEvent(made.AT, "unreachable", (name,), words="timeout" if name != "gpu03" else "reset") for name in nodes
    ]
    errors = [ClusterEvent(made.AT, "error", ("gpu01",), str(index), words="driver mismatch") for index in (0, 1, 2, 5)]
    rogues = [ClusterEvent(made.AT, "rogue", (name,), "0", "mallory", "./miner") for name in nodes[:2]]
    assert merged([*down, *errors, *rogues]) == [
        ClusterEvent(made.AT, "unreachable", tuple(nodes), words="timeout (19 of 20)"),
        ClusterEvent(made.AT, "error", ("gpu01",), "0-2,5", words="driver mismatch"),
        ClusterEvent(made.AT, "rogue", ("gpu00", "gpu01"), "", "mallory", "./miner"),
    ]
