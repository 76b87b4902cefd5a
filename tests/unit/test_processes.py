"""The processes of a snapshot: each once, in every order, in groups; the table of `gpuboard ps`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpuboard.agent.nvml.terms import NO_DRIVER
from gpuboard.board.text.processes import about, overview, running_row
from gpuboard.board.theme.styles import UNICODE
from gpuboard.cli.see.ps import table
from gpuboard.cli.table import width_of
from gpuboard.cluster.snapshot.processes import (
    SORTS,
    OnGpu,
    Running,
    ended_leases,
    gpus_of,
    grouped,
    in_order,
    note,
    running,
    sums,
    unread,
)
from gpuboard.model.snapshot import GpuView, NodeView, ProcessView, Snapshot
from tests.board import made

GIB = 2**30


def process(pid: int, memory: int | None = GIB, **values: Any) -> ProcessView:
    given: dict[str, Any] = {"user": "alice", "command": f"python {pid}.py", "type": "compute", "started": 5.0} | values
    return ProcessView(pid=pid, memory=memory, **given)


def gpu(node: str, index: int, processes: list[ProcessView] | None, **more: Any) -> GpuView:
    values: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-{node}-{index}",
        "name": "H100",
        "pci_bus_id": "",
        "state": "busy",
    }
    return GpuView(**values, reason="", processes=processes, **more)


def failing(name: str, error: str) -> NodeView:
    """Return a node that was read, but whose NVML fails."""
    return NodeView(name=name, state="up", age_s=0.5, error=f"NVML: {error}")


def node(name: str, *processes: list[ProcessView] | None, state: str = "up") -> NodeView:
    return NodeView(name=name, state=state, gpus=[gpu(name, k, found) for k, found in enumerate(processes)])  # type: ignore[arg-type]


def pids(found: list[Running]) -> list[int]:
    return [one.pid for one in found]


def test_a_process_on_several_gpus_is_one() -> None:
    shared = [process(7, memory, sm_percent=sm, cpu_percent=12.5) for memory, sm in ((GIB, 40), (2 * GIB, None))]
    [one, other, alone] = running(
        [node("gpu02", [process(7)]), node("gpu01", [shared[0]], [shared[1], process(9, None)], [process(9, 1)])]
    )
    assert (one.node, one.pid, gpus_of(one, {}), one.memory, one.sm_percent) == ("gpu01", 7, "0-1", 3 * GIB, 40)
    assert one.gpus == [OnGpu(0, "GPU-gpu01-0", GIB, 40), OnGpu(1, "GPU-gpu01-1", 2 * GIB, None)]
    assert (other.pid, gpus_of(other, {}), other.memory, other.sm_percent) == (
        9,
        "1-2",
        None,
        None,
    )  # a part is unknown
    assert (alone.node, alone.cpu_percent, alone.key) == ("gpu02", None, "gpu02:7:5.0")
    assert sums([one, other, alone]) == "3 processes on 4 GPUs of 2 nodes"


def test_board_and_command_count_the_same_users_and_no_hidden_owner() -> None:
    found = running([node("gpu01", [process(1), process(2, user=None)], [process(3, user="bob")])])
    words = "3 processes on 2 GPUs of 1 node, 2 users"
    assert table(found, None, (), colour=False)[-1] == words
    assert overview(found, found, [], "by pid", ())[0][0] == f"{words}  3.0G"


def test_old_values_are_dim_and_in_no_mean() -> None:
    now, then = process(1, sm_percent=20), process(2, sm_percent=80)
    nodes = [node("gpu01", [now]), node("gpu02", [then], state="stale")]
    found = running(nodes)
    assert overview(found, found, [], "by pid", {"gpu02"})[0][0].endswith("of 2 nodes  2.0G  SM 20%")
    scene = made.scene(*nodes)
    [group] = grouped(found, {}, ())
    headings = running_row(group, scene, (), mine=False, indent=True, bar=6, glyphs=UNICODE).cells
    assert not callable(headings)
    assert str(headings[0].text).endswith("SM 20%")
    styles = []
    for one in found:
        row = running_row(one, scene, (), mine=False, indent=False, bar=6, glyphs=UNICODE)
        assert callable(row.cells)
        sm = row.cells()[5].text
        assert isinstance(sm, tuple)
        styles.append((row.dim, [style for _, style in sm]))
    assert styles == [(False, ["busy", "dim", ""]), (True, ["dim", "dim", "dim"])]


def test_a_process_of_one_mig_device_is_named_by_it() -> None:
    split = made.mig("gpu01", 2, "busy", "busy")
    on_one, on_both = process(1), process(2)
    devices = [
        msgspec.structs.replace(device, processes=found)
        for device, found in zip(split.mig, ([on_both], [on_one, on_both]), strict=True)
    ]
    gpus = [
        msgspec.structs.replace(split, mig=devices, processes=[on_one, on_both]), made.gpu("gpu01", 3),
        made.gpu("gpu01", 4, processes=[process(3)]), made.gpu("gpu01", 5, processes=[process(3)]),
    ]  # fmt: skip
    scene = made.scene(made.node("gpu01", gpus))
    found = running(scene.snapshot.nodes)
    assert {one.pid: gpus_of(one, scene.nodes) for one in found} == {1: "2:1", 2: "2", 3: "4-5"}
    lines = table(found, None, scene.snapshot.nodes, colour=False)
    assert [line.split()[2:4] for line in lines[1:4]] == [["2:1", "1"], ["2", "2"], ["4-5", "3"]]
    assert "on gpu01:2:1 " in about(found[0], scene)[0][0][0]


def test_a_reused_pid_is_another_process() -> None:
    assert len(running([node("gpu01", [process(7)], [process(7, started=6.0)])])) == 2


@pytest.mark.parametrize("key", SORTS)
def test_unknown_values_come_last_either_way(key: str) -> None:
    values: dict[str, Any] = {
        "user": "bob", "sm_percent": 9, "cpu_percent": 9.0, "host_memory": 9, "runtime_s": 9.0, "job": "9",
        "lease": "k", "container": "c",
    }  # fmt: skip
    found = running([node("gpu01", [process(3, None, user=None)], [process(8, **values)], [process(9, 2 * GIB)])])
    assert sorted(pids(in_order(found, key))) == [3, 8, 9]
    unknown = [
        pid for pid in (3, 9) if key not in {"node", "pid", "command"} and (pid == 3 or key not in {"memory", "user"})
    ]
    for reverse in (False, True):
        order = pids(in_order(found, key, reverse=reverse))
        assert order[len(order) - len(unknown) :] == unknown
    if key == "memory":
        assert pids(in_order(found, key)) == [9, 8, 3]  # largest first


def test_groups_are_runs_then_jobs_then_leases() -> None:
    found = running(
        [
            node(
                "gpu01",
                [process(1)],
                [process(2, job="17", lease="k1")],
                [process(3, job="17")],
                [process(4, lease="k2")],
                [process(5, lease="k2", user="bob")],
                [process(6, lease="k1")],
            )
        ]
    )
    groups = [(group.title, pids(group.processes)) for group in grouped(found, {"k1": "r-1"}, ())]
    assert groups == [
        ("run r-1", [2, 6]),
        ("job 17", [3]),
        ("lease k2 of alice", [4]),
        ("lease k2 of bob", [5]),
        ("no run, job or lease", [1]),
    ]


def test_a_lease_that_has_ended_is_named_so_in_groups_and_notes() -> None:
    late = gpu("gpu01", 0, [process(1, lease="k1"), process(2, lease="k2"), process(3)], flags=["overdue"])
    held = gpu("gpu01", 1, [process(4, lease="k2")], leases=["k2"])
    nodes = [NodeView(name="gpu01", state="up", gpus=[late, held])]
    found, ended = running(nodes), ended_leases(nodes)
    assert [group.title for group in grouped(found, {}, ended)] == [
        "ended lease k1 of alice", "lease k2 of alice", "no run, job or lease"
    ]  # fmt: skip
    assert {one.pid: note(one, ended) for one in found} == {1: "overdue", 2: "", 3: "", 4: ""}
    assert [line.split()[-3] for line in table(found, None, nodes, colour=False)[1:5]].count("overdue") == 1


def test_what_was_not_read_is_named() -> None:
    nodes = [
        node("gpu01", [], None), node("gpu02", state="unreachable"), node("gpu03", None, None, state="unreachable"),
        node("login1"), node("gpu04", [process(1)], state="stale"), failing("gpu05", "driver/library version mismatch"),
        failing("login2", NO_DRIVER),
    ]  # fmt: skip
    assert unread(Snapshot(1, "", "lab", nodes)) == ["gpu01:1", "gpu02", "gpu03", "gpu05"]


def test_a_hidden_user_is_not_counted_as_another_one() -> None:
    found = running([node("gpu01", [process(1), process(2, user=None), process(3, user=None)])])
    assert table(found, None, (), colour=False)[-1] == "3 processes on 1 GPU of 1 node"


def test_columns_without_values_are_left_out() -> None:
    plain = running([node("gpu01", [process(4711, 3 * GIB, runtime_s=3725.0)])])
    assert table(plain, None, (), colour=False) == [
        "USER    NODE   GPU   PID  MEMORY  SM%  CPU%  HOST   TIME  COMMAND",
        "alice   gpu01    0  4711    3.0G    ?     ?     ?  1h02m  python 4711.py",
        "",
        "1 process on 1 GPU of 1 node",
    ]
    full = process(
        1, 700 * 2**20, user=None, rogue=True, sm_percent=97, cpu_percent=412.4, host_memory=2000 * GIB, lease="k3f9",
        container="3f4c0d0d0d0d", job="17",
    )  # fmt: skip
    head, line, *_ = table(running([node("gpu01", [full])]), None, (), colour=False)
    assert head.split()[-5:] == ["JOB", "LEASE", "CONTAINER", "NOTE", "COMMAND"]
    words = "hidden gpu01 0 1 700M 97 412 2.0T ? 17 k3f9 3f4c0d0d0d0d rogue python 1.py"
    assert line.split() == words.split()


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120])
def test_no_line_exceeds_the_width(width: int) -> None:
    values: dict[str, Any] = {
        "user": "张伟" * 9,
        "command": "x" * 500,
        "lease": "k3f9aa",
        "rogue": True,
        "job": "123456",
    }
    found = running([node("a-node-with-a-long-name", [process(4194304, **values)], [process(1)])])
    lines = table(found, width, (), colour=False)
    assert [line for line in lines if width_of(line) > width] == []
    assert "PID" in lines[0]
