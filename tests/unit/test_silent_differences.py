"""Ranks that differ in a collective that torch accepts."""

from __future__ import annotations

import msgspec

from gpuboard.launch.events import Leaving, Raised
from gpuboard.launch.stalls.differences import evidence_of, merged, silent_difference
from gpuboard.launch.stalls.evidence import Collective, ProcessGroup, RankEvidence, StackFrame

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


def test_what_was_seen_of_a_rank_before_its_end_is_kept() -> None:
    raised = evidence_of(
        Raised(
            1, "RuntimeError", "closed", "/exp/train.py", 12, "main", called=[(5, 0)], calls=["all_gather of float 6"]
        )
    )
    assert raised is not None
    subgroup = ProcessGroup("1", 2, 2)
    seen = RankEvidence(1, 101, collectives=[ProcessGroup("0", 5, 4, [Collective(5, "all_gather", [[6]])]), subgroup])
    after = merged(raised, seen)
    assert (after.stack, after.collectives) == (raised.stack, seen.collectives), "its process had ended: no stack"
    ending = [StackFrame("_shutdown", "/usr/lib/python3.11/threading.py", 1553)]
    assert merged(raised, msgspec.structs.replace(seen, stack=ending)).stack == raised.stack, "its interpreter ended"
    assert merged(None, msgspec.structs.replace(seen, stack=ending)).stack == ending
    assert merged(seen, raised).collectives == [*(raised.collectives or []), subgroup]
    later = RankEvidence(1, 101, collectives=[ProcessGroup("0", 6, 5)])
    assert merged(raised, later) == later, "the stack is of another call"
