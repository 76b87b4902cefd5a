"""Ranks that differ in a collective that torch accepts."""

from __future__ import annotations

from gpuboard.launch.events import Leaving
from gpuboard.launch.stalls.differences import silent_difference

LABELS = {rank: f"rank {rank} (gpu0{rank + 1}:0)" for rank in range(3)}


def test_ranks_that_differ_without_an_error_are_named() -> None:
    right, wrong = "broadcast of float 4", "broadcast of float 2"
    left = [
        Leaving(0, called=[(1, 0), (2, 0), (3, 0)], calls=[right]),
        Leaving(1, called=[(1, 0), (2, 1), (3, 1)], calls=[right, wrong]),
        Leaving(2, called=[(2, 0)], calls=[right]),
    ]
    assert silent_difference(left, LABELS) == (
        f"the ranks differ at collective 2: rank 1 (gpu02:0) called {wrong}; ranks 0,2 called {right}; "
        "torch reported no error: results may be wrong"
    )


def test_ranks_that_agree_as_far_as_known_do_not_differ() -> None:
    left = [
        Leaving(rank, called=[(number, 0) for number in range(max(1, newest - 255), newest)], calls=["barrier"])
        for rank, newest in enumerate((3, 900, 3000))
    ]
    left.append(Leaving(0, called=[(2950, 7)], calls=["reduce"]))  # a number without its call
    assert silent_difference(left, LABELS) is None
