"""Request + schedule → the shape of a job, or a refusal."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.errors import UsageError
from gpuboard.leases.picks import parse_picks
from gpuboard.leases.slurm.fit import Fit, Limits, fit
from gpuboard.model.request import Refusal, Request
from gpuboard.model.schedule import Gres, Schedule, SchedulerNode
from gpuboard.scheduler.slurm.sbatch_args import Shape

ALL = Limits()


def node(name: str, *gpus: tuple[str, int], used: int = 0, state: str = "idle", **more: object) -> SchedulerNode:
    """A node with GPUs of these types, of which ``used`` of the first type are allocated."""
    kinds = tuple(Gres(kind, count) for kind, count in gpus)
    allocated = (Gres(gpus[0][0], used),) if used else ()
    return SchedulerNode(name, name, "10.0.0.1", state, gpus=kinds, used=allocated, **more)  # type: ignore[arg-type]


def schedule(*nodes: SchedulerNode) -> Schedule:
    return Schedule(0.0, "lab", {each.name: each for each in nodes})


def shape(request: Request, *nodes: SchedulerNode, limits: Limits = ALL) -> Shape:
    found = fit(request, schedule(*nodes), limits)
    assert isinstance(found, Fit), found
    return found.shape


def refused(request: Request, *nodes: SchedulerNode, limits: Limits = ALL) -> Refusal:
    found = fit(request, schedule(*nodes), limits)
    assert isinstance(found, Refusal), found
    assert found.code == 3
    return found


def eight(used: int = 0, count: int = 3) -> list[SchedulerNode]:
    return [node(f"gpu{k:02}", ("h100", 8), used=used) for k in range(1, count + 1)]


def test_as_many_nodes_as_are_needed_now() -> None:
    assert shape(Request(n=4), *eight()) == Shape(4, 1, type="h100")
    assert shape(Request(n=4), *eight(used=6)) == Shape(4, 2, type="h100")
    assert shape(Request(n=6), *eight(used=6)) == Shape(6, 3, type="h100")


def test_as_many_nodes_as_are_needed_with_all_gpus_where_too_few_are_free() -> None:
    found = fit(Request(n=10), schedule(*eight(used=8)), ALL)
    assert isinstance(found, Fit)
    assert found.shape == Shape(10, 2, type="h100")
    why = "10 GPUs: at most 2 nodes, the fewest possible; free for Slurm: none, so the job waits; type h100"
    assert found.why == why


def test_max_nodes_and_per_node() -> None:
    assert shape(Request(n=6, max_nodes=2), *eight(used=6)).nodes == 1  # waits for a whole node
    assert shape(Request(n=8, per_node=4), *eight()) == Shape(8, 2, 4, "h100")
    assert refused(Request(n=9, max_nodes=1), *eight()).nearest == "--max-nodes 2 or --n 8"
    assert refused(Request(n=20, per_node=10), *eight()).message.startswith("requested 20 GPUs, 10 on each node; never")


def test_more_than_exist_is_never_possible() -> None:
    found = refused(Request(n=25), *eight())
    assert found.nearest == "--n 24"
    assert "matching GPUs in total: 24, at most 8 on one node" in found.message
    assert len(found.gpus) == 24


def test_gpus_in_use_count_where_only_one_side_has_types() -> None:
    def untyped(name: str, used: int) -> SchedulerNode:
        return msgspec.structs.replace(node(name, ("", 8)), used=(Gres("h100", used),))

    assert shape(Request(n=8), untyped("gpu01", 8), untyped("gpu02", 4), untyped("gpu03", 4)).nodes == 2
    typed = [msgspec.structs.replace(node(f"gpu{k}", ("h100", 8)), used=(Gres("", 6),)) for k in (1, 2)]
    assert shape(Request(n=4), *typed).nodes == 2


def test_closed_nodes_count_for_what_is_ever_possible() -> None:
    drained = node("gpu01", ("h100", 8), state="idle+drain")
    assert shape(Request(n=10), drained, node("gpu02", ("h100", 8), used=4)) == Shape(10, 2, type="h100")
    reserved = node("gpu01", ("h100", 8), state="idle+reserved", reservation="exam")
    free = node("gpu02", ("h100", 4))
    assert shape(Request(n=6), reserved, free) == Shape(6, 1, type="h100")  # not gpu02's four and two reserved ones
    assert shape(Request(n=12), reserved, free, limits=Limits(reservation="exam")).nodes == 2


def test_the_model_is_a_type_a_feature_or_a_glob() -> None:
    two = [node("a", ("a100", 4)), node("h", ("h100", 4))]
    assert shape(Request(n=2, model="A100"), *two) == Shape(2, 1, type="a100")
    assert shape(Request(n=2, model="*100"), *two) == Shape(2, 1)
    assert shape(Request(n=2, model="H100 80GB"), node("x", ("h100_80gb_hbm3", 4))).type == "h100_80gb_hbm3"
    untyped = [node("x", ("", 4), features=("rtx6000", "ib")), node("y", ("", 4), features=("v100",))]
    assert shape(Request(n=2, model="v100"), *untyped) == Shape(2, 1, exclude="x")
    assert "GPU types here: a100, h100" in refused(Request(n=1, model="b200"), *two).message


def test_several_matching_types_exclude_nodes_with_mixed_types() -> None:
    nodes = [node("a", ("a100_40", 4)), node("b", ("a100_80", 4)), node("c", ("a100_40", 4), ("v100", 4))]
    found = fit(Request(n=4, model="a100"), schedule(*nodes), ALL)
    assert isinstance(found, Fit)
    assert (found.shape.type, found.excluded) == ("", ("c",))
    mixed = refused(Request(n=2, model="a100"), node("c", ("a100_40", 4), ("a100_80", 2), ("v100", 2)))
    assert mixed.nearest == "--model TYPE"
    assert shape(Request(n=2, model="a100"), node("c", ("a100", 4), ("v100", 4))) == Shape(2, 1, type="a100")


def test_memory_is_read_from_the_name_of_a_type_or_feature() -> None:
    nodes = [node("a", ("a100_40gb", 4)), node("b", ("a100_80gb", 4))]
    assert shape(Request(n=2, gpu_mem=60 * 2**30), *nodes).type == "a100_80gb"
    assert shape(Request(n=2, gpu_mem=60 * 2**30), node("x", ("a100", 4), features=("gpu80gb",))).nodes == 1
    unknown = refused(Request(n=2, gpu_mem=60 * 2**30), *eight())
    assert "without a memory size in their names" in unknown.message
    assert unknown.nearest == "--model TYPE without --gpu-mem, or --slurm=--constraint=FEATURE"


def test_scope_exclude_and_partition() -> None:
    nodes = [node(f"gpu{k:02}", ("h100", 8), partitions=("gpu",) if k < 3 else ("big",)) for k in range(1, 5)]
    assert shape(Request(n=2), *nodes, limits=Limits(scope={"gpu02", "gpu03"})).exclude == "gpu[01,04]"
    assert shape(Request(n=2), *nodes, limits=Limits(scope={"gpu02"}, partitions=("gpu",))).exclude == "gpu01"
    assert shape(Request(n=2, exclude=parse_picks("gpu01", whole_nodes=True)), *nodes).exclude == "gpu01"
    assert refused(Request(n=17), *nodes, limits=Limits(partitions=("gpu",))).nearest == "--n 16"
    excluded = refused(Request(n=1, exclude=parse_picks("gpu01", whole_nodes=True)), nodes[0])
    assert {gpu.reason for gpu in excluded.gpus} == {"excluded"}


def test_what_slurm_cannot_guarantee_is_refused_with_an_alternative() -> None:
    with pytest.raises(UsageError, match="Slurm, which chooses the GPUs; try --n 2 --nodes 'gpu01'"):
        fit(Request(picks=parse_picks("gpu01:0,3")), schedule(*eight()), ALL)
    with pytest.raises(UsageError, match="only whole nodes with Slurm, which chooses the GPUs; try --exclude gpu01"):
        fit(Request(n=1, exclude=parse_picks("gpu01:0", whole_nodes=True)), schedule(*eight()), ALL)
    with pytest.raises(UsageError, match="no node 'gpu09' in Slurm"):
        fit(Request(n=1, exclude=parse_picks("gpu09", whole_nodes=True)), schedule(*eight()), ALL)


def test_mig_devices_only_where_named_or_nothing_else_exists() -> None:
    nodes = [node("a", ("a100", 2)), node("m", ("a100_3g.40gb", 4))]
    assert shape(Request(n=2), *nodes) == Shape(2, 1, type="a100")
    assert shape(Request(n=1, model="3g.40gb"), *nodes) == Shape(1, 1, type="a100_3g.40gb")
    assert shape(Request(n=1), nodes[1]).type == "a100_3g.40gb"
    with pytest.raises(UsageError, match="only one MIG device"):
        fit(Request(n=2, model="3g.40gb"), schedule(*nodes), ALL)


def test_names_that_have_two_ranges_are_written_out() -> None:
    nodes = [node(f"r{rack}n{k}", ("h100", 8)) for rack in (1, 2) for k in (1, 2)]
    found = shape(Request(n=1), *nodes, node("x", ("h100", 8)), limits=Limits(scope={"x"}))
    assert sorted(found.exclude.split(",")) == ["r1n1", "r1n2", "r2n1", "r2n2"]


KINDS = st.lists(st.tuples(st.sampled_from(["", "h100", "a100", "a100_3g.40gb"]), st.integers(0, 8)), max_size=3)


@given(
    st.lists(st.tuples(KINDS, st.integers(0, 9), st.sampled_from(["idle", "mixed", "down", "idle+drain"])), max_size=5),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 4)),
    st.sampled_from([None, "h100", "100", "3g.40gb", "*"]),
)
def test_a_shape_fits_the_schedule(
    made: list[tuple[list[tuple[str, int]], int, str]], n: int, max_nodes: int | None, model: str | None
) -> None:
    nodes = [
        SchedulerNode(
            f"n{k}", f"n{k}", "", state, gpus=tuple(Gres(t, c) for t, c in kinds),
            used=tuple(Gres(t, min(c, used)) for t, c in kinds),
        )
        for k, (kinds, used, state) in enumerate(made)
    ]  # fmt: skip
    try:
        found = fit(Request(n=n, max_nodes=max_nodes, model=model), schedule(*nodes), ALL)
    except UsageError:
        return
    if isinstance(found, Fit):
        able = [each for each in nodes if each.name not in found.excluded]
        kinds = [g.count for each in able for g in each.gpus if found.shape.type in {"", g.type}]
        assert 1 <= found.shape.nodes <= len(able)
        assert max_nodes is None or found.shape.nodes <= max_nodes
        assert sum(kinds) >= n
    else:
        assert found.code == 3
        assert found.message
