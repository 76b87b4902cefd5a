"""Leases over several nodes: all or nothing, with the real agent's claims in one folder a node; claims → leases."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from gpuboard.agent.claims import store as claims
from gpuboard.board.dialogs.request_form import places_words
from gpuboard.errors import GpuboardError, NoSuchLease
from gpuboard.keeper.holder import identify
from gpuboard.leases.claims import client as ledger
from gpuboard.leases.picks import parse_picks
from gpuboard.leases.terms import LONGEST_S, new_id
from gpuboard.model.lease import Lease, LeaseGpu, LeaseHolder, gpus_text
from gpuboard.model.reading import Claim, ClaimHolder
from gpuboard.model.replies import Detail, decode
from gpuboard.model.request import Pick
from gpuboard.model.units import iso
from gpuboard.transport.base import CallFailed, LinkLost
from tests.board import made

T = TypeVar("T")
NODES = ("gpu01", "gpu02", "gpu03")


class Nodes:
    """Three nodes' agents, called in this process; ``broken`` says which calls fail and how."""

    def __init__(self, root: str) -> None:
        self.folders = {}
        for name in NODES:
            path = Path(root, name)
            path.mkdir()
            path.chmod(0o1777)
            self.folders[name] = claims.Folder(str(path))
        self.broken: dict[tuple[str, str], BaseException] = {}
        self.lost_after: set[tuple[str, str]] = set()  # the call arrives, the answer does not
        self.calls: list[tuple[str, str]] = []
        self.together: list[list[str]] = []  # the nodes of each call_all

    def call_all(
        self, calls: Mapping[str, tuple[str, dict[str, Any]]], timeout_s: float, kind: type[T]
    ) -> dict[str, T | CallFailed | LinkLost]:
        assert timeout_s > 0
        self.together.append(list(calls))
        return {node: self.call(node, op, args, kind) for node, (op, args) in calls.items()}

    def call(self, node: str, op: str, args: dict[str, Any], kind: type[T]) -> T | CallFailed | LinkLost:
        self.calls.append((node, op))
        if (node, op) in self.broken:
            if isinstance(error := self.broken[node, op], (CallFailed, LinkLost)):
                return error
            raise error
        try:
            value = claims.handle(op, json.loads(json.dumps(args)), self.folders[node])
        except claims.Refuse as refused:
            detail = refused.detail and decode(json.dumps(refused.detail).encode(), Detail)
            return CallFailed(refused.kind, refused.message, detail)
        if (node, op) in self.lost_after:
            return LinkLost(node, "connection reset")
        return decode(json.dumps(value).encode(), kind)

    def claims(self) -> dict[str, list[Claim]]:
        return {name: msgspec.convert(folder.read()[0], list[Claim]) for name, folder in self.folders.items()}

    def lying(self) -> set[tuple[str, str]]:
        return {(name, claim.uuid) for name, found in self.claims().items() for claim in found}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="gpuboard-ledger-", dir="/var/tmp") as path:
        os.chmod(path, 0o755)
        yield Nodes(path)


def wanted(**gpus: list[str]) -> ledger.Wanted:
    holder = ClaimHolder("login1", "b", 42, 7)
    return ledger.Wanted(gpus=gpus, for_s=600.0, host="login1", holder=holder, purpose="training")


def no_sleep(seconds: float) -> None:
    assert 0 < seconds < 1


def test_a_lease_over_three_nodes(nodes: Nodes) -> None:
    taken = ledger.take(nodes.call_all, wanted(gpu03=["GPU-e"], gpu01=["GPU-a", "GPU-b"], gpu02=["GPU-c"]))
    assert nodes.calls == [("gpu01", "take"), ("gpu02", "take"), ("gpu03", "take")]  # sorted
    assert taken.gpus == {"gpu01": ["GPU-a", "GPU-b"], "gpu02": ["GPU-c"], "gpu03": ["GPU-e"]}
    assert taken.remaining_s == pytest.approx(600, abs=30)
    found = nodes.claims()["gpu02"][0]
    assert (found.lease, found.gpus, found.nodes, found.purpose) == (taken.lease, 4, list(NODES), "training")
    outcome = ledger.renew(nodes.call_all, taken.lease, NODES, 6000.0)
    assert (sorted(outcome.done), outcome.failed) == (list(NODES), {})
    assert {round(claim.remaining_s, -2) for found in nodes.claims().values() for claim in found} == {6000}
    released = ledger.release(nodes.call_all, taken.lease, NODES)
    assert released.done == {"gpu01": ["GPU-a", "GPU-b"], "gpu02": ["GPU-c"], "gpu03": ["GPU-e"]}
    assert nodes.lying() == set()
    # Claims are made one after the other; renewals and releases do not wait for each other.
    assert nodes.together == [["gpu01"], ["gpu02"], ["gpu03"], list(NODES), list(NODES)]


def test_releasing_what_has_ended_already_is_no_failure(nodes: Nodes) -> None:
    taken = ledger.take(nodes.call_all, wanted(gpu01=["GPU-a"], gpu02=["GPU-c"]))
    ledger.release(nodes.call_all, taken.lease, ["gpu02"])
    outcome = ledger.release(nodes.call_all, taken.lease, ["gpu01", "gpu02"])
    assert (outcome.done, outcome.failed) == ({"gpu01": ["GPU-a"], "gpu02": []}, {})


def test_a_conflict_on_the_last_node_drops_all(nodes: Nodes) -> None:
    first = ledger.take(nodes.call_all, wanted(gpu03=["GPU-e"]))
    with pytest.raises(ledger.Conflict) as caught:
        ledger.take(nodes.call_all, wanted(gpu01=["GPU-a"], gpu03=["GPU-e"]))
    assert (caught.value.node, caught.value.left, caught.value.exit_code) == ("gpu03", (), 4)
    assert [(claim.lease, claim.uuid, claim.owner) for claim in caught.value.claims] == [(first.lease, "GPU-e", "root")]
    assert nodes.lying() == {("gpu03", "GPU-e")}


@pytest.mark.parametrize("arrived", [True, False])
def test_a_lost_connection_drops_all(nodes: Nodes, arrived: bool) -> None:
    if arrived:
        nodes.lost_after.add(("gpu02", "take"))
    else:
        nodes.broken["gpu02", "take"] = LinkLost("gpu02", "connection reset")
    with pytest.raises(ledger.NodeFailed) as caught:
        ledger.take(nodes.call_all, wanted(gpu01=["GPU-a"], gpu02=["GPU-c"], gpu03=["GPU-e"]))
    assert (caught.value.node, caught.value.kind, caught.value.left) == ("gpu02", "link", ())
    assert str(caught.value) == "gpu02: connection reset"
    assert nodes.lying() == set()


def test_a_node_that_stays_silent_is_named(nodes: Nodes) -> None:
    nodes.lost_after.add(("gpu02", "take"))
    nodes.broken["gpu02", "release"] = LinkLost("gpu02", "no answer in 5 s")
    with pytest.raises(ledger.NodeFailed) as caught:
        ledger.take(nodes.call_all, wanted(gpu01=["GPU-a"], gpu02=["GPU-c"]))
    assert caught.value.left == ("gpu02",)
    assert nodes.calls.count(("gpu02", "release")) == 2
    assert nodes.lying() == {("gpu02", "GPU-c")}  # nobody keeps it: it lapses


def test_a_node_that_cannot_hold_claims(nodes: Nodes) -> None:
    Path(nodes.folders["gpu02"].path).chmod(0o755)
    with pytest.raises(ledger.NodeFailed) as caught:
        ledger.take(nodes.call_all, wanted(gpu01=["GPU-a"], gpu02=["GPU-c"]))
    assert caught.value.kind == "folder"
    assert "it is not sticky" in str(caught.value)
    assert nodes.lying() == set()


def test_an_interrupt_drops_all(nodes: Nodes) -> None:
    nodes.broken["gpu02", "take"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ledger.take(nodes.call_all, wanted(gpu01=["GPU-a"], gpu02=["GPU-c"]))
    assert nodes.lying() == set()


def test_a_claim_in_progress_may_still_be_withdrawn(nodes: Nodes) -> None:
    """A conflict with a young claim of a lease over several nodes is tried again; here its taker gives up meanwhile."""
    ledger.take(nodes.call_all, wanted(gpu01=["GPU-a"], gpu02=["GPU-c"]))
    [other] = {claim.lease for found in nodes.claims().values() for claim in found}

    def gives_up(seconds: float) -> None:
        no_sleep(seconds)
        ledger.release(nodes.call_all, other, ["gpu01", "gpu02"])

    taken = ledger.take(nodes.call_all, wanted(gpu02=["GPU-c"]), sleep=gives_up)
    assert nodes.lying() == {("gpu02", "GPU-c")}
    assert taken.lease != other


def test_a_young_conflict_ends_too(nodes: Nodes) -> None:
    ledger.take(nodes.call_all, wanted(gpu01=["GPU-a"], gpu02=["GPU-c"]))
    with pytest.raises(ledger.Conflict):
        ledger.take(nodes.call_all, wanted(gpu02=["GPU-c"]), sleep=no_sleep)


def test_renew_reports_nodes_where_it_failed(nodes: Nodes) -> None:
    taken = ledger.take(nodes.call_all, wanted(gpu01=["GPU-a"], gpu02=["GPU-c"]))
    nodes.broken["gpu01", "renew"] = LinkLost("gpu01", "connection reset")
    outcome = ledger.renew(nodes.call_all, taken.lease, ["gpu01", "gpu02", "gpu03"], 60.0)
    assert list(outcome.done) == ["gpu02"]
    assert {node: str(error) for node, error in outcome.failed.items()} == {
        "gpu01": "gpu01: connection reset",
        "gpu03": f"no lease {taken.lease} on this node",
    }
    assert outcome.reasons == {"gpu01": "connection reset", "gpu03": f"no lease {taken.lease} on this node"}


def test_a_conflict_without_details() -> None:
    def call_all(calls: Mapping[str, Any], timeout_s: float, kind: type[T]) -> dict[str, T | CallFailed | LinkLost]:
        return {node: CallFailed("conflict", "no") for node in calls}

    with pytest.raises(ledger.Conflict) as caught:
        ledger.take(call_all, wanted(gpu01=["GPU-a"]), sleep=no_sleep)
    assert caught.value.claims == ()


def test_ids_are_short_new_and_unambiguous() -> None:
    ids = {new_id() for _ in range(2000)}
    assert len(ids) > 1990
    assert {len(lease) for lease in ids} == {6}
    assert not set("".join(ids)) & set("0o1liu")
    assert all(lease[0].isalpha() for lease in ids)


# --- claims → leases


def claim(lease: str, uuid: str, **changes: Any) -> Claim:
    values: dict[str, Any] = {
        "uid": 1001, "owner": "alice", "state": "live", "since": 5000.0, "until": 5600.0, "remaining_s": 500.0,
        "host": "login1", "nodes": ["gpu01", "gpu02"], "gpus": 2,
    }  # fmt: skip
    return Claim(lease=lease, uuid=uuid, **{**values, **changes})


SLOTS = {
    "gpu01": {"GPU-a": ledger.GpuSlot(0), "GPU-b": ledger.GpuSlot(1)},
    "gpu02": {"GPU-c": ledger.GpuSlot(0)},
}


def test_claims_become_a_lease() -> None:
    holder = ClaimHolder("login1", "b", 42, 7)
    found = {
        "gpu02": [claim("k3f9", "GPU-c", holder=holder, purpose="x")],
        "gpu01": [claim("k3f9", "GPU-a", holder=holder, purpose="x", remaining_s=400.0, since=0.0, until=500.0)],
    }
    assert ledger.leases_of(found, SLOTS, 1_000_000.0, lambda h: h.pid == 42) == [
        Lease(
            id="k3f9", owner="alice", uid=1001, host="login1",
            gpus=[LeaseGpu("gpu01", 0, "GPU-a"), LeaseGpu("gpu02", 0, "GPU-c")],
            since=iso(1_000_400.0 - 500.0), until=iso(1_000_400.0), holder=LeaseHolder(42, True), purpose="x",
            remaining_s=400.0, nodes=["gpu01", "gpu02"],
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "flags"),
    [
        ({"gpu01": [claim("k3f9", "GPU-a")], "gpu02": [claim("k3f9", "GPU-c")]}, []),
        ({"gpu01": [claim("k3f9", "GPU-a")], "gpu02": []}, ["partial"]),
        ({"gpu01": [claim("k3f9", "GPU-a")], "gpu02": [claim("k3f9", "GPU-c", state="lapsed")]}, ["partial"]),
        ({"gpu01": [claim("k3f9", "GPU-a")]}, ["unread"]),
        ({"gpu01": [claim("k3f9", "GPU-a", disputed_with=["zzzz"], gpus=1)]}, ["disputed"]),
    ],
)
def test_what_is_wrong_with_a_lease_is_a_flag(found: dict[str, list[Claim]], flags: list[str]) -> None:
    assert [lease.flags for lease in ledger.leases_of(found, SLOTS, 0.0)] == [flags]


@pytest.mark.parametrize(
    ("remaining_s", "until", "left_s"),
    [(1e300, 1e300, LONGEST_S), (-1e300, -1e300, 0.0), (1e300, -1e300, LONGEST_S), (600.0, 1e17, 600.0)],
)
def test_times_beyond_all_sense_are_bounded(remaining_s: float, until: float, left_s: float) -> None:
    found = {"gpu01": [claim("k3f9", "GPU-a", gpus=1, remaining_s=remaining_s, until=until)]}
    [lease] = ledger.leases_of(found, SLOTS, 1769860800.0)
    assert lease.remaining_s == left_s
    assert lease.until == iso(1769860800.0 + left_s)
    assert "2024" < lease.since <= lease.until


def test_a_gpu_that_is_gone_has_no_index() -> None:
    [lease] = ledger.leases_of({"gpu01": [claim("k3f9", "GPU-x"), claim("k3f9", "GPU-a")]}, SLOTS, 0.0)
    assert [(gpu.index, gpu.uuid) for gpu in lease.gpus] == [(0, "GPU-a"), (None, "GPU-x")]


def test_a_mig_device_has_its_number() -> None:
    split = made.mig("gpu01", 0, *("free", "busy") * 4)
    held = [split.mig[7].uuid, split.mig[5].uuid]
    found = {"gpu01": [claim("k3f9", uuid, nodes=["gpu01"]) for uuid in held]}
    [lease] = ledger.leases_of(found, ledger.slots([made.node("gpu01", [split, made.gpu("gpu01", 1)])]), 0.0)
    assert [(gpu.index, gpu.mig) for gpu in lease.gpus] == [(0, 5), (0, 7)]
    assert gpus_text(lease.gpus) == places_words(lease.gpus) == "gpu01:0:5,0:7"
    assert parse_picks(gpus_text(lease.gpus)) == (Pick("gpu01", 0, None, 5), Pick("gpu01", 0, None, 7))
    [gone] = ledger.leases_of(found, {}, 0.0)
    assert [(gpu.index, gpu.mig) for gpu in gone.gpus] == [(None, None)] * 2


def test_a_lease_that_was_taken_under_another_name_of_the_node_is_whole() -> None:
    found = {"gpu01": [claim("k3f9", "GPU-a", nodes=["alias"], gpus=1)]}
    assert ledger.mine(found, {"gpu01": 1001}) == {"k3f9": ledger.Mine("k3f9", {"gpu01": ["GPU-a"]}, ["gpu01"])}
    [lease] = ledger.leases_of(found, SLOTS, 0.0)
    assert (lease.nodes, lease.flags) == (["gpu01"], [])


def test_a_forged_id_is_a_lease_of_its_own() -> None:
    found = {"gpu01": [claim("k3f9", "GPU-a")], "gpu02": [claim("k3f9", "GPU-c", owner="bob", uid=1002)]}
    assert [(lease.owner, [gpu.uuid for gpu in lease.gpus]) for lease in ledger.leases_of(found, SLOTS, 0.0)] == [
        ("alice", ["GPU-a"]),
        ("bob", ["GPU-c"]),
    ]


@pytest.mark.parametrize(
    ("uids", "mine", "may_end"),
    [
        ({"gpu01": 1001, "gpu02": 2002}, True, True),
        ({"gpu01": 2002, "gpu02": 1001}, False, False),  # on the other node the claim's uid is another user's
        ({"gpu02": 1001}, False, False),  # who the caller is on gpu01 is not known
        ({}, False, False),
        ({"gpu01": 0, "gpu02": 0}, False, True),  # root may end it, and yet does not hold it
        ({"gpu01": 0, "gpu02": 1002}, False, False),  # root on one of its nodes only
    ],
)
def test_a_lease_is_the_caller_s_by_the_uids_on_its_nodes(uids: dict[str, int], mine: bool, may_end: bool) -> None:
    claims = {"gpu01": [claim("k3f9", "GPU-a")], "gpu02": [claim("k3f9", "GPU-c", uid=2002)]}
    [lease] = ledger.leases_of(claims, SLOTS, 0.0, uids=uids)
    assert (lease.mine, lease.may_end, lease.ledger) == (mine, may_end, "nodes")


def test_the_holder_of_a_claim_is_known_on_its_own_host_only() -> None:
    """A container has its own name and its own pids, but the boot id of its host."""
    me = identify(os.getpid())
    assert me is not None
    assert ledger.holder_alive(ClaimHolder(*me)) is True
    assert ledger.holder_alive(ClaimHolder(*me._replace(start=me.start - 1))) is False
    assert ledger.holder_alive(ClaimHolder(*me._replace(host="container", start=me.start - 1))) is None


def test_dead_claims_and_garbage_make_no_lease() -> None:
    found = {"gpu01": [claim("a", "GPU-a", state="lapsed"), claim("b", "GPU-b", state="garbage")]}
    assert ledger.leases_of(found, SLOTS, 0.0) == []
    assert ledger.mine(found, {"gpu01": 1001}) == {}


MANY = {
    "gpu01": [claim("k3f9xx", "GPU-a"), claim("k4aaaa", "GPU-b", gpus=1, nodes=["gpu01"])],
    "gpu02": [claim("k3f9xx", "GPU-c", uid=77), claim("bobsxx", "GPU-d", uid=1002, owner="bob")],
}
UIDS = {"gpu01": 1001, "gpu02": 77}  # uids can differ between the servers of a lab


def test_finding_ones_own() -> None:
    assert sorted(ledger.mine(MANY, UIDS)) == ["k3f9xx", "k4aaaa"]
    whole = ledger.Mine("k3f9xx", {"gpu01": ["GPU-a"], "gpu02": ["GPU-c"]}, ["gpu01", "gpu02"])
    assert ledger.find("k3f9xx", MANY, UIDS) == whole
    assert ledger.find("k3", MANY, UIDS) == whole
    one_read = {"gpu01": MANY["gpu01"]}
    assert ledger.find("k3", one_read, UIDS) == ledger.Mine("k3f9xx", {"gpu01": ["GPU-a"]}, ["gpu01", "gpu02"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("k", "'k' is ambiguous: it matches your leases k3f9xx, k4aaaa; write more characters"),
        ("bobsxx", "lease bobsxx belongs to bob; others cannot use or renew it, and only root can end it"),
        ("bob", "no lease 'bob'; yours are: k3f9xx, k4aaaa"),
        ("", "no lease ''; yours are: k3f9xx, k4aaaa"),
    ],
)
def test_a_lease_that_is_not_found_has_a_reason(text: str, words: str) -> None:
    with pytest.raises(NoSuchLease) as caught:
        ledger.find(text, MANY, UIDS)
    assert (str(caught.value), caught.value.exit_code) == (words, 5)


def test_a_lease_may_be_on_a_node_without_a_reading() -> None:
    with pytest.raises(GpuboardError, match=r"it may be on a node whose leases could not be read: gpu03") as caught:
        ledger.find("bob", MANY, UIDS, ["gpu03"])
    assert caught.value.exit_code == 1
