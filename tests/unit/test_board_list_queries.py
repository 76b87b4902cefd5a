"""The filters of processes and events: the keys that they share with the filter of GPUs take the same values."""

from __future__ import annotations

import pytest

from gpuboard.board.filter.events import EVENTS
from gpuboard.board.filter.processes import PROCESSES
from gpuboard.cluster.snapshot.processes import running
from gpuboard.model.snapshot import ProcessView
from gpuboard.model.units import seconds_of
from gpuboard.recording.events import ClusterEvent
from tests.board.made import AT, GIB, gpu, node, scene


def process(pid: int, memory: int | None, sm: int | None) -> ProcessView:
    return ProcessView(pid, "alice", "python", memory, "compute", started=1.0, uid=7, sm_percent=sm, cpu_percent=150.0)


WIDE = process(2, 30 * GIB, 60)
SCENE = scene(
    node("gpu01", [
        gpu("gpu01", 0, processes=[process(1, 50 * GIB, 90)]),
        gpu("gpu01", 1, processes=[WIDE]),
        gpu("gpu01", 2, processes=[WIDE]),
        gpu("gpu01", 3, processes=[process(3, 50 * GIB, None)], memory_total=None),
    ]),
    node("gpu02", [gpu("gpu02", 3, processes=[process(4, None, 10)])]),
    uids={"gpu02": 7},
)  # fmt: skip
EVENTS_SEEN = [
    ClusterEvent(AT, "unreachable", ("gpu01",)),
    ClusterEvent(AT, "lost", ("gpu01",), "3"),
    ClusterEvent(AT, "xid", ("gpu01",), "0-2,7"),
    ClusterEvent(AT, "ended", ("gpu01",), "1,5:0,5:3"),
    ClusterEvent(AT, "later", ("gpu01",), "of another version"),
]


@pytest.mark.parametrize(
    ("text", "pids"),
    [
        ("gpu:3", [3, 4]),
        ("gpu:0,3 node:gpu01", [1, 3]),
        ("gpu:2-3", [2, 3, 4]),
        ("-gpu:2-3", [1]),
        ("index:0", [1]),
        ("mem>40G", [1, 2, 3]),  # of all GPUs of a process
        ("mem>50%", [1]),
        ("mem:30%-40%", [2]),
        ("sm>50", [1, 2]),
        ("sm>50%", [1, 2]),
        ("sm:?", [3]),
        ("cpu>100%", [1, 2, 3, 4]),
        ("pid:2-3", [2, 3]),
        ("user:me", [4]),
    ],
)
def test_what_a_query_finds_of_processes(text: str, pids: list[int]) -> None:
    query = PROCESSES.parse(text)
    assert [one.pid for one in running(SCENE.snapshot.nodes) if query.matches(one, SCENE)] == pids


@pytest.mark.parametrize(("text", "pids"), [("flag:overdue", [1]), ("overdue", [1]), ("-flag:overdue", [2])])
def test_a_query_finds_the_processes_of_ended_leases(text: str, pids: list[int]) -> None:
    found = [ProcessView(pid, "alice", "python", GIB, "compute", lease=f"k{pid}") for pid in (1, 2)]
    late, held = gpu("gpu01", 0, flags=["overdue"], processes=found), gpu("gpu01", 1, leases=["k2"])
    shown, query = scene(node("gpu01", [late, held])), PROCESSES.parse(text)
    assert [one.pid for one in running(shown.snapshot.nodes) if query.matches(one, shown)] == pids


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("gpu:3", ["lost"]),
        ("gpu:2-3", ["lost", "xid"]),
        ("gpu:1,3", ["lost", "xid", "ended"]),
        ("gpu:5", ["ended"]),
        ("-gpu:1", ["lost"]),
        ("gpu:?", ["unreachable", "later"]),
    ],
)
def test_what_a_query_finds_of_events(text: str, kinds: list[str]) -> None:
    query = EVENTS.parse(text)
    assert [event.kind for event in EVENTS_SEEN if query.matches(event, seconds_of(AT))] == kinds
