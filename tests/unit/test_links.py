"""`gpuboard doctor --nccl`: bandwidths, kinds of links, and the slow ones."""

from __future__ import annotations

import pytest

from gpuboard.agent.launch.rank.links import _rounds
from gpuboard.doctor.links import AllReduce, MeasuredLink, all_reduce, all_reduce_words, link_checks, links
from gpuboard.launch.events import Measured, Reduction, Transfer
from gpuboard.launch.runs.folder import RankView
from gpuboard.model.snapshot import GpuView, NodeView, Snapshot


def test_the_bus_bandwidth_does_not_depend_on_the_number_of_ranks() -> None:
    found = all_reduce(Reduction(2**30, 10, 0.01), 4)
    assert [found.algorithm, found.bus] == pytest.approx([107.4, 161.1], abs=0.1)
    assert all_reduce_words(found) == "1024 MiB in 10 ms: bus 161 GB/s, algorithm 107 GB/s"
    small = AllReduce(16384, 10, 0.0001, 0.16, 0.2)
    assert all_reduce_words(small) == "16 KiB in 0.10 ms: bus 0.20 GB/s, algorithm 0.16 GB/s"


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 9])
def test_each_pair_of_neighbours_is_in_one_round_and_no_rank_twice(world: int) -> None:
    rounds = _rounds(world)
    pairs = [pair for found in rounds for pair in found]
    assert {frozenset(pair) for pair in pairs} == {frozenset((rank, (rank + 1) % world)) for rank in range(world)}
    assert len(pairs) == (world if world > 2 else 1)
    for found in rounds:
        assert len({rank for pair in found for rank in pair}) == 2 * len(found)


def ring(per_node: int, *speeds: float) -> list[MeasuredLink]:
    """Return the links of a ring with these bandwidths in GB/s, ``per_node`` ranks to a node."""
    world = len(speeds)
    ranks = {rank: RankView(rank, f"gpu0{rank // per_node + 1}", 0, rank % per_node) for rank in range(world)}
    transfers = [
        Transfer((rank, (rank + 1) % world), 10**9, 1 / speed, 0.9 / speed) for rank, speed in enumerate(speeds)
    ]
    return links(Measured(0, [], transfers), ranks, None)


def test_a_link_is_slow_beside_others_of_its_kind() -> None:
    found = ring(2, 200, 10, 90, 11, 210, 9)
    assert [(one.kind, one.slow) for one in found] == [
        ("same node", False), ("between nodes", False), ("same node", True), ("between nodes", False),
        ("same node", False), ("between nodes", False),
    ]  # fmt: skip
    assert found[2].gpus == ("gpu02:0", "gpu02:1")
    assert [found[2].there, found[2].usual] == pytest.approx([90, 205])
    checks = link_checks(found, [AllReduce(2**20, 5, 0.02, 1.0, 1.5)])
    assert [check.status for check in checks] == ["ok", "ok", "warn", "ok", "ok", "ok", "ok"]
    assert checks[2].evidence == "gpu02:0 ↔ gpu02:1 (same node): 90.0 GB/s there, 100 GB/s back"
    assert checks[2].cause == "slow: the other links of this kind have 205 GB/s"
    assert checks[2].remedy.startswith("on gpu02: see nvidia-smi topo -m")
    assert (checks[-1].name, checks[-1].evidence) == (
        "all-reduce",
        "1 MiB in 20 ms: bus 1.5 GB/s, algorithm 1.0 GB/s",
    )


def test_a_node_all_of_whose_links_are_slow_is_named() -> None:
    found = ring(1, 10, 10, 1, 1)
    assert [one.slow for one in found] == [False, False, True, True]
    assert {check.remedy for check in link_checks(found, [])} == {
        "",
        "all links of gpu04 are slow: its network card, cable or switch port (ethtool, ibstat)",
    }
    (alone,) = [one for one in ring(1, 10, 10, 10, 1) if one.slow]
    assert "see which interface is used" in link_checks([*ring(1, 10, 10, 10), alone], [])[-1].remedy


def test_kinds_come_from_the_topology_of_the_nodes() -> None:
    gpus = [GpuView(k, f"GPU-{k}", "H100", "", "free", "") for k in range(3)]
    gpus[0] = GpuView(0, "GPU-0", "H100", "", "free", "", links={"GPU-1": 18}, pci={"GPU-1": 10, "GPU-2": 10})
    snapshot = Snapshot(1, "", "", [NodeView("gpu01", "up", gpus=gpus)])
    ranks = {rank: RankView(rank, "gpu01", rank, rank) for rank in range(3)}
    transfers = [Transfer((rank, (rank + 1) % 3), 10**9, 0.1, 0.1) for rank in range(3)]
    assert [one.kind for one in links(Measured(0, [], transfers), ranks, snapshot)] == ["NV18", "same node", "SYS"]
