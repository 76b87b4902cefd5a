"""What every ledger does, on real ones: claims on nodes over ssh, and a real Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.hosts import Host, Running
from tests.nodes import Cluster
from tests.nvml import Gpu
from tests.slurm import SlurmCluster
from tests.waiting import read_line, until

pytestmark = pytest.mark.nodes
DRIVER = Path(__file__).with_name("ledger_driver.py")
NODES = ("gpu01", "gpu02")
PER_NODE = 4


class Opened(NamedTuple):
    """A ledger that is ready for use."""

    env: dict[str, str]  # of its users
    left: Callable[[], bool]  # whether a claim or job is left
    clear: Callable[[], None]  # removes all; both without the ledger


class Lab:
    """One ledger, and users of it on the login node."""

    def __init__(self, host: Host, name: str, opened: Opened, stack: ExitStack) -> None:
        self._host = host
        self._name = name
        self._env, self.left, self.clear = opened
        self._stack = stack
        self._drivers: dict[str, Running] = {}

    def start(self, user: str = "alice") -> Running:
        """Return a new process of a user that takes operations."""
        command = [sys.executable, str(DRIVER), self._name, "gpu[01-02]"]
        process = self._host.popen(command, user=user, env=self._env, stdin=subprocess.PIPE)
        return self._stack.enter_context(process)

    def do(self, operation: str, *, user: str = "alice", **args: Any) -> Any:
        """Return the answer to an operation."""
        if user not in self._drivers:
            self._drivers[user] = self.start(user)
        return ask(self._drivers[user], operation, **args)

    def forget(self) -> None:
        """End the users' processes and remove what they share: Slurm's last answer."""
        for user, process in self._drivers.items():
            process.kill()
            self._host.run(["rm", "-rf", ".cache"], user=user, check=True)
        self._drivers.clear()

    def ids(self, user: str = "alice") -> list[str]:
        """Return the ids of all leases, as a user sees them."""
        return [lease["id"] for lease in self.do("leases", user=user)]


def ask(driver: Running, operation: str, **args: Any) -> Any:
    """Have a driver do something and return its answer."""
    assert driver.stdin is not None
    driver.stdin.write(json.dumps([operation, args]) + "\n")
    driver.stdin.flush()
    return json.loads(read_line(driver))


def gpus(answer: Any) -> list[tuple[str, int | None]]:
    return sorted((gpu["node"], gpu["index"]) for gpu in answer["lease"]["gpus"])


def open_claims(nodes: Cluster, _: pytest.FixtureRequest) -> Opened:
    hosts = [nodes[name] for name in NODES]

    def claims() -> list[Path]:
        return [path for host in hosts for path in host.path("/var/tmp").glob("gpuboard.GPU-*")]

    def remove() -> None:
        for path in claims():
            path.unlink(missing_ok=True)

    return Opened({"GPUBOARD_SCHEDULER": "none"}, lambda: bool(claims()), remove)


def open_slurm(_: Cluster, request: pytest.FixtureRequest) -> Opened:
    slurm: SlurmCluster = request.getfixturevalue("started_slurm")
    slurm.configure(gres=f"Name=gpu Type=h100 File=/dev/nvidia[0-{PER_NODE - 1}]")

    def cancel() -> None:
        slurm.run(["scancel", "--user=alice"], user="root", check=True)

    return Opened({}, lambda: bool(slurm.jobs()), cancel)


OPEN = {"claims on the nodes": open_claims, "Slurm": open_slurm}  # by `Ledger.name`


@pytest.fixture(scope="module", params=OPEN)
def ledger(started_nodes: Cluster, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A lab for each ledger, with two nodes of four GPUs."""
    started_nodes.reset()
    for name in NODES:
        started_nodes[name].script([Gpu() for _ in range(PER_NODE)])
    with ExitStack() as stack:
        yield Lab(started_nodes["login1"], request.param, OPEN[request.param](started_nodes, request), stack)


@pytest.fixture
def lab(ledger: Lab) -> Iterator[Lab]:
    """The lab, without leases."""
    yield ledger
    ledger.clear()
    until(lambda: not ledger.left(), "nothing is left")
    ledger.forget()


def released(lab: Lab, what: str) -> None:
    """Wait until no claim or job is left."""
    until(lambda: not lab.left(), what)


def test_a_lease_is_found_renewed_used_and_released(lab: Lab) -> None:
    assert lab.do("covers") == ["gpu01", "gpu02"]
    made = lab.do("reserve", n=2)
    lease = made["lease"]["id"]
    assert len({node for node, _ in gpus(made)}) == 1, "as few nodes as possible"
    [listed] = lab.do("leases")
    assert (listed["id"], listed["owner"], listed["purpose"], gpus({"lease": listed})) == (
        lease, "alice", "a test", gpus(made),
    )  # fmt: skip
    for text in (lease, lease[:3]):
        [found] = lab.do("find", ids=[text])["leases"]
        assert (found["id"], gpus({"lease": found})) == (lease, gpus(made))
    assert [found["id"] for found in lab.do("find")["leases"]] == [lease]
    again = lab.do("existing", lease=lease)
    assert (again["ranks"], gpus(again)) == (made["ranks"], gpus(made))
    assert len(lab.do("existing", lease=lease, n=1)["ranks"]) == 1
    renewed = lab.do("renew", lease=lease, for_s=300.0)
    assert 300.0 <= renewed.pop("for_s") < 360.0, "a scheduler counts in minutes"
    assert renewed == {"nodes": [made["ranks"][0]["node"]], "failed": {}}
    [after] = lab.do("find", ids=[lease])["leases"]
    assert 200.0 < after["remaining_s"] <= 360.0, "a scheduler counts in minutes"
    assert datetime.fromisoformat(after["until"]) < datetime.fromisoformat(made["lease"]["until"])
    answer = lab.do("release", lease=lease)
    assert (answer["failed"], len(answer["gpus"])) == ({}, 2)
    released(lab, "it is released")
    until(lambda: not lab.ids(), "no lease is listed")


def test_the_gpus_of_a_lease_show_as_held_and_preflight_accepts_them(lab: Lab) -> None:
    made = lab.do("reserve", n=2)
    held = [[node, index] for node, index in gpus(made)]
    assert lab.do("shown") == held
    assert lab.do("shown", user="bob") == held, "to everybody"
    checks = lab.do("preflight", lease=made["lease"]["id"])
    assert [check["status"] for check in checks] == ["ok", "ok"], checks
    lab.do("release", lease=made["lease"]["id"])
    released(lab, "it is released")
    until(lambda: not lab.do("shown"), "its GPUs show as held no more")


def test_leases_of_others_cannot_be_named_but_by_root(lab: Lab) -> None:
    lease = lab.do("reserve", n=1)["lease"]["id"]
    for operation in ("release", "renew"):
        extra = {"for_s": 60.0} if operation == "renew" else {}
        refused = lab.do(operation, user="bob", lease=lease, **extra)
        assert (refused["exit_code"], "belongs to alice" in refused["error"]) == (5, True)
    assert lab.do("existing", user="bob", lease=lease)["exit_code"] == 5
    assert lab.do("find", user="bob")["leases"] == []
    assert lab.do("release", user="root", lease=lease)["failed"] == {}
    released(lab, "root has released it")


def test_an_id_that_starts_several_leases_is_refused_and_one_that_has_ended_is_released(lab: Lab) -> None:
    made = [lab.do("reserve", n=1)["lease"]["id"] for _ in range(2)]
    same = [one for one in made if one[:1] == made[0][:1]]
    found = lab.do("find", ids=[made[0][:1]])
    if len(same) == 2:
        assert found["exit_code"] == 5
    else:
        assert [lease["id"] for lease in found["leases"]] == [made[0]]
    assert lab.do("find", ids=["zzzzzz"]) == {"leases": [], "missing": ["zzzzzz"]}
    assert sorted(lease["id"] for lease in lab.do("find", ids=made)["leases"]) == sorted(made)
    assert lab.do("release_twice", lease=made[0])["failed"] == {}, "one that has ended is released"
    until(lambda: lab.ids() == made[1:], "it is released")
    assert lab.do("find", ids=made[:1]) == {"leases": [], "missing": made[:1]}


def test_all_or_nothing_and_why_and_a_plan_takes_nothing(lab: Lab) -> None:
    assert lab.do("plan", n=2)["why"]
    assert lab.do("plan", n=2 * PER_NODE + 1)["exit_code"] == 3
    assert not lab.left()
    never = lab.do("reserve", n=2 * PER_NODE + 1)
    assert never["exit_code"] == 3
    everything = lab.do("reserve", n=2 * PER_NODE)
    assert len(everything["lease"]["gpus"]) == 2 * PER_NODE
    refused = lab.do("reserve", user="bob", n=1)
    assert refused["exit_code"] == 4, refused
    assert "--wait" in refused["error"]
    assert lab.ids("bob") == [everything["lease"]["id"]]


def test_what_was_not_published_is_released(lab: Lab) -> None:
    assert "stopped" in lab.do("reserve", n=2, stop=True)
    released(lab, "an exception before it was published releases it")
    driver = lab.start()
    lease = ask(driver, "reserve", n=2, held=True, publish=False)
    assert lab.ids() == [lease]
    driver.kill()
    released(lab, "the keeper releases what a killed command did not publish")


def test_a_lease_ends_with_its_holder(lab: Lab) -> None:
    driver = lab.start()
    ask(driver, "reserve", n=1, held=True)
    assert lab.left()
    driver.kill()
    released(lab, "the keeper releases it")
