"""Claims of a user of one node: they count for that node's GPUs alone, and under his own name."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.hosts import USERS
from tests.nodes import Cluster
from tests.nvml import Gpu

pytestmark = pytest.mark.nodes
SCOPE = ("--nodes", "gpu[01-02]")
CLAIM = """
import json, sys
from gpuboard.agent.claims import store as claims
lease, *uuids = sys.argv[1:]
holder = {"host": "login1", "boot_id": "x", "pid": 4242, "start": 1}
args = {"lease": lease, "uuids": uuids, "for_s": 86000.0, "purpose": "mine", "host": "elsewhere", "holder": holder,
        "nodes": ["gpu01", "gpu02"], "gpus": 9}
claims.handle("take", args, claims.Folder("/var/tmp"))
"""


def gpuboard(nodes: Cluster, *args: str, user: str = "alice") -> subprocess.CompletedProcess[str]:
    return nodes["login1"].run(["gpuboard", *args, *SCOPE], user=user)


def asked(nodes: Cluster, *args: str, user: str = "alice") -> Any:
    done = gpuboard(nodes, *args, user=user)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def claim(nodes: Cluster, node: str, lease: str, *uuids: str) -> None:
    """Let bob claim GPUs on ``node``, whatever node has them."""
    nodes[node].run([sys.executable, "-c", CLAIM, lease, *uuids], user="bob", check=True)


def owners(nodes: Cluster) -> set[str]:
    """Return whose claims lie on the nodes."""
    names = {uid: name for name, uid in USERS.items()}
    files = [path for host in nodes for path in host.path("/var/tmp").glob("gpuboard.GPU-*")]
    return {names[path.stat().st_uid] for path in files}


@pytest.fixture
def uuids(nodes: Cluster) -> dict[str, list[str]]:
    return {name: [gpu.uuid for gpu in nodes[name].script([Gpu(), Gpu()])] for name in ("gpu01", "gpu02")}


def test_a_claim_blocks_no_gpu_of_another_node(nodes: Cluster, uuids: dict[str, list[str]]) -> None:
    claim(nodes, "gpu02", "zzzzzz", *uuids["gpu01"])
    seen = asked(nodes, "status", "--json")
    states = {(node["name"], gpu["state"], *gpu["leases"]) for node in seen["nodes"] for gpu in node["gpus"]}
    assert states == {("gpu01", "free"), ("gpu02", "free")}
    [found] = asked(nodes, "leases", "--json")["leases"]
    assert (found["owner"], {(gpu["node"], gpu["index"]) for gpu in found["gpus"]}) == ("bob", {("gpu02", None)})
    taken = asked(nodes, "allocate", "--n", "4", "--detach", "--for", "10m", "--format", "json")
    assert len(taken["lease"]["gpus"]) == 4


def test_a_claim_on_a_lost_gpu_still_counts(nodes: Cluster, uuids: dict[str, list[str]]) -> None:
    taken = asked(nodes, "allocate", "--gpus", "gpu02:1", "--detach", "--for", "10m", "--format", "json")
    nodes["gpu02"].script([Gpu()])  # it has fallen off the bus
    [found] = asked(nodes, "leases", "--json")["leases"]
    assert [gpu["uuid"] for gpu in found["gpus"]] == [uuids["gpu02"][1]]
    assert asked(nodes, "release", taken["lease"]["id"], "--json")["released"][0]["gpus"][0]["node"] == "gpu02"


def test_her_lease_stays_hers_whatever_bob_claims_under_its_id(nodes: Cluster, uuids: dict[str, list[str]]) -> None:
    """bob's claims lie on the node that is read first, and name a GPU of each node."""
    theirs = [uuids["gpu01"][0], uuids["gpu02"][0]]
    taken = asked(nodes, "allocate", "--gpus", "gpu02:0", "--detach", "--for", "10m", "--purpose", "hers",
                  "--format", "json")["lease"]  # fmt: skip
    lease = taken["id"]
    claim(nodes, "gpu01", lease, *theirs)
    for user in ("alice", "bob"):
        gpu = asked(nodes, "status", "--json", user=user)["nodes"][1]["gpus"][0]
        assert (gpu["leases"], gpu["flags"]) == ([lease], [])
        assert gpu["reason"].startswith("alice, ")
        assert gpu["reason"].endswith(": hers")
    for user in ("alice", "root"):
        both = {one["owner"]: one for one in asked(nodes, "leases", "--json", user=user)["leases"]}
        assert both.keys() == {"alice", "bob"}
        hers = both["alice"]
        assert [hers[key] for key in ("gpus", "purpose", "host", "flags", "holder")] == [
            taken["gpus"], "hers", "login1", [], None,
        ]  # fmt: skip
        assert hers["remaining_s"] < 601
    assert asked(nodes, "env", lease, "--format", "json")["rank_map"]["nodes"][0]["name"] == "gpu02"
    assert asked(nodes, "renew", lease, "--for", "20m", "--json")["nodes"] == ["gpu02"]
    assert gpuboard(nodes, "release", lease, user="bob").returncode == 0  # his own, and nothing else
    assert owners(nodes) == {"alice"}
    claim(nodes, "gpu01", lease, *theirs)
    assert [gpu["node"] for gpu in asked(nodes, "release", lease, "--json")["released"][0]["gpus"]] == ["gpu02"]
    assert owners(nodes) == {"bob"}
