"""A real mpirun takes `--format hostfile` and `rankfile` and starts every rank where the rank map says."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import msgspec
import pytest

from gpuboard.model.rankmap import RankMap
from tests.nodes import USERS, Cluster

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (openmpi-bin)"),
]

RANK = """
import json, os
names = "RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"
found = {name: int(os.environ["OMPI_COMM_WORLD_" + name]) for name in names}
found["cores"] = sorted(os.sched_getaffinity(0))
print(json.dumps(dict(found, host=os.uname().nodename, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))), flush=True)
"""
# one has gaps and begins on the node that comes last by name, one is a single node
SETS = ["gpu01:7@gpu03:2,0", "gpu02:4,1"]


@pytest.fixture(params=SETS)
def leased(nodes: Cluster, request: pytest.FixtureRequest) -> tuple[Cluster, str, RankMap]:
    """The nodes, the id of a lease of alice's, and its rank map; her home has it as hostfile and as rankfile."""
    config = nodes.home("alice") / ".config" / "gpuboard" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('nodes = ["gpu[01-03]"]\nscheduler = "none"\n')
    (nodes.home("alice") / "rank.py").write_text(RANK)
    for path in (config, config.parent, config.parent.parent):
        os.chown(path, USERS["alice"], USERS["alice"])
    asked = ["gpuboard", "allocate", "--gpus", request.param, "--detach", "--for", "5m", "--format", "json"]
    got = json.loads(nodes["login1"].run(asked, check=True).stdout)
    for form in ("hostfile", "rankfile"):
        nodes["login1"].run(["sh", "-c", f"gpuboard env {got['lease']['id']} --format {form} >{form}"], check=True)
    return nodes, got["lease"]["id"], msgspec.convert(got["rank_map"], RankMap)


def mpirun(nodes: Cluster, *args: str) -> list[dict[str, Any]]:
    """Return what each rank printed about itself, by rank."""
    done = nodes["login1"].run(["mpirun", *args])
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda found: found["RANK"])


def test_ranks_start_on_the_nodes_of_the_rank_map(leased: tuple[Cluster, str, RankMap]) -> None:
    nodes, lease, rank_map = leased
    sizes = {node.name: node.local_world_size for node in rank_map.nodes}
    expected = [
        {
            "RANK": rank.rank,
            "host": rank.node,
            "LOCAL_RANK": rank.local_rank,
            "SIZE": rank_map.world_size,
            "LOCAL_SIZE": sizes[rank.node],
        }
        for rank in rank_map.ranks
    ]
    with_env = ["-x", "PATH", "sh", "-c", f'eval "$(gpuboard env {lease} --format shell)" && exec python3 rank.py']
    found = mpirun(nodes, "--hostfile", "hostfile", *with_env)
    assert [{key: one[key] for key in expected[0]} for one in found] == expected
    gpus = [int(one["visible"].split(",")[one["LOCAL_RANK"]]) for one in found]
    assert gpus == [rank.index for rank in rank_map.ranks]
    found = mpirun(nodes, "--rankfile", "rankfile", "--bind-to", "core", "python3", "rank.py")
    assert [{key: one[key] for key in expected[0]} for one in found] == expected
    # a rank with its loaders needs more than the one core that a numbered slot would give it
    assert {tuple(one["cores"]) for one in found} == {tuple(sorted(os.sched_getaffinity(0)))}
