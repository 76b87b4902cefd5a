"""Many processes of two users on two client hosts ask for the GPUs of three nodes at once, some killed with -9.

In the suite a small round; the whole of it, 20 rounds of 50 processes (some 15 minutes on two cores):

    GPUBOARD_RACE_ROUNDS=20 GPUBOARD_RACE_PROCESSES=50 python -m pytest tests/integration/test_claims_race.py -s
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Set
from typing import Any

import msgspec
import pytest

from tests.hosts import USERS, Running
from tests.integration.claims_on_nodes import NODES, SCOPE, Lying, claimed_by, lying, names, owners_of, release_all
from tests.nodes import Cluster
from tests.nvml import Gpu
from tests.waiting import until

pytestmark = pytest.mark.nodes

ROUNDS = int(os.environ.get("GPUBOARD_RACE_ROUNDS", "1"))
PER_NODE = 3  # GPUs, fewer in all than what the processes request
PROCESSES = int(os.environ.get("GPUBOARD_RACE_PROCESSES", "6"))


class Asker(msgspec.Struct):
    """One `gpuboard allocate` and how it ended."""

    purpose: str
    user: str
    n: int
    process: Running
    killed: bool = False
    answer: Any = None
    errors: str = ""

    @property
    def gpus(self) -> set[tuple[str, str]]:
        """The GPUs it was granted, as (node, UUID)."""
        return {(gpu["node"], gpu["uuid"]) for gpu in self.answer["lease"]["gpus"]} if self.won else set()

    @property
    def won(self) -> bool:
        return not self.killed and self.process.returncode == 0


def start(nodes: Cluster, rng: random.Random, purpose: str) -> Asker:
    user, n = rng.choice(("alice", "bob")), rng.randint(1, 4)
    argv = [
        "gpuboard",
        "allocate",
        "--n",
        str(n),
        "--nodes",
        SCOPE,
        "--format",
        "json",
        "--detach",
        "--for",
        "30m",
    ]
    host = nodes[rng.choice(("login1", "login2"))]
    patience = {"GPUBOARD_CONNECT_TIMEOUT": "60s"}
    return Asker(purpose, user, n, host.popen([*argv, "--purpose", purpose], user=user, env=patience))


def kill_some(askers: list[Asker], rng: random.Random, busy: Any) -> None:
    """Kill a third with -9: a first part anywhere on its way, the rest as soon as claims appear on the nodes."""
    victims = rng.sample(askers, len(askers) // 3)
    deadline = time.monotonic() + 60
    for number, victim in enumerate(victims):
        while number % 2 and not busy() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.3))  # anywhere on its way
        try:
            inner = victim.process.inner
        except TimeoutError:
            continue  # it has ended by itself
        victim.killed = True
        try:
            os.kill(inner, signal.SIGKILL)
        except ProcessLookupError:
            victim.killed = False


def history_is_sound(askers: list[Asker], left: Lying) -> None:
    """Check one round against what lies on the nodes at its end; nothing was released meanwhile."""
    by_gpu: dict[tuple[str, str], list[str]] = {}
    for node, uuid, lease in left:
        by_gpu.setdefault((node, uuid), []).append(lease)
    assert {gpu: leases for gpu, leases in by_gpu.items() if len(leases) > 1} == {}, "a GPU twice"
    for asker in askers:
        mine = claimed_by(left, asker.purpose)
        assert owners_of(left, asker.purpose) <= {USERS[asker.user]}
        if asker.killed:
            continue  # what it left lapses
        assert asker.process.returncode in {0, 4}, (asker.process.returncode, asker.errors, asker.answer)
        assert mine == asker.gpus, "holds what it was granted and nothing else; refused takers hold nothing"
        assert len(mine) == (asker.n if asker.won else 0)
    for asker in askers:
        if not asker.killed and not asker.won:
            refusal_is_true(asker, {other.purpose: other for other in askers}, by_gpu.keys())


def refusal_is_true(asker: Asker, by_purpose: dict[str, Asker], claimed: Set[tuple[str, str]]) -> None:
    """Check a refusal: the named holder of each GPU holds it, or was killed or refused later.

    Without the GPUs of those who dropped them again there were fewer than it asked for.
    """
    error = asker.answer["error"]
    gpus = {(reported["node"], reported["uuid"]): reported for reported in error["gpus"]}
    assert len(gpus) == 3 * PER_NODE
    dropped = set()
    for gpu, reported in gpus.items():
        if reported["state"] == "reserved":
            holder = by_purpose[reported["reason"].rpartition(": ")[2]]
            assert gpu in holder.gpus or not holder.won, f"{gpu} is not {holder.purpose}'s: {error}"
            dropped |= set() if holder.won else {gpu}
    free = len(gpus.keys() - claimed - dropped)
    assert asker.n > free or "quicker" in error["message"], f"{free} free, {asker.n} refused: {error}"


@pytest.mark.timeout(ROUNDS * PROCESSES * 12 + 120)
def test_no_gpu_twice_no_part_left_every_refusal_true(nodes: Cluster) -> None:
    for name in NODES:
        nodes[name].script([Gpu() for _ in range(PER_NODE)])
    rng = random.Random(int(os.environ.get("GPUBOARD_RACE_SEED", "11")))
    for number in range(ROUNDS):
        began = time.monotonic()
        askers = [start(nodes, rng, f"r{number}p{i}") for i in range(PROCESSES)]
        kill_some(askers, rng, lambda: any(names(nodes, name) for name in NODES))
        for asker in askers:
            out, asker.errors = asker.process.communicate(timeout=PROCESSES * 10)
            asker.answer = json.loads(out) if out.strip() and not asker.killed else None
        left = lying(nodes)
        history_is_sound(askers, left)
        killed, won = sum(a.killed for a in askers), sum(a.won for a in askers)
        print(
            f"round {number}: {won} got GPUs, {PROCESSES - won - killed} refused, {killed} killed, "
            f"{len(left)} of {3 * PER_NODE} GPUs claimed, {time.monotonic() - began:.0f} s"
        )
        # Again where the agent of one that was killed has only now come to its turn.
        until(lambda: release_all(nodes, ("alice", "bob")), "all can be released from any host")
