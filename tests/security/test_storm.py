"""Three users on two hosts reserve the GPUs of three nodes at once; allocates, shells and keepers are killed with -9.

In the suite a small round; the whole of it, 15 rounds of 60 allocations (half an hour on two cores):

    GPUBOARD_STORM_ROUNDS=15 GPUBOARD_STORM_SHELLS=60 python -m pytest tests/security/test_storm.py -s
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import threading
import time

import pytest

from tests.hosts import USERS, Host, NodeProcess, Running
from tests.integration.claims_on_nodes import NODES, SCOPE, claimed_by, lying, names, owners_of
from tests.nodes import Cluster
from tests.nvml import Gpu
from tests.waiting import read_line, until

pytestmark = pytest.mark.nodes

ROUNDS = int(os.environ.get("GPUBOARD_STORM_ROUNDS", "1"))
SHELLS = int(os.environ.get("GPUBOARD_STORM_SHELLS", "6"))
GPUS = 3  # of each node: the shells of the suite ask for more than all of them
PEOPLE = ("alice", "bob", "carol")
LIFE_S = 90.0  # of a claim without a heartbeat
PATIENCE = {"GPUBOARD_CONNECT_TIMEOUT": "60s"}

_SCRIPT = """
export CUDA_VISIBLE_DEVICES=
eval "$(gpuboard allocate --n {n} --nodes '{scope}' --for 30m --purpose {purpose})"
echo "$?|$GPUBOARD_LEASE|$(cat "$GPUBOARD_RANK_MAP")"
read -r _
"""


class Shell:
    """A person's shell that takes a lease and holds it until it is told to end."""

    def __init__(self, nodes: Cluster, rng: random.Random, purpose: str) -> None:
        self.purpose = purpose
        self.user = rng.choice(PEOPLE)
        self.host = nodes[rng.choice(("login1", "login2"))]
        self.n = rng.randint(1, 4)
        script = _SCRIPT.format(n=self.n, scope=SCOPE, purpose=purpose)
        self.process = self.host.popen(
            ["bash", "-c", script], user=self.user, env=PATIENCE, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.gpus: set[tuple[str, str]] = set()
        self.answered = False
        self.hit = False  # it or its allocate was killed
        self.granted_at = math.inf
        self.ended_at = math.inf
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def won(self) -> bool:
        return bool(self.gpus)

    @property
    def waits(self) -> bool:
        """Whether its allocate has not answered."""
        return self._reader.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Wait for the answer of its allocate, or its end."""
        self._reader.join(timeout_s)
        assert not self._reader.is_alive(), f"{self.purpose}: no answer in {timeout_s:.0f} s"

    def kill(self, what: str) -> bool:
        """Kill the ``shell`` or its ``allocate``; tell whether there was one."""
        if what == "shell":
            try:
                pid = self.process.inner
            except TimeoutError:
                return False
            self.hit = True
            self.ended_at = time.monotonic()
            return _kill(pid)
        found = self.host.processes(lambda process: "allocate" in process.argv and self.purpose in process.argv)
        self.hit = self.hit or bool(found)
        return sum(_kill(process.pid) for process in found) > 0

    def let_go(self, *, kill: bool) -> None:
        """End the shell, by -9 or in order; :meth:`close` waits for it."""
        assert self.process.stdin is not None
        if kill and self.process.poll() is None:
            with contextlib.suppress(TimeoutError):
                _kill(self.process.inner)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        code, _, rest = read_line(self.process).strip().partition("|")
        lease, _, rank_map = rest.partition("|")
        self.answered = bool(code)
        if code == "0" and lease:
            self.granted_at = time.monotonic()
            self.gpus = {(rank["node"], rank["uuid"]) for rank in json.loads(rank_map)["ranks"]}


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def is_keeper(process: NodeProcess) -> bool:
    return process.name == "gpuboard-keeper"


def kill_some(nodes: Cluster, shells: list[Shell], rng: random.Random) -> dict[str, int]:
    """Kill half as many processes as there are shells, anywhere on their way, until the last has its answer."""
    counts = {"allocate": 0, "shell": 0, "keeper": 0}
    commands: list[Running] = []
    while sum(counts.values()) < SHELLS // 2 and (waiting := [s for s in shells if s.waits and not s.hit]):
        what = rng.choice(tuple(counts))
        if what == "keeper":
            host = nodes[rng.choice(("login1", "login2"))]
            for keeper in rng.sample(found := host.processes(is_keeper), min(1, len(found))):
                counts[what] += _kill(keeper.pid)
                commands.append(next_command(host, keeper.uid))
        else:
            victims = waiting if what == "allocate" else [s for s in shells if not s.hit]
            counts[what] += rng.choice(victims).kill(what)
        time.sleep(rng.uniform(0, 1.0))
    for command in commands:
        command.communicate(timeout=SHELLS * 10)
    return counts


def next_command(host: Host, uid: int) -> Running:
    """Start the next gpuboard command of a user whose keeper was killed: it starts another keeper."""
    user = next(name for name, known in USERS.items() if known == uid)
    return host.popen(["gpuboard", "leases", "--nodes", SCOPE], user=user, env=PATIENCE)


def end_all(nodes: Cluster, shells: list[Shell], rng: random.Random) -> int:
    """End all holders at one stroke, half of them by -9, and kill half of the keepers; return how many of these."""
    for shell in shells:
        shell.let_go(kill=rng.random() < 0.5)
    keepers = [keeper for name in ("login1", "login2") for keeper in nodes[name].processes(is_keeper)]
    return sum(_kill(keeper.pid) for keeper in keepers if rng.random() < 0.5)


def given_twice(shells: list[Shell]) -> list[str]:
    """Return what was granted to one shell while another still had it."""
    return [
        f"{sorted(one.gpus & other.gpus)}: {one.purpose} and {other.purpose}"
        for one in shells
        for other in shells
        if one is not other and one.gpus & other.gpus and one.granted_at <= other.granted_at < one.ended_at
    ]


def partial(nodes: Cluster, shells: list[Shell]) -> list[str]:
    """Return the shells that hold something else than they were told, or than they asked for."""
    left = lying(nodes)
    found = []
    for shell in shells:
        assert owners_of(left, shell.purpose) <= {USERS[shell.user]}
        mine = claimed_by(left, shell.purpose)
        if not shell.hit and (mine != shell.gpus or len(mine) not in {0, shell.n}):
            found.append(f"{shell.purpose} asked for {shell.n}, was told {sorted(shell.gpus)}, holds {sorted(mine)}")
    return found


def live(nodes: Cluster) -> bool:
    """Tell whether any claim on the nodes still counts: one without a heartbeat for 90 s does not."""
    for name in NODES:
        for path in names(nodes, name):
            with contextlib.suppress(FileNotFoundError):
                facts = path.lstat()
                if time.time() - min(facts.st_mtime, facts.st_ctime) < LIFE_S:
                    return True
    return False


@pytest.mark.timeout(ROUNDS * (SHELLS * 12 + 300))
def test_no_gpu_twice_no_part_and_all_gone_in_time(nodes: Cluster) -> None:
    rng = random.Random(int(os.environ.get("GPUBOARD_STORM_SEED", "9")))
    longest = 0.0
    for name in NODES:
        nodes[name].script([Gpu()] * GPUS)
    for number in range(ROUNDS):
        began = time.monotonic()
        shells = [Shell(nodes, rng, f"r{number}s{k}") for k in range(SHELLS)]
        counts = kill_some(nodes, shells, rng)
        for shell in shells:
            shell.wait(SHELLS * 10)
        twice, parts = given_twice(shells), partial(nodes, shells)
        assert not [shell.purpose for shell in shells if not shell.answered and not shell.hit]
        held = len({(node, uuid) for node, uuid, _ in lying(nodes)})
        assert held
        began_to_end = time.monotonic()
        counts["keeper"] += end_all(nodes, shells, rng)
        ended = time.monotonic()
        until(lambda: not live(nodes), "no claim counts any more", 300)
        took = time.monotonic() - ended
        longest = max(longest, took)
        for shell in shells:
            shell.close()
        won = sum(shell.won for shell in shells)
        refused = sum(not shell.won and not shell.hit for shell in shells)
        print(
            f"round {number}: {won} granted, {refused} refused, killed {counts}, {held} of {GPUS * len(NODES)} GPUs "
            f"claimed, {len(twice)} twice, {len(parts)} partial, all gone {took:.1f} s after "
            f"the holders (which took {ended - began_to_end:.1f} s), {time.monotonic() - began:.0f} s",
            flush=True,
        )
        assert twice == []
        assert parts == []
        assert took <= LIFE_S + 5.0, "5 s for a heartbeat that was under way when the holders ended"
        status = nodes["login1"].run(["gpuboard", "status", "--json", "--nodes", SCOPE], user="carol", env=PATIENCE)
        states = [gpu["state"] for node in json.loads(status.stdout)["nodes"] for gpu in node["gpus"]]
        assert states == ["free"] * GPUS * len(NODES)
    print(f"{ROUNDS} rounds of {SHELLS}: longest time until all were gone {longest:.1f} s")
