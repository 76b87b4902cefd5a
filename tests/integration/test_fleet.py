"""Fleets over the local transport and over the test nodes: what one node does to another, and what comes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.timing import TIMING, FleetTiming
from gpuboard.config import Settings
from gpuboard.model.replies import ReleasedClaims, Touched
from gpuboard.model.snapshot import NodeView, Snapshot
from gpuboard.transport.base import CallFailed, LinkLost
from tests.nodes import Cluster, eight
from tests.sshd import children
from tests.waiting import Stopwatch, read_line, until

DRIVER = Path(__file__).with_name("fleet_driver.py")
SIMULATED = {"cluster": "test", "model": "NVIDIA H100 80GB HBM3", "count": 2}


FOREIGN: set[int] = set()


@pytest.fixture(scope="module", autouse=True)
def agents_of_other_files() -> None:
    """Leave out agents below this process that tests of other files have not ended yet."""
    FOREIGN.update(own_agents())


@contextlib.contextmanager
def local(
    *names: str, interval_s: float | None = None, one_shot: bool = True, timing: FleetTiming = TIMING
) -> Iterator[Fleet]:
    """A started fleet of simulated nodes on this machine, whose agents are the only ones below us."""
    until(lambda: not own_agents(), "the agents of the fleet before have ended")
    nodes = [Node(name, None, simulate={**SIMULATED, "cluster": f"test-{os.getpid()}"}) for name in names]
    fleet = Fleet(nodes, Settings(), interval_s=interval_s, one_shot=one_shot, timing=timing)
    try:
        fleet.start()
        fleet.wait(60)
        yield fleet
    finally:
        fleet.close()


def own_agents() -> list[int]:
    """Return the pids of the agents that tests of this file started."""
    found: list[int] = []
    for pid in set(children(os.getpid())) - FOREIGN:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if b"gpuboard.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_a_one_shot_fleet_reads_each_node_once_and_when_asked() -> None:
    with local("a", "b") as fleet:
        seen = fleet.snapshot()
        assert [(n.name, n.state, n.error, len(n.gpus)) for n in seen.nodes] == [
            ("a", "up", None, 2),
            ("b", "up", None, 2),
        ]
        assert {gpu.state for node in seen.nodes for gpu in node.gpus} == {"free"}
        assert seen.cluster == "a,b"
        before = time.monotonic()
        assert fleet.refresh(["a"], 60) == {}
        took = time.monotonic() - before
        ages = {node.name: node.age_s for node in fleet.snapshot().nodes}
        assert (ages["a"] or 0) <= time.monotonic() - before + 0.1
        assert (ages["b"] or 0) >= took


def test_calls_answer_refuse_or_are_lost_each_in_its_way() -> None:
    with local("a", "b") as fleet:
        assert fleet.call("a", "touch", {"leases": ["x"]}, 60, Touched) == Touched([], [], ["x"])
        with pytest.raises(CallFailed) as refused:
            fleet.call("a", "release", {"lease": "nosuch"}, 60, ReleasedClaims)
        assert refused.value.kind == "not-found"
        with pytest.raises(LinkLost, match="c: not one of the nodes in scope"):
            fleet.call("c", "touch", {}, 5, Touched)
        both = fleet.call_all({"a": ("touch", {"leases": []}), "b": ("nonsense", {})}, 60, Touched)
        assert both["a"] == Touched([], [], [])
        assert isinstance(both["b"], CallFailed)
        assert fleet.claims() == {"a": [], "b": []}


def test_a_picture_that_is_kept_open_says_free_after_two_readings() -> None:
    # The next one comes when it is asked for: a tick by the clock, as there is at the end of every hour, is far away.
    with local("a", interval_s=2e6, one_shot=False) as fleet:
        assert {gpu.reason for gpu in fleet.snapshot().nodes[0].gpus} == {"waiting for a second reading"}
        assert fleet.refresh(["a"], 60) == {}
        until(lambda: {gpu.state for gpu in fleet.snapshot().nodes[0].gpus} == {"free"}, "free")


def test_readings_come_each_tick_by_the_wall_clock_and_together() -> None:
    with local("a", "b", "c", interval_s=0.5) as fleet:

        def aligned() -> bool:
            at = []
            for _ in range(10):
                assert fleet.wait_change(60)
                at.append(time.time())
            # Most of them, for this machine may lose a moment: one change a tick, though three nodes report.
            each = 0.3 < median(b - a for a, b in pairwise(at)) < 0.7
            return each and median(moment % 0.5 for moment in at) < 0.2

        until(aligned, "ten in a row come with the ticks")


def test_a_node_whose_agent_has_ended_has_the_reason() -> None:
    patient = FleetTiming(backoff_first_s=3600.0, backoff_most_s=3600.0)  # it is not connected again meanwhile
    with local("a", "b", interval_s=0.3, timing=patient) as fleet:
        os.kill(own_agents()[0], signal.SIGKILL)
        until(lambda: any("killed by signal 9" in (n.error or "") for n in fleet.snapshot().nodes), "seen")


def test_a_node_whose_agent_has_ended_gets_another_one() -> None:
    with local("a", "b", interval_s=0.3) as fleet:
        victim = own_agents()[0]
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(own_agents()) == 2 and victim not in own_agents(), "it is replaced")
        until(lambda: all(n.error is None for n in fleet.snapshot().nodes), "it came back")


def test_a_stopped_agent_is_stale_then_unknown_and_the_other_goes_on() -> None:
    with local("a", "b", interval_s=0.2) as fleet:
        victim = own_agents()[0]
        os.kill(victim, signal.SIGSTOP)
        try:

            def apart() -> dict[str, NodeView]:
                nodes: dict[str, NodeView] = {n.state: n for n in fleet.snapshot().nodes}
                return nodes if nodes.keys() == {"up", "stale"} and (nodes["up"].age_s or 9) < 0.4 else {}

            nodes = until(apart, "stale after 5 s, and the other's readings go on", 20)
            assert {gpu.state for gpu in nodes["stale"].gpus} == {"unknown"}
            with pytest.raises(LinkLost, match=r"no answer in \d\.\d s"):
                fleet.call(nodes["stale"].name, "touch", {"leases": []}, 0.2, Touched)
        finally:
            start = Stopwatch()
            fleet.close()
            assert start.stop() < 3.0  # waiting for the node would take 5 s
            until(lambda: not own_agents(), "also a stopped agent ends")


def test_a_big_write_goes_out_piece_by_piece() -> None:
    with local("a") as fleet:
        answer = fleet.call("a", "touch", {"leases": ["x" * 2000] * 1000}, 60, Touched)
        assert len(answer.missing) in {1, 1000}


def test_many_threads_may_call_at_once() -> None:
    with local("a", "b") as fleet:
        answers: list[Any] = []

        def work(node: str, number: int) -> None:
            answer = fleet.call(node, "touch", {"leases": [f"l{number}"]}, 60, Touched)
            answers.append(answer == Touched([], [], [f"l{number}"]))

        threads = [threading.Thread(target=work, args=("ab"[k % 2], k)) for k in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert answers == [True] * 40


def test_a_prestarted_agent_is_used_and_inherits_no_descriptor() -> None:
    code = (
        "import os\n"
        "extra = os.open('/dev/null', os.O_RDONLY); os.set_inheritable(extra, True)\n"
        "from gpuboard.transport import spawn\n"
        "spawn.prestart(); pid = spawn._prestarted[0].pid\n"
        "from gpuboard.cluster.fleet import Fleet\n"
        "from gpuboard.cluster.inventory.nodes import Node\n"
        "from gpuboard.config import Settings\n"
        f"fleet = Fleet([Node('a', None, simulate={SIMULATED!r})], Settings(), interval_s=None)\n"
        "fleet.start(); fleet.wait(60)\n"
        "facts = [fleet._feeds['a'].facts.hello.pid == pid, fleet.snapshot().nodes[0].state]\n"
        "facts += [os.getsid(pid) == pid, extra in map(int, os.listdir(f'/proc/{pid}/fd'))]\n"
        "import sys\n"
        "facts += [sorted({'asyncio', 'asyncssh', 'ClusterShell', 'pynvml', 'subprocess'} & set(sys.modules))]\n"
        "print(facts)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        close_fds=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout == "[True, 'up', True, False, []]\n", done.stderr


STOPPED = """
import sys, time
from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.timing import FleetTiming
from gpuboard.config import Settings
simulate = {"cluster": f"test-{sys.argv[1]}", "model": "NVIDIA H100 80GB HBM3", "count": 2}
timing = FleetTiming(silence_s=2.0, pace_s=0.25, suspended_s=1.0)
fleet = Fleet([Node(f"n{k}", None, simulate=simulate) for k in range(9)], Settings(), interval_s=0.2, timing=timing)
fleet.start()
while True:
    print(f"{time.monotonic()}", sorted({node.error or node.state for node in fleet.snapshot().nodes}), flush=True)
    time.sleep(0.01)
"""


def test_a_suspended_client_does_not_mark_its_agents_stale() -> None:
    """As by ctrl-Z and fg: frames that arrived meanwhile are read before deadlines are checked."""
    command = [sys.executable, "-c", STOPPED, str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            while "['up']" not in read_line(client):
                pass
            client.send_signal(signal.SIGSTOP)
            time.sleep(3.0)
            over = time.monotonic() + 1.0  # the deadlines have been checked twice
            client.send_signal(signal.SIGCONT)
            lines = [read_line(client)]
            while float(lines[-1].split()[0]) < over:
                lines.append(read_line(client))
        finally:
            client.kill()
    assert [line for line in lines if "no message from the agent" in line] == []


class Watched:
    """A fleet that is kept open on login1; what it said, by arrival."""

    def __init__(self, nodes: Cluster, **options: Any) -> None:
        options = {"nodes": ["gpu[01-03]"], "interval_s": 1.0} | options
        command = [sys.executable, str(DRIVER), json.dumps(options)]
        self.process = nodes["login1"].popen(command, user="alice", stdin=subprocess.PIPE)
        self.seen: list[Snapshot] = []
        self.came: list[tuple[float, float]] = []  # when each did: by the machine's clock, and by that of tests
        self.watch = Stopwatch()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        decoder = msgspec.json.Decoder(Snapshot)
        for line in self.process.stdout:
            self.came.append((time.monotonic(), self.watch.seconds))
            self.seen.append(decoder.decode(line))

    def node(self, name: str) -> NodeView | None:
        """Return a node as it was seen last."""
        return next((n for n in self.seen[-1].nodes if n.name == name), None) if self.seen else None

    def states(self) -> dict[str, str]:
        return {n.name: n.state for n in self.seen[-1].nodes} if self.seen else {}

    def oldest(self, since: int, *names: str) -> float:
        """Return the greatest age of ``names`` in what was seen from entry ``since`` on, by the clock of tests."""
        shots = list(enumerate(self.seen))[since:]
        return max(self._spent(k, n.age_s or 0.0) for k, shot in shots for n in shot.nodes if n.name in names)

    def _spent(self, entry: int, age_s: float) -> float:
        """Return how much of an age that an entry told has passed while this machine went on."""
        now, spent_s = self.came[entry]
        return spent_s - max((spent for at, spent in self.came[:entry] if at <= now - age_s), default=0.0)

    def stop(self) -> None:
        self.watch.stop()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@pytest.fixture
def watched(nodes: Cluster) -> Iterator[Watched]:
    it = Watched(nodes, settings={"connect_timeout": "3s"})
    try:
        until(lambda: set(it.states().values()) == {"up"}, "all three up")
        yield it
    finally:
        it.stop()


@pytest.mark.nodes
def test_a_failing_node_leaves_the_others_ages_under_two_intervals(nodes: Cluster, watched: Watched) -> None:
    def error(name: str) -> str:
        node = watched.node(name) or NodeView("", "unreachable")
        return (node.error or "") if node.state == "unreachable" else ""

    since = len(watched.seen)
    nodes["gpu01"].script(
        [msgspec.structs.replace(gpu, trouble=("hang *",)) if k == 3 else gpu for k, gpu in enumerate(eight())]
    )

    def only_gpu3_unknown() -> bool:
        node = watched.node("gpu01")
        return node is not None and [g.index for g in node.gpus if g.state == "unknown"] == [3]

    until(only_gpu3_unknown, "GPU 3 unknown and no other")
    assert watched.oldest(since, "gpu01", "gpu02", "gpu03") < 2.0  # the node itself goes on, too

    since = len(watched.seen)
    nodes["gpu02"].unplug()
    until(lambda: watched.states().get("gpu02") == "stale", "gpu02 stale without its cable")
    assert watched.oldest(since, "gpu01", "gpu03") < 2.0
    nodes["gpu02"].plug()
    until(lambda: watched.states().get("gpu02") == "up", "gpu02 up again")

    since = len(watched.seen)
    nodes["gpu02"].pause_sshd()
    until(lambda: watched.states().get("gpu02") == "stale", "gpu02 stale with a stopped sshd")
    node = watched.node("gpu02")
    assert node is not None
    assert {gpu.state for gpu in node.gpus} == {"unknown"}
    assert watched.oldest(since, "gpu01", "gpu03") < 2.0
    nodes["gpu02"].resume_sshd()
    until(lambda: watched.states().get("gpu02") == "up", "gpu02 up again")

    since = len(watched.seen)
    nodes["gpu03"].sshd("AuthorizedKeysFile /nonexistent")
    words = "ssh: alice@gpu03 was refused: no key was accepted; check `ssh gpu03`"
    until(lambda: error("gpu03").startswith(words), "unreachable once its reading is old, with the reason")
    assert watched.oldest(since, "gpu01") < 2.0  # gpu02 has just come back


def files(nodes: Cluster, name: str) -> list[Path]:
    """Return what lies in the folders of a node that everybody may write."""
    return sorted(path for folder in ("/var/tmp", "/tmp", "/dev/shm") for path in nodes[name].path(folder).iterdir())


@pytest.mark.nodes
def test_a_killed_client_leaves_nothing_on_a_node_whose_nvml_hangs(nodes: Cluster, watched: Watched) -> None:
    names = ("gpu01", "gpu02", "gpu03")
    before = {name: files(nodes, name) for name in names}
    nodes["gpu01"].script([msgspec.structs.replace(gpu, trouble=("hang *",)) for gpu in eight()])
    until(
        lambda: any(g.state == "unknown" for g in (watched.node("gpu01") or NodeView("", "unreachable")).gpus),
        "it hangs",
    )
    assert nodes["gpu01"].processes(user="alice")
    watched.process.kill()
    for name in names:
        until(lambda name=name: not nodes[name].processes(user="alice"), f"{name} is empty", 20)  # type: ignore[misc]
        assert files(nodes, name) == before[name]
    # The home is the client's, too, which keeps the bundle.
    assert {path.name for path in nodes.home("alice").iterdir()} == {".ssh", ".cache"}
    assert [path.name for path in nodes.home("alice").glob(".cache/*/*")] == [
        f"bundle-node-{sys.implementation.cache_tag}"
    ]
