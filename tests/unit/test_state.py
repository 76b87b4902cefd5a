"""The state of a GPU: its rules one by one, and what must hold for any reading at all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.model.gpu import GpuReading, GpuStatic, MigStatic, Process, Xid
from gpuboard.model.reading import Claim
from gpuboard.model.state import STATES, Facts, Job, Ruling, Thresholds, judge, narrow_links
from gpuboard.model.units import day_time

GIB = 2**30
UUID = "GPU-0"
STATIC = GpuStatic(index=0, uuid=UUID, name="H100", pci_bus_id="0", memory_total=80 * GIB, pcie_width_max=16)
SPLIT = msgspec.structs.replace(STATIC, mig=[MigStatic("MIG-0", "3g.40gb")])
SHARED = msgspec.structs.replace(STATIC, name="NVIDIA GB10", memory_shared=True)
IDLE = GpuReading(uuid=UUID, memory_used=0, utilization=0, compute_mode=0, processes=[])
CLAIM = Claim(lease="k3f9", uuid=UUID, uid=1, owner="alice", state="live", since=0, until=9, remaining_s=3725)
BOB = Process(pid=7, type="compute", memory=GIB, user="bob", name="python")


def facts(**changes: Any) -> Facts:
    """Return the facts of an idle GPU with ``changes``; those that are a reading's go there."""
    own = {key: changes.pop(key) for key in list(changes) if key not in Facts.__struct_fields__}
    return msgspec.structs.replace(Facts(static=STATIC, reading=msgspec.structs.replace(IDLE, **own)), **changes)


TABLE: list[tuple[str, dict[str, Any], str, str, tuple[str, ...]]] = [
    ("idle", {}, "free", "no process, no reservation", ()),
    ("a job", {"ruling": Ruling((Job("12", "bob"),))}, "allocated", "job 12 of bob", ()),
    ("a job on an unread GPU", {"ruling": Ruling((Job("12", "bob"),)), "reading": None},
     "allocated", "job 12 of bob", ()),
    ("a job with a limit", {"ruling": Ruling((Job("12", "bob", "gpu", 1e9),))},
     "allocated", f"job 12 of bob in gpu, until {day_time(1e9)}", ()),
    ("a suspended job", {"ruling": Ruling((Job("12", "bob", words="suspended"),))},
     "allocated", "job 12 of bob, suspended", ()),
    ("two jobs, shards", {"ruling": Ruling((Job("12", "bob"), Job("13", "eve")))},
     "allocated", "job 12 of bob; job 13 of eve", ()),
    ("a hidden job", {"ruling": Ruling(hidden="a job that you cannot see")},
     "allocated", "a job that you cannot see", ()),
    ("lost in a job", {"ruling": Ruling((Job("12", "bob"),)), "lost": True}, "allocated", "job 12 of bob", ()),
    ("a job, unused", {"ruling": Ruling((Job("12", "bob"),)), "idle_for_s": 900.0},
     "allocated", "job 12 of bob; unused for 15m and more", ("idle",)),
    ("a hidden job, unused", {"ruling": Ruling(hidden="hidden"), "idle_for_s": 900.0},
     "allocated", "hidden; unused for 15m and more", ("idle",)),
    ("a stranger in a job", {"ruling": Ruling((Job("12", "alice"),)), "processes": [BOB]},
     "allocated", "job 12 of alice; bob: python (pid 7) does not belong to that job", ("rogue",)),
    ("a job's process under another name", {"ruling": Ruling((Job("12", "alice"),)),
     "processes": [msgspec.structs.replace(BOB, job="12")]}, "allocated", "job 12 of alice", ()),
    ("a job and a lease", {"ruling": Ruling((Job("12", "bob"),)), "claims": (CLAIM,)},
     "allocated", "job 12 of bob; also reserved: alice (k3f9)", ("disputed",)),
    ("a lease within one's job", {"ruling": Ruling((Job("12", "alice"),)), "claims": (CLAIM,)},
     "allocated", "job 12 of alice", ()),
    ("free for Slurm", {"ruling": Ruling()}, "free", "no process, no reservation", ()),
    ("free for Slurm, by order", {"ruling": Ruling(note="by order")},
     "free", "no process, no reservation; by order", ()),
    ("free for Slurm, in use", {"ruling": Ruling(), "processes": [BOB]},
     "busy", "free for Slurm, yet in use: bob: python (pid 7)", ()),
    ("of a newer job", {"ruling": Ruling(), "processes": [msgspec.structs.replace(BOB, job="14")]},
     "busy", "bob: python (pid 7), of job 14, which Slurm's last answer does not list here", ()),
    ("drained", {"ruling": Ruling(withheld="drained: bad fan")}, "reserved", "drained: bad fan", ()),
    ("in doubt", {"ruling": Ruling(doubt="Slurm: node is down")}, "unknown", "Slurm: node is down", ()),
    ("only Slurm", {"ruling": Ruling(), "reading": None, "unseen": True},
     "free", "free for Slurm; NVML not seen", ()),
    ("only Slurm, no answer", {"ruling": Ruling(), "reading": None, "unseen": True, "scheduler_error": "dead"},
     "unknown", "scheduler: dead", ()),
    ("only Slurm, drained", {"ruling": Ruling(withheld="drained"), "reading": None, "unseen": True},
     "reserved", "drained", ()),
    ("lost", {"lost": True, "error": "GPU is lost"}, "broken", "GPU lost: GPU is lost", ()),
    ("lost, as NVML says it", {"lost": True, "error": "GPU is lost: it has fallen off the bus or cannot be reached"},
     "broken", "GPU lost: it has fallen off the bus or cannot be reached", ()),
    ("lost and reserved", {"lost": True, "claims": (CLAIM,)}, "broken", "GPU lost: fallen off the bus", ()),
    ("remap failed", {"remap_failed": True}, "broken", "row remapping failed: the GPU needs replacement", ()),
    ("recovery", {"recovery_action": "reset"}, "broken", "the driver requests: reset", ()),
    ("no recovery", {"recovery_action": "none"}, "free", "no process, no reservation", ()),
    ("no reading", {"reading": None}, "unknown", "no reading of this GPU yet", ()),
    ("5 s old", {"age_s": 5.0}, "free", "no process, no reservation", ()),
    ("6 s old", {"age_s": 6.0}, "unknown", "last reading is 6 s old", ()),
    ("6 s old at 2 s", {"age_s": 6.0, "interval_s": 2.0}, "free", "no process, no reservation", ()),
    ("held back", {"age_s": 1.0, "delay_s": 8.0}, "unknown", "last reading is 9 s old", ()),
    ("hangs", {"age_s": 1.0, "delay_s": 2.5, "error": "NVML hangs"}, "unknown", "NVML hangs", ()),
    ("hangs, old", {"age_s": 1.0, "delay_s": 50.0, "error": "NVML hangs"},
     "unknown", "NVML hangs; last reading is 51 s old", ()),
    ("hangs while a lease holds it", {"delay_s": 50.0, "error": "NVML hangs", "claims": (CLAIM,)},
     "unknown", "NVML hangs; last reading is 50 s old", ()),
    ("old by the connection", {"age_s": 50.0, "error": "Unknown Error"}, "unknown", "last reading is 50 s old", ()),
    ("hangs in MIG mode", {"delay_s": 50.0, "error": "NVML hangs", "static": SPLIT},
     "mig", "in MIG mode: its devices can be reserved; NVML hangs; last reading is 50 s old", ("mig",)),
    ("error", {"error": "Unknown Error"}, "unknown", "NVML: Unknown Error", ()),
    ("no memory", {"memory_used": None}, "unknown", "not readable: memory", ()),
    ("no list, no mode", {"processes": None, "compute_mode": None},
     "unknown", "not readable: processes, compute mode", ()),
    ("no utilization", {"utilization": None}, "free", "no process, no reservation", ()),
    ("scheduler", {"scheduler_error": "no answer"}, "unknown", "scheduler: no answer", ()),
    ("claims", {"claims_error": "NFS"}, "unknown", "reservations: NFS", ()),
    ("reserved", {"claims": (CLAIM,)}, "reserved", "alice, 1h02m left", ()),
    ("used by its holder", {"claims": (CLAIM,), "processes": [msgspec.structs.replace(BOB, user="alice")]},
     "reserved", "alice, 1h02m left", ()),
    ("rogue", {"claims": (CLAIM,), "processes": [BOB]}, "reserved", "alice, 1h02m left", ("rogue",)),
    ("bob says he is within the lease", {"claims": (CLAIM,), "processes": [msgspec.structs.replace(BOB, lease="k3f9")]},
     "reserved", "alice, 1h02m left", ("rogue",)),
    ("root in a container, perhaps her", {"claims": (CLAIM,), "processes": [
        msgspec.structs.replace(BOB, user="root", uid=0, container="3f4c0d", lease="k3f9")]},
     "reserved", "alice, 1h02m left", ()),
    ("root in a container, by its own word another", {"claims": (CLAIM,), "processes": [
        msgspec.structs.replace(BOB, user="root", uid=0, container="3f4c0d", lease="zzzz")]},
     "reserved", "alice, 1h02m left", ("rogue",)),
    ("owner hidden is no rogue", {"claims": (CLAIM,), "processes": [msgspec.structs.replace(BOB, user=None)]},
     "reserved", "alice, 1h02m left", ()),
    ("unused", {"claims": (CLAIM,), "idle_for_s": 900.0}, "reserved", "alice, 1h02m left", ("idle",)),
    ("unused for less", {"claims": (CLAIM,), "idle_for_s": 899.0}, "reserved", "alice, 1h02m left", ()),
    ("idle without a lease", {"idle_for_s": 9000.0}, "free", "no process, no reservation", ()),
    ("disputed", {"claims": (msgspec.structs.replace(CLAIM, disputed_with=["x"]),)},
     "reserved", "alice, 1h02m left", ("disputed",)),
    ("a process", {"processes": [BOB]}, "busy", "bob: python (pid 7)", ()),
    ("graphics", {"processes": [msgspec.structs.replace(BOB, type="graphics")]}, "busy", "bob: python (pid 7)", ()),
    ("hidden owner", {"processes": [msgspec.structs.replace(BOB, user=None, name="")]},
     "busy", "owner hidden: process (pid 7)", ()),
    ("overdue", {"processes": [msgspec.structs.replace(BOB, lease="old")]},
     "busy", "bob: python (pid 7)", ("overdue",)),
    ("a process of a lease on other GPUs", {"processes": [msgspec.structs.replace(BOB, lease="k3f9")],
     "leases": frozenset({("k3f9", "bob")})}, "busy", "bob: python (pid 7)", ()),
    ("a process of an ended lease whose id another took", {"processes": [msgspec.structs.replace(BOB, lease="k3f9")],
     "leases": frozenset({("k3f9", "eve")})}, "busy", "bob: python (pid 7)", ("overdue",)),
    ("Xorg", {"processes": [Process(pid=1, type="graphics", memory=9, user="root", name="Xorg")]},
     "free", "no process, no reservation", ()),
    ("an Xorg that computes", {"processes": [msgspec.structs.replace(BOB, memory=9, name="Xorg")]},
     "busy", "bob: Xorg (pid 7)", ()),
    ("an Xorg of bob's on her GPU", {"claims": (CLAIM,), "processes": [
        msgspec.structs.replace(BOB, type="graphics", memory=9, name="Xorg")]},
     "reserved", "alice, 1h02m left", ("rogue",)),
    ("an Xorg of unknown memory", {"memory_used": GIB, "processes": [
        Process(pid=1, type="graphics", user="root", name="Xorg", system=True)]}, "busy", "root: Xorg (pid 1)", ()),
    ("a big Xorg", {"processes": [Process(pid=1, type="graphics", memory=GIB, user="root", name="Xorg")]},
     "busy", "root: Xorg (pid 1)", ()),
    ("4 %", {"utilization": 4}, "free", "no process, no reservation", ()),
    ("5 %", {"utilization": 5}, "busy", "5 % utilization, no process visible", ()),
    ("prohibited", {"compute_mode": 2}, "busy", "compute mode: prohibited", ()),
    ("exclusive and idle", {"compute_mode": 3}, "free", "no process, no reservation", ()),
    ("exclusive with a context",
     {"compute_mode": 3, "processes": [Process(pid=1, type="compute", memory=9, name="Xorg", system=True)]},
     "busy", "compute mode: exclusive, and a process holds it", ()),
    ("memory without a process", {"memory_used": 600 * 2**20},
     "occupied", "0.6 GiB in use by a process that is not visible here", ()),
    ("a little memory", {"memory_used": 512 * 2**20}, "free", "no process, no reservation", ()),
    ("first of two", {"one_shot": False}, "unknown", "waiting for a second reading", ()),
    ("second of two", {"one_shot": False, "previous": IDLE}, "free", "no process, no reservation", ()),
    ("busy before", {"one_shot": False, "previous": msgspec.structs.replace(IDLE, processes=[BOB])},
     "busy", "a moment ago: bob: python (pid 7)", ()),
    ("occupied before", {"one_shot": False, "previous": msgspec.structs.replace(IDLE, memory_used=GIB)},
     "occupied", "a moment ago: memory in use by a process that is not visible here", ()),
    ("failed before", {"one_shot": False, "previous": msgspec.structs.replace(IDLE, error="Timeout")},
     "unknown", "a moment ago: NVML: Timeout", ()),
    ("unreadable before", {"one_shot": False, "previous": msgspec.structs.replace(IDLE, processes=None)},
     "unknown", "a moment ago: not readable: processes", ()),
    ("lost before", {"one_shot": False, "previous": msgspec.structs.replace(IDLE, lost=True)},
     "unknown", "a moment ago: GPU lost: fallen off the bus", ()),
    ("ECC", {"ecc_uncorrected": 1}, "free", "no process, no reservation", ("sick",)),
    ("remap pending", {"remap_pending": True}, "free", "no process, no reservation", ("sick",)),
    ("hot", {"throttle": ["hw_thermal"]}, "free", "no process, no reservation", ("sick",)),
    ("an error of the GPU", {"xids": [Xid(94, 1.0)]}, "free", "no process, no reservation", ("sick",)),
    ("an error of a program", {"xids": [Xid(31, 1.0)]}, "free", "no process, no reservation", ()),
    ("power cap is no sickness", {"throttle": ["sw_power_cap"]}, "free", "no process, no reservation", ()),
    ("narrower than it was", {"pcie_width": 8, "narrow": "PCIe x8 of x16: narrower than before"},
     "free", "no process, no reservation", ("sick",)),
    ("below its maximum, as ever", {"pcie_width": 8}, "free", "no process, no reservation", ()),
    ("the host's memory in use", {"static": SHARED, "memory_used": 60 * GIB},
     "free", "no process, no reservation", ()),
    ("the host's memory, a process", {"static": SHARED, "memory_used": 60 * GIB, "processes": [BOB]},
     "busy", "bob: python (pid 7)", ()),
    ("the host's memory in use before", {"static": SHARED, "one_shot": False,
     "previous": msgspec.structs.replace(IDLE, memory_used=60 * GIB)}, "free", "no process, no reservation", ()),
    ("the host's memory, no list", {"static": SHARED, "processes": None}, "unknown", "not readable: processes", ()),
    ("the host's memory, unreadable", {"static": SHARED, "memory_used": None}, "unknown", "not readable: memory", ()),
    ("MIG parent", {"static": SPLIT}, "mig", "in MIG mode: its devices can be reserved", ("mig",)),
    ("MIG parent without devices", {"static": msgspec.structs.replace(STATIC, mig=[])},
     "mig", "in MIG mode, without devices", ("mig",)),
    ("MIG parent, first of two", {"static": SPLIT, "one_shot": False},
     "mig", "in MIG mode: its devices can be reserved", ("mig",)),
    ("MIG parent, unreadable", {"static": SPLIT, "memory_used": None, "processes": None, "compute_mode": None},
     "mig", "in MIG mode: its devices can be reserved", ("mig",)),
    ("MIG parent, a process", {"static": SPLIT, "processes": [BOB]},
     "mig", "in MIG mode: its devices can be reserved", ("mig",)),
    ("MIG parent, error", {"static": SPLIT, "error": "Timeout"},
     "mig", "in MIG mode: its devices can be reserved; NVML: Timeout", ("mig",)),
    ("MIG parent, reserved", {"static": SPLIT, "claims": (CLAIM,)},
     "mig", "in MIG mode: its devices can be reserved; alice, 1h02m left", ("mig",)),
    ("MIG parent, lost", {"static": SPLIT, "lost": True}, "broken", "GPU lost: fallen off the bus", ("mig",)),
    ("MIG parent of a job", {"static": SPLIT, "ruling": Ruling((Job("12", "bob"),))},
     "allocated", "job 12 of bob", ("mig",)),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "state", "reason", "flags"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE])
def test_the_table(changes: dict[str, Any], state: str, reason: str, flags: tuple[str, ...]) -> None:
    verdict = judge(facts(**changes), Thresholds())
    assert (verdict.state, verdict.reason, verdict.flags) == (state, reason, flags)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remap_pending": True}, ("row remap pending; reset the GPU",)),
        ({"ecc_uncorrected": 1}, ("1 uncorrected ECC error since the driver was loaded",)),
        ({"ecc_uncorrected": 3}, ("3 uncorrected ECC errors since the driver was loaded",)),
        ({"throttle": ["sw_power_cap", "hw_thermal"]}, ("too hot, slowed down by the hardware",)),
        ({"throttle": ["hw_power_brake"]}, ("power brake: requested by the power supply",)),
        ({"xids": [Xid(94, 2.0), Xid(31, 1.5), Xid(94, 1.0), Xid(7, 0.5)]},
         ("XID 94: contained ECC error", "XID 7: see the list of XID errors in NVIDIA’s documentation")),
        ({"narrow": "PCIe x4 of x16: narrower than before", "remap_pending": True},
         ("row remap pending; reset the GPU", "PCIe x4 of x16: narrower than before")),
        ({"lost": True, "remap_pending": True}, ()),
        ({"reading": None, "narrow": "PCIe x4 of x16: narrower than before"}, ()),
    ],
)  # fmt: skip
def test_the_reasons_of_sick(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    verdict = judge(facts(**changes), Thresholds())
    assert verdict.sick == words
    assert ("sick" in verdict.flags) == bool(words)


@pytest.mark.parametrize(
    ("widths", "widest", "narrow"),
    [
        ([8, 8, 8, 8], {}, {}),  # so by construction: T4 and A10G at x8 of x16
        ([16, 16, 4], {}, {2: "PCIe x4 of x16: narrower than most of its model on this node"}),
        ([16, 16, 16, 8, 8], {}, {3: "PCIe x8 of x16: narrower than most of its model on this node",
                                  4: "PCIe x8 of x16: narrower than most of its model on this node"}),
        ([16, 16, 8, 8], {}, {}),  # half are no majority
        ([16, 8], {}, {}),
        ([16], {}, {}),
        ([16, 8, 4, 4], {}, {}),
        ([16, 16, None, 8], {}, {3: "PCIe x8 of x16: narrower than most of its model on this node"}),
        ([16, 16, 16, 0], {}, {}),  # no link seen: nothing is known of it
        ([4], {0: 16}, {0: "PCIe x4 of x16: narrower than before"}),
        ([16], {0: 8}, {}),
        ([None], {0: 16}, {}),
    ],
)  # fmt: skip
def test_a_link_is_narrow_compared_with_before_or_with_its_model(
    widths: list[int | None], widest: dict[int, int], narrow: dict[int, str]
) -> None:
    gpus = [GpuStatic(index=k, uuid=f"GPU-{k}", name="A10G", pci_bus_id="", pcie_width_max=16) for k in range(9)]
    gpus[8] = msgspec.structs.replace(gpus[8], name="H100")
    readings = [GpuReading(uuid=f"GPU-{k}", pcie_width=width) for k, width in enumerate(widths)]
    others = [GpuReading(uuid="GPU-8", pcie_width=16)]  # of another model
    found = narrow_links(gpus, [*readings, *others], {f"GPU-{k}": width for k, width in widest.items()})
    assert found == {f"GPU-{k}": words for k, words in narrow.items()}


processes = st.builds(
    Process,
    pid=st.integers(1, 99),
    type=st.sampled_from(["compute", "graphics"]),
    memory=st.none() | st.sampled_from([0, 2**20, GIB]),
    user=st.sampled_from([None, "alice", "bob"]),
    name=st.sampled_from(["python", "Xorg", ""]),
    lease=st.sampled_from([None, "k3f9", "old"]),
)
readings = st.builds(
    GpuReading,
    uuid=st.just(UUID),
    error=st.none() | st.just("Unknown Error"),
    lost=st.booleans(),
    delay_s=st.sampled_from([0.0, 3.0, 100.0]),
    memory_used=st.none() | st.sampled_from([0, 2**29, GIB]),
    utilization=st.none() | st.sampled_from([0, 4, 5, 100]),
    compute_mode=st.none() | st.integers(0, 3),
    processes=st.none() | st.lists(processes, max_size=2),
    remap_failed=st.none() | st.booleans(),
    recovery_action=st.sampled_from([None, "none", "reset"]),
)
any_facts = st.builds(
    Facts,
    static=st.just(STATIC),
    reading=st.none() | readings,
    previous=st.none() | readings,
    age_s=st.sampled_from([0.0, 1.0, 4.0, 5.1, 1e6]),
    one_shot=st.booleans(),
    claims=st.lists(st.just(CLAIM), max_size=1).map(tuple),
    claims_error=st.none() | st.just("NFS"),
    ruling=st.none()
    | st.builds(
        Ruling,
        jobs=st.lists(st.just(Job("1", "bob")), max_size=1).map(tuple),
        hidden=st.sampled_from(["", "a job that you cannot see"]),
        doubt=st.sampled_from(["", "Slurm: no numbers"]),
        withheld=st.sampled_from(["", "drained"]),
        note=st.sampled_from(["", "by order"]),
    ),
    unseen=st.booleans(),
    scheduler_error=st.none() | st.just("down"),
    idle_for_s=st.none() | st.sampled_from([0.0, 1e4]),
)


@given(any_facts)
def test_free_needs_all_data_and_no_contradiction(about: Facts) -> None:
    verdict = judge(about, Thresholds())
    assert verdict.state in STATES
    assert verdict.reason
    if verdict.state != "free":
        return
    assert about.ruling is None or about.ruling == Ruling(note=about.ruling.note)
    assert not about.claims
    assert about.scheduler_error is None
    if about.reading is None:
        assert about.unseen
        assert verdict.reason.startswith("free for Slurm; NVML not seen")
        return
    assert about.claims_error is None
    for reading in [about.reading] if about.one_shot else [about.reading, about.previous]:
        assert reading is not None
        assert not reading.lost
        assert reading.error is None
        assert not reading.remap_failed
        assert reading.memory_used is not None
        assert reading.memory_used <= 2**29
        assert reading.processes is not None
        assert all(p.name == "Xorg" and (p.memory or 0) < 2**29 for p in reading.processes)
        assert reading.compute_mode in {0, 1, 3}
        assert (reading.utilization or 0) < 5
    assert about.reading is not None
    assert about.age_s + about.reading.delay_s <= 5.0


@given(any_facts, st.sampled_from(["error", "age", "memory_used", "processes", "compute_mode", "claims", "scheduler"]))
def test_missing_data_never_makes_a_gpu_free(about: Facts, what: str) -> None:
    others: dict[str, dict[str, Any]] = {
        "age": {"age_s": 1e6},
        "claims": {"claims_error": "gone"},
        "scheduler": {"scheduler_error": "gone"},
    }
    if what in others:
        worse = msgspec.structs.replace(about, unseen=False, **others[what])
    else:
        value = "Timeout" if what == "error" else None
        reading = about.reading and msgspec.structs.replace(about.reading, **{what: value})
        worse = msgspec.structs.replace(about, unseen=False, reading=reading)
    assert judge(worse, Thresholds()).state != "free"
