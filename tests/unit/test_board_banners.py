"""Banners: what is wrong with the cluster as a whole."""

from __future__ import annotations

import msgspec
import pytest

from gpuboard.board.core import banners
from gpuboard.model.snapshot import NodeView, SchedulerView, Snapshot
from tests.board.made import gpu

UP = NodeView(name="gpu01", state="up", error=None, age_s=0.5, source="nvml")


def cluster(*nodes: NodeView) -> Snapshot:
    return Snapshot(schema=1, at="2026-01-31T12:00:00.000Z", cluster="lab", nodes=list(nodes))


def node(**changes: object) -> NodeView:
    return msgspec.structs.replace(UP, **changes)


def away(reason: str, source: str = "nvml") -> NodeView:
    return node(state="unreachable", error=reason, age_s=None, source=source)


WITH_GPU = node(gpus=[gpu("gpu01", 0)])
WAITING = node(state="unreachable", error="no answer yet", age_s=None, connecting=True)
LOST = node(claims_error="/var/tmp is on NFS", gpus=[gpu("gpu01", 0)])


@pytest.mark.parametrize(
    ("nodes", "running_s", "words"),
    [
        ([WITH_GPU, UP], 60, ()),
        ([UP, UP], 60, ("no GPU on these nodes: list other nodes with --nodes, or as `nodes` in the config",)),
        ([UP], 60, ("no GPU here: list other nodes with --nodes, or as `nodes` in the config",)),
        ([UP, away("no route")], 60, ()),
        ([], 0, ("no nodes: list some with --nodes, or as `nodes` in the config",)),
        ([WAITING, WAITING], 3, ()),
        ([WAITING, WAITING], 30, ("no node is reachable yet",)),
        ([WAITING, away("no route")], 3, ("no node is reachable yet: no route (1 of 2)",)),
        ([away("no route"), away("no route")], 0.5, ("no node is reachable: no route",)),
        ([away("no route"), away("refused"), away("no route")], 9, ("no node is reachable: no route (2 of 3)",)),
        (
            [node(state="stale", error="no reading for 9 s")],
            9,
            ("every node is stale or unreachable: no reading for 9 s",),
        ),
        (
            [LOST, UP, LOST],
            9,
            ("no reservations on 2 of 3 nodes: /var/tmp is on NFS; no GPU there counts as free",),
        ),
        ([LOST], 9, ("no reservations on this node: /var/tmp is on NFS; no GPU there counts as free",)),
        ([node(state="stale", error="old", claims_error="x"), UP], 9, ()),
    ],
)
def test_banners(nodes: list[NodeView], running_s: float, words: tuple[str, ...]) -> None:
    assert banners(cluster(*nodes), running_s=running_s) == words


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (SchedulerView("slurm", 5.0, None, current=True), ()),
        (SchedulerView("slurm", None), ()),  # not asked yet
        (SchedulerView("slurm", 5.0, None, current=True, notes=["job 7 twice", "x"]),
         ("Slurm: job 7 twice; and 1 more",)),
        (SchedulerView("slurm", 70.0, "connect failure", current=True),
         ("Slurm's newest answer is 1m old: connect failure",)),
        (SchedulerView("slurm", 400.0, "connect failure"),
         ("no answer from Slurm for 6m: connect failure; none of its GPUs counts as free meanwhile",)),
        (SchedulerView("slurm", None, "no munge"),
         ("Slurm does not answer: no munge; no GPU counts as free meanwhile",)),
    ],
)  # fmt: skip
def test_a_scheduler_that_does_not_answer(seen: SchedulerView, words: tuple[str, ...]) -> None:
    for nodes in ([WITH_GPU, UP], [away("scheduler: no answer", source="slurm")] if words else [WITH_GPU]):
        assert banners(msgspec.structs.replace(cluster(*nodes), scheduler=seen), running_s=60) == words
