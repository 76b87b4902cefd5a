"""The order of rows: natural, stable, unknown last, in groups; whole values."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.board.arrange import (
    SORTS,
    Group,
    NodeRow,
    ViewState,
    arrange,
    arrange_nodes,
    count,
    key_of,
    natural,
    users_of,
)
from gpuboard.board.filter.conditions import GPUS
from gpuboard.board.scene import Scene
from gpuboard.board.text.gpu_row import Device, units, with_devices
from gpuboard.board.text.picture import group_words
from gpuboard.cli.see import status
from gpuboard.model.lease import LeaseGpu
from gpuboard.model.snapshot import NodeView, ProcessView, Tally
from gpuboard.model.state import STATES
from tests.board.made import GIB, busy, gpu, lease, mig, node, scene, unread

SCENE = scene(
    node("gpu10", [busy("gpu10", 0, "alice", name="L40S"), gpu("gpu10", 1, utilization=None, power=None)]),
    unread("gpu3"),
    node("gpu2", [gpu("gpu2", 0, "reserved", leases=["k3f9"]), busy("gpu2", 1, "bob", utilization=20), gpu("gpu2", 2)]),
    leases=[lease("k3f9", "alice", [("gpu2", 0)])],
)


def keys(view: ViewState, query: str = "", within: Scene = SCENE) -> list[str]:
    rows = arrange(within, view, GPUS.parse(query).matches if query else None)
    return [key_of(row).removeprefix("GPU-") for row in rows]


def pictured(view: ViewState, query: str = "") -> list[Any]:
    """Return the picture's rows as group names or (node, its GPUs shown)."""
    rows = arrange_nodes(SCENE, view, GPUS.parse(query).matches if query else None)
    return [
        row.name if isinstance(row, Group) else (row.node.name, None if row.shown is None else len(row.shown))
        for row in rows
    ]


def test_without_a_sort_nodes_stand_as_people_count() -> None:
    assert keys(ViewState()) == ["gpu2-0", "gpu2-1", "gpu2-2", "node:gpu3", "gpu10-0", "gpu10-1"]


def test_a_filter_leaves_rows_out() -> None:
    assert keys(ViewState(), "user:alice") == ["gpu2-0", "gpu10-0"]
    assert keys(ViewState(), "state:unknown") == ["node:gpu3"]


def test_a_sort_is_stable_and_unknown_comes_last_both_ways() -> None:
    up = ["gpu2-0", "gpu2-2", "gpu2-1", "gpu10-0", "node:gpu3", "gpu10-1"]
    down = ["gpu10-0", "gpu2-1", "gpu2-0", "gpu2-2", "node:gpu3", "gpu10-1"]
    assert keys(ViewState(sort="utilization")) == up
    assert keys(ViewState(sort="utilization", reverse=True)) == down


@pytest.mark.parametrize("sort", list(SORTS))
@pytest.mark.parametrize("reverse", [False, True])
def test_every_sort_keeps_every_row(sort: str, reverse: bool) -> None:
    assert sorted(keys(ViewState(sort=sort, reverse=reverse))) == sorted(keys(ViewState()))


def test_an_unknown_sort_or_group_of_an_older_version_changes_nothing() -> None:
    assert keys(ViewState(sort="nonsense", group="rack")) == keys(ViewState())


def counts(**states: int) -> Tally:
    return Tally(Counter({state: states[state] for state in STATES if state in states}), Counter())


def test_mig_devices_are_counted_in_place_of_their_gpu_everywhere() -> None:
    one = scene(node("n", [mig("n", 0, "free", "busy"), gpu("n", 1), gpu("n", 2, "mig", flags=["mig"])]))
    (group,) = (row for row in arrange(one, ViewState(group="node")) if isinstance(row, Group))
    assert group.counts == Tally(Counter({"free": 1, "mig": 1}), Counter({"free": 1, "busy": 1}))
    words = "".join(text for text, _ in group_words(group))
    assert words == "n  2 GPUs  1 free  1 mig  2 MIG devices  1 free  1 busy"
    assert status.sums(one.snapshot).endswith("2 GPUs: 1 free, 1 mig; 2 MIG devices: 1 free, 1 busy")
    assert sum(count.states["free"] for count in one.sums.models) == 2
    assert sum(count.total for count in one.sums.models) == 4


def test_groups_have_headers_with_counts() -> None:
    rows = arrange(SCENE, ViewState(group="user"))
    assert [row if isinstance(row, Group) else key_of(row) for row in rows] == [
        Group("group:alice", "alice", counts(reserved=1, busy=1)),
        "GPU-gpu2-0", "GPU-gpu10-0",
        Group("group:bob", "bob", counts(busy=1)),
        "GPU-gpu2-1",
        Group("group:no one", "no one", counts(free=2)),
        "GPU-gpu2-2", "GPU-gpu10-1",
        Group("group:unknown", "unknown", counts()),
        "node:gpu3",
    ]  # fmt: skip


def test_a_gpu_whose_user_is_not_known_belongs_to_nobody_only_if_it_is_not_in_use() -> None:
    gpus = [
        gpu("n", 0), busy("n", 1, None), gpu("n", 2, "occupied"), gpu("n", 3, "broken", processes=None),
        gpu("n", 4, "broken"), gpu("n", 5, "unknown"),
    ]  # fmt: skip
    rows = arrange(scene(node("n", gpus)), ViewState(group="user"))
    assert [row.name if isinstance(row, Group) else row.gpu.index for row in rows if not isinstance(row, NodeView)] == [
        "no one", 0, 4, "unknown", 1, 2, 3, 5,
    ]  # fmt: skip


def test_each_device_of_a_gpu_in_mig_mode_is_in_the_group_of_its_user() -> None:
    split = mig("n", 0, "free", "busy", "busy", "free", "reserved")
    used = [ProcessView(pid, user, "train", GIB, "compute") for pid, user in ((7, "dave"), (8, None))]
    devices = [msgspec.structs.replace(split.mig[k], processes=[used[k - 1]] if k in {1, 2} else []) for k in range(5)]
    held = msgspec.structs.replace(split, mig=devices, processes=used)
    lent = msgspec.structs.replace(lease("k3f9", "erin", []), gpus=[LeaseGpu("n", 0, "MIG-n-0-4")])
    shown = scene(node("n", [held, gpu("n", 1)]), leases=[lent])
    rows = with_devices(arrange(shown, ViewState(group="user")))
    assert [
        "".join(text for text, _ in group_words(row)) if isinstance(row, Group)
        else row.mig.uuid if isinstance(row, Device) else key_of(row)
        for row in rows
    ] == [
        "dave  1 MIG device  1 busy", "GPU-n-0", "MIG-n-0-1",
        "erin  1 MIG device  1 reserved", "MIG-n-0-4",
        "no one  1 GPU  1 free  2 MIG devices  2 free", "MIG-n-0-0", "MIG-n-0-3", "GPU-n-1",
        "unknown  1 MIG device  1 busy", "MIG-n-0-2",
    ]  # fmt: skip
    picture = arrange_nodes(shown, ViewState(group="user"), GPUS.parse("state:free,busy").matches)
    found = [row.name if isinstance(row, Group) else [*map(units, row.parts)] for row in picture]
    assert found == ["dave", [(0, 1)], "no one", [(2, 2), (1, 1)], "unknown", [(0, 1)]]


def test_groups_by_node_know_their_node_and_turn_with_the_sort() -> None:
    rows = arrange(SCENE, ViewState(group="node", sort="node", reverse=True))
    groups = [row for row in rows if isinstance(row, Group)]
    assert [(g.name, g.node and g.node.name, g.counts.gpus.total()) for g in groups] == [
        ("gpu10", "gpu10", 2), ("gpu3", "gpu3", 0), ("gpu2", "gpu2", 3),
    ]  # fmt: skip


def test_states_are_grouped_in_the_order_people_ask_for_them() -> None:
    rows = arrange(SCENE, ViewState(group="state"))
    assert [row.name for row in rows if isinstance(row, Group)] == ["free", "reserved", "busy", "unknown"]


def test_the_picture_has_a_row_a_node() -> None:
    assert pictured(ViewState()) == [("gpu2", None), ("gpu3", None), ("gpu10", None)]
    assert pictured(ViewState(group="node")) == pictured(ViewState())
    assert pictured(ViewState(sort="utilization", reverse=True)) == [("gpu10", None), ("gpu2", None), ("gpu3", None)]


def test_nodes_are_sorted_by_how_many_gpus_are_free() -> None:
    nodes = [
        node("a", [gpu("a", 0), gpu("a", 1, "busy")]),
        node("b", [mig("b", 0, "free", "free", "busy"), gpu("b", 1)]),
        node("c", [gpu("c", 0, "busy")]),
        node("d", [gpu("d", 0)], state="stale"),
    ]
    rows = arrange_nodes(scene(*nodes), ViewState(sort="free-gpus", reverse=True))
    assert [row.node.name for row in rows if isinstance(row, NodeRow)] == ["b", "a", "c", "d"]


def test_the_picture_shows_which_gpus_match() -> None:
    assert pictured(ViewState(), "state:free") == [("gpu2", 1), ("gpu10", 1)]


def test_a_node_has_a_row_in_every_group_of_its_gpus() -> None:
    assert pictured(ViewState(group="model")) == [
        "L40S", ("gpu10", 1), "NVIDIA H100 80GB HBM3", ("gpu2", 3), ("gpu10", 1), "unknown", ("gpu3", None),
    ]  # fmt: skip
    rows = arrange_nodes(SCENE, ViewState(group="model"))
    keys = [row.key for row in rows]
    assert len(set(keys)) == len(keys)
    assert [row.key for row in rows if isinstance(row, NodeRow)][-1] == "node:gpu3/unknown"


def test_one_machine_under_two_names_is_one_row_a_gpu() -> None:
    twice = scene(node("a", [gpu("x", 0)]), node("b", [gpu("x", 0, "busy")]))
    assert keys(ViewState(), within=twice) == ["x-0"]


def test_users_are_named_once_owners_first() -> None:
    processes = [
        ProcessView(1, "bob", "a", 1 * GIB, "compute"),
        ProcessView(2, None, "b", 9 * GIB, "compute"),
        ProcessView(3, "eve", "c", 5 * GIB, "compute"),
        ProcessView(4, "alice", "d", None, "compute"),
    ]
    one = gpu("gpu2", 0, leases=["k3f9", "gone"], processes=processes)
    assert users_of(one, SCENE) == ("alice", "eve", "bob")


@given(st.text(max_size=12), st.text(max_size=12))
def test_any_names_have_an_order(one: str, other: str) -> None:
    assert natural(one) <= natural(other) or natural(other) <= natural(one)


def test_numbers_count() -> None:
    names = ["gpu10", "GPU2", "gpu02", "gpu1a", "gpu", "gpu1"]
    assert sorted(names, key=natural) == ["gpu", "gpu1", "gpu1a", "GPU2", "gpu02", "gpu10"]


def test_a_filter_leaves_out_the_mig_devices_that_do_not_match() -> None:
    split = mig("gpu01", 0, "free", "busy", "reserved")
    shown = scene(
        node("gpu01", [split, gpu("gpu01", 1)]),
        leases=[msgspec.structs.replace(lease("k3f9", "erin", []), gpus=[LeaseGpu("gpu01", 0, "MIG-gpu01-0-2")])],
    )

    def devices(text: str) -> list[str]:
        rows = with_devices(arrange(shown, ViewState(), GPUS.parse(text).matches))
        return [row.mig.state for row in rows if isinstance(row, Device)]

    assert devices("state:free") == ["free"]
    assert devices("state:busy,reserved") == ["busy", "reserved"]
    assert devices("user:erin") == ["reserved"]
    assert devices("model:3g") == ["free", "busy", "reserved"]
    assert devices("state:mig") == ["free", "busy", "reserved"]  # the GPU itself
    assert devices("gpu:1") == []
    assert devices("user:erin state:reserved") == ["reserved"]
    assert keys(ViewState(), "user:erin state:free", shown) == []  # no device is both
    assert devices("-state:free") == ["busy", "reserved"]
    assert devices("-state:free,busy,reserved") == devices("-state:mig") == devices("-state:up") == []
    assert devices("-user:erin") == devices("-user:erin -state:reserved") == ["free", "busy"]
    assert devices("-user:erin -state:free,busy") == []


def test_what_a_filter_leaves_out_is_not_counted() -> None:
    split = scene(
        node("gpu01", [mig("gpu01", 0, "free", "busy", "free"), gpu("gpu01", 1), busy("gpu01", 2)]), unread("gpu02")
    )
    for text, gpus, nodes in (("state:free", 3, 0), ("state:busy", 2, 0), ("3g", 3, 0), ("state:unreachable", 0, 1)):
        matches = GPUS.parse(text).matches
        rows = arrange(split, ViewState(group="model"), matches)
        pictured = arrange_nodes(split, ViewState(), matches)
        assert count(rows) == count(pictured) == (gpus, nodes), text
        assert sum(sum(part.total() for _, part in row.counts.parts) for row in rows if isinstance(row, Group)) == gpus
