"""Groups of well linked GPUs: the rule against brute force, its run time, and the size of the groups."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuboard.leases.policy.topology import Matrix, best_group, equal_rows, matrix, ring_order
from tests.steps import steps

LINKS = (0, 10, 20, 40, 50, 110, 210, 410)


def symmetric(count: int) -> st.SearchStrategy[list[list[int]]]:
    pairs = count * (count - 1) // 2
    values = st.one_of(
        st.lists(st.sampled_from(LINKS), min_size=pairs, max_size=pairs),
        st.lists(st.sampled_from((10, 310)), min_size=pairs, max_size=pairs),
    )

    def fill(flat: list[int]) -> list[list[int]]:
        left = iter(flat)
        return matrix(count, lambda a, b: next(left))

    return values.map(fill)


def inner(scores: Matrix, members: Sequence[int]) -> int:
    return sum(scores[a][b] for a, b in combinations(members, 2))


def splits(left: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to split ``left`` into groups of ``size`` and one smaller rest."""
    rest = len(left) % size
    for odd in combinations(left, rest):
        yield from ([*groups, odd] for groups in full_splits(tuple(i for i in left if i not in odd), size))


def full_splits(left: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    if not left:
        yield []
        return
    for others in combinations(left[1:], size - 1):
        group = (left[0], *others)
        for groups in full_splits(tuple(i for i in left if i not in group), size):
            yield [group, *groups]


def by_brute_force(scores: Matrix, size: int) -> tuple[int, int]:
    """The best sum over all groups of any split, and the best score of one group in a split of that sum."""
    return max(
        (sum(inner(scores, g) for g in split), max(inner(scores, g) for g in split if len(g) == size))
        for split in splits(tuple(range(len(scores))), size)
    )


@given(st.integers(2, 8).flatmap(lambda n: st.tuples(symmetric(n), st.integers(2, n))))
@settings(max_examples=120, deadline=None)
def test_the_group_is_the_best_of_the_best_split(case: tuple[list[list[int]], int]) -> None:
    scores, size = case
    found = best_group(scores, size)
    total, best = by_brute_force(scores, size)
    assert (found.exact, len(found.members), found.score) == (True, size, best)
    rest = tuple(i for i in range(len(scores)) if i not in found.members)
    others = max((sum(inner(scores, g) for g in split) for split in splits(rest, size)), default=0)
    assert found.score + others == total
    assert found.score == inner(scores, found.members)


@pytest.mark.parametrize("size", range(1, 17))
def test_sixteen_unequal_gpus_take_a_bounded_search(size: int) -> None:
    dice = random.Random(size)
    scores = matrix(16, lambda a, b: dice.randrange(10_000))
    found = best_group(scores, size)
    assert len(set(found.members)) == size
    assert found.score == inner(scores, found.members)
    assert steps(lambda: best_group(scores, size)) < 600_000
    assert found == best_group(scores, size)


def test_a_search_over_its_budget_is_not_exact_but_finds_planted_groups() -> None:
    dice = random.Random(5)
    scores = matrix(16, lambda a, b: (900 if a % 4 == b % 4 else 0) + dice.randrange(100))
    found = best_group(scores, 4, budget=100)
    assert not found.exact
    assert {member % 4 for member in found.members} == {found.members[0] % 4}


def test_equal_links_give_the_lowest_indexes() -> None:
    scores = matrix(16, lambda a, b: 1800)
    assert [best_group(scores, size).members for size in (1, 2, 5, 16)] == [
        (0,), (0, 1), (0, 1, 2, 3, 4), tuple(range(16)),
    ]  # fmt: skip
    assert equal_rows(scores) == [list(range(16))]


def test_a_good_pair_is_left_for_the_next_user() -> None:
    # a chain 0-1-2-3: a greedy choice takes the best pair, 1-2, and leaves the pair without a link
    scores = matrix(4, lambda a, b: {(0, 1): 100, (1, 2): 110, (2, 3): 100}.get((a, b), 10))
    assert best_group(scores, 2).members == (0, 1)


def test_one_gpu_is_the_one_with_the_worst_links() -> None:
    scores = matrix(5, lambda a, b: 300 if {a, b} in ({0, 1}, {3, 4}) else 10)
    assert best_group(scores, 1).members == (2,)


def ring(scores: Matrix, order: Sequence[int]) -> int:
    return sum(scores[a][b] for a, b in zip(order, [*order[1:], order[0]], strict=True))


@given(st.integers(2, 6).flatmap(symmetric))
@settings(max_examples=80, deadline=None)
def test_the_ring_is_the_best_one(scores: list[list[int]]) -> None:
    found = ring_order(scores)
    orders = [(0, *rest) for rest in permutations(range(1, len(scores)))]
    assert sorted(found) == list(range(len(scores)))
    assert found[0] == 0
    assert ring(scores, found) == max(ring(scores, order) for order in orders)


def test_a_long_ring_follows_the_links() -> None:
    order = list(range(12))
    random.Random(3).shuffle(order)
    neighbours = {frozenset(pair) for pair in zip(order, [*order[1:], order[0]], strict=True)}
    scores = matrix(12, lambda a, b: 400 if frozenset((a, b)) in neighbours else 10)
    assert ring(scores, ring_order(scores)) >= 11 * 400
