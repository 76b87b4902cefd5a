"""Who holds and uses GPUs, and what ends next."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpuboard.board.overview.people import People, Person
from gpuboard.board.overview.upcoming import Upcoming, UpcomingEnd
from gpuboard.board.scene import Scene
from gpuboard.model.gpu import NodeState
from gpuboard.model.lease import LeaseGpu, LeaseList
from gpuboard.model.snapshot import JobView, NodeView
from gpuboard.model.units import seconds_of
from tests.board import made

NOW = seconds_of(made.AT)
LEASE = made.lease("k3f0", "alice", [("gpu01", 0), ("gpu01", 1), ("gpu02", 0)])


def job(name: str, user: str, until: str | None = "2026-01-31T13:00:00.000Z") -> JobView:
    return JobView(name, user, "main", until)


def lab() -> Scene:
    """Return two nodes: alice holds three GPUs and uses one, a rogue is on another; bob's job spans both nodes."""
    first = made.node("gpu01", [
        made.busy("gpu01", 0, "alice"),
        made.busy("gpu01", 1, "mallory", flags=["rogue", "idle"]),
        made.gpu("gpu01", 2, "allocated", jobs=[job("15", "bob")]),
    ])  # fmt: skip
    parts = made.mig("gpu02", 2, "allocated", "free")
    parts = msgspec.structs.replace(
        parts, mig=[msgspec.structs.replace(parts.mig[0], jobs=[job("16", "erin", None)]), parts.mig[1]]
    )
    second = made.node("gpu02", [
        made.gpu("gpu02", 0, "reserved"), made.gpu("gpu02", 1, "allocated", jobs=[job("15", "bob")]), parts
    ])  # fmt: skip
    return made.scene(first, second, leases=[LEASE])


def test_gpus_held_used_and_idle_are_counted_for_each_person() -> None:
    assert People().of(lab()) == [
        Person("alice", held=3, used=1, idle=1),
        Person("bob", held=2),
        Person("erin", held=1),
        Person("mallory", used=1, rogue=1),
    ]
    assert [one.name for one in People().of(lab(), "used")] == ["alice", "mallory", "bob", "erin"]


@pytest.mark.parametrize("state", ["stale", "unreachable"])
def test_processes_on_a_node_whose_reading_is_old_are_not_counted(state: NodeState) -> None:
    scene, people = lab(), People()
    people.of(scene)
    first, second = scene.snapshot.nodes
    old = msgspec.structs.replace(first, state=state)
    assert people.of(made.scene(old, second)) == [Person("bob", held=2), Person("erin", held=1)]


def test_only_nodes_with_new_readings_are_counted_again() -> None:
    scene, people, upcoming = lab(), People(), Upcoming()
    before, ending = people.of(scene), upcoming.of(scene, NOW)

    class Untouched(Scene):
        def leases_on(self, uuid: str) -> Any:
            raise AssertionError(f"{uuid} counted again")

    same = [msgspec.structs.replace(node, age_s=2.5) for node in scene.snapshot.nodes]
    later = Untouched(msgspec.structs.replace(scene.snapshot, nodes=same), scene.leases, uids={})
    assert people.of(later) == before
    assert upcoming.of(later, NOW) == ending
    gone: list[NodeView] = same[1:]
    assert people.of(made.scene(*gone, leases=[LEASE])) == [
        Person("alice", held=1),
        Person("bob", held=1),
        Person("erin", held=1),
    ]


def test_another_owner_of_a_lease_counts_though_no_gpu_was_judged_again() -> None:
    scene, people = lab(), People()
    people.of(scene)
    renamed = msgspec.structs.replace(LEASE, owner="alicia")
    found = people.of(Scene(scene.snapshot, LeaseList(1, made.AT, [renamed]), uids={}))
    assert next(one.held for one in found if one.name == "alicia") == len(LEASE.gpus)


def test_what_ends_next_names_mig_devices_by_their_numbers() -> None:
    split = made.mig("gpu01", 0, "free", "reserved", "allocated")
    on_job = msgspec.structs.replace(split.mig[2], jobs=[job("15", "bob")])
    split = msgspec.structs.replace(split, mig=[*split.mig[:2], on_job])
    held = msgspec.structs.replace(LEASE, gpus=[LeaseGpu("gpu01", 0, split.mig[1].uuid, mig=1)])
    found = Upcoming().of(made.scene(made.node("gpu01", [split]), leases=[held]), NOW)
    assert [one.place for one in found] == ["gpu01:0:2", "gpu01:0:1"]


def test_what_ends_next_are_leases_and_jobs_with_a_limit() -> None:
    end = seconds_of("2026-01-31T13:00:00.000Z")
    assert Upcoming().of(lab(), NOW) == [
        UpcomingEnd(end, "bob", "job 15", 2, "gpu01:2 +1"),
        UpcomingEnd(seconds_of(LEASE.until), "alice", "k3f0", 3, "gpu01:0-1 +1"),
    ]


def test_a_job_s_lease_is_listed_once() -> None:
    scene = lab()
    lease = msgspec.structs.replace(LEASE, id="j7", owner="bob", job="15")
    both = Scene(scene.snapshot, msgspec.structs.replace(scene.leases, leases=[lease]), uids={})
    assert [one.name for one in Upcoming().of(both, NOW)] == ["j7"]
