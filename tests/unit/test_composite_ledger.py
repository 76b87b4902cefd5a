"""Leases are found in every ledger that answers, also where another one does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from gpuboard.errors import NoNodeReached, NoSuchLease
from gpuboard.leases.composite import CompositeLedger
from gpuboard.leases.ledger import Found, Ledger, Scope
from gpuboard.model.lease import Lease


class Keeping:
    """The part of a ledger that finds leases. ``down``: it does not answer."""

    def __init__(self, *leases: str, down: bool = False) -> None:
        self._leases = leases
        self._down = down

    def find(self, ids: Sequence[str]) -> Found:
        if self._down:
            raise NoNodeReached("it does not answer", ["it"])
        found = [lease for lease in self._leases if not ids or lease in ids]
        return Found(
            [cast(Lease, lease) for lease in found],
            {text: NoSuchLease(f"no lease {text}") for text in ids if text not in found},
        )


def names(found: Found) -> list[str]:
    return [cast(str, lease) for lease in found.leases]


def composed(*ledgers: Keeping) -> CompositeLedger:
    return CompositeLedger(lambda: Scope(()), [cast(Ledger, ledger) for ledger in ledgers])


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
    with pytest.raises(NoSuchLease, match="no lease m7"):
        composed(Keeping("w2aa"), Keeping("k3f9")).find(["m7"])
