"""Leases are found in every ledger that answers, also where another one does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.errors import NoNodeReached, NoSuchLease
from gpuboard.leases.composite import CompositeLedger
from gpuboard.leases.ledger import Found, Ledger, Scope, UnknownLease
from gpuboard.model.lease import Lease


class Keeping:
    """The part of a ledger that finds leases. ``down``: it does not answer."""

    def __init__(self, *leases: str, down: bool = False, nodes: str = "") -> None:
        self._leases = leases
        self._nodes = nodes
        self._down = down

    def find(self, ids: Sequence[str]) -> Found:
        if self._down:
            raise NoNodeReached("it does not answer", ["it"])
        found = [lease for lease in self._leases if not ids or lease in ids]
        return Found(
            [cast(Lease, lease) for lease in found],
            {text: UnknownLease(text, self._leases) for text in ids if text not in found},
        )

    def covers(self, nodes: Sequence[Node], *, ask: bool = True) -> list[str]:
        return [node.name for node in nodes if node.name in self._nodes]

    def existing(self, text: str, n: int | None = None) -> str:
        found = self.find([text])
        if found.missing:
            raise found.missing[text]
        return f"{text} of {self._nodes}"


def names(found: Found) -> list[str]:
    return [cast(str, lease) for lease in found.leases]


def composed(*ledgers: Keeping) -> CompositeLedger:
    nodes = tuple(Node(name, name) for name in "abc")
    return CompositeLedger(lambda: Scope(nodes), [cast(Ledger, ledger) for ledger in ledgers])


def test_a_lease_is_found_although_another_ledger_does_not_answer() -> None:
    found = composed(Keeping(down=True), Keeping("k3f9", "w2aa")).find(["k3f9"])
    assert (names(found), found.unreached) == (["k3f9"], None)


@pytest.mark.parametrize("ids", [[], ["k3f9", "m7"]])
def test_what_a_ledger_without_an_answer_may_have_is_unknown(ids: list[str]) -> None:
    found = composed(Keeping(down=True), Keeping("k3f9")).find(ids)
    assert names(found) == ["k3f9"]
    assert str(found.unreached) == "it does not answer"
    assert found.unread == ["it"]


def test_a_lease_that_no_ledger_has_is_an_error() -> None:
    both = "no lease 'm7'; yours are: k3f9, w2aa"
    with pytest.raises(NoSuchLease, match=both):
        composed(Keeping("w2aa"), Keeping("k3f9")).find(["w2aa", "m7"])
    with pytest.raises(NoSuchLease, match=both):
        composed(Keeping("w2aa"), Keeping("k3f9")).existing("m7")


@pytest.mark.parametrize(("lease", "of"), [("j1", "a"), ("d1", "b"), ("c1", "c")])
@pytest.mark.parametrize("down", [False, True])
def test_each_of_three_ledgers_is_asked_for_a_lease(lease: str, of: str, down: bool) -> None:
    ledgers = [Keeping("j1", nodes="a"), Keeping("d1", nodes="b"), Keeping("c1", nodes="c")]
    if down and of != "a":
        ledgers[0] = Keeping(down=True, nodes="a")
    assert cast(str, composed(*ledgers).existing(lease)) == f"{lease} of {of}"


def test_a_lease_that_is_in_no_ledger_may_be_in_one_without_an_answer() -> None:
    with pytest.raises(NoNodeReached):
        composed(Keeping(down=True, nodes="a"), Keeping("c1", nodes="bc")).existing("k3f9")
    with pytest.raises(NoSuchLease, match="no lease 'k3f9'; yours are: c1, j1"):
        composed(Keeping("j1", nodes="a"), Keeping("c1", nodes="bc")).existing("k3f9")


def test_a_ledger_without_a_node_is_not_asked() -> None:
    with pytest.raises(NoSuchLease):
        composed(Keeping("j1", nodes="abc"), Keeping(down=True)).existing("k3f9")
