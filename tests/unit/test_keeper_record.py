"""The keeper's records of leases, and the decision when a lease ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.keeper.holder import Holder
from gpuboard.keeper.record import EndDecision, HolderLook, KeptNode, LeaseRecord, decide, decode
from gpuboard.keeper.timing import TIMING

RECORD = LeaseRecord(
    lease="k3f9",
    nodes=[KeptNode("gpu01", ["GPU-0"], "gpu01", "/var/tmp", None), KeptNode("n", ["SIM-1"], None, "/c", {"gpus": 2})],
    settings={"ssh_config": "~/.ssh/config"},
    holder=Holder("login1", "b00t", 4242, 99),
    session=10,
    group=11,
    created=1.5,
    until=3601.5,
)


def test_record_round_trip() -> None:
    assert decode(RECORD.plain()) == RECORD
    assert decode(RECORD._replace(holder=None).plain()) == RECORD._replace(holder=None)


def test_the_job_of_a_node_survives_the_round_trip() -> None:
    node = RECORD.nodes[0]._replace(job="13+1")
    assert decode(RECORD._replace(nodes=[node]).plain()).nodes == [node]
    old = RECORD.plain()
    for values in old["nodes"]:
        del values["job"]
    assert decode(old) == RECORD, "a record of an older release"


@pytest.mark.parametrize(
    ("count", "settings", "rounds"),
    [(1, {}, 1), (64, {}, 1), (65, {}, 2), (9, {"max_connections": 4}, 3), (9, {"max_connections": "x"}, 1)],
)
def test_nodes_are_connected_to_in_rounds(count: int, settings: dict[str, object], rounds: int) -> None:
    assert RECORD._replace(nodes=RECORD.nodes[:1] * count, settings=settings).rounds == rounds


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        "k3f9",
        {**RECORD.plain(), "lease": "../../etc"},
        {**RECORD.plain(), "lease": ""},
        {**RECORD.plain(), "nodes": []},
        {**RECORD.plain(), "nodes": [{"name": "n"}]},
        {**RECORD.plain(), "holder": {"pid": "x"}},
        {**RECORD.plain(), "until": "soon"},
        {**RECORD.plain(), "settings": 7},
    ],
)
def test_invalid_records_are_refused(values: object) -> None:
    with pytest.raises(ValueError):
        decode(values)


def test_without_carriers_and_orphans_the_lease_ends_at_once() -> None:
    assert decide(HolderLook(False, orphans=False), None, 100.0) == EndDecision(True, 2.0, 100.0)


def test_carriers_hold_the_lease_without_limit() -> None:
    assert decide(HolderLook(True, orphans=False), 10.0, 1e6) == EndDecision(False, 5.0, None)


@pytest.mark.parametrize("seen", [HolderLook(False, orphans=True), HolderLook(None, orphans=False)])
def test_orphans_and_unreachable_nodes_hold_it_for_a_minute(seen: HolderLook) -> None:
    assert decide(seen, None, 100.0) == EndDecision(False, 2.0, 100.0)
    assert decide(seen, 100.0, 159.0) == EndDecision(False, 2.0, 100.0)
    assert decide(seen, 100.0, 160.0).release


@given(st.lists(st.tuples(st.sampled_from([True, False, None]), st.booleans()), min_size=1, max_size=80))
def test_a_lease_never_ends_while_carried_and_ends_within_a_minute_after(looks: list[tuple[bool | None, bool]]) -> None:
    now, since, last_carried = 0.0, None, 0.0
    for carriers, orphans in looks:
        decision = decide(HolderLook(carriers, orphans), since, now)
        if carriers:
            last_carried = now
            assert not decision.release
        if decision.release:
            assert carriers is not True
            return
        assert now - last_carried <= TIMING.look_s + 5.0
        since, now = decision.since, now + decision.again_s
