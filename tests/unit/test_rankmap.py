"""A rank map is a bijection, or every way in which it is not is named."""

from __future__ import annotations

import msgspec
import pytest

from gpuboard.model.rankmap import Rank, RankMap, RankNode, problems


def sound() -> RankMap:
    """Return 2 + 1 ranks on two nodes."""
    return RankMap(
        schema=1,
        lease="k3f9",
        master_addr="10.0.0.1",
        master_port=0,
        world_size=3,
        nodes=[RankNode("gpu01", "10.0.0.1", 0, 2, "0,3"), RankNode("gpu02", "10.0.0.2", 1, 1, "GPU-c")],
        ranks=[
            Rank(0, "gpu01", 0, 0, "GPU-a"),
            Rank(1, "gpu01", 1, 3, "GPU-b"),
            Rank(2, "gpu02", 0, 7, "GPU-c"),
        ],
    )


def test_a_valid_map_has_no_problems() -> None:
    assert problems(sound()) == []


def _with_rank(at: int, **changes: object) -> RankMap:
    ranks = list(sound().ranks)
    ranks[at] = msgspec.structs.replace(ranks[at], **changes)
    return msgspec.structs.replace(sound(), ranks=ranks)


@pytest.mark.parametrize(
    ("rank_map", "words"),
    [
        (_with_rank(2, rank=1), "rank 1 is listed 2 times"),
        (_with_rank(2, rank=9), "out of range"),
        (_with_rank(1, node="gpu09"), "'gpu09', which is not in nodes"),
        (_with_rank(1, local_rank=0), "local_rank 0 is listed 2 times"),
        (_with_rank(1, uuid="GPU-a"), "GPU GPU-a is given to 2 ranks"),
        (_with_rank(2, uuid="GPU-a"), "GPU GPU-a is listed on gpu01 and gpu02"),
        (_with_rank(1, index=2), "would see GPU '3' but rank 1 is mapped to index 2"),
        (_with_rank(2, index=-1), "node gpu02: index -1 of rank 2 is negative"),
        (_with_rank(0, memory_fraction=0.0), "memory_fraction 0.0"),
        (
            msgspec.structs.replace(sound(), nodes=[*sound().nodes, RankNode("gpu03", "10.0.0.3", 2, 0, "")]),
            "node gpu03: no rank is on it",
        ),
        (msgspec.structs.replace(sound(), world_size=4), "world_size is 4 but 3 ranks"),
        (msgspec.structs.replace(sound(), schema=2), "schema is 2"),
        (msgspec.structs.replace(sound(), master_port=70000), "not a port"),
        (msgspec.structs.replace(sound(), ranks=[]), "nothing to launch"),
        (msgspec.structs.replace(sound(), nodes=[sound().nodes[0]] * 2), "node 'gpu01' is listed 2 times"),
        (
            msgspec.structs.replace(
                sound(), nodes=[msgspec.structs.replace(sound().nodes[0], cuda_visible_devices="0"), sound().nodes[1]]
            ),
            "names 1 GPUs, 2 ranks need one each",
        ),
        (
            msgspec.structs.replace(
                sound(),
                nodes=[
                    msgspec.structs.replace(sound().nodes[0], node_rank=1),
                    msgspec.structs.replace(sound().nodes[1], node_rank=0),
                ],
            ),
            "node gpu02 has node_rank 0 but not rank 0",
        ),
    ],
)
def test_every_fault_is_named(rank_map: RankMap, words: str) -> None:
    assert any(words in problem for problem in problems(rank_map)), problems(rank_map)


@pytest.mark.parametrize(
    "devices", ["0,abc", "0,,3", "0;3", "-1,3", "0,GPU-b", "GPU-a,3", "0, 3", ",0,3", "0,3,", "0,٣"]
)
def test_a_list_that_cuda_would_cut_short_is_named(devices: str) -> None:
    first, second = sound().nodes
    nodes = [msgspec.structs.replace(first, cuda_visible_devices=devices), second]
    assert any(
        "CUDA ignores what follows the first wrong entry" in problem
        for problem in problems(msgspec.structs.replace(sound(), nodes=nodes))
    )


def test_a_gpu_that_is_listed_twice_is_named() -> None:
    first, second = sound().nodes
    nodes = [msgspec.structs.replace(first, cuda_visible_devices="0,0"), second]
    words = "node gpu01: cuda_visible_devices '0,0' lists '0' 2 times"
    assert words in problems(msgspec.structs.replace(sound(), nodes=nodes))


@pytest.mark.parametrize("devices", ["0,3", "GPU-a,GPU-b"])
def test_a_list_of_indexes_or_uuids_is_valid(devices: str) -> None:
    first, second = sound().nodes
    nodes = [msgspec.structs.replace(first, cuda_visible_devices=devices), second]
    assert problems(msgspec.structs.replace(sound(), nodes=nodes)) == []


def test_ranks_without_gpus_need_no_list_of_gpus_but_a_list_must_be_valid() -> None:
    def on_cpu(devices: str, **changes: object) -> list[str]:
        nodes = [msgspec.structs.replace(node, cuda_visible_devices=devices) for node in sound().nodes]
        return problems(msgspec.structs.replace(_with_rank(1, **changes), nodes=nodes), "cpu")

    assert on_cpu("", uuid="GPU-a", index=0) == []
    assert "node gpu01: index 0 is given to 2 ranks" in on_cpu("0,3", index=0)
    assert any("CUDA ignores" in problem for problem in on_cpu("0,abc"))
