"""Whatever JSON a node sends: decoders give values of their type or the designated error, and what takes them holds."""

from __future__ import annotations

import functools
import json
import queue
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect as types

from gpuboard.board.history import History
from gpuboard.board.scene import Place, Scene
from gpuboard.board.tables.held import held
from gpuboard.board.text.detail import gpu as gpu_lines
from gpuboard.cli.reserve.leases import table as lease_table
from gpuboard.cli.see.status import table
from gpuboard.cluster.feed import NodeFeed
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.snapshot.builder import SnapshotBuilder
from gpuboard.cluster.snapshot.views import NodeFacts, node_claims
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError
from gpuboard.keeper.daemon.calls import NodeAnswer
from gpuboard.keeper.daemon.keeper import Keeper
from gpuboard.keeper.daemon.lease import KeptLease
from gpuboard.keeper.daemon.nodes import Connectors, Logins, NodeCalls
from gpuboard.keeper.record import KeptNode, LeaseRecord
from gpuboard.keeper.runtime_dir import RuntimeDir as KeeperPlace
from gpuboard.keeper.runtime_dir import acquire
from gpuboard.keeper.timing import TIMING
from gpuboard.launch import events, supervisors
from gpuboard.launch.failure import FailureWatch
from gpuboard.launch.preflight import collect
from gpuboard.launch.preflight.check import check_text, grouped
from gpuboard.launch.preflight.checks import interfaces, preflight
from gpuboard.leases.claims import client as ledger
from gpuboard.leases.rank_map import reachable_addresses
from gpuboard.model import replies
from gpuboard.model.lease import LeaseList
from gpuboard.model.reading import Claim, Event, GpuDetails, GpuNumbers, Reading, ReadingDelta, Static
from gpuboard.model.replies import Malformed
from gpuboard.model.state import Thresholds
from gpuboard.shellprobe.connector import NodeConnector
from gpuboard.transport.base import CallFailed, LinkLost
from gpuboard.transport.connector import Connector
from gpuboard.transport.limits import Exceeded
from gpuboard.transport.link import AgentLink
from tests.board.made import scene
from tests.unit.test_plan import planned
from tests.unit.test_snapshot_views import NOW, view

REPLIES: list[type[msgspec.Struct]] = [
    each for each in vars(replies).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)
]
EVENTS = dict(events._TYPES)
TAGS = {Static: b"static", Reading: b"reading", ReadingDelta: b"delta"}
UUIDS = ("GPU-a", "GPU-b", "MIG-c")
HUGE = "1e400"  # in JSON a number; written behind a marker, for Python has no such float

text = st.one_of(st.text("ab\n\x1b[é\u202e", max_size=8), st.sampled_from(["x" * 5000, "GPU-a", "lease1", "live", ""]))
integers = st.one_of(st.integers(-2, 9), st.sampled_from([-(2**63), 2**63 - 1, 2**63, 10**30, -(10**30)]))
floats = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 1.0, -1.0, 1e20, -1e20, 1e300, -1e300, 1.7e308]),
)
leaves = st.one_of(st.none(), st.booleans(), integers, floats, text, st.sampled_from(["\ud800", f"@{HUGE}"]))
junk = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3))
)


def shaped(kind: types.Type, junk_too: bool = True) -> st.SearchStrategy[Any]:
    """Return JSON of a type: values of it at and beyond its bounds, now and then something else."""
    found: st.SearchStrategy[Any]
    if isinstance(kind, types.StructType) and kind.array_like:
        found = st.tuples(*(named(field.encode_name, field.type) for field in kind.fields)).map(list)
    elif isinstance(kind, types.StructType):
        required = {field.encode_name: field for field in kind.fields if field.required}
        optional = {field.encode_name: field for field in kind.fields if not field.required}
        found = st.fixed_dictionaries(
            {name: named(name, field.type) for name, field in required.items()},
            optional={name: named(name, field.type) for name, field in optional.items()},
        )
    elif isinstance(kind, types.UnionType):
        found = st.one_of([shaped(each, False) for each in kind.types])
    elif isinstance(kind, types.ListType):
        found = st.lists(shaped(kind.item_type, False), max_size=3)
    elif isinstance(kind, types.DictType):
        found = st.dictionaries(text, shaped(kind.value_type, False), max_size=3)
    elif isinstance(kind, types.IntType):
        found = st.one_of(st.integers(0, 9), st.sampled_from([kind.ge or 0, kind.le or 0, -1]))
    elif isinstance(kind, types.FloatType):
        found = st.one_of(st.floats(0, 1e6), st.sampled_from([kind.ge or 0.0, kind.le or 0.0, -1.0]))
    elif isinstance(kind, types.BoolType):
        found = st.booleans()
    elif isinstance(kind, types.NoneType):
        found = st.none()
    elif isinstance(kind, types.StrType):
        found = text
    else:
        found = junk  # msgspec.Raw
    return found


def named(name: str, kind: types.Type) -> st.SearchStrategy[Any]:
    """Return JSON of a field; UUIDs, leases and states are such as have a meaning, so that things meet."""
    if isinstance(kind, types.StrType) and name in {"uuid", "lease", "state"}:
        usual = {"uuid": UUIDS, "lease": ("lease1", "lease2"), "state": ("live", "lapsed", "garbage")}
        return st.one_of(st.sampled_from(usual[name]), text)
    return shaped(kind)


@functools.cache
def of(kind: Any) -> st.SearchStrategy[Any]:
    """Return JSON that is nearly a message or an answer of a type: about one in four has something of another type."""
    good = shaped(types.type_info(kind))

    @st.composite
    def draw(draw: Callable[..., Any]) -> Any:
        value = draw(good)
        if isinstance(value, dict) and value and draw(st.integers(0, 3)) == 0:
            value[draw(st.sampled_from(sorted(value)))] = draw(junk)
        return value

    return draw()


def raw(value: Any) -> bytes:
    """Return JSON text as a careless or a hostile program would write it: NaN, 1e400, lone surrogates included."""
    return json.dumps(value).replace(f'"@{HUGE}"', HUGE).encode("utf-8", "surrogatepass")


class Answering:
    """A channel to an agent that answers each call with the same bytes behind the reply's id."""

    def __init__(self, node: str, answer: bytes) -> None:
        self.answer = answer
        self.ended: list[str] = []
        self.heard: list[Any] = []
        self.link = AgentLink(node, "node", {}, self.heard.append, lambda error: self.ended.append(str(error)))
        self.link.attach(self)
        hello = {"t": "hello", "hostname": "n", "boot_id": "b", "uid": 0, "user": "root", "pid": 1, "python": "3"}
        self.link.received(self.frame(json.dumps(hello).encode()))

    def frame(self, message: bytes) -> bytes:
        return b"@" + self.nonce.encode() + message + b"\n"

    def write(self, data: bytes) -> None:
        for line in data.splitlines():
            message = json.loads(line)
            if message["t"] == "start":
                self.nonce: str = message["nonce"]
            else:
                self.link.received(self.frame(b'{"t":"reply","id":%d,%s}' % (message["id"], self.answer)))

    def close(self) -> None:
        """Nothing is open."""


@given(st.data())
@settings(max_examples=100)
def test_an_answer_is_of_its_type_or_malformed(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(REPLIES))
    sent = raw(data.draw(st.one_of(of(kind), junk)))
    try:
        found = replies.decode(sent, kind)
    except Malformed as malformed:
        assert str(malformed).isprintable()
        return
    assert isinstance(found, kind)
    assert msgspec.convert(msgspec.to_builtins(found), kind) == found
    assert "\x1b" not in msgspec.json.encode(found).decode()


@given(
    st.one_of(st.binary(max_size=200), st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b'"\xff"', b"9" * 10_000]))
)
def test_no_bytes_are_another_error(sent: bytes) -> None:
    for kind in (*REPLIES, *EVENTS.values()):
        try:
            replies.decode(sent, kind)
        except Malformed:
            continue


@given(st.data())
@settings(max_examples=100)
def test_a_call_gives_its_type_or_fails_in_a_designated_way(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(REPLIES))
    refused = st.fixed_dictionaries({"kind": text, "message": text}, optional={"detail": of(replies.Detail)})
    key, value = data.draw(st.one_of(st.tuples(st.just(b"value"), of(kind)), st.tuples(st.just(b"error"), refused)))
    there = Answering("gpu01", b'"%s":%s' % (key, raw(value)))
    try:
        assert isinstance(there.link.call("take", {}, 1.0, kind), kind)
    except CallFailed as error:
        assert error.detail is None or isinstance(error.detail, replies.Detail)
    except LinkLost as error:
        assert "malformed answer" in str(error)


@given(st.data())
@settings(max_examples=40)
def test_a_take_release_and_renew_end_in_a_designated_way(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([replies.Ends, replies.ReleasedClaims, replies.Detail]))
    value = raw(data.draw(of(kind)))
    refusal = b'"error":{"kind":"conflict","message":"no","detail":%s}' % value
    there = Answering("gpu01", refusal if kind is replies.Detail else b'"value":%s' % value)

    def call(op: str, args: dict[str, Any], kind: type[Any]) -> Any:
        try:
            return there.link.call(op, args, 1.0, kind)
        except (CallFailed, LinkLost) as error:
            return error

    def call_all(calls: Any, timeout_s: float, kind: type[Any]) -> dict[str, Any]:
        return {node: call(op, args, kind) for node, (op, args) in calls.items()}

    try:
        taken = ledger.take(call_all, ledger.Wanted({"gpu01": ["GPU-a"]}, 60.0, "h"), sleep=lambda _: None)
        assert taken.remaining_s <= 60.0
    except ledger.NotClaimed:
        pass
    assert len(ledger.release(call_all, "lease1", ["gpu01"]).failed) <= 1
    assert len(ledger.renew(call_all, "lease1", ["gpu01"], 60.0).failed) <= 1


@given(st.data())
@settings(max_examples=60)
def test_a_picture_can_be_made_of_whatever_is_well_formed(data: st.DataObject) -> None:
    """A lying node beside an honest one, in all that shows it: nothing fails, and the honest one is as it was."""
    honest = NodeFacts(name="honest", reading=Reading(1, 0.0, 1.0), arrived=NOW)
    feed = NodeFeed(
        Node("liar", "liar"),
        NodeConnector(Settings()),
        claims_dir="/var/tmp",
        thresholds=Thresholds(),
        interval_s=1.0,
        answer_s=1.0,
        changed=lambda: None,
    )
    there = Answering("liar", b"")
    there.heard.clear()
    feed.link = there.link
    builder = SnapshotBuilder()
    for message in data.draw(st.lists(st.sampled_from([Static, Reading, ReadingDelta]), min_size=1, max_size=4)):
        sent = data.draw(of(message))
        if message is ReadingDelta:
            gpus = feed.facts.reading.gpus if feed.facts.reading is not None else []
            numbers, details = (st.lists(of(kind), max_size=3) for kind in (GpuNumbers, GpuDetails))
            sent |= {"of": feed._whole[1], "gpus": (data.draw(numbers) + [[]] * len(gpus))[: len(gpus)]}
            sent["details"] = data.draw(details | junk)
        there.link.received(there.frame(b'{"t":"%s",' % TAGS[message] + raw(sent)[1:]))
        for heard in there.heard:
            with suppress(Exceeded) if message is ReadingDelta else nullcontext():  # of no reading
                feed._message(0, heard)
        there.heard.clear()
        facts = msgspec.structs.replace(feed.facts, arrived=NOW, hello=there.link.hello)
        assert feed._number == 0
        for one_shot in (True, False):
            at = view(one_shot=one_shot)
            seen = SnapshotBuilder().snapshot([facts, honest], at)
            assert (seen.nodes[1].state, seen.nodes[1].gpus) == ("up", [])
            msgspec.json.decode(msgspec.json.encode(seen))
            for width in (None, 80):
                table(Scene(seen, LeaseList(1, "", []), uids={}), width, colour=True)
            for node in seen.nodes:
                for gpu in node.gpus:
                    assert gpu.state != "free" or gpu.memory_used is not None
            if not one_shot:
                assert builder.snapshot([facts, honest], at) == seen
        claims = {"liar": node_claims(facts, {}), "honest": []}
        found = ledger.leases_of(claims, {}, time.time())
        leases = LeaseList(1, "", found)
        lease_table(held(Scene(seen, leases, uids={})), leases, 100, colour=False)
        ledger.mine(claims, {"liar": 0})
        reachable_addresses({node.name: node.addresses for node in seen.nodes}, {})
        shown, history = scene(*seen.nodes, leases=found), History()
        history.add(seen, 1.0)
        for gpu in seen.nodes[0].gpus:
            place = Place(seen.nodes[0], gpu)
            gpu_lines.head(place, shown, 80)
            gpu_lines.processes(place, 10, 80)
            gpu_lines.links(place, 80)
            gpu_lines.health(gpu, 80)
            history.of(gpu.uuid)
    assert there.ended == [] or there.ended[0].startswith("malformed answer: ")


def occupied(folder: str) -> KeeperPlace:
    place = acquire(folder, 0.0)
    assert place is not None
    return place


@given(st.data())
@settings(max_examples=50)
def test_a_keeper_takes_whatever_a_node_answers(data: st.DataObject) -> None:
    """A lease over a lying node and an honest one: the honest part is kept, and so is the other lease."""
    kind = data.draw(st.sampled_from([replies.Touched, replies.Carriers, replies.ReleasedClaims, replies.Read]))
    there = Answering("liar", b'"value":%s' % raw(data.draw(st.one_of(of(kind), junk))))
    node = KeptNode("liar", ["GPU-a"], "liar", "/var/tmp", None)
    record = LeaseRecord("lease1", [node], {}, None, 0, 0, 0.0, 1e9)
    calls = NodeCalls(node, record, Connectors(Logins(TIMING)), TIMING)
    calls._link = there.link
    with tempfile.TemporaryDirectory() as folder, closing(occupied(folder)) as place:
        keeper = Keeper(folder, place)
        honest = KeptNode("honest", ["GPU-b"], None, folder, None)
        for lease, nodes in (("lease1", [node, honest]), ("lease2", [honest])):
            Path(folder, f"{lease}.json").write_text("{}")
            keeper.kept[lease] = KeptLease(LeaseRecord(lease, nodes, {}, None, 0, 0, 0.0, 1e9), keeper.context)
        steps: tuple[tuple[str, Callable[[NodeAnswer], None]], ...] = (
            ("touch", lambda answer: keeper._touched("liar", ["lease1"], answer)),
            ("read", lambda answer: keeper.kept["lease1"]._read("liar", answer)),
            ("carriers", lambda answer: keeper.kept["lease1"]._carriers_read("liar", answer)),
        )
        for op, take in steps:
            answer = calls._answer(op, {"leases": ["lease1"]})
            assert isinstance(answer, NodeAnswer)
            assert answer.kind or answer.value is not None
            take(answer)
            if vars(calls)["_link"] is None:
                break  # what is no frame has ended it: the next call would connect
            keeper.kept["lease1"].phase, keeper.kept["lease1"].asked = "orphaned", {"liar", "other"}
        assert keeper.kept["lease2"].record.nodes == [honest]
        assert honest in keeper.kept["lease1"].record.nodes


@given(st.data())
@settings(max_examples=60)
def test_a_run_survives_any_message_of_a_supervisor(data: st.DataObject) -> None:
    plan = planned()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    run = supervisors.Supervisors(plan, {}, Connector(Settings()), inbox)
    watch = FailureWatch(plan)
    listener: list[Any] = []

    class Opened:
        def open(self, *_: Any, **options: Any) -> Any:
            listener.append(options["listener"])

    run._connector, run._nodes = Opened(), {"gpu02": Node("gpu02", None)}  # type: ignore[assignment]
    run._open("gpu02", {})
    for kind in data.draw(st.lists(st.sampled_from(sorted(EVENTS)), min_size=1, max_size=5)):
        sent = raw(data.draw(of(EVENTS[kind])))
        try:
            listener[0](Event(kind, msgspec.Raw(sent)))
        except GpuboardError:
            raise AssertionError("a listener must not raise") from None
    now = 1.0
    while not inbox.empty():
        watch.event("gpu02", inbox.get().event, now)
        now += 1.0
        watch.tick(now)
    assert {watch.ranks[rank].state for rank in (0, 1)} == {"waiting"}, "it speaks for its own ranks alone"
    assert 0 <= watch.exit_code() <= 255
    watch.summary()


@given(st.data())
@settings(max_examples=30)
def test_preflight_judges_whatever_was_answered(data: st.DataObject) -> None:
    plan = planned()
    asked = collect.PreflightCalls(plan, supervisors.Supervisors(plan, {}, Connector(Settings()), queue.SimpleQueue()))
    kinds: dict[supervisors.SupervisorCall, type] = {
        "check": replies.LaunchFacts,
        "listen": replies.Listening,
        "spawn": replies.RanksStarted,
        "probe-listen": replies.Ports,
        "probe-connect": replies.Probed,
    }
    for op, kind in kinds.items():
        for node in ("gpu01", "gpu02"):
            there = Answering(node, b'"value":%s' % raw(data.draw(of(kind))))
            value: object
            try:
                value = there.link.call(op, {}, 1.0, kind)
            except LinkLost as error:
                value = error
            asked.take(supervisors.CallReply(node, op, value))
    answers = asked.collect()
    checks = preflight(plan.rank_map, plan.nodes[0].master_addr, "cuda", answers)
    for check in grouped(checks):
        check_text(check)
    assert len(asked._ports("gpu01")) <= 2
    assert asked.port is None or 1 <= asked.port <= 65535
    interfaces(plan.nodes[0].master_addr, "gpu01", answers)


def test_every_answer_of_an_honest_agent_is_well_formed() -> None:
    """Claims and file times at the bounds that any user of a node may choose must not make its readings malformed."""
    extreme = {"uuid": "GPU-a", "lease": "k3", "uid": 2**32 - 1, "owner": "bob", "state": "live", "share": 2**63 - 1}
    times = {"from": -1e18, "until": 1e18 + 3e7, "remaining_s": 3e7, "age_s": 9.3e18, "gpus": 1_000_000}
    holder = {"host": "h", "boot_id": "b", "pid": -(2**63) + 1, "start": 2**63 - 1}
    assert msgspec.convert(extreme | times | {"holder": holder}, Claim).uid == 2**32 - 1
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(extreme | times | {"age_s": 1e21}, Claim)
