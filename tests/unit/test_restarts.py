"""Restarts of a run: when, on which GPUs, and how a stop between two attempts ends it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.errors import UsageError
from gpuboard.launch.head import Head
from gpuboard.launch.output import Screen
from gpuboard.launch.plan import LaunchOptions, LaunchPlan, launch_plan, next_attempt
from gpuboard.launch.restarts import Attempts, pause_s, reassigned, restarts
from gpuboard.launch.runs.control import ControlRequest, ask
from gpuboard.launch.runs.folder import RunFolder, RunView, read_state
from gpuboard.launch.target import Target
from gpuboard.launch.timing import HeadTiming
from gpuboard.leases.rank_map import rank_map
from gpuboard.model.rankmap import RankMap
from gpuboard.model.request import ChosenGpu
from gpuboard.model.snapshot import NodeView, Snapshot
from gpuboard.transport.connector import Connector
from tests.unit.test_plan import MAP, planned
from tests.unit.test_preflight import gpu
from tests.waiting import until


def test_which_attempts_are_followed_by_another() -> None:
    first = planned(max_restarts=2)
    last = next_attempt(next_attempt(first, first.rank_map, "s"), first.rank_map, "t")
    assert restarts(first, 1, opened=True, asked=False)
    assert not restarts(first, 0, opened=True, asked=False), "success"
    assert not restarts(first, 143, opened=True, asked=True), "the user's stop"
    assert not restarts(first, 7, opened=False, asked=False), "the first preflight"
    assert restarts(next_attempt(first, first.rank_map, "s"), 7, opened=False, asked=False)
    assert not restarts(last, 1, opened=True, asked=False)
    assert not restarts(planned(), 1, opened=True, asked=False)


def test_pauses_grow_up_to_a_limit() -> None:
    timing = HeadTiming(restart_pause_s=1.0, restart_pause_max_s=60.0)
    assert [pause_s(attempt, timing) for attempt in (1, 2, 6, 7, 9999)] == [1.0, 2.0, 32.0, 60.0, 60.0]


def test_the_next_attempt_has_its_number_and_a_secret_of_its_own() -> None:
    plan = next_attempt(planned(max_restarts=2), MAP, "other")
    assert (plan.attempt, plan.run) == (2, "rabc")
    assert {(node.attempt, node.max_restarts, node.secret) for node in plan.nodes} == {(2, 2, "other")}


ADDRESSES = {"gpu01": "10.0.0.1", "gpu02": "10.0.0.2", "gpu03": "10.0.0.3"}


def of_lease(*gpus: str) -> RankMap:
    """Return the map of ``gpu01:0``, … of lease k3f9."""
    places = [(node, int(index)) for node, _, index in (name.partition(":") for name in gpus)]
    return rank_map("k3f9", [ChosenGpu(node, i, f"GPU-{node}-{i}") for node, i in places], ADDRESSES)


LEASE = of_lease("gpu01:0", "gpu01:1", "gpu01:2", "gpu02:0", "gpu02:1", "gpu03:0")
USED = of_lease("gpu01:0", "gpu01:1", "gpu02:0")


def reading(down: tuple[str, ...] = (), **changes: dict[str, Any]) -> Snapshot:
    """Return a snapshot of the lease's GPUs; ``down``: unreachable nodes; ``changes``: of ``gpu01_0``."""
    nodes = []
    for node in LEASE.nodes:
        gpus = [
            gpu(r.index, r.uuid, **changes.get(f"{node.name}_{r.index}", {}))
            for r in LEASE.ranks
            if r.node == node.name
        ]
        lost = NodeView(node.name, "unreachable", error="ssh: no answer", gpus=gpus)
        nodes.append(lost if node.name in down else NodeView(node.name, "up", gpus=gpus))
    return Snapshot(schema=1, at="", cluster="", nodes=nodes)


BROKEN = {"state": "broken", "reason": "GPU is lost"}
SICK = {"flags": ["sick"], "sick": ["row remap pending"]}


@pytest.mark.parametrize(
    ("snapshot", "gpus", "words"),
    [
        (reading(), "", ""),
        (reading(gpu01_1=BROKEN), "gpu01:0 gpu01:2 gpu02:0", "left out: gpu01: GPU 1 is broken (GPU is lost)"),
        (reading(gpu01_1=SICK), "gpu01:0 gpu01:2 gpu02:0", "left out: gpu01: GPU 1 is sick (row remap pending)"),
        (reading(gpu01_0=BROKEN, gpu01_1=BROKEN), "gpu02:0 gpu02:1 gpu01:2", "on gpu02:0-1@gpu01:2; left out: "),
        (reading(down=("gpu02",)), "gpu01:0 gpu01:1 gpu01:2", "left out: gpu02: ssh: no answer"),
        (reading(down=("gpu01",)), "gpu02:0 gpu02:1 gpu03:0", "on gpu02:0-1@gpu03:0; left out: gpu01: ssh: no answer"),
        (reading(gpu02_0={"leases": [], "reason": "no process"}), "gpu01:0 gpu01:1 gpu01:2", "is no longer held by"),
        (reading(gpu01_0=SICK, gpu01_2=SICK, gpu02_1=SICK, gpu03_0=SICK), "", ""),
        (reading(down=("gpu01", "gpu03")), "", ""),
    ],
)  # fmt: skip
def test_gpus_that_cannot_be_used_are_replaced_by_others_of_the_lease(
    snapshot: Snapshot, gpus: str, words: str
) -> None:
    found, text = reassigned(USED, LEASE, snapshot, "cuda", most=3, least=3)
    assert words in text
    assert found == (of_lease(*gpus.split()) if gpus else USED)
    assert (text == "") == (found is USED)


def test_ranks_on_the_cpu_need_nodes_only() -> None:
    found, _ = reassigned(USED, LEASE, reading(gpu01_0=BROKEN), "cpu", most=3, least=3)
    assert found is USED


def test_with_a_least_number_of_ranks_a_run_shrinks_and_grows_again() -> None:
    lost = reading(gpu01_1=BROKEN, gpu01_2=BROKEN, down=("gpu02",))
    fewer, text = reassigned(USED, USED, lost, "cuda", most=3, least=1)
    assert fewer == of_lease("gpu01:0")
    words = "1 rank in place of 3, on gpu01:0; left out: gpu01: GPU 1 is broken (GPU is lost); gpu02: ssh: no answer"
    assert text == words
    assert reassigned(fewer, USED, lost, "cuda", most=3, least=1) == (fewer, "")
    assert reassigned(USED, USED, lost, "cuda", most=3, least=2) == (USED, ""), "preflight reports what is wrong"
    assert reassigned(fewer, USED, reading(), "cuda", most=3, least=1) == (
        USED,
        "3 ranks in place of 1, on gpu01:0-1@gpu02:0",
    )


def test_addresses_of_the_user_s_rank_map_stay() -> None:
    nodes = [msgspec.structs.replace(node, address=f"10.9.0.{node.node_rank}") for node in USED.nodes]
    used = msgspec.structs.replace(USED, master_addr="10.9.8.7", master_port=29500, nodes=nodes)
    found, _ = reassigned(used, LEASE, reading(gpu01_1=BROKEN), "cuda", most=3, least=3)
    assert (found.master_addr, found.master_port, found.nodes) == ("10.9.8.7", 29500, [
        msgspec.structs.replace(nodes[0], cuda_visible_devices="0,2"), nodes[1]
    ])  # fmt: skip
    found, _ = reassigned(used, LEASE, reading(down=("gpu01",)), "cuda", most=3, least=3)
    assert found.master_addr == "10.9.0.1", "another node is the first"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    found = Lab(tmp_path)
    yield found
    found.screen.close()
    found.connector.close()


class Lab:
    """A run of one rank that always fails, on this machine under the names gpu01 and gpu02."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder({"HOME": str(folder), "XDG_STATE_HOME": str(folder)}, "rabc")
        self.screen = Screen(io.StringIO(), io.StringIO())
        self.connector = Connector(Settings())
        self.nodes = {name: Node(name, None) for name in ("gpu01", "gpu02")}
        self.timing = HeadTiming()
        self.read_lease: Callable[[Callable[[Snapshot], None]], None] | None = None
        self.plan = self.planned(of_lease("gpu01:0"), Target("program", "false"))

    def planned(self, rank_map: RankMap, target: Target) -> LaunchPlan:
        """Return the plan of a run that is restarted once."""
        return launch_plan(
            rank_map,
            target,
            run="rabc",
            secret="5ec",
            cwd=str(self.folder.path),
            environ={"PATH": os.environ["PATH"]},
            options=LaunchOptions(device="cpu", max_restarts=1),
        )

    def make(self, plan: LaunchPlan, before: Head | None, change: str) -> Head:
        """Return the head of an attempt."""
        return Head(
            plan,
            self.folder,
            self.screen,
            connector=self.connector,
            nodes=self.nodes,
            read_gpus=None,
            read_lease=self.read_lease,
            before=before,
            change=change,
            timing=self.timing,
        )

    def view(self) -> RunView:
        """Return the run as written."""
        found = read_state(self.folder.path)
        assert found is not None
        return found


def test_an_error_between_two_attempts_ends_the_run(lab: Lab) -> None:
    lab.timing = HeadTiming(restart_pause_s=0.1, restart_pause_max_s=0.1)

    def make(plan: LaunchPlan, before: Head | None, change: str) -> Head:
        if before is not None:
            raise UsageError("the map of the spare GPUs is wrong")
        return lab.make(plan, before, change)

    with pytest.raises(UsageError):
        Attempts(lab.plan, make, None).run()
    assert lab.view().state == "failed"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not (lab.folder.path / "control.sock").exists()


@pytest.mark.parametrize(
    ("stop", "code"),
    [
        (lambda _: os.kill(os.getpid(), signal.SIGINT), 130),
        (lambda _: os.kill(os.getpid(), signal.SIGHUP), 129),
        (lambda path: ask(path, ControlRequest("stop", None, "enough")), 143),
    ],
    ids=["ctrl-C", "closed terminal", "stop"],
)
def test_a_stop_in_the_pause_ends_the_run_at_once(lab: Lab, stop: Callable[[Path], object], code: int) -> None:
    lab.timing = HeadTiming(restart_pause_s=600.0, restart_pause_max_s=600.0)
    log = lab.folder.path / "head.log"
    log.touch()

    def when_paused() -> None:
        until(lambda: "attempt 2 in 600 s" in log.read_text(), "the pause begins")
        stop(lab.folder.path)

    thread = threading.Thread(target=when_paused)
    thread.start()
    assert Attempts(lab.plan, lab.make, None).run() == code
    thread.join()
    assert (lab.view().state, lab.view().exit_code, lab.view().attempt) == ("stopped", code, 1)
    assert [verdict.kind for verdict in lab.view().verdicts] == ["exit", "stopped"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not (lab.folder.path / "control.sock").exists()


def test_only_a_reading_of_the_whole_lease_decides_where_the_next_attempt_runs(lab: Lab) -> None:
    """Not a late one of the GPUs that the failed attempt used."""
    lease = of_lease("gpu01:0", "gpu02:0")
    lab.timing = HeadTiming(restart_pause_s=0.0)

    def read(done: Callable[[Snapshot], None]) -> None:
        attempts.head._inbox.put(Snapshot(1, "", "", [NodeView("gpu01", "up")]))
        threading.Timer(0.5, done, [reading(down=("gpu01",))]).start()

    lab.read_lease = read
    attempts = Attempts(lab.plan, lab.make, lease)
    assert attempts.run() == 1
    assert [rank.node for rank in lab.view().ranks] == ["gpu02"]
    assert "attempt 2 of 2: on gpu02:0; left out: gpu01: ssh: no answer" in (lab.folder.path / "head.log").read_text()


def test_attach_and_logs_name_the_gpu_of_each_attempt(lab: Lab) -> None:
    """The first attempt fails on gpu01 while it is attached to, the second one succeeds on gpu02."""
    fail = lab.folder.path / "fail"
    script = f"""
echo "rank $RANK, attempt $GPUBOARD_ATTEMPT"
test $GPUBOARD_ATTEMPT = 2 && exit 0
until test -e {fail}; do sleep 0.05; done
exit 1
"""
    plan = lab.planned(of_lease("gpu01:0", "gpu01:1"), Target("program", "sh", ["-c", script]))
    lab.timing = HeadTiming(restart_pause_s=0.0)
    lab.read_lease = lambda done: done(reading(down=("gpu01",)))
    folder = str(lab.folder.path.parents[2])
    command = [sys.executable, "-m", "gpuboard"]
    env = os.environ | {"HOME": folder, "XDG_STATE_HOME": folder}
    shown = lab.folder.path / "shown"

    def attach() -> None:
        logs = [lab.folder.path / f"rank-{rank}.out" for rank in (0, 1)]
        until(lambda: all(log.exists() and log.read_text() for log in logs), "the ranks print")
        with shown.open("w") as out:
            attached.append(subprocess.Popen([*command, "attach", "rabc"], env=env, stdout=out))
        until(lambda: shown.read_text().count("attempt 1") == 2, "attach shows what they printed")
        fail.touch()

    attached: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=attach)
    thread.start()
    assert Attempts(plan, lab.make, of_lease("gpu01:0", "gpu01:1", "gpu02:0", "gpu02:1")).run() == 0
    thread.join()
    assert attached[0].wait(60) == 0
    logs = subprocess.run([*command, "logs", "rabc"], env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    expected = {
        f"[rank {rank} gpu0{attempt}:{rank}] rank {rank}, attempt {attempt}" for rank in (0, 1) for attempt in (1, 2)
    }
    for text in (shown.read_text(), logs):
        assert {line for line in text.splitlines() if line.endswith(("attempt 1", "attempt 2"))} == expected
    assert [(place.rank, place.node, place.attempt) for place in lab.view().former] == [
        (0, "gpu01", 1),
        (1, "gpu01", 1),
    ]
