"""Hand-written rank maps are checked like any input; all errors are listed at once."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.errors import UsageError
from gpuboard.launch.plan import Device, check_rank_map
from gpuboard.launch.rank_map_source import nodes_of, read_rank_map
from gpuboard.model.rankmap import Rank, RankMap, RankNode
from gpuboard.model.text import clean
from tests.unit.test_plan import MAP

KNOWN = ("gpu01", "gpu02")


def refusal(rank_map: RankMap, device: Device = "cuda") -> str:
    """Return the message with which ``rank_map`` is refused."""
    with pytest.raises(UsageError) as caught:
        check_rank_map(rank_map, KNOWN, "map.json", device)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_valid_map_passes() -> None:
    assert check_rank_map(MAP, KNOWN, "map.json", "cuda") is None  # type: ignore[func-returns-value]


def test_every_problem_is_named() -> None:
    nodes = [RankNode("gpu09", "10.0.0.9", 0, 1, "0"), RankNode("a;reboot", "$(id)", 1, 1, "0;1")]
    wrong = RankMap(
        1, None, "-oProxyCommand=x", 70000, 2, nodes, [Rank(0, "gpu09", 0, 0, "a"), Rank(0, "x", 0, 0, "b")]
    )
    words = refusal(wrong)
    assert words.startswith("map.json:\n")
    for part in (
        "rank 0 is listed 2 times",
        "is on node 'x', which is not in nodes",
        "master_port 70000",
        "node 'gpu09' is not in the inventory (gpu01, gpu02)",
        "node 'a;reboot' is not a host name",
        "'$(id)' is neither a host name nor an IP address",
        "cuda_visible_devices '0;1' is not a list of GPUs",
        "master_addr '-oProxyCommand=x' is neither",
    ):
        assert part in words


def test_control_characters_of_a_map_are_removed() -> None:
    named = "gpu01\x1b[31m\nx"
    ranks = [Rank(rank, named, rank, 0, "GPU-\x1b]0;owned\x07") for rank in range(2)]
    words = refusal(RankMap(1, None, "10.0.0.1", 0, 2, [RankNode(named, "10.0.0.1", 0, 2, "0,0")], ranks))
    assert "node gpu01[31m x: GPU GPU-]0;owned is given to 2 ranks" in words
    assert [c for c in words if c != "\n" and clean(c) != c] == []


def test_without_gpus_only_the_numbering_is_checked() -> None:
    nodes = [RankNode("gpu01", "10.0.0.1", 0, 2, ""), RankNode("gpu02", "10.0.0.2", 1, 1, "")]
    ranks = [Rank(0, "gpu01", 0, 0, ""), Rank(1, "gpu01", 1, 0, ""), Rank(2, "gpu02", 0, 0, "")]
    bare = RankMap(1, None, "10.0.0.1", 0, 3, nodes, ranks)
    assert check_rank_map(bare, KNOWN, "map.json", "cpu") is None  # type: ignore[func-returns-value]
    assert "is given to 2 ranks" in refusal(bare, "cuda")
    assert "out of range" in refusal(
        msgspec.structs.replace(bare, ranks=[*ranks[:2], Rank(5, "gpu02", 0, 0, "")]), "cpu"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a rank map"),
        (b"{", "not a rank map"),
        (b"[" * 100000, "not a rank map"),
        (b"\xff\xfe", "not a rank map"),
        (b'{"schema": "one"}', "not a rank map: Expected `int`, got `str` - at `$.schema`"),
        (b'{"schema": 1}', "missing required field"),
    ],
)
def test_a_file_without_a_rank_map_is_a_usage_error(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "map.json").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_rank_map(tmp_path / "map.json")
    assert words in str(caught.value)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_bytes(b"\xef\xbb\xbf" + msgspec.json.encode(MAP))
    assert read_rank_map(tmp_path / "map.json") == MAP


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the rank map .*: No such file"):
        read_rank_map(tmp_path / "map.json")


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_bytes(msgspec.json.encode(MAP))
    assert read_rank_map(tmp_path / "map.json") == MAP


def test_this_machine_may_be_listed_under_one_of_its_names_only() -> None:
    own = [RankNode(name, "127.0.0.1", at, 1, "0") for at, name in enumerate(("localhost", os.uname().nodename))]
    one = RankMap(1, None, "127.0.0.1", 0, 1, own[:1], [Rank(0, "localhost", 0, 0, "a")])
    there = Node("gpu01", "gpu01")
    assert nodes_of(one, [there]) == {"gpu01": there, "localhost": Node("localhost", None)}
    with pytest.raises(UsageError, match="use one of them"):
        nodes_of(msgspec.structs.replace(one, nodes=own), [there])
