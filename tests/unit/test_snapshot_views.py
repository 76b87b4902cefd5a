"""Readings, claims and now make a snapshot: node states, joins by UUID, hostile text, what is missing."""

from __future__ import annotations

import unicodedata
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuboard.cluster.feed import backoff_s, next_tick_ms
from gpuboard.cluster.snapshot.builder import SnapshotBuilder
from gpuboard.cluster.snapshot.views import NodeFacts, Scheduled, View, inert_static, node_claims
from gpuboard.model.gpu import GpuReading, GpuStatic, MigReading, MigStatic, Process
from gpuboard.model.reading import Claim, Hello, Reading, Static
from gpuboard.model.snapshot import GpuView, NodeView
from gpuboard.model.state import Ruling, Thresholds

NOW = 1000.0
HELLO = Hello(hostname="gpu01", boot_id="b", uid=1, user="alice", pid=2, python="3.6.8", addresses=["10.0.0.1"])


def static(uuid: str, index: int = 0, **changes: Any) -> GpuStatic:
    return GpuStatic(index=index, uuid=uuid, name="H100", pci_bus_id="00000000:1B:00.0", memory_total=80, **changes)


def idle(uuid: str, **changes: Any) -> GpuReading:
    return GpuReading(uuid=uuid, **{"memory_used": 0, "utilization": 0, "compute_mode": 0, "processes": [], **changes})


def claim(lease: str, uuid: str, **changes: Any) -> Claim:
    values = {"uid": 1, "owner": "alice", "state": "live", "since": 0.0, "until": 9.0, "remaining_s": 60.0, **changes}
    return Claim(lease=lease, uuid=uuid, **values)


def facts(name: str = "gpu01", *gpus: str, age_s: float = 0.5, **changes: Any) -> NodeFacts:
    """Return a node with idle GPUs of these UUIDs, read ``age_s`` ago; ``reading`` changes its reading."""
    statics = [static(uuid, index) for index, uuid in enumerate(gpus)]
    reading = {"seq": 1, "at": 500.0, "interval_s": 1.0, "gpus": [idle(u) for u in gpus], **changes.pop("reading", {})}
    values: dict[str, Any] = {
        "hello": HELLO,
        "static": Static(gpus=statics, driver="580", cuda="13.0"),
        "known": {gpu.uuid: gpu for gpu in statics},
        "reading": Reading(**reading),
        "arrived": NOW - age_s,
    }
    return NodeFacts(name=name, **(values | changes))


def view(**changes: Any) -> View:
    values: dict[str, Any] = {
        "now": NOW, "at": 1.0, "cluster": "c", "thresholds": Thresholds(), "users": {},
        "interval_s": 1.0, "one_shot": True,
    }  # fmt: skip
    return View(**(values | changes))


def node(about: NodeFacts, **changes: Any) -> NodeView:
    return SnapshotBuilder().snapshot([about], view(**changes)).nodes[0]


def gpu(about: NodeFacts, **changes: Any) -> GpuView:
    return node(about, **changes).gpus[0]


def test_a_node_in_full() -> None:
    about = facts("gpu01", "GPU-a", reading={"cpu_percent": 12.5, "memory_used": 1, "memory_total": 2})
    shot = SnapshotBuilder().snapshot([about], view())
    assert (shot.schema, shot.at, shot.cluster) == (1, "1970-01-01T00:00:01.000Z", "c")
    expected = GpuView(
        index=0, uuid="GPU-a", name="H100", pci_bus_id="00000000:1B:00.0", state="free",
        reason="no process, no reservation", memory_used=0, memory_total=80, utilization=0, processes=[],
        compute_mode=0,
    )  # fmt: skip
    assert shot.nodes == [
        NodeView(
            name="gpu01", state="up", age_s=0.5, driver="580", cuda="13.0", cpu_percent=12.5,
            memory_used=1, memory_total=2, gpus=[expected], hostname="gpu01", addresses=["10.0.0.1"],
            connected=True,
        )
    ]  # fmt: skip


def test_node_states() -> None:
    def state(about: NodeFacts, **changes: Any) -> tuple[str, str | None]:
        seen = node(about, **changes)
        return seen.state, seen.error

    assert state(NodeFacts(name="x")) == ("unreachable", "no answer yet")
    assert state(NodeFacts(name="x", error="ssh: refused")) == ("unreachable", "ssh: refused")
    assert state(facts("x", age_s=5.0)) == ("up", None)
    assert state(facts("x", age_s=5.1)) == ("stale", "no reading for 5 s")
    assert state(facts("x", age_s=14.0), interval_s=5.0) == ("up", None)
    assert state(facts("x", age_s=1.0, error="lost")) == ("up", "lost")
    assert state(facts("x", age_s=9.0, error="lost")) == ("unreachable", "lost")
    assert state(facts("x", reading={"nvml_error": "no driver"})) == ("up", "NVML: no driver")
    assert state(facts("x", age_s=-3.0)) == ("up", None)


def test_a_node_is_connecting_until_it_answers_or_has_an_error() -> None:
    def awaited(about: NodeFacts, said: Scheduled | None = None) -> bool:
        return node(about, scheduled={} if said is None else {about.name: said}).connecting

    assert awaited(NodeFacts(name="x"))
    assert awaited(NodeFacts(name="x"), Scheduled(error="not asked yet"))
    assert not awaited(NodeFacts(name="x", error="ssh: refused"))
    assert not awaited(NodeFacts(name="x", closed=True))
    assert not awaited(NodeFacts(name="x"), Scheduled(state="idle"))  # the scheduler shows it meanwhile
    assert not awaited(NodeFacts(name="x"), Scheduled(state="down", doubt="Slurm has it down"))
    for about in (facts("x"), facts("x", age_s=9.0), facts("x", age_s=9.0, error="lost")):
        assert not awaited(about)


def test_an_agents_longer_interval_counts_within_bounds() -> None:
    seldom = {"interval_s": 10.0}
    assert gpu(facts("x", "GPU-a", age_s=29.0, reading=seldom)).state == "free"
    assert gpu(facts("x", "GPU-a", age_s=31.0, reading=seldom)).state == "unknown"
    assert node(facts("x", age_s=29.0, reading=seldom)).state == "up"
    invented = {"interval_s": 1e9}
    assert node(facts("x", age_s=901.0, reading=invented)).state == "stale"


def test_gpus_of_an_old_reading_are_unknown_never_free() -> None:
    old = gpu(facts("x", "GPU-a", age_s=6.0))
    assert (old.state, old.reason) == ("unknown", "last reading is 6 s old")
    held_back = facts("x", "GPU-a", reading={"gpus": [idle("GPU-a", delay_s=9.0)]})
    assert gpu(held_back).state == "unknown"
    future = facts("x", "GPU-a", reading={"gpus": [idle("GPU-a", delay_s=-9.0)]})
    assert (gpu(future).state, gpu(future).reason) == ("unknown", "NVML: the reading's age is negative")


def test_a_missing_gpu_stays_visible() -> None:
    missing = facts("x", "GPU-a", "GPU-b", reading={"gpus": [idle("GPU-b")]})
    assert [(g.state, g.reason) for g in node(missing).gpus] == [
        ("unknown", "NVML: missing from the newest reading"), ("free", "no process, no reservation"),
    ]  # fmt: skip
    fallen = msgspec.structs.replace(missing, static=Static(gpus=[static("GPU-b", 0)]))
    assert [(g.uuid, g.state, g.reason) for g in node(fallen).gpus if g.uuid == "GPU-a"] == [
        ("GPU-a", "broken", "GPU lost: NVML no longer lists it")
    ]
    gone = facts("x", "GPU-a", reading={"gpus": [], "nvml_error": "driver reload"})
    assert (gpu(gone).state, gpu(gone).reason) == ("unknown", "NVML: driver reload")


def test_gpus_hidden_in_a_job_without_gpus_are_not_lost() -> None:
    """A device cgroup hides all of them then; Slurm has shown them."""
    by_slurm = Scheduled(state="idle", gpus={"slurm-gpu01-0": Ruling()}, shown=[static("slurm-gpu01-0")])

    def shown(hello: Hello, **reading: Any) -> tuple[str, str]:
        found = gpu(facts(hello=hello, static=Static(), reading=reading), scheduled={"gpu01": by_slurm})
        return found.state, found.reason

    confined = msgspec.structs.replace(HELLO, job="7")
    assert shown(confined) == ("free", "free for Slurm; NVML not seen")
    assert shown(HELLO) == ("broken", "GPU lost: NVML no longer lists it")
    assert shown(confined, nvml_error="driver not loaded") == ("unknown", "NVML: driver not loaded")


def test_claims_are_joined_by_uuid_on_the_node_that_stores_them() -> None:
    one = facts("gpu01", "GPU-a", "GPU-b", reading={"claims": [claim("k1", "GPU-a"), claim("k2", "GPU-d")]})
    two = facts("gpu02", "GPU-c", "GPU-d", reading={"claims": [claim("k2", "GPU-c"), claim("k3", "GPU-gone")]})
    seen = {g.uuid: (g.state, g.leases) for n in SnapshotBuilder().snapshot([one, two], view()).nodes for g in n.gpus}
    assert seen == {
        "GPU-a": ("reserved", ["k1"]), "GPU-b": ("free", []), "GPU-c": ("reserved", ["k2"]), "GPU-d": ("free", []),
    }  # fmt: skip
    assert [c.uuid for c in node_claims(two, {})] == ["GPU-c", "GPU-gone"]


def test_only_live_claims_reserve() -> None:
    claims = [claim("k1", "GPU-a", state="lapsed"), claim("k2", "GPU-a", state="garbage")]
    assert gpu(facts("x", "GPU-a", reading={"claims": claims})).state == "free"
    disputed = [claim("k1", "GPU-a", disputed_with=["k2"]), claim("k2", "GPU-a", owner="bob", disputed_with=["k1"])]
    seen = gpu(facts("x", "GPU-a", reading={"claims": disputed}))
    assert (seen.state, seen.leases, seen.flags) == ("reserved", ["k1", "k2"], ["disputed"])
    assert seen.reason == "alice, 1m00s left; bob, 1m00s left"


def test_a_claim_ends_with_its_job_by_an_answer_queried_later() -> None:
    """The node's clock says 500 at the reading, which arrived here at 999.5; the claim was made 100 s before."""

    def state(
        job: str | None, asked: float = 990.0, jobs: frozenset[int] | None = frozenset({8}), at: float = 400.0
    ) -> str:
        about = facts("gpu01", "u0", reading={"claims": [claim("k3f9", "u0", job=job, since=at)]})
        known = Scheduled(state="idle", gpus={"u0": Ruling()}, asked=asked, jobs=jobs)
        return gpu(about, scheduled={"gpu01": known}).state

    assert state("7") == state("7.1") == "free"
    assert state("8") == state("8.2") == "reserved", "that job has something"
    assert state(None) == state("") == state("x") == state("9" * 60) == "reserved", "no job of Slurm's"
    assert state("7", asked=899.0) == state("7", asked=904.0) == "reserved", "an answer from before the claim"
    assert state("7", at=489.0) == "reserved", "a claim from after the answer"
    assert state("7", at=1e9) == "reserved", "one from the future"
    assert state("7", jobs=None) == "reserved", "an old answer, or one that does not tell of all jobs"


def test_a_node_that_cannot_hold_claims_has_no_free_gpu() -> None:
    seen = node(facts("x", "GPU-a", reading={"claims_error": "/var/tmp is on NFS"}))
    assert (seen.claims_error, seen.gpus[0].state) == ("/var/tmp is on NFS", "unknown")
    assert seen.gpus[0].reason == "reservations: /var/tmp is on NFS"


def test_users_have_the_names_to_show() -> None:
    process = Process(pid=1, type="compute", user="al", name="python", started=440.0)
    about = facts(
        "x", "GPU-a", reading={"claims": [claim("k1", "GPU-a")], "gpus": [idle("GPU-a", processes=[process])]}
    )
    assert gpu(about).flags == ["rogue"]
    seen = gpu(about, users={"al": "alice"})
    assert seen.flags == []
    assert seen.processes is not None
    assert (seen.processes[0].user, seen.processes[0].runtime_s) == ("alice", 60.0)


def test_idle_is_flagged_after_it_was_read_long_enough() -> None:
    about = facts("x", "GPU-a", reading={"claims": [claim("k1", "GPU-a")]}, last_busy={"GPU-a": NOW - 900})
    assert gpu(about).flags == ["idle"]
    assert gpu(msgspec.structs.replace(about, last_busy={"GPU-a": NOW - 899})).flags == []
    assert gpu(msgspec.structs.replace(about, last_busy={})).flags == []


def test_mig_devices_are_judged_one_by_one() -> None:
    devices = [MigStatic(uuid=f"MIG-{k}", profile="3g.40gb", memory_total=40) for k in range(4)]
    parent = static("GPU-a", mig=devices)
    process = Process(pid=1, type="compute", user="bob", name="python")
    readings = [
        MigReading(uuid="MIG-0", memory_used=0, processes=[]),
        MigReading(uuid="MIG-1", memory_used=1, processes=[process]),
        MigReading(uuid="MIG-2", error="Unknown Error"),
    ]
    about = facts(
        "x", "GPU-a",
        static=Static(gpus=[parent]),
        known={"GPU-a": parent},
        reading={"gpus": [idle("GPU-a", memory_used=None, processes=None, mig=readings)]},
    )  # fmt: skip
    seen = gpu(about)
    assert seen.flags == ["mig"]
    assert [(m.uuid, m.state, m.reason, m.memory_used, m.memory_total) for m in seen.mig] == [
        ("MIG-0", "free", "no process, no reservation", 0, 40),
        ("MIG-1", "busy", "bob: python (pid 1)", 1, 40),
        ("MIG-2", "unknown", "NVML: Unknown Error", None, 40),
        ("MIG-3", "unknown", "NVML: missing from the newest reading", None, 40),
    ]
    users = [None if device.processes is None else [p.user for p in device.processes] for device in seen.mig]
    assert users == [[], ["bob"], None, None]
    assert seen.processes is None, "those of two devices are not known"
    parts = [MigReading(uuid=f"MIG-{k}", memory_used=0, processes=[process][: k == 1]) for k in range(4)]
    held = [claim("k1", "MIG-1", owner="alice", uid=1001)]
    foreign = msgspec.structs.replace(process, uid=1002)
    parts[1] = msgspec.structs.replace(parts[1], processes=[foreign])
    for listed in (None, [], [foreign]):  # by the GPU itself, which NVML lets privileged callers see
        reading = {"gpus": [idle("GPU-a", memory_used=None, processes=listed, mig=parts)], "claims": held}
        seen = gpu(facts("x", "GPU-a", static=Static(gpus=[parent]), known={"GPU-a": parent}, reading=reading))
        assert [(p.pid, p.user, p.rogue) for p in seen.processes or ()] == [(1, "bob", True)]
        assert seen.flags == ["rogue", "mig"]
    assert about.reading is not None
    claimed = msgspec.structs.replace(about.reading, claims=[claim("k1", "MIG-0")])
    seen = gpu(msgspec.structs.replace(about, reading=claimed))
    assert [(m.state, m.leases) for m in seen.mig][:2] == [("reserved", ["k1"]), ("busy", [])]
    whole = msgspec.structs.replace(about.reading, claims=[claim("k2", "GPU-a")])
    seen = gpu(msgspec.structs.replace(about, reading=whole))
    assert [m.state for m in seen.mig] == ["reserved", "reserved", "unknown", "unknown"]


hostile = st.text(max_size=40) | st.sampled_from(
    ["\x1b[2J\x07", "[/x]", "a\nb", "\u202ejpg.exe", "\x9b31m", "x" * 9000]
)


@given(hostile, hostile, hostile)
@settings(max_examples=80, deadline=None)
def test_all_text_of_a_node_is_cleaned(a: str, b: str, c: str) -> None:
    process = Process(pid=1, type=a, user=b, name=c, command=a, lease=b, job=c, container=a)
    mig = MigStatic(uuid=a, profile=b)
    whole = GpuStatic(index=0, uuid=a, name=b, pci_bus_id=c, mig=[mig], links={a: 1}, pci={b: 10})
    about = NodeFacts(
        name="x",
        error=a,
        hello=Hello(hostname=a, boot_id=b, uid=0, user=c, pid=1, python=a, addresses=[b]),
        static=Static(gpus=[whole], driver=a, cuda=b, source=c),
        known={"x": inert_static(whole)},
        reading=Reading(
            seq=1, at=0, interval_s=1, claims_error=c, nvml_error=b,
            gpus=[idle(a, error=c, processes=[process], throttle=[a], recovery_action=b)],
            claims=[claim(a, a, owner=b, purpose=c, host=a, nodes=[b], disputed_with=[c], reason=a)],
        ),
        arrived=NOW,
    )  # fmt: skip
    shown = [SnapshotBuilder().snapshot([about], view())]
    for text in _texts(msgspec.to_builtins([shown, node_claims(about, {})])):
        assert all(c.isprintable() or unicodedata.category(c) == "Zs" for c in text), ascii(text)
        assert len(text) <= 1100


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _texts(item)]
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []


def test_backoff_grows_to_a_minute_and_is_slower_for_keys() -> None:
    assert all(0.5 <= backoff_s(1, "lost") <= 1.0 for _ in range(50))
    assert all(30 <= backoff_s(9, "timeout") <= 60 for _ in range(50))
    assert all(15 <= backoff_s(1, "auth") <= 30 for _ in range(50))
    assert all(150 <= backoff_s(99, "host-key") <= 300 for _ in range(50))


def test_ticks_fall_on_multiples_of_the_interval() -> None:
    assert [next_tick_ms(at, 1.0) for at in (10.0, 10.25, 10.9995)] == [1000, 750, 1]
    assert next_tick_ms(12.0, 5.0) == 3000
