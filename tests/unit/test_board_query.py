"""The filter's language: what each term matches, and the errors of wrong or incomplete terms."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.board.filter.conditions import GPUS, KEYS
from gpuboard.board.filter.language import QueryError
from gpuboard.board.scene import Scene
from gpuboard.model.lease import Lease, LeaseGpu
from gpuboard.model.snapshot import JobView, ProcessView
from tests.board.made import GIB, awaited, busy, crowd, gpu, lease, mig, node, scene, unread
from tests.steps import steps

SCENE = scene(
    node(
        "gpu01",
        [
            gpu("gpu01", 0),
            busy("gpu01", 1, "alice", flags=["rogue"], leases=["k3f9"], temperature=85),
            gpu("gpu01", 2, "allocated", jobs=[JobView("123", "dave", "long", None)], memory_used=10 * GIB),
        ],
    ),
    node(
        "gpu02.cluster.local",
        [
            gpu("gpu02", 0, "reserved", leases=["m7p2"], name="NVIDIA L40S", memory_total=48 * GIB),
            gpu(
                "gpu02", 1, "unknown", utilization=None, memory_used=None, temperature=None, processes=None, delay_s=9.0
            ),
        ],
        age_s=6.0,
    ),
    node("gpu10", [mig("gpu10", 0, "free")]),
    unread("gpu11"),
    leases=[lease("k3f9", "bob", [("gpu01", 1)]), lease("m7p2", "Carol", [("gpu02", 0)])],
)  # fmt: skip
ALL = ["gpu01:0", "gpu01:1", "gpu01:2", "gpu02:0", "gpu02:1", "gpu10:0", "gpu11"]


def found(text: str, within: Scene = SCENE) -> list[str]:
    """Return what a query finds, as ``node:index``, or the node alone where it has no GPU."""
    query = GPUS.parse(text)
    names = []
    for one in within.snapshot.nodes:
        name = one.name.split(".")[0]
        names += [f"{name}:{g.index}" for g in one.gpus if query.matches(one, g, within)]
        if not one.gpus and query.matches(one, None, within):
            names.append(name)
    return names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ALL),
        ("  ", ALL),
        ("state:free", ["gpu01:0", "gpu10:0"]),
        ("STATE:Free,busy", ["gpu01:0", "gpu01:1", "gpu10:0"]),
        ("state:re", ["gpu02:0"]),
        ("state=reserved", ["gpu02:0"]),
        ("state:unreachable", ["gpu11"]),
        ("state:mig", ["gpu10:0"]),
        ("model:3g", ["gpu10:0"]),
        ("uuid:MIG-gpu10", ["gpu10:0"]),
        ("state:unknown", ["gpu02:1", "gpu11"]),
        ("-state:free -state:unknown", ["gpu01:1", "gpu01:2", "gpu02:0"]),
        ("state!=free state:free,busy", ["gpu01:1"]),
        ("user:al", ["gpu01:1"]),
        ("user:carol", ["gpu02:0"]),
        ("user=caro", []),
        ("owner:bob,dave", ["gpu01:1", "gpu01:2"]),
        ("user:?", ["gpu01:0", "gpu02:1", "gpu10:0", "gpu11"]),
        ("mem>40G", ["gpu01:1"]),
        ("mem>=10GiB", ["gpu01:1", "gpu01:2"]),
        ("mem>50%", ["gpu01:1"]),
        ("mem<1G", ["gpu01:0", "gpu02:0", "gpu10:0"]),
        ("-mem<1G", ["gpu01:1", "gpu01:2"]),
        ("mem:?", ["gpu02:1", "gpu11"]),
        ("-mem:?", ["gpu01:0", "gpu01:1", "gpu01:2", "gpu02:0", "gpu10:0"]),
        ("free>60G", ["gpu01:0", "gpu01:2", "gpu10:0"]),
        ("total<60G", ["gpu02:0"]),
        ("util>50", ["gpu01:1"]),
        ("util>=50%", ["gpu01:1"]),
        ("temp>80", ["gpu01:1"]),
        ("temp>80C", ["gpu01:1"]),
        ("temp>80°c", ["gpu01:1"]),
        ("temp:80-90", ["gpu01:1"]),
        ("util:50-95%", ["gpu01:1"]),
        ("mem:5GiB-20GiB", ["gpu01:2"]),
        ("mem:10%-50%", ["gpu01:2"]),
        ("power>300W", ["gpu01:1"]),
        ("age>5s", ["gpu02:0", "gpu02:1"]),
        ("age>10s", ["gpu02:1"]),
        ("model:l40", ["gpu02:0"]),
        ('model="H100 80GB"', ["gpu01:0", "gpu01:1", "gpu01:2", "gpu02:1"]),
        ('model="H100 80GB 3g.40gb"', ["gpu10:0"]),
        ("model:*H?00*", ["gpu01:0", "gpu01:1", "gpu01:2", "gpu02:1", "gpu10:0"]),
        ("gpu:0,1 node:gpu01", ["gpu01:0", "gpu01:1"]),
        ("gpu:1-2", ["gpu01:1", "gpu01:2", "gpu02:1"]),
        ("gpu=0,2-7 node:gpu01", ["gpu01:0", "gpu01:2"]),
        ("-gpu:1-2", ["gpu01:0", "gpu02:0", "gpu10:0"]),
        ("gpu>1", ["gpu01:2"]),
        ("gpu:?", ["gpu11"]),
        ("node:gpu[01-04]", ["gpu01:0", "gpu01:1", "gpu01:2", "gpu02:0", "gpu02:1"]),
        ("node:gpu[02,10]", ["gpu02:0", "gpu02:1", "gpu10:0"]),
        ("node:gpu1", ["gpu10:0", "gpu11"]),
        ("node=gpu1", []),
        ("node=gpu02", ["gpu02:0", "gpu02:1"]),
        ("node:gpu?1", ["gpu01:0", "gpu01:1", "gpu01:2", "gpu11"]),
        ("flag:rogue", ["gpu01:1"]),
        ("flag:mig,ro", ["gpu01:1", "gpu10:0"]),
        ("lease:k3", ["gpu01:1"]),
        ("job:12", ["gpu01:2"]),
        ("job=12", []),
        ("command:TRAIN", ["gpu01:1"]),
        ("pid:4001", ["gpu01:1"]),
        ("pid:400", []),
        ("pid:400*", ["gpu01:1"]),
        ("pid:400,4001", ["gpu01:1"]),
        ("pid=4001", ["gpu01:1"]),
        ("uuid:gpu-gpu02", ["gpu02:0", "gpu02:1"]),
        ("reason:train", []),
        ('reason:"no process"', ["gpu01:0", "gpu01:2", "gpu02:0", "gpu02:1"]),
        ("train", ["gpu01:1"]),
        ("carol", ["gpu02:0"]),
        ('"python train"', ["gpu01:1"]),
        ("python -alice", []),
        ("ssh:", None),
        ("no answer", ["gpu11"]),
        ("00000000:1B", []),
        ("GPU-gpu02-0", ["gpu02:0"]),
    ],
)
def test_what_a_query_finds(text: str, expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises(QueryError, match="is not a key"):
            GPUS.parse(text)
    else:
        assert found(text) == expected


def test_connecting_and_unreachable_nodes_are_distinguished() -> None:
    shown = scene(unread("gpu01"), awaited("gpu02"))

    def names(text: str) -> list[str]:
        matches = GPUS.parse(text).matches
        return [node.name for node in shown.snapshot.nodes if matches is not None and matches(node, None, shown)]

    assert (names("state:connecting"), names("state:unreachable")) == (["gpu02"], ["gpu01"])
    assert names("state:unknown") == ["gpu01", "gpu02"]


@pytest.mark.parametrize(
    ("text", "words", "position"),
    [
        ("mem>", "mem> needs a value: the memory in use, mem>40GiB or mem>50%", 0),
        ("state:free  util<", "util< needs a value: a percentage, util<10", 12),
        (
            "state:free,",
            "state: needs a value: one of allocated, broken, mig, unknown, reserved, busy, occupied, free, up, stale, "
            "connecting, unreachable",
            0,
        ),
        ("alice -", "- needs a word or key:value to exclude", 6),
        ("mem>40", "mem>40: write a size or a part, mem>40GiB or mem>50%", 0),
        ("age>5", "age>5: write age>5s", 0),
        ("gpu:3-0", "gpu:3-0: write gpu:0,3 or gpu:0-3", 0),
        ("gpu:0-", "gpu:0-: write gpu:0,3 or gpu:0-3", 0),
        ("gpu>0-3", "gpu>0-3: write gpu:0,3 or gpu:0-3", 0),
        ("temp>80F", "temp>80F: write temp>80", 0),
        ("state:fine", "no state begins with 'fine'; there are allocated, broken, mig, unknown, reserved, busy, "
         "occupied, free, up, stale, connecting, unreachable", 0),
        ("user>alice", "user is not a number; write user:alice", 0),
        ("pid>4000", "pid is not a number; write pid:4000", 0),
        ("x node:gpu[01-", "the bracket is not closed", 2),
        ('purpose:"night', "the quote is not closed", 0),
    ],
)  # fmt: skip
def test_missing_parts_are_reported(text: str, words: str, position: int) -> None:
    with pytest.raises(QueryError) as caught:
        GPUS.parse(text)
    assert (caught.value.words, caught.value.position) == (words, position)


def test_an_invalid_nodeset_is_reported() -> None:
    with pytest.raises(QueryError, match="cannot be read") as caught:
        GPUS.parse("free node:gpu[01-04]x]")
    assert caught.value.position == 5


def test_every_incomplete_key_shows_how_to_continue() -> None:
    for key, about in KEYS.items():
        with pytest.raises(QueryError) as caught:
            GPUS.parse(f"{key}:")
        assert caught.value.words == f"{key}: needs a value: {about.hint}"


def test_brackets_and_markup_are_plain_text() -> None:
    process = ProcessView(1, "eve", "[/x] [red]boo ]", 1, "compute")
    one = scene(node("n", [gpu("n", 0, processes=[process])]))
    assert [found(text, one) for text in ("[/x]", "[red", "]", "it's")] == [["n:0"], ["n:0"], ["n:0"], []]


@given(st.text(max_size=40))
def test_any_text_is_a_query_or_an_error_with_a_reason(text: str) -> None:
    try:
        names = found(text)
    except QueryError as error:
        assert error.words and 0 <= error.position <= len(text)
    else:
        assert set(names) <= set(ALL)


@given(
    st.lists(st.sampled_from(["state:free", "user:alice", "mem>40G", "-train", "util<10", "gpu:0", "h100"]), max_size=4)
)
def test_terms_hold_together_in_any_order(terms: list[str]) -> None:
    expected = [name for name in ALL if all(name in found(term) for term in terms)]
    assert found(" ".join(terms)) == expected
    assert found("  ".join(reversed(terms))) == expected


def test_a_large_cluster_is_filtered_within_a_frame_or_few() -> None:
    large = crowd(1000)
    query = GPUS.parse("state:free mem<40G model:H100")

    def number() -> int:
        return sum(query.matches(one, g, large) for one in large.snapshot.nodes for g in one.gpus)

    assert number() > 0
    assert steps(number) < 200_000  # of 8,000 GPUs


def mig_lease(name: str, owner: str, on: str, uuid: str, uid: int = 1001) -> Lease:
    return msgspec.structs.replace(lease(name, owner, [], uid), gpus=[LeaseGpu(node=on, index=0, uuid=uuid)])


def test_the_caller_s_own_gpus_are_found_by_me_whatever_the_name_on_the_node() -> None:
    me, they = 1001, 1002
    mine = ProcessView(1, "al", "train", 1, "compute", uid=me)
    theirs = ProcessView(2, "merlin", "train", 1, "compute", uid=they)
    shown = scene(
        node("gpu01", [gpu("gpu01", 0, processes=[mine]), gpu("gpu01", 1, processes=[theirs]), gpu("gpu01", 2)]),
        node("gpu02", [gpu("gpu02", 0, leases=["k3f9"]), gpu("gpu02", 1, processes=[mine])]),
        node("gpu03", [mig("gpu03", 0, "reserved", "free")]),
        unread("gpu04"),
        leases=[lease("k3f9", "al", [("gpu02", 0)], uid=me), mig_lease("m2", "al", "gpu03", "MIG-gpu03-0-0", uid=me)],
        uids={"gpu01": me, "gpu02": me, "gpu03": me},
    )
    assert found("user:me", shown) == ["gpu01:0", "gpu02:0", "gpu02:1", "gpu03:0"]
    assert found("user=merlin", shown) == ["gpu01:1"]
    assert found("user:me,merlin", shown) == ["gpu01:0", "gpu01:1", "gpu02:0", "gpu02:1", "gpu03:0"]
    assert found("-user:me", shown) == ["gpu01:1", "gpu01:2", "gpu04"]


def test_mig_devices_are_found_by_state_model_user_and_any_word() -> None:
    device = msgspec.structs.replace(mig("gpu01", 0, "allocated").mig[0], jobs=[JobView("77", "dora", "long", None)])
    other = msgspec.structs.replace(mig("gpu01", 0, "allocated", "free").mig[1], reason="no claim", uuid="MIG-b")
    held = msgspec.structs.replace(mig("gpu01", 0), mig=[device, other])
    shown = scene(
        node("gpu01", [held]), node("gpu02", [mig("gpu02", 0, "busy")]),
        leases=[mig_lease("m2", "erin", "gpu02", "MIG-gpu02-0-0")],
    )  # fmt: skip
    for text in ("state:allocated", "state:free", "user:dora", "dora", "job:77", '"no claim"', "MIG-b"):
        assert found(text, shown) == ["gpu01:0"], text
    for text in ("state:busy", "user:erin", "erin"):
        assert found(text, shown) == ["gpu02:0"], text
    assert found("model:3g", shown) == found(device.profile, shown) == ["gpu01:0", "gpu02:0"]
