"""Choose a group of GPUs of one node, and their rank order, by their links alone. Pure.

The rule is NVIDIA's best effort: among all ways to split the available GPUs into groups of the requested size (the
rest, too few for a group, is one more group), maximise the sum of the pair scores inside all groups and take the best
group of that split. A greedy choice would leave worse groups for the next request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import msgspec

NVLINK = 100  # added per NVLink to the PCIe level: 10 SYS, 20 NODE, 30 PHB, 40 PXB, 50 PIX, 60 PSB
BUDGET = 12_000  # groups examined: about 30 ms for 16 GPUs; a count, not a time, so that results are reproducible
_EXACT_RING = 9  # GPUs: the largest number for which the best ring is searched exactly (2^8 · 8² steps)

Matrix = Sequence[Sequence[int]]


class GpuGroup(msgspec.Struct, frozen=True):
    """The chosen members (positions in the matrix, ascending), their own score, and whether the search was complete."""

    members: tuple[int, ...]
    score: int
    exact: bool


class _BudgetExceeded(Exception):
    """The search examined more groups than its budget allows."""


def best_group(scores: Matrix, size: int, budget: int = BUDGET) -> GpuGroup:
    """Return the group of ``size`` members that the rule chooses; ties go to the lowest positions.

    ``scores`` is symmetric, n x n, with a zero diagonal; 1 <= size <= n. When ``budget`` is exceeded, the result comes
    from the best split found so far, improved by exchanging members.
    """
    count = len(scores)
    if size == count:
        return GpuGroup(tuple(range(count)), _inner(scores, tuple(range(count))), True)
    if size == 1:  # every group scores 0: take the GPU whose links to the others are worst
        return GpuGroup((min(range(count), key=lambda i: (sum(scores[i]), i)),), 0, True)
    classes = equal_rows(scores)
    search = _Search(scores, classes, size, budget)
    try:
        return search.run()
    except _BudgetExceeded:
        return _by_exchange(scores, size, search.members(search.best[2]) if search.best else ())


def equal_rows(scores: Matrix) -> list[list[int]]:
    """Return classes of positions; exchanging two of one class changes no score."""
    classes: list[list[int]] = []
    for i in range(len(scores)):
        for members in classes:
            j = members[0]
            if all(scores[i][x] == scores[j][x] for x in range(len(scores)) if x not in {i, j}):
                members.append(i)
                break
        else:
            classes.append([i])
    return classes


class _Search:
    """The exact search: dynamic programming over the set of remaining GPUs, with an upper bound on its score.

    Sets are bit masks in which position 0 is the highest bit: of two groups of one size, the one with the lower
    positions is the larger number. GPUs of one class are always taken in order, so that sets that differ only by
    an exchange within a class are one set.
    """

    def __init__(self, scores: Matrix, classes: list[list[int]], size: int, budget: int) -> None:
        count = len(scores)
        self.size = size
        self.budget = budget
        self.best: tuple[int, int, int] | None = None  # of the full set, so far
        self._scores = scores
        self._bits = [1 << (count - 1 - i) for i in range(count)]
        self._before = [0] * count  # the bit of the class member that must be taken first
        for members in classes:
            for earlier, later in pairwise(members):
                self._before[later] = self._bits[earlier]
        self._most = [sum(sorted(row, reverse=True)[: size - 1]) for row in scores]  # twice what one GPU can add
        self._known: dict[int, tuple[int, int, int]] = {0: (0, -1, 0)}

    def run(self) -> GpuGroup:
        """Return the chosen group. Raises _BudgetExceeded; ``best`` is then the best found so far."""
        everything = (1 << len(self._bits)) - 1
        _, score, group = self._one_group() if 2 * self.size >= len(self._bits) else self._value(everything)
        return GpuGroup(self.members(group), score, True)

    def members(self, group: int) -> tuple[int, ...]:
        """Return the positions in a mask, ascending."""
        return tuple(i for i, bit in enumerate(self._bits) if group & bit)

    def _one_group(self) -> tuple[int, int, int]:
        """Return the best split into one group and a rest that is not larger; examines each group once."""
        degrees = [sum(row) for row in self._scores]
        total = sum(degrees) // 2  # of all pairs; a split has total - (degrees in the group) + 2 * (pairs in it)
        self.budget += 4 << len(degrees)  # upper limit of C(n, k) groups and the steps to them
        return max(
            (total + 2 * score - cost, score, group)
            for group, score, cost in self._groups((1 << len(degrees)) - 1, self.size, degrees, first=False)
        )

    def _value(self, left: int) -> tuple[int, int, int]:
        """Return the best split of ``left``: its sum, the score of its best full group, and that group."""
        known = self._known.get(left)
        if known is not None:
            return known
        count = left.bit_count()
        rest = count % self.size
        most = sum(m for bit, m in zip(self._bits, self._most, strict=True) if left & bit)
        outermost = count == len(self._bits)
        best = (-1, -1, 0)
        found = [(2 * score - cost, score, group) for group, score, cost in self._groups(left, self.size, self._most)]
        if rest:  # the first GPU may also be in the rest
            found += [(2 * score - cost, score, group) for group, score, cost in self._groups(left, rest, self._most)]
        found.sort(reverse=True)
        for ahead, score, group in found:
            if ahead + most < 2 * best[0]:
                break  # bound: no later group can be better
            total, inner, members = self._value(left & ~group)
            full = group.bit_count() == self.size
            if full and (score, group) > (inner, members):
                inner, members = score, group
            best = max(best, (total + score, inner, members))
            if outermost:
                self.best = best
        self._known[left] = best
        return best

    def _groups(
        self, left: int, size: int, weights: Sequence[int], *, first: bool = True
    ) -> list[tuple[int, int, int]]:
        """Return (mask, score, sum of ``weights``) of the groups in ``left``; ``first``: with its first GPU."""
        places = [i for i, bit in enumerate(self._bits) if left & bit]
        rows = [[self._scores[i][j] for j in places] for i in places]
        bits = [self._bits[i] for i in places]
        costs = [weights[i] for i in places]
        before = [self._before[i] & left for i in places]
        found: list[tuple[int, int, int]] = []

        def extend(start: int, need: int, group: int, score: int, cost: int, gains: list[int]) -> None:  # noqa: PLR0917
            if self.budget < 0:
                raise _BudgetExceeded
            if need == 1:
                ends = [
                    (group | bits[j], score + gains[j], cost + costs[j])
                    for j in range(start, len(bits))
                    if not before[j] & ~group
                ]
                self.budget -= len(ends) + 1
                found.extend(ends)
                return
            self.budget -= 1
            for j in range(start, len(bits) - need + 1):
                if not before[j] & ~group:
                    more = [a + b for a, b in zip(gains, rows[j])]  # noqa: B905 - equal lengths, and this is the hot line
                    extend(j + 1, need - 1, group | bits[j], score + gains[j], cost + costs[j], more)

        if not first:
            extend(0, size, 0, 0, 0, [0] * len(bits))
        elif size == 1:
            found.append((bits[0], 0, costs[0]))
        else:
            extend(1, size - 1, bits[0], 0, costs[0], rows[0])
        return found


def _by_exchange(scores: Matrix, size: int, found: tuple[int, ...]) -> GpuGroup:
    """Return a good group without the exact search: split greedily, exchange members while the sum grows.

    ``found``: the best group of the unfinished search, if any; a second split starts from it.
    """
    starts = [_greedy(scores, size, ())] + ([_greedy(scores, size, found)] if found else [])
    splits = [_exchange(scores, start) for start in starts]
    best = max(splits, key=lambda groups: sum(_inner(scores, group) for group in groups))
    group = min((g for g in best if len(g) == size), key=lambda g: (-_inner(scores, g), g))
    return GpuGroup(group, _inner(scores, group), False)


def _greedy(scores: Matrix, size: int, first: tuple[int, ...]) -> list[list[int]]:
    """Return a split: ``first``, then repeatedly the best remaining pair and the GPUs that add most to it."""
    groups = [list(first)] if first else []
    left = [i for i in range(len(scores)) if i not in first]
    while len(left) > size:
        pair = max(combinations(left, 2), key=lambda two: scores[two[0]][two[1]])
        group = list(pair)
        while len(group) < size:
            gains = {i: sum(scores[i][j] for j in group) for i in left if i not in group}
            group.append(max(gains, key=gains.__getitem__))
        groups.append(group)
        left = [i for i in left if i not in group]
    return [*groups, left] if left else groups


def _exchange(scores: Matrix, groups: list[list[int]]) -> list[tuple[int, ...]]:
    """Return the split after exchanging two members at a time while the sum grows."""
    where = {member: g for g, group in enumerate(groups) for member in group}
    reach = [[sum(scores[i][j] for j in group) for group in groups] for i in range(len(scores))]
    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(scores)), 2):
            ga, gb = where[a], where[b]
            if ga != gb and reach[a][gb] + reach[b][ga] - 2 * scores[a][b] > reach[a][ga] + reach[b][gb]:
                where[a], where[b] = gb, ga
                for i, row in enumerate(reach):
                    row[ga] += scores[i][b] - scores[i][a]
                    row[gb] += scores[i][a] - scores[i][b]
                improved = True
    return [tuple(sorted(m for m, g in where.items() if g == k)) for k in range(len(groups))]


def _inner(scores: Matrix, members: Sequence[int]) -> int:
    return sum(scores[a][b] for a, b in combinations(members, 2))


def ring_order(scores: Matrix) -> tuple[int, ...]:
    """Return all positions in the ring order with the best links between neighbours.

    Starts with position 0; of equally good orders the lowest is taken, so that equal links keep the order of indexes.
    """
    count = len(scores)
    if count <= 3 or len({scores[a][b] for a in range(count) for b in range(a)}) == 1:
        return tuple(range(count))
    return _exact_ring(scores) if count <= _EXACT_RING else _near_ring(scores)


def _exact_ring(scores: Matrix) -> tuple[int, ...]:
    """Held-Karp: the best path from ``at`` through ``left`` back to 0."""
    known: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}

    def onward(at: int, left: int) -> tuple[int, tuple[int, ...]]:
        if not left:
            return scores[at][0], ()
        key = (at, left)
        if key not in known:
            best: tuple[int, tuple[int, ...]] = (-1, ())
            for to in range(1, len(scores)):
                if left >> to & 1:
                    score, tail = onward(to, left & ~(1 << to))
                    if score + scores[at][to] > best[0]:
                        best = (score + scores[at][to], (to, *tail))
            known[key] = best
        return known[key]

    return (0, *onward(0, (1 << len(scores)) - 2)[1])


def _near_ring(scores: Matrix) -> tuple[int, ...]:
    """Nearest neighbour, then reversing parts of the ring while the score grows (2-opt)."""
    order = [0]
    while len(order) < len(scores):
        left = [i for i in range(len(scores)) if i not in order]
        order.append(max(left, key=lambda i: (scores[order[-1]][i], -i)))
    improved = True
    while improved:
        improved = False
        for i in range(1, len(order) - 1):
            for j in range(i + 1, len(order)):
                a, b, c, d = order[i - 1], order[i], order[j], order[(j + 1) % len(order)]
                if scores[a][c] + scores[b][d] > scores[a][b] + scores[c][d]:
                    order[i : j + 1] = reversed(order[i : j + 1])
                    improved = True
    return tuple(order)


def matrix(count: int, pair: Callable[[int, int], int]) -> list[list[int]]:
    """Return the symmetric matrix of ``pair(a, b)`` for a < b, with a zero diagonal."""
    rows = [[0] * count for _ in range(count)]
    for a in range(count):
        for b in range(a + 1, count):
            rows[a][b] = rows[b][a] = pair(a, b)
    return rows
