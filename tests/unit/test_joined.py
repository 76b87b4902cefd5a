"""The scheduler's answers over time: rebuilt after a change, aged without a newer one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from gpuboard.cluster.snapshot.scheduler_join import Join
from gpuboard.cluster.snapshot.scheduler_monitor import SchedulerMonitor
from gpuboard.cluster.snapshot.views import NodeFacts, Scheduled, inert_static
from gpuboard.config import Settings
from gpuboard.model.gpu import GpuReading, GpuStatic, Process
from gpuboard.model.reading import Hello, Reading, shared
from gpuboard.model.schedule import Grant, Gres, Schedule, SchedulerJob, SchedulerNode, Seen
from gpuboard.model.units import day_time

AT = 1e9
STATICS = [GpuStatic(index=i, uuid=f"u{i}", name="H100", pci_bus_id="", minor=i) for i in range(2)]
KNOWN = {gpu.uuid: inert_static(gpu) for gpu in STATICS}
JOB = SchedulerJob("7", 7, "bob", 1, "x", "gpu", "running", (Grant("gpu01", (Gres("h100", 1, (0,)),)),))
SCHEDULE = Schedule(
    AT,
    "c",
    {"gpu01": SchedulerNode("gpu01", "host-a", "10.0.0.1", "mixed", reason="a\x1b[31m b", gpus=(Gres("h100", 2),))},
    (JOB,),
)
GPU01 = NodeFacts(name="gpu01", known=KNOWN)


class Silent:
    """A scheduler that has not answered yet."""

    seen = Seen()

    def start(self, changed: Callable[[], None]) -> None:
        """Does nothing."""

    def look(self, timeout_s: float = 0.0, *, retry: bool = False) -> Seen:
        return self.seen

    def close(self) -> None:
        """Does nothing."""


def joined(seen: Seen, now: float = 100.0, at: float = AT) -> Join:
    join = Join()
    join.take(seen, now, at)
    return join


def test_a_node_is_found_by_its_name_its_address_and_its_own_hostname() -> None:
    join = joined(Seen(SCHEDULE, arrived=99.0))
    hello = Hello(hostname="host-a", boot_id="", uid=1, user="", pid=1, python="")
    for facts in (
        GPU01,
        replace(GPU01, name="10.0.0.1"),
        replace(GPU01, name="gpu01.lab"),
        replace(GPU01, name="x", hello=hello),
    ):
        found = join.of(facts)
        assert found is not None, facts.name
        assert [job.id for job in found.gpus["u0"].jobs] == ["7"]
    assert join.of(replace(GPU01, name="other")) is None
    called = replace(GPU01, name="h1")
    assert join.of(called) is None
    join.alias("h1", "host-a.lab")
    assert join.of(called) is not None, "ssh goes to that host for its name"
    late = replace(GPU01, name="y")
    assert join.of(late) is None
    assert join.of(replace(late, hello=hello)) is not None, "its name came with the first reading"


def test_the_list_of_jobs_is_complete_only_if_the_answer_is_current_and_hides_none() -> None:
    def jobs(schedule: Schedule = SCHEDULE, **seen: Any) -> frozenset[int] | None:
        found = joined(Seen(schedule, **({"arrived": 99.0} | seen))).of(GPU01)
        assert found is not None
        return found.jobs

    het = replace(JOB, id="5+1", number=6)
    assert jobs() == frozenset({7})
    assert jobs(replace(SCHEDULE, jobs=(het,))) == frozenset({5, 6}), (
        "each component may call itself by the first one's number"
    )
    assert jobs(arrived=9.0) is None
    assert jobs(arrived=54.0, error="connect failure") is None

    def gpu01(**changes: Any) -> Schedule:
        return replace(SCHEDULE, nodes={"gpu01": replace(SCHEDULE.nodes["gpu01"], **changes)})

    assert jobs(gpu01(used=(Gres("h100", 2, (0, 1)),))) is None, "PrivateData: somebody has the other one"
    assert jobs(gpu01(doubt="cannot be read")) is None
    assert jobs(gpu01(state="down")) is None


def test_nothing_is_rebuilt_while_nothing_has_changed() -> None:
    join = joined(Seen(SCHEDULE, arrived=99.0))
    first = join.of(GPU01)
    join.take(Seen(SCHEDULE, arrived=99.0), 130.0, AT + 30)
    assert join.of(replace(GPU01, arrived=129.0)) is first
    assert join.of(replace(GPU01, known=KNOWN | {"u2": STATICS[0]})) is not first
    join.take(Seen(replace(SCHEDULE, jobs=()), arrived=130.0), 131.0, AT + 31)
    again = join.of(GPU01)
    assert again is not None
    assert not again.gpus["u0"].jobs


def test_an_old_answer_proves_who_held_which_gpu_only() -> None:
    assert getattr(joined(Seen(SCHEDULE, arrived=11.0)).of(GPU01), "error", "") is None
    assert getattr(joined(Seen(SCHEDULE, arrived=56.0, error="connect failure")).of(GPU01), "error", "") is None
    assert getattr(joined(Seen(SCHEDULE, arrived=54.0, error="connect failure")).of(GPU01), "error", "")
    join = joined(Seen(SCHEDULE, arrived=9.0, error="connect failure\x07", current_s=90.0))
    found = join.of(GPU01)
    assert found is not None
    assert set(found.gpus) == {"u0"}
    assert found.gpus["u0"].note == f"as of {day_time(AT)}"
    assert found.error == f"no answer since {day_time(AT - 91)}: connect failure"
    join.take(Seen(SCHEDULE, arrived=9.0, error="connect failure\x07", current_s=90.0), 160.0, AT + 60)
    assert join.of(GPU01) is found, "its words tell a time, not an age, so they stay"


def test_without_an_answer_every_node_has_an_error() -> None:
    found = joined(Seen(error="connect failure")).of(GPU01)
    assert found is not None
    assert (found.gpus, found.error) == ({}, "no answer: connect failure")


def test_a_node_that_was_never_read_has_the_gpus_that_slurm_counts() -> None:
    found = joined(Seen(SCHEDULE, arrived=99.0)).of(NodeFacts(name="gpu01"))
    assert found is not None
    assert [gpu.uuid for gpu in found.shown] == ["slurm-gpu01-0", "slurm-gpu01-1"]
    assert [job.id for job in found.gpus["slurm-gpu01-0"].jobs] == ["7"]
    assert found.reason == "a[31m b", "no control character is left"


def test_processes_identify_a_jobs_gpus_where_indexes_do_not() -> None:
    counted = replace(JOB, grants=(Grant("gpu01", (Gres("h100", 1),)),))
    join = joined(Seen(replace(SCHEDULE, jobs=(counted,)), arrived=99.0))
    blind = join.of(GPU01)
    assert blind is not None
    assert all(ruling.doubt for ruling in blind.gpus.values())
    process = Process(pid=1, type="compute", job="7")
    gpus = [GpuReading(uuid="u0", processes=[]), GpuReading(uuid="u1", processes=[process])]
    seen = join.of(replace(GPU01, reading=Reading(seq=1, at=1.0, interval_s=1.0, gpus=gpus)))
    assert seen is not None
    assert [[job.id for job in seen.gpus[uuid].jobs] for uuid in ("u0", "u1")] == [[], ["7"]]
    assert not seen.gpus["u0"].doubt


def test_a_doubtful_node_is_rebuilt_when_more_than_numbers_has_changed() -> None:
    counted = replace(JOB, grants=(Grant("gpu01", (Gres("h100", 1),)),))
    join = joined(Seen(replace(SCHEDULE, jobs=(counted,)), arrived=99.0))
    old = Reading(seq=1, at=1.0, interval_s=1.0, gpus=[GpuReading(uuid=gpu.uuid, processes=[]) for gpu in STATICS])
    facts = replace(GPU01, reading=old)
    first = join.of(facts)
    hotter = replace(old, seq=2, gpus=[replace(gpu, temperature=50) for gpu in old.gpus])
    assert join.of(replace(facts, reading=shared(hotter, old))) is first
    process = Process(pid=1, type="compute", job="7")
    used = replace(old, seq=3, gpus=[replace(gpu, processes=[process]) for gpu in old.gpus])
    second = join.of(replace(facts, reading=shared(used, old)))
    assert second is not None
    assert second is not first
    hello = Hello(hostname="gpu01", boot_id="", uid=1, user="", pid=1, python="", job="7")
    assert join.of(replace(facts, reading=shared(used, old), hello=hello)) is not second


def test_a_node_confined_to_our_jobs_gpus_shows_the_others_by_slurm() -> None:
    confined = [replace(STATICS[0], index=0, uuid="mine", minor=1)]  # NVML counts from 0 there
    hello = Hello(hostname="gpu01", boot_id="", uid=1, user="", pid=1, python="", job="7")
    ours = replace(JOB, grants=(Grant("gpu01", (Gres("h100", 1, (1,)),)),))
    join = joined(Seen(replace(SCHEDULE, jobs=(ours,)), arrived=99.0))
    facts = NodeFacts(name="gpu01", hello=hello, known={gpu.uuid: gpu for gpu in confined})
    found = join.of(facts)
    assert found is not None
    assert [(gpu.uuid, gpu.index) for gpu in found.shown] == [("slurm-gpu01-0", 0), ("mine", 1)]
    assert [[job.id for job in found.gpus[gpu.uuid].jobs] for gpu in found.shown] == [[], ["7"]]
    outside = join.of(replace(facts, name="10.0.0.1", hello=replace(hello, job=None)))
    assert outside is not None
    assert not outside.shown, "a GPU that is missing there is missing"


def test_before_the_first_answer_the_gpus_of_a_node_that_was_read_are_unknown() -> None:
    monitor = SchedulerMonitor(Silent(), Settings(ssh="all"), lambda routes_of: None)
    read = replace(GPU01, reading=Reading(seq=1, at=0.0, interval_s=1.0))
    waited_for = replace(GPU01, name="gpu02")
    assert monitor.of([read, waited_for], 100.0, AT) == {"gpu01": Scheduled(error="no answer: not queried yet")}
