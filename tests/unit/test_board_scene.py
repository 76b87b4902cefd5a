"""Whose a lease is, and which leases are on a GPU, also where others have the same uid or took the same id."""

from __future__ import annotations

import msgspec
import pytest

from gpuboard.board.arrange import as_gpu, users_of
from gpuboard.board.scene import Scene
from gpuboard.board.tables.held import held
from gpuboard.model.snapshot import ProcessView
from tests.board import made


@pytest.mark.parametrize("ours_first", [True, False])
def test_an_id_that_another_user_also_took_changes_nothing(ours_first: bool) -> None:
    ours = made.lease("k3f9", "alice", [("gpu01", 0)], uid=1001)
    forged = made.lease("k3f9", "eve", [("gpu01", 1)], uid=1002)
    gpus = [made.gpu("gpu01", index, "reserved", leases=["k3f9"]) for index in range(2)]
    leases = [ours, forged] if ours_first else [forged, ours]
    scene = made.scene(made.node("gpu01", gpus), leases=leases, uids={"gpu01": 1001})
    assert (scene.by_lease["k3f9"].owner, scene.by_lease["k3f9"].mine) == ("alice", True)
    assert [users_of(gpu, scene) for gpu in gpus] == [("alice",), ("eve",)]


def test_a_claim_on_a_gpu_of_another_node_is_on_nothing() -> None:
    gpu = made.gpu("gpu01", 0)
    foreign = made.lease("zzzz", "eve", [("gpu01", 0)], uid=1002)
    elsewhere = [msgspec.structs.replace(part, node="gpu02", index=None) for part in foreign.gpus]
    foreign = msgspec.structs.replace(foreign, gpus=elsewhere)
    nodes = made.node("gpu01", [gpu]), made.node("gpu02", [made.gpu("gpu02", 0)])
    scene = made.scene(*nodes, leases=[foreign])
    assert users_of(gpu, scene) == ()
    assert held(scene)[0].gpus == []


def test_of_a_shared_gpu_no_holder_is_a_rogue() -> None:
    processes = [
        ProcessView(pid, user, "python", 1, "compute") for pid, user in enumerate(("alice", "bob", "carol", None))
    ]
    processes[2] = msgspec.structs.replace(processes[2], rogue=True)
    gpu = made.gpu("gpu01", 0, "reserved", leases=["aaaa", "bbbb"], flags=["rogue"], processes=processes)
    leases = [made.lease("aaaa", "alice", [("gpu01", 0)]), made.lease("bbbb", "bob", [("gpu01", 0)], uid=1002)]
    found = held(made.scene(made.node("gpu01", [gpu]), leases=leases))
    assert [[process.user for _, process in one.rogues] for one in found] == [["carol"], ["carol"]]


def test_a_gpu_is_found_wherever_its_node_stands_now() -> None:
    nodes = [made.node(name, [made.gpu(name, index) for index in range(2)]) for name in ("gpu01", "gpu02", "gpu03")]
    uuid = nodes[1].gpus[1].uuid

    def found(*order: int) -> tuple[str, int] | None:
        scene = made.scene(*(nodes[at] for at in order))
        place = scene.place(uuid)
        assert place == scene.places.get(uuid)
        return None if place is None else (place.node.name, place.gpu.index)

    for order in ((0, 1, 2), (0, 1, 2), (1, 0), (2, 0, 1), (1,)):
        assert found(*order) == ("gpu02", 1)
    assert found(0, 2) is None
    assert found() is None
    assert found(0, 1, 2) == ("gpu02", 1)


def test_a_replay_of_simulated_nodes_has_both_labels() -> None:
    plain = made.node("gpu01", [made.gpu("gpu01", 0)])
    for source, label in (("nvml", "REPLAY"), ("simulated", "REPLAY  SIMULATED")):
        scene = made.scene(msgspec.structs.replace(plain, source=source))
        assert Scene(scene.snapshot, scene.leases, uids={}, label="REPLAY").label == label


def test_users_of_a_mig_device_are_those_of_its_processes() -> None:
    gpu = made.mig("gpu01", 0, "busy", "busy")
    device = msgspec.structs.replace(gpu.mig[0], processes=[ProcessView(7, "carol", "python", 1, "compute")])
    scene = made.scene(made.node("gpu01", [gpu]))
    assert users_of(device, scene) == ("carol",)
    assert users_of(as_gpu(gpu, device), scene) == ("carol",)
    assert users_of(gpu.mig[1], scene) == ()


def test_a_gpu_is_found_also_after_its_node_has_moved_or_gone() -> None:
    nodes = [made.node(name, [made.gpu(name, index) for index in range(2)]) for name in ("gpu01", "gpu02", "gpu03")]
    for shown in (nodes, nodes, nodes[::-1], nodes[1:]):
        place = made.scene(*shown).place("GPU-gpu02-1")
        assert place is not None
        assert (place.node.name, place.gpu.index) == ("gpu02", 1)
    assert made.scene(nodes[0]).place("GPU-gpu02-1") is None
