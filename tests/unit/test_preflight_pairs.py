"""Which nodes connect to which: every pair of a small run, a constant number per node of a large one."""

from __future__ import annotations

import pytest

from gpuboard.launch.preflight.pairs import EVERY_PAIR, pairs_text, peers


def names(count: int) -> list[str]:
    """Return node names."""
    return [f"gpu{at:04d}" for at in range(count)]


@pytest.mark.parametrize("count", [1, 2, EVERY_PAIR])
def test_a_small_run_tries_every_pair_in_both_directions(count: int) -> None:
    chosen = peers(names(count), "r1")
    assert {(a, b) for a, others in chosen.items() for b in others} == {
        (a, b) for a in names(count) for b in names(count) if a != b
    }


@pytest.mark.parametrize("count", [EVERY_PAIR + 1, 64, 1000])
def test_in_a_large_run_the_number_per_node_is_constant(count: int) -> None:
    nodes = names(count)
    chosen = peers(nodes, "r1")
    assert list(chosen) == nodes
    tried = {(a, b) for a, others in chosen.items() for b in others}
    assert tried == {(b, a) for a, b in tried}, "each pair in both directions, so in-degree is out-degree"
    assert {(a, b) for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)} <= tried, "the ring of node ranks"
    for node, others in chosen.items():
        assert node not in others
        assert len(set(others)) == len(others)
        assert 2 <= len(others) <= 6
    assert sum(len(others) for others in chosen.values()) > (2 if count < 64 else 5.5) * count, (
        "samples beside the ring"
    )


def test_the_choice_depends_on_the_run_alone() -> None:
    assert peers(names(64), "r1") == peers(names(64), "r1")
    assert peers(names(64), "r1") != peers(names(64), "r2")


def test_the_text_says_which_pairs_were_tried() -> None:
    assert pairs_text(2, 2) == "every pair: 2 of 2 pairs"
    assert pairs_text(64, 440) == "the first node, a ring and samples: 440 of 4,032 pairs"
