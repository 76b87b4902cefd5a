"""The policy: what it chooses and refuses, with its messages."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuboard.errors import UsageError
from gpuboard.leases.picks import parse_picks
from gpuboard.leases.policy.candidates import check, without_utilization
from gpuboard.leases.policy.choose import choose, pair_scores
from gpuboard.model.request import Choice, ChosenGpu, Pick, Refusal, Request
from gpuboard.model.snapshot import GpuView, MigView, NodeView, ProcessView, Snapshot
from gpuboard.model.state import STATES
from tests.calls import calls_of

GIB = 2**30


def gpu(index: int, node: str = "gpu01", state: str = "free", **changes: object) -> GpuView:
    values: dict[str, object] = {
        "index": index, "uuid": f"GPU-{node}-{index}", "name": "NVIDIA H100 80GB HBM3", "pci_bus_id": "",
        "state": state,
        "reason": "no process, no reservation" if state == "free" else f"it is {state}",
        "memory_used": 0, "memory_total": 80 * GIB,
    }  # fmt: skip
    return msgspec.convert(values | changes, GpuView)


def node(name: str, states: str = "ffffffff", **changes: object) -> NodeView:
    """A node whose GPUs' states are given by their first letters."""
    words = {state[0]: state for state in STATES} | {"b": "busy", "x": "broken"}
    gpus = [gpu(i, name, words[letter]) for i, letter in enumerate(states)]
    return msgspec.structs.replace(NodeView(name=name, state="up", gpus=gpus), **changes)


def cluster(*nodes: NodeView) -> Snapshot:
    return Snapshot(schema=1, at="", cluster="", nodes=list(nodes))


def got(request: Request, *nodes: NodeView) -> dict[str, list[int]]:
    answer = choose(request, cluster(*nodes))
    assert isinstance(answer, Choice), answer
    found: dict[str, list[int]] = {}
    for chosen in answer.gpus:
        found.setdefault(chosen.node, []).append(chosen.index)
    return found


def refused(request: Request, *nodes: NodeView) -> Refusal:
    answer = choose(request, cluster(*nodes))
    assert isinstance(answer, Refusal), answer
    return answer


def test_only_utilization_without_a_process_is_looked_past() -> None:
    process = ProcessView(1, "bob", "python", GIB, "compute")
    lingering, working = gpu(0, state="busy", utilization=78), gpu(1, state="busy", utilization=78, processes=[process])
    prohibited = gpu(2, state="busy", utilization=0)
    mixed = NodeView(name="gpu01", state="up", gpus=[lingering, working, prohibited])
    found, names = without_utilization(cluster(mixed, node("gpu02", "bf")), busy=5)
    assert names == ["gpu01"]
    assert [[each.state for each in one.gpus] for one in found.nodes] == [["free", "busy", "busy"], ["busy", "free"]]


def test_a_model_that_no_gpu_has_is_said_to_match_none() -> None:
    assert "no GPU matches" in refused(Request(n=1, model="nonsense"), node("gpu01")).message
    assert "no GPU is free (4 busy)" in refused(Request(n=1, model="H100"), node("gpu01", "bbbb")).message


def test_one_node_is_taken_when_one_suffices_and_the_fullest_when_not() -> None:
    one, two = node("gpu01", "ffffbbbb"), node("gpu02")
    assert got(Request(n=4), one, two) == {"gpu01": [0, 1, 2, 3]}
    assert got(Request(n=5), one, two) == {"gpu02": [0, 1, 2, 3, 4]}
    assert got(Request(n=10), one, two) == {"gpu02": [0, 1, 2, 3, 4, 5, 6, 7], "gpu01": [0, 1]}


def test_whole_nodes_are_left_to_others_and_the_rest_comes_from_the_smallest_fit() -> None:
    nodes = [node("gpu01"), node("gpu02"), node("gpu03", "ffbbbbbb"), node("gpu04", "fffbbbbb")]
    assert got(Request(n=2), *nodes) == {"gpu03": [0, 1]}
    assert got(Request(n=10), *nodes) == {"gpu01": [0, 1, 2, 3, 4, 5, 6, 7], "gpu03": [0, 1]}


def test_links_come_before_a_tight_fit() -> None:
    linked = [gpu(i, "gpu02", links={f"GPU-gpu02-{1 - i}": 4} if i < 2 else {}) for i in range(4)]
    nodes = [node("gpu01", "ff"), NodeView(name="gpu02", state="up", gpus=linked)]
    assert got(Request(n=2), *nodes) == {"gpu02": [0, 1]}
    assert got(Request(n=2, topology="any"), *nodes) == {"gpu01": [0, 1]}


def test_numa_decides_between_equal_links() -> None:
    gpus = [gpu(i, numa_node=i % 2) for i in range(4)]
    assert got(Request(n=2), NodeView(name="gpu01", state="up", gpus=gpus)) == {"gpu01": [0, 2]}


def test_ranks_follow_the_links() -> None:
    ring = {0: 2, 2: 1, 1: 3, 3: 0}
    links = [
        {f"GPU-gpu01-{ring[i]}": 1} | {f"GPU-gpu01-{j}": 1 for j in ring if ring[j] == i} for i in range(4)
    ]  # fmt: skip
    gpus = [gpu(i, links=links[i]) for i in range(4)]
    assert got(Request(n=4), NodeView(name="gpu01", state="up", gpus=gpus)) == {"gpu01": [0, 2, 1, 3]}


def test_per_node_takes_exactly_this_many_on_each() -> None:
    nodes = [node("gpu01", "fffbbbbb"), node("gpu02"), node("gpu03", "ffffbbbb")]
    assert got(Request(n=8, per_node=4), *nodes) == {"gpu02": [0, 1, 2, 3], "gpu03": [0, 1, 2, 3]}
    answer = refused(Request(n=12, per_node=4), *nodes)
    assert (answer.code, answer.nearest) == (4, "--n 12 without --per-node, --n 8 or --wait")


@pytest.mark.parametrize("request_", [Request(n=400), Request(n=80, per_node=2), Request(n=80, max_nodes=20)])
def test_the_links_of_each_node_are_evaluated_once(request_: Request) -> None:
    names = [f"gpu{number:03d}" for number in range(60)]
    with calls_of(pair_scores) as calls:
        answer = choose(request_, cluster(*(node(name) for name in names)))
    evaluated = [call["gpus"][0].node for call in calls]
    assert evaluated
    assert isinstance(answer, Choice)
    assert len(answer.gpus) == request_.n
    assert sorted(evaluated) == sorted(set(evaluated))


def test_the_nearest_request_keeps_the_model_while_one_is_free() -> None:
    def small(name: str, states: str) -> NodeView:
        found = node(name, states)
        return msgspec.structs.replace(
            found, gpus=[msgspec.structs.replace(gpu, name="NVIDIA A10", memory_total=24 * GIB) for gpu in found.gpus]
        )

    nodes = node("gpu02", "fbbb"), small("gpu01", "ffff")
    assert refused(Request(n=2, model="H100"), *nodes).nearest == "--n 1 or --wait"
    assert refused(Request(n=2, model="H100", exclude=(Pick("gpu02", 0, None),)), *nodes).nearest == "--wait"
    busy = node("gpu02", "bbbb")
    assert refused(Request(n=2, model="H100"), busy, nodes[1]).nearest == "without --model or --wait"
    picks = (Pick("gpu02", 1, None), Pick("gpu02", 2, None))
    assert refused(Request(n=None, picks=picks), *nodes).nearest == "--gpus gpu02:0 or --wait"
    assert refused(Request(n=None, picks=picks), busy, nodes[1]).nearest == "--gpus gpu01:0,1 or --wait"
    assert refused(Request(n=None, picks=picks[:1]), *nodes, node("gpu03")).nearest == "--gpus gpu02:0 or --wait"


def test_a_refusal_names_the_nearest_request_that_works() -> None:
    answer = refused(Request(n=4, max_nodes=1), node("gpu01", "fffbb"), node("gpu02", "frr"))
    assert answer.code == 4
    assert answer.message == (
        "requested 4 GPUs on one node; gpu01 has 3 free, gpu02 has 1 free (2 busy, 2 reserved); "
        "try --max-nodes 2, --n 3 or --wait"
    )
    assert {(g.node, g.index, g.state, g.reason) for g in answer.gpus} >= {
        ("gpu01", 0, "free", "available"), ("gpu01", 3, "busy", "it is busy"),
        ("gpu02", 1, "reserved", "it is reserved"),
    }  # fmt: skip


def test_a_huge_request_is_refused_at_once() -> None:
    assert refused(Request(n=10**20), node("gpu01", "fffb")).nearest == "--n 3"
    assert refused(Request(n=3 * 10**20, per_node=3), node("gpu01", "ffff")).nearest == "--n 3"


def test_never_possible_only_when_every_node_was_read() -> None:
    unreachable = NodeView(name="gpu02", state="unreachable", error="ssh: connection refused")
    assert refused(Request(n=9), node("gpu01")).code == 3
    answer = refused(Request(n=9), node("gpu01"), unreachable)
    assert answer.code == 4
    assert "not read: gpu02 (ssh: connection refused)" in answer.message
    assert refused(Request(n=8), node("gpu01", "xfffffff")).code == 4  # a broken GPU may be repaired
    assert refused(Request(n=1, model="B200"), node("gpu01")).code == 3
    assert refused(Request(n=1), node("gpu01", claims_error="NFS")).code == 4
    assert refused(Request(n=1), node("gpu01", claims_error="NFS")).nearest == ""  # waiting does not help
    assert refused(Request(picks=(Pick("gpu01", 0, None),)), node("gpu01", claims_error="NFS")).nearest == ""
    assert refused(Request(n=9), node("gpu01", claims_error="NFS"), node("gpu02", "b")).nearest == "--wait"


def test_never_possible_names_the_most_on_one_node_where_there_are_several() -> None:
    message = refused(Request(n=6, max_nodes=1), node("gpu01", "ffff"), node("gpu02", "fff")).message
    assert "never possible here: matching GPUs in total: 7, at most 4 on one node; try --max-nodes 2" in message
    assert "matching GPUs in total: 7; try" in refused(Request(n=8), node("gpu01", "fffffff")).message


def test_models_match_by_part_or_glob_without_case() -> None:
    nodes = [node("gpu01", gpus=[gpu(0, name="NVIDIA A100-SXM4-40GB")]), node("gpu02", "f")]
    assert got(Request(n=1, model="a100"), *nodes) == {"gpu01": [0]}
    assert got(Request(n=1, model="*H100*HBM3"), *nodes) == {"gpu02": [0]}
    assert got(Request(n=1, model="A100 40GB"), *nodes) == {"gpu01": [0]}  # as tables show it
    assert got(Request(n=1, model="H100*"), *nodes) == {"gpu02": [0]}
    assert refused(Request(n=1, model="100*"), *nodes).nearest == "without --model"


def test_free_memory_is_what_is_not_used() -> None:
    gpus = [gpu(0, memory_used=50 * GIB), gpu(1, memory_used=300 * 2**20), gpu(2, memory_used=None)]
    one = NodeView(name="gpu01", state="up", gpus=gpus)
    assert got(Request(n=1, gpu_mem=40 * GIB), one) == {"gpu01": [1]}
    answer = refused(Request(n=2, gpu_mem=40 * GIB), one)
    assert answer.nearest == "--n 1, --gpu-mem 30GiB or --wait"
    assert [g.reason for g in answer.gpus] == [
        "30 GiB free, 40 GiB requested",
        "available",
        "? free, 40 GiB requested",
    ]
    assert refused(Request(n=1, gpu_mem=100 * GIB), one).code == 3
    assert refused(Request(n=3, gpu_mem=40 * GIB), one).code == 4


def test_memory_that_the_driver_reserves_is_not_free() -> None:
    gpus = [gpu(index, memory_reserved=reserved) for index, reserved in enumerate((GIB // 2, 8 * GIB))]
    one = NodeView(name="gpu01", state="up", gpus=gpus)
    assert got(Request(n=1, gpu_mem=76 * GIB), one) == {"gpu01": [0]}
    assert refused(Request(n=2, gpu_mem=76 * GIB), one).nearest == "--n 1 or --gpu-mem 72GiB"
    answer = refused(Request(n=1, gpu_mem=80 * GIB), one)
    assert [each.reason for each in answer.gpus] == [f"has {size} GiB usable, 80 GiB requested" for size in (79.5, 72)]
    assert (answer.code, answer.nearest) == (3, "--gpu-mem 79GiB")


def test_several_nodes_are_no_remedy_where_only_one_can_be_used() -> None:
    nodes = node("gpu01", "fff"), node("gpu02", "ff")
    assert refused(Request(n=4, max_nodes=1), *nodes).nearest == "--max-nodes 2 or --n 3"
    assert refused(Request(n=4, max_nodes=1, one_node=True), *nodes).nearest == "--n 3"


def test_excluded_gpus_and_nodes_are_not_taken() -> None:
    exclude = parse_picks("gpu01:0,2@gpu02", whole_nodes=True)
    assert got(Request(n=6, exclude=exclude), node("gpu01"), node("gpu02")) == {"gpu01": [1, 3, 4, 5, 6, 7]}
    for text in ("gpu[02-03],gpu01:0,2", "gpu01:0,2,gpu02,gpu03", "gpu[02,03]@gpu01:0,2"):
        assert set(parse_picks(text, whole_nodes=True)) >= set(exclude)
    with pytest.raises(ValueError, match="cannot be read"):
        parse_picks("gpu[02", whole_nodes=True)


def test_an_exclusion_that_matches_no_gpu_is_reported() -> None:
    def notes(text: str) -> tuple[str, ...]:
        answer = choose(Request(n=1, exclude=parse_picks(text, whole_nodes=True)), nodes)
        assert isinstance(answer, Choice)
        return answer.notes

    nodes = cluster(node("gpu01"), node("gpu02"), NodeView(name="gpu04", state="unreachable"))

    assert notes("gpu01:0,7@gpu02") == ()
    assert notes("gpu1:0,1@gpu02:8@gpu3") == ("--exclude matches no GPU in scope: gpu1:0, gpu1:1, gpu02:8, gpu3",)
    assert notes("gpu04:3@gpu04") == ()
    assert notes("GPU-elsewhere-1") == ()  # scripts exclude broken GPUs of any node


def test_the_gpus_of_a_machine_with_two_names_count_once() -> None:
    twin = msgspec.structs.replace(node("gpu01"), name="gpu01-ib")
    assert got(Request(n=8), node("gpu01"), twin) == {"gpu01": list(range(8))}
    answer = refused(Request(n=9), node("gpu01"), twin)
    assert answer.code == 3
    assert answer.gpus[8].reason == "the same GPU as gpu01:0"


def test_a_node_that_lists_the_gpus_of_another_does_not_block_them() -> None:
    false = msgspec.structs.replace(node("gpu00", "rrr"), gpus=node("gpu01", "rrr").gpus)
    assert got(Request(n=3), false, node("gpu01", "fff")) == {"gpu01": [0, 1, 2]}


def test_a_gpu_named_twice_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="twice"):
        check(Request(picks=(*parse_picks("gpu01:0"), *parse_picks("gpu01:0"))))


def test_named_gpus_are_taken_exactly_or_not_at_all() -> None:
    nodes = [node("gpu01", "ffrf"), node("gpu02")]
    assert got(Request(picks=parse_picks("gpu02:1@gpu01:0,3")), *nodes) == {"gpu01": [0, 3], "gpu02": [1]}
    assert got(Request(picks=parse_picks("GPU-gpu02-5")), *nodes) == {"gpu02": [5]}
    answer = refused(Request(picks=parse_picks("gpu01:1,2")), *nodes)
    assert (answer.code, answer.nearest) == (4, "--gpus gpu01:0,1 or --wait")
    assert answer.message.startswith("gpu01:2 is reserved: it is reserved")
    assert refused(Request(picks=parse_picks("gpu01:9")), *nodes).code == 3


def test_a_node_without_a_named_gpu_has_no_part_in_its_refusal() -> None:
    nodes = [node("gpu01", "ffrf"), NodeView(name="gpu02", state="unreachable", error="ssh: connection refused")]
    answer = refused(Request(picks=parse_picks("gpu01:2")), *nodes)
    assert answer.message == "gpu01:2 is reserved: it is reserved; try --gpus gpu01:0 or --wait"
    answer = refused(Request(picks=parse_picks("gpu01:9")), *nodes)  # 3 would mean that every node was read
    assert answer.code == 4
    assert answer.message.startswith("no GPU gpu01:9; not read: gpu02 (ssh: connection refused)")


def test_a_named_gpu_of_a_node_without_a_reading_may_exist() -> None:
    gone = [NodeView(name=f"gone{n}", state="unreachable", error="no answer") for n in range(9)]
    answer = refused(Request(picks=parse_picks("gone8:0")), node("gpu01", "b"), *gone)
    assert (answer.code, answer.message) == (
        4,
        "not read: gone8 (no answer), gone0 (no answer), gone1 (no answer), gone2 (no answer) and 5 more; try --wait",
    )


def test_named_gpus_with_the_same_reason_are_refused_in_one_phrase() -> None:
    nodes = [node("gpu01", "rrrb"), node("gpu02", "frbr")]
    answer = refused(Request(picks=parse_picks("gpu01:0-3@gpu02:1-3")), *nodes)
    assert answer.message.startswith(
        "gpu01:0-2@gpu02:1,3 are reserved: it is reserved; gpu01:3@gpu02:2 are busy: it is busy; try "
    )
    assert len(answer.gpus) == 7


@pytest.mark.parametrize(
    "request_",
    [
        Request(), Request(n=1, picks=(Pick("gpu01", 0, None),)), Request(n=0), Request(n=5, per_node=2),
        Request(n=8, per_node=2, max_nodes=3), Request(picks=(Pick("gpu77", 0, None),)),
        Request(picks=(Pick(None, 0, None),)), Request(picks=(Pick("gpu01", 0, None), Pick(None, None, "GPU-gpu01-0"))),
    ],
)  # fmt: skip
def test_contradictions_are_usage_errors(request_: Request) -> None:
    with pytest.raises(UsageError):
        choose(request_, cluster(node("gpu01"), node("gpu02")))


def test_an_index_alone_means_the_only_node() -> None:
    assert got(Request(picks=parse_picks("0,2-3")), node("gpu01")) == {"gpu01": [0, 2, 3]}


def mig_node() -> NodeView:
    devices = [
        MigView(f"MIG-{i}", profile, "free", "", 0, total * GIB)
        for i, (profile, total) in enumerate([("1g.10gb", 10), ("3g.40gb", 40)])
    ]
    return NodeView(
        name="gpu01", state="up", gpus=[gpu(0, state="mig", flags=["mig"], mig=devices), gpu(1, state="busy")]
    )


def test_one_mig_device_per_request_and_never_its_gpu() -> None:
    one = mig_node()
    assert choose(Request(n=1, model="3g.40gb"), cluster(one)) == Choice(
        (ChosenGpu("gpu01", 0, "MIG-1", mig=1),),
        "gpu01: 0:1 (MIG 3g.40gb, 1 of 1 free); 1 node, the fewest possible; "
        "lowest indexes, then whole nodes kept free",
    )
    named = choose(Request(picks=(Pick(None, None, "MIG-0"),)), cluster(one))
    assert isinstance(named, Choice)
    assert named.gpus[0].uuid == "MIG-0"
    assert [g.reason for g in refused(Request(n=1), one).gpus if g.index == 0] == [
        "in MIG mode: use --n 1 --model 1g.10gb",
        "MIG device 1g.10gb: use --model 1g.10gb",
        "MIG device 3g.40gb: use --model 3g.40gb",
    ]
    answer = refused(Request(n=2, model="3g.40gb"), one)
    assert (answer.code, answer.message) == (
        3,
        "requested 2 GPUs of model 3g.40gb; a process can use only one MIG device; try --n 1",
    )
    assert "MIG" not in refused(Request(n=2, model="3g.80gb"), one).message
    assert "MIG" not in refused(Request(n=9, model="H100"), one).message


def test_one_gpu_is_a_mig_device_where_no_whole_gpu_matches() -> None:
    only = msgspec.structs.replace(mig_node(), gpus=mig_node().gpus[:1])
    for request, uuid in ((Request(n=1), "MIG-0"), (Request(n=1, gpu_mem=20 * GIB), "MIG-1")):
        answer = choose(request, cluster(only))
        assert isinstance(answer, Choice)
        assert [g.uuid for g in answer.gpus] == [uuid]
    assert refused(Request(n=2), only).code == 3
    hung = NodeView(name="gpu02", state="unreachable", error="hung")
    assert refused(Request(n=1), only, hung).code == 4  # there may be whole GPUs


def test_a_mig_device_is_named_as_status_prints_it() -> None:
    one, other = mig_node(), node("gpu02")
    for picks in (parse_picks("gpu01:0:1"), (Pick(None, None, "MIG-1"),)):
        answer = choose(Request(picks=picks), cluster(one, other))
        assert isinstance(answer, Choice)
        assert answer.gpus == (ChosenGpu("gpu01", 0, "MIG-1", mig=1),)
        assert answer.why == "gpu01:0:1: as requested, all free"
    alone = choose(Request(picks=parse_picks("0:1")), cluster(one))
    assert isinstance(alone, Choice)
    assert [gpu.uuid for gpu in alone.gpus] == ["MIG-1"]
    assert "no GPU gpu01:0:7" in refused(Request(picks=parse_picks("gpu01:0:7")), one).message
    whole = refused(Request(picks=parse_picks("gpu01:0")), one)
    assert whole.message.startswith("gpu01:0 is mig: in MIG mode: use --n 1 --model 1g.10gb")
    assert got(Request(n=1, model="1g", exclude=parse_picks("gpu01:1:0", whole_nodes=True)), one) == {"gpu01": [0]}
    excluded = refused(Request(n=1, model="1g", exclude=parse_picks("gpu01:0:0", whole_nodes=True)), one)
    assert [(g.mig, g.reason) for g in excluded.gpus if g.mig == 0] == [(0, "excluded")]
    for exclude in (parse_picks("gpu01:0", whole_nodes=True), (Pick(None, None, one.gpus[0].uuid),)):
        devices = [g for g in refused(Request(n=1, model="1g", exclude=exclude), one).gpus if g.mig is not None]
        assert {g.reason for g in devices if g.index == 0} == {"excluded"}


def test_a_node_whose_name_is_a_number_goes_before_a_mig_device() -> None:
    assert got(Request(picks=parse_picks("2:1")), node("2"), node("3")) == {"2": [1]}
    assert got(Request(picks=parse_picks("2:1@3:0")), node("2"), node("3")) == {"2": [1], "3": [0]}


def sick_node(name: str, sick: str) -> NodeView:
    """A node of free GPUs; those with a ``+`` are sick."""
    words = ["row remap pending; reset the GPU"]
    gpus = [gpu(i, name, flags=["sick"] * (c == "+"), sick=words * (c == "+")) for i, c in enumerate(sick)]
    return NodeView(name=name, state="up", gpus=gpus)


def test_a_sick_gpu_is_taken_only_by_name_or_when_allowed_and_healthy_ones_come_first() -> None:
    nodes = sick_node("gpu01", "+++."), sick_node("gpu02", "+.+.")
    assert got(Request(n=2), *nodes) == {"gpu02": [1, 3]}
    assert got(Request(n=1), *nodes) == {"gpu01": [3]}
    assert got(Request(n=3), *nodes) == {"gpu02": [1, 3], "gpu01": [3]}
    answer = refused(Request(n=4), *nodes)
    assert answer.code == 4
    assert answer.nearest == "--n 3, --allow-sick or --wait"
    assert "5 free but sick" in answer.message
    assert answer.gpus[0].reason == "sick: row remap pending; reset the GPU (allowed with --allow-sick)"
    assert got(Request(n=2, allow_sick=True), *nodes) == {"gpu02": [1, 3]}
    assert got(Request(n=3, max_nodes=1, allow_sick=True), *nodes) == {"gpu02": [0, 1, 3]}
    taken = choose(Request(picks=parse_picks("gpu01:0,3")), cluster(*nodes))
    assert isinstance(taken, Choice)
    assert [gpu.index for gpu in taken.gpus] == [0, 3]
    assert taken.notes == ("gpu01:0 is sick: row remap pending; reset the GPU",)
    assert taken.why.endswith("; gpu01:0 is sick: row remap pending; reset the GPU")


def test_links_never_prefer_a_sick_gpu() -> None:
    links = {0: 1, 1: 0}
    gpus = [
        gpu(i, links={f"GPU-gpu01-{links[i]}": 18} if i in links else {}, flags=["sick"] if i == 0 else [])
        for i in range(3)
    ]
    one = NodeView(name="gpu01", state="up", gpus=gpus)
    assert got(Request(n=2, allow_sick=True), one) == {"gpu01": [1, 2]}


def test_inside_a_lease_its_own_gpus_count_as_free_and_no_others() -> None:
    gpus = [
        gpu(0, state="reserved", leases=["mine"]),
        gpu(1, state="reserved", leases=["mine"]),
        gpu(2, state="reserved", leases=["hers"]),
        gpu(3),
    ]
    snapshot = cluster(NodeView(name="gpu01", state="up", gpus=gpus))
    within = ("GPU-gpu01-0", "GPU-gpu01-1")
    inside = choose(Request(n=2, within=within), snapshot, {"mine"})
    assert isinstance(inside, Choice)
    assert [g.index for g in inside.gpus] == [0, 1]
    assert isinstance(choose(Request(n=2, within=within), snapshot), Refusal)
    beyond = choose(Request(n=3, within=within), snapshot, {"mine"})
    assert isinstance(beyond, Refusal)
    assert beyond.code == 3


states = st.sampled_from(STATES)
gpus_of = st.lists(st.tuples(states, st.integers(0, 81), st.integers(0, 3)), min_size=0, max_size=6)


@given(
    st.lists(st.tuples(gpus_of, st.sampled_from(["up", "up", "up", "stale", "unreachable"])), min_size=1, max_size=4),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(1, 4)),
    st.one_of(st.none(), st.integers(1, 3)),
    st.one_of(st.none(), st.integers(1, 80)),
    st.randoms(use_true_random=False),
)
@settings(max_examples=120, deadline=None)
def test_only_free_gpus_as_many_as_requested_and_deterministic(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    nodes, n, per_node, max_nodes, mem, dice
) -> None:
    views = [
        NodeView(
            name=f"gpu{k}",
            state=state,
            error=None if state == "up" else "gone",
            gpus=[
                gpu(i, f"gpu{k}", s, memory_used=min(used, 80) * GIB, numa_node=link % 2, links={f"GPU-gpu{k}-0": link})
                for i, (s, used, link) in enumerate(found)
            ],
        )
        for k, (found, state) in enumerate(nodes)
    ]
    request = Request(
        n=n * (per_node or 1), per_node=per_node, max_nodes=max_nodes, gpu_mem=None if mem is None else mem * GIB
    )
    if per_node and max_nodes and n > max_nodes:
        return
    answer = choose(request, cluster(*views))
    shuffled = [
        msgspec.structs.replace(v, gpus=dice.sample(v.gpus, len(v.gpus))) for v in dice.sample(views, len(views))
    ]
    able = {
        g.uuid: v.name
        for v in views for g in v.gpus
        if v.state == "up" and g.state == "free" and 80 * GIB - (g.memory_used or 0) >= (request.gpu_mem or 0)
    }  # fmt: skip
    if isinstance(answer, Choice):
        assert choose(request, cluster(*shuffled)) == answer
        assert len({g.uuid for g in answer.gpus}) == request.n == len(answer.gpus)
        assert all(able[g.uuid] == g.node for g in answer.gpus)
        counts = [sum(g.node == name for g in answer.gpus) for name in {g.node for g in answer.gpus}]
        assert max_nodes is None or len(counts) <= max_nodes
        assert per_node is None or set(counts) == {per_node}
        return
    free = sorted((list(able.values()).count(v.name) for v in views), reverse=True)
    if per_node:
        assert sum(count >= per_node for count in free) < n
    else:
        assert sum(free[:max_nodes]) < n
    assert answer.code == 4 or all(v.state == "up" for v in views)
    assert len(answer.gpus) == sum(len(v.gpus) for v in views)


def test_picks_are_parsed_and_invalid_ones_refused() -> None:
    assert parse_picks("gpu01:0,3@gpu02:1-2") == (
        Pick("gpu01", 0, None), Pick("gpu01", 3, None), Pick("gpu02", 1, None), Pick("gpu02", 2, None),
    )  # fmt: skip
    assert parse_picks("GPU-aaaa-1,MIG-bbbb-2") == (Pick(None, None, "GPU-aaaa-1"), Pick(None, None, "MIG-bbbb-2"))
    assert parse_picks("gpu01:2:1,3@0:7") == (
        Pick("gpu01", 2, None, mig=1), Pick("gpu01", 3, None), Pick(None, 0, None, mig=7),
    )  # fmt: skip
    assert parse_picks("ddae9891-aaa8-5edd-bbf3-3a33c5adc75f")[0].uuid == "ddae9891-aaa8-5edd-bbf3-3a33c5adc75f"
    invalid = ["", "gpu01:", "gpu01:x", "gpu01:3-1", "gpu01:0,0", "$(reboot):0", "gpu01:0-999999", "-1", "gpu01"]
    invalid += ["gpu01:2:x", "gpu01:2:1:0", "gpu01:1-2:1", "gpu01:2:"]
    for text in invalid:
        with pytest.raises(ValueError, match=r"."):
            parse_picks(text)
