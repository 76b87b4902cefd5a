"""Snapshots built from the last one equal the first one of a new builder, over random histories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuboard.board.history.records import keys, sample
from gpuboard.cluster.snapshot.builder import SnapshotBuilder
from gpuboard.cluster.snapshot.views import NodeFacts, Scheduled, View, inert_static, node_claims
from gpuboard.model.gpu import GpuReading, GpuStatic, Load, MigReading, MigStatic, Process, Sensors, Xid
from gpuboard.model.late import base_of
from gpuboard.model.reading import Claim, GpuDetails, GpuNumbers, Hello, Reading, ReadingDelta, Static, applied, shared
from gpuboard.model.snapshot import GpuView, SchedulerView, Snapshot, judged
from gpuboard.model.state import Job, Ruling, Thresholds

replace = msgspec.structs.replace
GIB = 2**30
USERS = {"al": "alice"}
HELLO = Hello(hostname="gpu01", boot_id="b", uid=1, user="alice", pid=2, python="3.6.8", addresses=["10.0.0.1"])
STATICS = [
    GpuStatic(index=0, uuid="GPU-a", name="H100", pci_bus_id="1", memory_total=80 * GIB, pcie_width_max=16),
    GpuStatic(index=1, uuid="GPU-b", name="GB10", pci_bus_id="2", memory_total=80 * GIB, memory_shared=True),
    GpuStatic(index=2, uuid="GPU-c", name="A100", pci_bus_id="3", mig=[MigStatic("MIG-0", "3g.40gb", 40 * GIB)]),
]
PROCESSES = [
    Process(pid=1, type="compute", memory=GIB, user="al", name="python", command="train", started=10.0, lease="k1"),
    Process(pid=2, type="compute", memory=None, user=None, name="python", started=None),
    Process(pid=3, type="graphics", memory=9, user="root", name="Xorg", started=1.5),
    Process(pid=4, type="compute", memory=GIB, user="bob", name="python", started=20.0, uid=7, lease="old"),
]
# Every field of GpuReading: NUMBERS change at nearly every reading, EVENTS now and then.
NUMBERS: dict[str, Any] = {
    "memory_used": st.sampled_from([0, 0, 1, 512 * 2**20, 3 * GIB, None]),
    "utilization": st.sampled_from([0, 0, 4, 5, 50]),
    "temperature": st.sampled_from([30, 31]),
    "power": st.sampled_from([70.0, 71.5]),
    "pcie_generation": st.sampled_from([1, 5]),
    "sensors": st.sampled_from([None, Sensors(sm_clock=345), Sensors(sm_clock=1980, fan=30)]),
    "loads": st.sampled_from([[], [Load(7, 12.5, GIB)], [Load(8, 99.0, 2 * GIB), Load(None, 1.0)]]),
}
EVENTS: dict[str, Any] = {
    "memory_used": st.none(),
    "utilization": st.none(),
    "processes": st.none() | st.lists(st.sampled_from(PROCESSES), max_size=2),
    "compute_mode": st.sampled_from([None, 0, 2, 3]),
    "power_limit": st.sampled_from([None, 700.0]),
    "error": st.sampled_from([None, "Unknown \x1b Error"]),
    "lost": st.booleans(),
    "delay_s": st.sampled_from([0.0, 0.5, 9.0, -1.0]),
    "throttle": st.sampled_from([[], ["hw_thermal"], ["sw_power_cap"]]),
    "pcie_width": st.sampled_from([None, 8, 16]),
    "ecc_uncorrected": st.sampled_from([None, 0, 3]),
    "remap_pending": st.booleans(),
    "remap_failed": st.booleans(),
    "recovery_action": st.sampled_from([None, "none", "reset"]),
    "xids": st.sampled_from([None, [], [Xid(79, 5.0)]]),
    "mig": st.sampled_from([[], [MigReading("MIG-0", 0, [])], [MigReading("MIG-0", 1, PROCESSES[:1])]]),
}
CLAIMS = [
    Claim(lease="k1", uuid="GPU-a", uid=1, owner="al", state="live", since=0, until=9, purpose="a\nb"),
    Claim(lease="k2", uuid="GPU-b", uid=2, owner="bob", state="live", since=0, until=9, disputed_with=["k1"]),
    Claim(lease="k1", uuid="GPU-b", uid=1, owner="al", state="live", since=0, until=9),
    Claim(lease="k3", uuid="GPU-a", uid=1, owner="al", state="lapsed", since=0, until=9),
    Claim(lease="k4", uuid="MIG-0", uid=1, owner="al", state="live", since=0, until=9),
]
RULINGS = [
    Ruling(),
    Ruling((Job("7", "al", "gpu", 1e9),)),
    Ruling(hidden="a job that Slurm does not show you"),
    Ruling(doubt="Slurm: the node is down", note="by order"),
    Ruling(withheld="Slurm: drained: \x07"),
]
SCHEDULED = st.builds(
    Scheduled,
    state=st.sampled_from(["idle", "mixed+drain"]),
    gpus=st.dictionaries(st.sampled_from(["GPU-a", "GPU-b", "MIG-0"]), st.sampled_from(RULINGS)),
    shown=st.sampled_from([[], STATICS[:1], [*STATICS, GpuStatic(3, "slurm-3", "h100", "", minor=3)]]),
    doubt=st.sampled_from(["", "Slurm: the node is down"]),
    error=st.sampled_from([None, None, "no answer"]),
    asked=st.floats(0.0, 1000.0),
)


def idle(uuid: str) -> GpuReading:
    return GpuReading(uuid=uuid, memory_used=0, utilization=0, compute_mode=0, processes=[], recovery_action="none")


class History:
    """Two nodes with random events, drawn by ``data``."""

    def __init__(self, data: st.DataObject, view: View) -> None:
        self.data, self.view = data, view
        self.statics = self.draw(st.sampled_from([STATICS, STATICS[:2]]))  # with and without a GPU in MIG mode
        known = {gpu.uuid: inert_static(gpu) for gpu in self.statics}
        self.nodes = [
            NodeFacts(name="gpu01", hello=HELLO, static=Static(gpus=self.statics), known=known),
            NodeFacts(name="gpu02"),
        ]
        self.claims: list[Claim] = []
        self.busy: dict[str, float] = {}

    def draw(self, what: Any) -> Any:
        return self.data.draw(what)

    def happen(self) -> None:
        """Apply one event."""
        node = self.nodes[0]
        what = self.draw(st.sampled_from(["tick"] * 6 + ["event", "node", "claims", "time", "frame", "other", "jobs"]))
        if what in {"tick", "event"}:
            for _ in range(self.draw(st.integers(1, 3))):  # several readings may arrive before somebody looks
                self.read(what == "event")
        elif what == "claims":
            self.claims = self.draw(st.lists(st.sampled_from(CLAIMS), max_size=3))
        elif what == "time":
            self.view = replace(self.view, now=self.view.now + self.draw(st.sampled_from([0.0, 0.4, 4.0, 6.0, 901.0])))
            if self.draw(st.booleans()):
                self.busy = self.busy | {"GPU-a": self.view.now}
        elif what == "node" and node.reading is not None:
            changes = {"claims_error": "NFS", "nvml_error": "driver reload", "interval_s": 2.0, "gpus": []}
            key = self.draw(st.sampled_from(sorted(changes)))
            self.nodes[0] = replace(node, reading=replace(node.reading, **{key: changes[key]}))
        elif what == "frame":
            self.nodes[0] = self.draw(
                st.sampled_from(
                    [
                        replace(node, error=None if node.error else "lost: \x07"),
                        replace(node, hello=replace(HELLO, hostname="other")),
                        replace(node, static=Static(gpus=STATICS[:2], driver="580")),
                        replace(node, known=node.known | {"GPU-a": replace(STATICS[0], index=5)}),
                        replace(node, previous=None),
                        replace(node, closed=not node.closed),
                    ]
                )
            )
        elif what == "jobs":
            names = st.sampled_from(["gpu01", "gpu02"])
            scheduled = self.draw(st.dictionaries(names, SCHEDULED))
            age_s = self.draw(st.sampled_from([None, 1.0, 2.0]))
            self.view = replace(self.view, scheduled=scheduled, scheduler=SchedulerView("slurm", age_s))
        elif what == "other":  # a node that holds a claim on a GPU of the first
            claims = self.draw(st.lists(st.sampled_from(CLAIMS[:2]), max_size=1))
            reading = Reading(seq=1, at=1.0, interval_s=1.0, claims=claims)
            self.nodes[1] = replace(self.nodes[1], reading=reading, arrived=self.view.now)

    def read(self, event: bool) -> None:
        """Add a reading a second after the last one."""
        node, old = self.nodes[0], self.nodes[0].reading
        gpus = (
            list(old.gpus)
            if old and old.gpus
            else [
                replace(idle(gpu.uuid), processes=self.draw(st.sampled_from([[], PROCESSES[:1]])))
                for gpu in self.statics
            ]
        )
        for place, gpu in enumerate(gpus):
            key = self.draw(st.sampled_from(sorted(NUMBERS)))
            gpus[place] = replace(gpu, **{key: self.draw(NUMBERS[key])})
        if event:
            place = self.draw(st.integers(0, len(gpus) - 1))
            key = self.draw(st.sampled_from(sorted(EVENTS)))
            gpus[place] = replace(gpus[place], **{key: self.draw(EVENTS[key])})
            if self.draw(st.integers(0, 9)) == 0:
                gpus = self.draw(st.sampled_from([gpus[1:], gpus[::-1], [*gpus, gpus[0]]]))
        self.view = replace(self.view, now=self.view.now + 1.0)
        age = self.draw(st.sampled_from([0.0, 1.0]))
        claims = [replace(claim, remaining_s=3700.0 - self.view.now, age_s=age) for claim in self.claims]
        seq = old.seq + 1 if old else 1
        reading = Reading(seq=seq, at=100.0 + seq, interval_s=1.0, gpus=gpus, claims=claims, load1=seq / 7)
        reading = replace(reading, net_received=seq * 1e6, net_sent=seq / 3)
        if old and old.gpus and not event and self.draw(st.booleans()):
            new = applied(delta(reading), old)
        else:  # as it comes: decoded, nothing in it shared with the one before
            decoded = msgspec.json.decode(msgspec.json.encode(reading), type=Reading)
            new = shared(decoded, old)
            assert new == decoded
        self.nodes[0] = replace(
            node, reading=new, previous=old, arrived=self.view.now - 0.1, last_busy=self.busy, error=None
        )


def delta(new: Reading) -> ReadingDelta:
    """Return what the agent sends of a reading in which only numbers have changed."""

    def values(kind: type[msgspec.Struct], source: object) -> dict[str, Any]:
        return {name: getattr(source, name) for name in kind.__struct_fields__ if hasattr(source, name)}

    numbers = [GpuNumbers(**values(GpuNumbers, gpu)) for gpu in new.gpus]
    details = msgspec.json.encode([GpuDetails(**values(GpuDetails, gpu)) for gpu in new.gpus])
    return ReadingDelta(**values(ReadingDelta, new) | {"of": 1, "gpus": numbers, "details": msgspec.Raw(details)})


def rogue(gpu: GpuView) -> list[str | None]:
    """The users without permission; the board's events take them for unchanged where the flags are the same object."""
    return [process.user for process in gpu.processes or () if process.rogue]


@given(st.data(), st.booleans(), st.sampled_from([1.0, 5.0]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_later_snapshots_equal_those_of_a_new_builder(data: st.DataObject, one_shot: bool, interval_s: float) -> None:
    view = View(
        now=1000.0, at=1.0, cluster="c", thresholds=Thresholds(), users=USERS, interval_s=interval_s, one_shot=one_shot
    )
    history, builder, late = History(data, view), SnapshotBuilder(), SnapshotBuilder()
    seen: dict[str, GpuView] = {}
    unread: list[tuple[Snapshot, Snapshot]] = []
    for _ in range(data.draw(st.integers(2, 25))):
        history.happen()
        expected = SnapshotBuilder().snapshot(history.nodes, history.view)
        found = builder.snapshot(history.nodes, history.view)
        assert found == expected
        unread.append((late.snapshot(history.nodes, history.view), expected))
        assert [_judgements(judged(node)) for node in unread[-1][0].nodes] == [
            _judgements(node.gpus) for node in expected.nodes
        ]
        for gpu in found.nodes[0].gpus:
            before = seen.get(gpu.uuid, gpu)
            assert gpu.flags is not before.flags or "rogue" not in gpu.flags or rogue(gpu) == rogue(before)
            seen[gpu.uuid] = gpu
        assert [builder.claims(node, USERS) for node in history.nodes] == [node_claims(n, USERS) for n in history.nodes]
    for found, expected in unread:  # their numbers are put in now, after all later readings
        columns = {key: number for number, key in enumerate(keys(expected.nodes))}
        assert sample(found.nodes, columns, 0.0) == sample(expected.nodes, columns, 0.0)
        assert found == expected


def _judgements(gpus: Sequence[GpuView]) -> list[Any]:
    """What does not depend on numbers alone."""
    return [
        (gpu.uuid, gpu.name, gpu.state, gpu.flags, gpu.sick, gpu.leases, gpu.jobs, gpu.error, gpu.xids, gpu.mig)
        for gpu in gpus
    ]


def test_histories_change_every_field_of_a_gpu() -> None:
    fields = {field.name for field in msgspec.structs.fields(GpuReading)}
    assert NUMBERS.keys() | EVENTS.keys() == fields - {"uuid"}


class Watch:
    """A node of one GPU read once a second, in snapshots of one builder, each compared with a new builder's."""

    def __init__(self, gpu: GpuReading, claims: list[Claim], **facts: Any) -> None:
        self.gpu, self.claims = gpu, claims
        self.builder = SnapshotBuilder()
        self.node = NodeFacts(
            name="gpu01", static=Static(gpus=STATICS[:1]), known={"GPU-a": inert_static(STATICS[0])}, **facts
        )
        self.other = NodeFacts(name="gpu02")
        self.now = 0.0

    def read(self) -> None:
        reading = Reading(seq=1, at=self.now + 100, interval_s=1.0, gpus=[self.gpu], claims=self.claims)
        self.now += 1.0
        self.node = replace(self.node, reading=reading, previous=self.node.reading, arrived=self.now)

    def hold(self, claims: list[Claim]) -> None:
        reading = Reading(seq=1, at=1.0, interval_s=1.0, claims=claims)
        self.other = replace(self.other, reading=reading, arrived=self.now)

    def see(self, after_s: float = 0.0) -> GpuView:
        self.now += after_s
        view = View(
            now=self.now, at=1.0, cluster="c", thresholds=Thresholds(), users={}, interval_s=1.0, one_shot=False
        )
        nodes = [self.node, self.other]
        seen = self.builder.snapshot(nodes, view)
        assert seen == SnapshotBuilder().snapshot(nodes, view)
        return seen.nodes[0].gpus[0]


def test_time_alone_makes_a_reserved_gpu_idle() -> None:
    watch = Watch(idle("GPU-a"), [CLAIMS[0]], last_busy={"GPU-a": -896.0})
    watch.read()
    watch.read()
    assert watch.see().flags == []
    assert watch.see(1.0).flags == []
    assert watch.see(1.0).flags == ["idle"]


def test_a_lease_that_ends_elsewhere_leaves_a_process_overdue() -> None:
    watch = Watch(replace(idle("GPU-a"), processes=PROCESSES[:1]), [])
    watch.hold([CLAIMS[2]])
    watch.read()
    watch.read()
    assert watch.see().flags == []
    watch.hold([])
    assert watch.see().flags == ["overdue"]
    watch.hold([CLAIMS[2]])
    watch.read()
    assert watch.see().flags == []
    watch.hold([])
    watch.read()
    assert watch.see().flags == ["overdue"]


def test_a_claim_stored_on_another_node_changes_nothing() -> None:
    watch = Watch(idle("GPU-a"), [])
    watch.read()
    watch.read()
    assert watch.see().state == "free"
    watch.hold([replace(CLAIMS[1], uuid="GPU-a")])
    assert watch.see().state == "free"


def test_ages_within_a_reading_grow() -> None:
    sick = Watch(replace(idle("GPU-a"), xids=[Xid(79, 5.0)]), [])
    ages = []
    for _ in range(3):
        sick.read()
        xids = sick.see().xids
        assert xids is not None
        ages.append(xids[0].age_s)
    assert ages == [95.0, 96.0, 97.0]
    late = Watch(replace(idle("GPU-a"), delay_s=4.0), [])
    late.read()
    late.read()
    assert [late.see(after).state for after in (0.0, 0.9, 0.2)] == ["free", "free", "unknown"]


def test_gpus_that_change_in_numbers_only_are_not_judged_again() -> None:
    """Their views are made from the last ones: what does not change is the same object."""
    statics = {gpu.uuid: inert_static(gpu) for gpu in STATICS[:2]}
    node = NodeFacts(name="gpu01", static=Static(gpus=STATICS[:2]), known=statics)
    view = View(
        now=0.0, at=1.0, cluster="c", thresholds=Thresholds(), users={}, interval_s=1.0, one_shot=False
    )  # fmt: skip
    builder, views = SnapshotBuilder(), []
    for second in range(5):
        gpus = [
            replace(idle("GPU-a"), temperature=30 + second, processes=[PROCESSES[0]], utilization=50 + second),
            replace(idle("GPU-b"), temperature=30 + second),
        ]
        reading = Reading(seq=second, at=100.0 + second, interval_s=1.0, gpus=gpus)
        node = replace(node, reading=reading, previous=node.reading, arrived=float(second))
        views.append(builder.snapshot([node], replace(view, now=second + 0.1)).nodes[0].gpus)
    assert [(a.state, a.utilization, b.state, b.temperature) for a, b in views] == [
        ("busy", 50 + second, "free" if second else "unknown", 30 + second) for second in range(5)
    ]
    assert all(a.reason is views[2][0].reason and a.flags is views[2][0].flags for a, _ in views[2:])
    assert views[4][0].processes is not None
    assert views[4][0].processes[0].runtime_s == 94.0


def test_an_answer_of_the_scheduler_that_says_the_same_changes_no_view() -> None:
    node = NodeFacts(name="gpu01", static=Static(gpus=STATICS[:1]), known={"GPU-a": inert_static(STATICS[0])})
    view = View(now=0.0, at=1.0, cluster="c", thresholds=Thresholds(), users={}, interval_s=1.0, one_shot=False)
    builder, seen, reading = SnapshotBuilder(), [], None
    for second, job in enumerate("777778"):
        whole = Reading(seq=second, at=second, interval_s=1.0, gpus=[idle("GPU-a")])
        reading = whole if reading is None else applied(delta(whole), reading)
        node = replace(node, reading=reading, previous=node.reading, arrived=float(second))
        ruling = Ruling((Job(job, "al", "gpu", 1e9),))
        said = Scheduled(gpus={"GPU-a": ruling}, asked=float(second), jobs=frozenset({int(job)}))
        later = replace(view, now=second + 0.1, scheduled={"gpu01": said})
        shot = builder.snapshot([node], later)
        assert shot == SnapshotBuilder().snapshot([node], later)
        seen.append(judged(shot.nodes[0])[0])
    assert seen[2] is seen[3] is seen[4]
    assert [job.id for job in seen[5].jobs] == ["8"]


def test_an_allocated_gpu_becomes_idle_without_a_new_reading() -> None:
    reading = Reading(seq=1, at=0.0, interval_s=1.0, gpus=[idle("GPU-a")])
    node = NodeFacts(
        name="gpu01", static=Static(gpus=STATICS[:1]), known={"GPU-a": inert_static(STATICS[0])}, reading=reading,
        previous=reading, arrived=100.0, last_busy={"GPU-a": 100.0},
    )  # fmt: skip
    limits = Thresholds(idle_after_s=1.5)
    said = {"gpu01": Scheduled(gpus={"GPU-a": Ruling((Job("7", "al", "gpu", 1e9),))}, jobs=frozenset({7}))}
    builder, flags = SnapshotBuilder(), []
    for now in (100.5, 101.0, 102.0):
        view = View(
            now=now, at=1.0, cluster="c", thresholds=limits, users={}, interval_s=1.0, one_shot=False, scheduled=said
        )
        shot = builder.snapshot([node], view)
        assert shot == SnapshotBuilder().snapshot([node], view)
        flags.append(shot.nodes[0].gpus[0].flags)
    assert flags == [[], [], ["idle"]]


@pytest.mark.parametrize("closed", [True, False])
def test_a_claim_ends_and_returns_with_its_job_without_a_new_reading(closed: bool) -> None:
    claim = replace(CLAIMS[0], job="7", remaining_s=100.0)
    reading = Reading(seq=1, at=0.0, interval_s=1.0, gpus=[idle("GPU-a")], claims=[claim])
    node = NodeFacts(
        name="gpu01", static=Static(gpus=STATICS[:1]), known={"GPU-a": inert_static(STATICS[0])}, closed=closed,
        reading=reading, previous=reading, arrived=100.0,
    )  # fmt: skip
    other = NodeFacts(name="gpu02", reading=replace(reading, gpus=[], claims=[CLAIMS[0]]), arrived=100.0)
    view = View(now=101.0, at=1.0, cluster="c", thresholds=Thresholds(), users={}, interval_s=1.0, one_shot=False)
    builder, states = SnapshotBuilder(), []
    for asked, jobs in ((110.0, {7}), (111.0, set()), (112.0, set()), (113.0, {7})):
        said = Scheduled(gpus={"GPU-a": Ruling()}, asked=asked, jobs=frozenset(jobs))
        seen = replace(view, scheduled={"gpu01": said})
        shot = builder.snapshot([node, other], seen)
        assert shot == SnapshotBuilder().snapshot([node, other], seen)
        states.append(shot.nodes[0].gpus[0].state)
    assert states == ["reserved", "free", "free", "reserved"]


def test_memory_that_becomes_unreadable_makes_a_busy_gpu_unknown() -> None:
    node = NodeFacts(name="gpu01", static=Static(gpus=STATICS[:1]), known={"GPU-a": inert_static(STATICS[0])})
    view = View(now=0.0, at=1.0, cluster="c", thresholds=Thresholds(), users={}, interval_s=1.0, one_shot=False)
    builder, states = SnapshotBuilder(), []
    first = replace(idle("GPU-a"), memory_used=GIB, processes=PROCESSES[:1])
    reading: Reading | None = None
    for second, memory in enumerate((GIB, GIB, GIB, None, GIB)):
        whole = Reading(seq=second, at=second, interval_s=1.0, gpus=[replace(first, memory_used=memory)])
        reading = whole if reading is None else applied(delta(whole), reading)
        node = replace(node, reading=reading, previous=node.reading, arrived=float(second))
        states.append(builder.snapshot([node], replace(view, now=second + 0.1)).nodes[0].gpus[0].state)
    assert states == ["busy", "busy", "busy", "unknown", "busy"]


@pytest.mark.parametrize("missed", [{"utilization": 90}, {"memory_used": 20 * GIB}, {"memory_used": None}, {}])
def test_the_reading_before_counts_where_nobody_looked_at_it(missed: dict[str, Any]) -> None:
    """GPUs are judged by their newest two readings, also where both have come since the last snapshot."""
    both = {gpu.uuid: inert_static(gpu) for gpu in STATICS[:2]}
    node = NodeFacts(name="gpu01", static=Static(gpus=STATICS[:2]), known=both)
    view = View(now=0.0, at=1.0, cluster="c", thresholds=Thresholds(), users={}, interval_s=1.0, one_shot=False)
    builder, found = SnapshotBuilder(), []
    reading: Reading | None = None
    for second, changed in enumerate(({}, {}, {}, missed, {}, {}, {})):
        gpus = [replace(idle("GPU-a"), temperature=second, **changed), replace(idle("GPU-b"), temperature=second)]
        whole = Reading(seq=second, at=second, interval_s=1.0, gpus=gpus)
        reading = whole if reading is None else applied(delta(whole), reading)
        node = replace(node, reading=reading, previous=node.reading, arrived=float(second))
        if second in {2, 4, 6}:
            seen = replace(view, now=second + 0.1)
            found.append(builder.snapshot([node], seen))
            assert found[-1] == SnapshotBuilder().snapshot([node], seen)
    assert [shot.nodes[0].gpus[0].state == "free" for shot in found] == [True, not missed, True]
    assert missed or judged(found[1].nodes[0]) is judged(found[2].nodes[0])  # not judged again


def test_claims_of_one_lease_that_move_are_noticed() -> None:
    """The leases stay the same, and the readings differ in numbers and claims alone."""
    both = {gpu.uuid: inert_static(gpu) for gpu in STATICS[:2]}
    node = NodeFacts(name="gpu01", static=Static(gpus=STATICS[:2]), known=both)
    view = View(now=0.0, at=1.0, cluster="c", thresholds=Thresholds(), users={}, interval_s=1.0, one_shot=False)
    on_a, on_b = CLAIMS[0], CLAIMS[2]
    builder, states = SnapshotBuilder(), []
    reading: Reading | None = None
    for second, claims in enumerate(([on_a], [on_a], [on_a], [on_a, on_b], [on_a, on_b], [on_b], [on_b], [on_a])):
        left = [replace(claim, remaining_s=3600.0 - second) for claim in claims]
        gpus = [replace(idle(gpu.uuid), temperature=second) for gpu in STATICS[:2]]
        whole = Reading(seq=second, at=second, interval_s=1.0, gpus=gpus, claims=left)
        reading = whole if reading is None else applied(delta(whole), reading)
        node = replace(node, reading=reading, previous=node.reading, arrived=float(second))
        seen = replace(view, now=second + 0.1)
        shot = builder.snapshot([node], seen)
        assert shot == SnapshotBuilder().snapshot([node], seen)
        states.append("".join(gpu.state[0] for gpu in shot.nodes[0].gpus))
    assert states == ["ru", "rf", "rf", "rr", "rr", "fr", "fr", "rf"]


def test_what_a_reading_shares_with_the_one_before() -> None:
    old = Reading(seq=1, at=1.0, interval_s=1.0, gpus=[replace(idle("GPU-a"), processes=PROCESSES[:1]), idle("GPU-b")])
    moved = [replace(old.gpus[0], processes=list(PROCESSES[:1]), power=99.0), replace(idle("GPU-b"), lost=True)]
    new = replace(old, seq=2, gpus=moved)
    found = shared(new, old)
    assert found == new
    assert base_of(found.gpus)[0] is old.gpus[0]
    assert found.gpus[0].processes is old.gpus[0].processes
    assert found.gpus[1] is moved[1]
    assert shared(new, None) is new
    fewer = replace(new, gpus=moved[:1])
    assert shared(fewer, old) is fewer
    assert base_of(shared(replace(old, seq=2, gpus=[moved[0], idle("GPU-b")]), old).gpus) is old.gpus
    assert base_of(shared(replace(old, seq=2, gpus=[idle("GPU-b"), moved[0]]), old).gpus) is not old.gpus
    later = shared(replace(new, seq=3, gpus=[replace(gpu, power=7.0) for gpu in moved]), found)
    assert base_of(later.gpus) is base_of(found.gpus)
    assert [gpu.power for gpu in later.gpus] == [7.0, 7.0]
