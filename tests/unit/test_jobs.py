"""Which job holds which GPU: the scheduler's indexes joined with a node's GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.cluster.snapshot import scheduler_jobs
from gpuboard.model.gpu import GpuStatic, MigStatic
from gpuboard.model.schedule import Grant, Gres, Schedule, SchedulerJob, SchedulerNode
from gpuboard.model.state import Ruling


def gpus(count: int, minors: list[int | None] | None = None, **more: Any) -> list[GpuStatic]:
    """Return GPUs ``u0``…, whose device files have these numbers (default: their indexes)."""
    found = minors if minors is not None else list(range(count))
    return [GpuStatic(i, f"u{i}", "H100", "", minor=found[i], **more) for i in range(count)]


def node(*count: Gres, used: tuple[Gres, ...] = (), state: str = "mixed", **more: Any) -> SchedulerNode:
    return SchedulerNode("n1", "n1", "10.0.0.1", state, gpus=count or (Gres("h100", 8),), used=used, **more)


def held(
    number: int, *gres: Gres, user: str = "bob", state: str = "running", shards: tuple[Gres, ...] = ()
) -> scheduler_jobs.Held:
    grant = Grant("n1", gres, shards)
    return SchedulerJob(str(number), number, user, 1, "x", "gpu", state, (grant,)), grant


def said(found: dict[str, Ruling]) -> dict[str, str]:
    """Return one word a GPU: job ids, ``hidden``, ``doubt``, ``withheld``; free ones are left out."""
    words = {
        uuid: "+".join(job.id for job in ruling.jobs)
        or next((word for word in ("hidden", "doubt", "withheld") if getattr(ruling, word)), "")
        for uuid, ruling in found.items()
    }
    return {uuid: word for uuid, word in words.items() if word}


def test_numbers_are_nvmls_indexes() -> None:
    ruled = scheduler_jobs.rule(node(), [held(1, Gres("h100", 2, (0, 3)))], gpus(8), {})
    assert said(ruled.gpus) == {"u0": "1", "u3": "1"}
    assert ruled.sure
    assert {ruling.note for ruling in ruled.gpus.values()} == {""}


def test_device_files_in_another_order_are_noted_and_decide_where_processes_prove_it() -> None:
    given = [held(1, Gres("h100", 2, (0, 3))), held(2, Gres("h100", 1, (6,)))]
    upside_down = gpus(8, [7, 6, 5, 4, 3, 2, 1, 0])

    def ruled(seen: dict[str, set[str]]) -> tuple[dict[str, str], set[str]]:
        found = scheduler_jobs.rule(node(), given, upside_down, seen)
        assert not found.sure
        return said(found.gpus), {ruling.note for ruling in found.gpus.values() if ruling.jobs}

    by_order = ({"u0": "1", "u3": "1", "u6": "2"}, {scheduler_jobs.OTHER_ORDER})
    assert ruled({}) == ruled({"u3": {"1"}}) == ruled({"u5": {"1"}}) == by_order
    # in device cgroups, where gres.conf lists the files by their numbers
    assert ruled({"u4": {"1"}}) == ({"u7": "1", "u4": "1", "u1": "2"}, {scheduler_jobs.BY_PROCESSES})
    assert ruled({"u4": {"1"}, "u6": {"2"}}) == by_order, "they do not tell"


@pytest.mark.parametrize(
    ("minors", "told", "places"),
    [
        ([2, 3], (2, 3), {2: "u0", 3: "u1"}),
        ([3, 2], (2, 3), {3: "u0", 2: "u1"}),  # gres.conf lists the files by their numbers
        ([5, 4], (2, 3), {2: "u0", 3: "u1"}),  # AutoDetect: NVML's order, whatever the files are called
        ([None, None], (2, 3), {2: "u0", 3: "u1"}),
        ([2, 3], None, {2: "u0", 3: "u1"}),  # the answer is older than the job
        ([None, None], None, {}),
        ([2, 2], (), {}),
        ([2, 9], (), {}),
    ],
)
def test_gpus_visible_in_a_device_cgroup_keep_slurms_indexes(
    minors: list[int | None], told: tuple[int, ...] | None, places: dict[int, str]
) -> None:
    given = [] if told is None else [held(7, Gres("h100", 2, told))]
    found = scheduler_jobs.whole(node(Gres("h100", 4)), gpus(2, minors), given, "7")
    assert {gpu.index: gpu.uuid for gpu in found if gpu.uuid.startswith("u")} == places
    assert [gpu.index for gpu in found] == ([0, 1, 2, 3] if places else [])
    if told:
        assert set(said(scheduler_jobs.rule(node(Gres("h100", 4)), given, found, {}).gpus)) == {"u0", "u1"}


def test_without_device_files_order_decides_and_is_noted() -> None:
    ruled = scheduler_jobs.rule(node(), [held(1, Gres("h100", 1, (2,)))], gpus(8, [None] * 8), {})
    assert said(ruled.gpus) == {"u2": "1"}
    assert {ruling.note for ruling in ruled.gpus.values()} == {scheduler_jobs.BY_ORDER}
    free = scheduler_jobs.rule(node(), [], gpus(8, [None] * 8), {})
    assert {ruling.note for ruling in free.gpus.values()} == {""}, "where nobody holds anything no number matters"


def test_two_types_on_a_node_are_numbered_together() -> None:
    both = (Gres("h100", 4), Gres("a100", 4))
    ruled = scheduler_jobs.rule(node(*both), [held(3, Gres("h100", 2, (2, 3)), Gres("a100", 1, (5,)))], gpus(8), {})
    assert said(ruled.gpus) == {"u2": "3", "u3": "3", "u5": "3"}


def test_a_lost_gpu_shifts_no_index() -> None:
    there = [gpu for gpu in gpus(8) if gpu.uuid != "u2"]
    ruled = scheduler_jobs.rule(node(), [held(1, Gres("h100", 2, (2, 3)))], there, {})
    assert said(ruled.gpus)["u3"] == "1"
    assert "u4" not in {uuid for uuid, word in said(ruled.gpus).items() if word == "1"}
    assert not ruled.sure


def test_on_a_node_with_more_gpus_than_slurm_counts_processes_decide() -> None:
    given = [held(1, Gres("h100", 2, (0, 1)))]
    blind = scheduler_jobs.rule(node(Gres("h100", 4)), given, gpus(8), {})
    assert set(said(blind.gpus).values()) == {"doubt"}
    assert "2 of these 8 GPUs belong to job 1 of bob" in blind.gpus["u0"].doubt
    seen = scheduler_jobs.rule(node(Gres("h100", 4)), given, gpus(8), {"u4": {"1"}, "u5": {"1"}})
    assert said(seen.gpus) == {"u4": "1", "u5": "1"}


def test_gpus_in_use_without_a_visible_job_are_hidden() -> None:
    used = (Gres("h100", 5, (0, 1, 2, 3, 4)),)
    ruled = scheduler_jobs.rule(node(used=used), [held(2, Gres("h100", 2, (3, 4)))], gpus(8), {})
    assert said(ruled.gpus) == {"u0": "hidden", "u1": "hidden", "u2": "hidden", "u3": "2", "u4": "2"}
    ending = scheduler_jobs.rule(node(used=used[:1]), [held(9, state="completing")], gpus(8), {})
    assert "job 9, which is ending" in ending.gpus["u0"].hidden


def test_untyped_gpus_that_are_counted_only() -> None:
    whole = node(Gres("", 4), used=(Gres("", 3),))
    ruled = scheduler_jobs.rule(whole, [held(2, Gres("", 1, (0,)))], gpus(4), {})
    assert said(ruled.gpus) == {"u0": "2", "u1": "doubt", "u2": "doubt", "u3": "doubt"}
    full = scheduler_jobs.rule(node(Gres("", 4), used=(Gres("", 4),)), [held(2, Gres("", 1, (0,)))], gpus(4), {})
    assert said(full.gpus) == {"u0": "2", "u1": "hidden", "u2": "hidden", "u3": "hidden"}


def test_a_count_without_indexes_makes_the_remaining_gpus_doubtful() -> None:
    ruled = scheduler_jobs.rule(node(), [held(1, Gres("h100", 2)), held(2, Gres("h100", 1, (0,)))], gpus(8), {})
    assert said(ruled.gpus)["u0"] == "2"
    assert set(said(ruled.gpus).values()) == {"2", "doubt"}
    assert said(scheduler_jobs.rule(node(), [held(1, Gres("h100", 8))], gpus(8), {}).gpus) == {
        f"u{i}": "1" for i in range(8)
    }


def test_shards_of_several_jobs_on_one_gpu() -> None:
    given = [held(1, shards=(Gres("", 3, (1,)),)), held(2, shards=(Gres("", 1, (1,)),), user="eve")]
    ruled = scheduler_jobs.rule(node(), given, gpus(8), {})
    assert said(ruled.gpus) == {"u1": "1+2"}
    assert [job.words for job in ruled.gpus["u1"].jobs] == ["3 shards", "1 shard"]


def test_mig_devices_are_counted_where_slurm_does() -> None:
    parts = [MigStatic("m0", "3g.40gb"), MigStatic("m1", "3g.40gb")]
    split = [GpuStatic(0, "u0", "H100", "", mig=parts, minor=0), GpuStatic(1, "u1", "H100", "", minor=1)]
    whole = node(Gres("h100_3g.40gb", 2), Gres("h100", 1))
    assert said(scheduler_jobs.rule(whole, [held(1, Gres("h100_3g.40gb", 1, (1,)))], split, {}).gpus) == {"m1": "1"}
    assert said(scheduler_jobs.rule(node(Gres("h100", 2)), [held(1, Gres("h100", 1, (1,)))], split, {}).gpus) == {
        "u1": "1"
    }


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("idle+drain", "bad fan [root@10:00]", ("Slurm: drained: bad fan [root@10:00]", "")),
        ("idle+maintenance+reserved", "", ("Slurm reservation maint", "")),
        ("down+not_responding", "gone", ("", "Slurm: the node is down: gone")),
        ("idle", "", ("", "")),
    ],
)
def test_what_a_nodes_state_means_for_its_idle_gpus(state: str, reason: str, words: tuple[str, str]) -> None:
    reservation = "maint" if "reserved" in state else ""
    there = node(state=state, reason=reason, reservation=reservation)
    assert scheduler_jobs.node_words(there) == words
    ruled = scheduler_jobs.rule(there, [held(1, Gres("h100", 1, (0,)))], gpus(8), {})
    assert said(ruled.gpus)["u0"] == "1", "what a job holds it holds"
    assert (ruled.gpus["u1"].withheld, ruled.gpus["u1"].doubt) == words


def test_no_job_starts_on_a_node_where_a_job_is_completing() -> None:
    there = node(state="mixed+completing")
    ruled = scheduler_jobs.rule(there, [held(1, Gres("h100", 1, (0,))), held(9, state="completing")], gpus(2), {})
    assert said(ruled.gpus)["u0"] == "1", "what a job holds it holds"
    assert ruled.gpus["u1"].withheld == "Slurm: job 9 is still completing there; no job starts before it ends"
    withheld = scheduler_jobs.rule(there, [], gpus(2), {}).gpus["u1"].withheld
    assert withheld.startswith("Slurm: a job is still completing")


def test_a_node_whose_line_could_not_be_read_has_no_free_gpu() -> None:
    ruled = scheduler_jobs.rule(node(doubt="GresUsed=? cannot be read"), [held(1, Gres("h100", 1, (0,)))], gpus(8), {})
    assert said(ruled.gpus) == {"u0": "1"} | {f"u{i}": "doubt" for i in range(1, 8)}
    assert ruled.gpus["u1"].doubt == "Slurm: GresUsed=? cannot be read"
    named = "Slurm reports GPUs in use that it does not have"
    assert scheduler_jobs.node_words(node(doubt=named)) == ("", named)


def test_gpus_that_only_slurm_shows_have_its_indexes() -> None:
    both = node(Gres("h100", 2), Gres("", 1))
    assert [(gpu.index, gpu.name, gpu.uuid) for gpu in scheduler_jobs.alone(both)] == [
        (0, "h100", "slurm-n1-0"),
        (1, "h100", "slurm-n1-1"),
        (2, "GPU", "slurm-n1-2"),
    ]
    assert len(scheduler_jobs.alone(node(Gres("h100", 10**12)))) == 1024


def test_a_node_is_known_by_its_other_names_but_its_own_comes_first() -> None:
    first = SchedulerNode("gpu01", "host-a", "10.0.0.1", "idle")
    second = SchedulerNode("host-a", "host-b.lab", "127.0.0.1", "idle")
    found = scheduler_jobs.names(Schedule(0.0, "c", {"gpu01": first, "host-a": second}))
    assert found == {
        "gpu01": "gpu01",
        "host-a": "host-a",
        "10.0.0.1": "gpu01",
        "host-b.lab": "host-a",
        "host-b": "host-a",
    }


@given(st.data(), st.integers(1, 6), st.integers(1, 8), st.booleans())
def test_no_gpu_that_may_be_held_is_free(data: st.DataObject, there: int, counted: int, files: bool) -> None:
    """At least as many GPUs are not free as jobs hold; ambiguous GPUs are never free."""
    left = data.draw(st.permutations(range(counted)))
    holders: list[Gres] = []
    named: set[int] = set()
    for _ in range(data.draw(st.integers(0, 4)) if left else 0):
        if not left:
            break
        count = data.draw(st.integers(1, len(left)))
        mine, left = left[:count], left[count:]
        told = data.draw(st.booleans())
        if told:
            named |= set(mine)
        holders.append(Gres("h100", count, tuple(mine) if told else None))
    hidden = data.draw(st.integers(0, len(holders)))  # of so many we see no job, but the node counts them
    visible = [held(number, one) for number, one in enumerate(holders[hidden:])]
    used = tuple(one for one in holders[:hidden] if one.indexes is not None)
    if any(one.indexes is None for one in holders[:hidden]):
        used = (Gres("h100", sum(one.count for one in holders)),)
    parts = gpus(there, list(range(there)) if files else [None] * there)
    found = scheduler_jobs.rule(node(Gres("h100", counted), used=used), visible, parts, {}).gpus
    plain = {uuid for uuid, ruling in found.items() if not (ruling.jobs or ruling.hidden or ruling.doubt)}
    assert set(found) == {gpu.uuid for gpu in parts}
    number = sum(one.count for one in holders)
    if not number:
        assert len(plain) == there
    elif counted == there:
        assert len(plain) <= there - number
    elif not files or there > counted:
        assert not plain
    if used != (Gres("h100", number),) and (files or counted == there) and there <= counted:
        assert not plain & {f"u{index}" for index in named}
