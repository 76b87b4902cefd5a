"""An allocation in every format, and the rank map behind it."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.errors import UsageError
from gpuboard.leases.output.formats import Allocation, error_of, render
from gpuboard.leases.output.shell import FORMATS
from gpuboard.leases.picks import parse_picks
from gpuboard.leases.rank_map import rank_map, reachable_addresses
from gpuboard.model.lease import Lease, LeaseGpu, LeaseHolder, gpus_text
from gpuboard.model.rankmap import RankMap, problems
from gpuboard.model.request import ChosenGpu, Refusal, RefusedGpu
from tests.steps import steps

GPUS = (ChosenGpu("gpu02", 2, "GPU-c"), ChosenGpu("gpu02", 0, "GPU-a"), ChosenGpu("gpu01", 7, "GPU-h"))
MAP = rank_map("k3f9xy", GPUS, {"gpu01": "10.0.0.1", "gpu02": "10.0.0.2"})
LEASE = Lease(
    id="k3f9xy", owner="alice", uid=1001, host="login1", gpus=[LeaseGpu("gpu01", 7, "GPU-h")],
    since="2026-01-31T12:00:00.000Z", until="2026-01-31T13:00:00.000Z", holder=LeaseHolder(42, True),
)  # fmt: skip
ALLOCATION = Allocation(LEASE, MAP, "because", "/home/al ice/it's.json", "gpu[01-02]", "gpu02")


def test_the_rank_map_is_sound_and_nodes_come_in_the_order_of_the_ranks() -> None:
    assert problems(MAP) == []
    assert (MAP.master_addr, MAP.master_port, MAP.world_size) == ("10.0.0.2", 0, 3)
    assert [(n.name, n.node_rank, n.local_world_size, n.cuda_visible_devices) for n in MAP.nodes] == [
        ("gpu02", 0, 2, "2,0"), ("gpu01", 1, 1, "7"),
    ]  # fmt: skip
    assert [(r.rank, r.node, r.local_rank, r.index) for r in MAP.ranks] == [
        (0, "gpu02", 0, 2), (1, "gpu02", 1, 0), (2, "gpu01", 0, 7),
    ]  # fmt: skip


def test_one_node_alone_talks_over_loopback_and_mig_goes_by_uuid() -> None:
    alone = rank_map(None, [ChosenGpu("gpu01", 0, "MIG-x")], {"gpu01": "10.0.0.1"})
    assert (alone.master_addr, alone.nodes[0].cuda_visible_devices) == ("127.0.0.1", "MIG-x")
    assert problems(alone) == []


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ([LeaseGpu("a", 0, "GPU-0"), LeaseGpu("a", 1, "GPU-1"), LeaseGpu("b", 3, "GPU-3")], "a:0-1@b:3"),
        ([LeaseGpu("a", 2, "GPU-2"), LeaseGpu("a", 0, "GPU-0")], "a:2,0"),
        ([LeaseGpu("a", 0, "MIG-5", mig=5), LeaseGpu("a", 0, "MIG-7", mig=7)], "a:0:5,0:7"),
        ([LeaseGpu("a", 0, "GPU-0"), LeaseGpu("a", 1, "MIG-2", mig=2), LeaseGpu("b", 1, "GPU-1")], "a:0,1:2@b:1"),
        ([LeaseGpu("a", 0, "MIG-x000"), LeaseGpu("a", 0, "MIG-y000")], "a:MIG-x000,MIG-y000"),  # from a rank map
        ([LeaseGpu("a", 0, "GPU-0"), LeaseGpu("a", None, "")], "a:0,?"),
    ],
)
def test_gpus_of_a_lease_are_written_as_requests_name_them(gpus: list[LeaseGpu], words: str) -> None:
    assert gpus_text(gpus) == words
    if "?" not in words:
        picks = parse_picks(words)
        assert [(pick.node, pick.index, pick.mig) for pick in picks if pick.uuid is None] == [
            (gpu.node, gpu.index, gpu.mig) for gpu in gpus if gpu.uuid not in words
        ]


def test_addresses_are_those_of_the_common_network() -> None:
    own = {
        "a": ["172.17.0.1", "192.168.7.4", "10.1.0.1", "fe80::1"],
        "b": ["172.17.0.1", "10.1.0.2", "192.168.99.1"],
        "c": ["10.1.0.3", "127.0.0.1"],
    }
    assert reachable_addresses(own, {}) == {"a": "10.1.0.1", "b": "10.1.0.2", "c": "10.1.0.3"}
    assert reachable_addresses(own, {"a": "192.168.7.4"})["a"] == "192.168.7.4"
    assert reachable_addresses({"a": [], "b": ["10.0.0.9"]}, {"a": "a.example"}) == {"a": "a.example", "b": "10.0.0.9"}


def test_addresses_of_a_thousand_nodes() -> None:
    """In linear time; comparing every pair of addresses takes half an hour."""
    own = {
        f"n{i}": [
            f"172.{i % 100}.{i // 100}.1",
            f"10.0.{i // 250}.{i % 250}",
            *(f"{net}.{i % 250}.{i // 250}.1" for net in range(20, 27)),
        ]
        for i in range(1000)
    }
    found: dict[str, str] = {}
    assert steps(lambda: found.update(reachable_addresses(own, {}))) < 5_000_000
    assert found == {f"n{i}": f"10.0.{i // 250}.{i % 250}" for i in range(1000)}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("shell", "export GPUBOARD_LEASE='k3f9xy'\nexport GPUBOARD_RANK_MAP='/home/al ice/it'\\''s.json'\n"
                  "export GPUBOARD_NODES='gpu[01-02]'\nexport CUDA_DEVICE_ORDER='PCI_BUS_ID'\n"
                  "export CUDA_VISIBLE_DEVICES='2,0'\n"),
        ("csh", "setenv GPUBOARD_LEASE k3f9xy;\nsetenv GPUBOARD_RANK_MAP /home/al\\ ice/it\\'s.json;\n"
                "setenv GPUBOARD_NODES gpu\\[01-02\\];\nsetenv CUDA_DEVICE_ORDER PCI_BUS_ID;\n"
                "setenv CUDA_VISIBLE_DEVICES 2,0;\n"),
        ("fish", "set -gx GPUBOARD_LEASE 'k3f9xy';\nset -gx GPUBOARD_RANK_MAP '/home/al ice/it\\'s.json';\n"
                 "set -gx GPUBOARD_NODES 'gpu[01-02]';\nset -gx CUDA_DEVICE_ORDER 'PCI_BUS_ID';\n"
                 "set -gx CUDA_VISIBLE_DEVICES '2,0';\n"),
        ("env", 'GPUBOARD_LEASE=k3f9xy\nGPUBOARD_RANK_MAP="/home/al ice/it\'s.json"\nGPUBOARD_NODES=gpu[01-02]\n'
                "CUDA_DEVICE_ORDER=PCI_BUS_ID\nCUDA_VISIBLE_DEVICES=2,0\n"),
        ("hostfile", "gpu02 slots=2\ngpu01 slots=1\n"),
        ("rankfile", "rank 0=gpu02 slot=S*\nrank 1=gpu02 slot=S*\nrank 2=gpu01 slot=S*\n"),
        ("deepspeed", "gpu02:2,0@gpu01:7\n"),
        ("uuids", "GPU-c,GPU-a,GPU-h\n"),
    ],
)  # fmt: skip
def test_every_format(form: str, text: str) -> None:
    assert render(ALLOCATION, form) == text


def included(text: str) -> dict[str, list[int]]:
    """Read what `deepspeed --include` documents: NODE_SPEC[@NODE_SPEC ...], NODE_SPEC=NAME[:SLOT[,SLOT ...]]."""
    found: dict[str, list[int]] = {}
    for spec in text.rstrip("\n").split("@"):
        name, colon, slots = spec.partition(":")
        assert re.fullmatch(r"[^:@,\s]+", name)
        assert colon, f"{spec}: without slots it would be all GPUs of the node"
        assert name not in found
        found[name] = [int(slot) for slot in slots.split(",")]
    return found


@given(
    st.dictionaries(st.sampled_from(["gpu01", "gpu-2.lab", "a_b"]), st.sets(st.integers(0, 15), min_size=1), min_size=1)
)
def test_deepspeed_gets_exactly_the_reserved_gpus_of_each_node(taken: dict[str, set[int]]) -> None:
    gpus = [ChosenGpu(node, index, f"GPU-{node}-{index}") for node, indexes in taken.items() for index in indexes]
    allocation = Allocation(LEASE, rank_map("k3f9xy", gpus, {}), "because")
    assert {node: set(slots) for node, slots in included(render(allocation, "deepspeed")).items()} == taken


def test_deepspeed_gets_no_mig_device_by_its_gpus_index() -> None:
    allocation = Allocation(LEASE, rank_map("k3f9xy", [ChosenGpu("gpu01", 3, "MIG-x")], {}), "because")
    with pytest.raises(UsageError, match="MIG devices have no index, which DeepSpeed needs"):
        render(allocation, "deepspeed")


def test_uuids_on_request_and_nothing_where_the_lease_has_no_gpu() -> None:
    assert "export CUDA_VISIBLE_DEVICES='GPU-c,GPU-a'\n" in render(ALLOCATION, "shell", uuids=True)
    for uuids in (False, True):
        elsewhere = render(msgspec.structs.replace(ALLOCATION, here=None), "shell", uuids=uuids)
        assert "export CUDA_VISIBLE_DEVICES=''\n" in elsewhere


def test_json_has_lease_rank_map_and_why() -> None:
    value = msgspec.json.decode(render(ALLOCATION, "json"))
    assert (value["schema"], value["why"]) == (1, "because")
    assert value["lease"]["from"] == "2026-01-31T12:00:00.000Z"
    assert msgspec.convert(value["rank_map"], RankMap) == MAP
    assert msgspec.json.decode(render(ALLOCATION, "rank-map"), type=RankMap) == MAP


def test_a_refusal_as_json_has_a_reason_for_every_gpu() -> None:
    refusal = Refusal(4, "not now", (RefusedGpu("gpu01", 0, "GPU-a", "busy", "bob: python"),), "--wait")
    assert msgspec.json.decode(msgspec.json.encode(error_of(4, "not now", refusal))) == {
        "schema": 1,
        "error": {
            "code": 4,
            "message": "not now",
            "gpus": [
                {"node": "gpu01", "index": 0, "uuid": "GPU-a", "state": "busy", "reason": "bob: python", "mig": None}
            ],
            "nearest": "--wait",
        },
    }


def test_each_format_is_rendered_and_an_unknown_one_is_not() -> None:
    assert all(render(ALLOCATION, form) for form in FORMATS)
    with pytest.raises(ValueError, match="unknown format"):
        render(ALLOCATION, "yaml")
