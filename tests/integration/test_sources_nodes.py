"""Nodes from a hostfile, from ssh_config and from ClusterShell's groups, reached over real ssh."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.nodes import USERS, Cluster

pytestmark = pytest.mark.nodes

# gpu03's alias has nothing of its name in it: only HostName says where it is.
LAB = "Host lab-a lab-b lab-*\n    HostKeyAlias %h\n"
ALIASES = "Host lab-a\n    HostName gpu01\n\nHost lab-b\n    HostName 10.88.0.13\n\nHost other\n    HostName gpu02\n"


def put(nodes: Cluster, user: str, files: dict[str, str]) -> None:
    """Write files of a user's home."""
    for name, text in files.items():
        path = nodes.home(user) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for part in (path, *path.relative_to(nodes.home(user)).parents):
            os.chown(nodes.home(user) / part, USERS[user], USERS[user])


def status(nodes: Cluster, *said: str) -> dict[str, str]:
    """Return name → state as alice sees the nodes from the login node."""
    flags = [word for text in said for word in ("--nodes", text)]
    done: subprocess.CompletedProcess[str] = nodes["login1"].run(["gpuboard", "status", "--json", *flags], user="alice")
    return {node["name"]: node["state"] for node in json.loads(done.stdout)["nodes"]}


def test_hosts_of_an_ssh_config_are_reached_by_their_aliases(nodes: Cluster) -> None:
    own = (nodes.home("alice") / ".ssh" / "config").read_text()
    put(nodes, "alice", {".ssh/config": f"Include lab/*.conf\n{own}", ".ssh/lab/hosts.conf": ALIASES})
    assert status(nodes, "ssh_config:lab-*") == {"lab-a": "up", "lab-b": "up"}
    assert status(nodes, "ssh_config:*,!lab-b", "gpu03") == {"lab-a": "up", "other": "up", "gpu03": "up"}


def test_hosts_of_a_hostfile_are_reached_as_the_users_that_it_names(nodes: Cluster) -> None:
    keys = nodes.home("bob") / ".ssh" / "authorized_keys"
    keys.write_text(keys.read_text() + (nodes.home("alice") / ".ssh" / "authorized_keys").read_text())
    put(nodes, "alice", {"hosts": "bob@gpu01 slots=2 max_slots=8\ngpu02:8\ngpu02:8\n"})
    asked = [
        "gpuboard",
        "allocate",
        "--n",
        "10",
        "--nodes",
        "hostfile:hosts",
        "--format",
        "json",
        "--for",
        "1m",
        "--detach",
    ]
    done = nodes["login1"].run(asked, user="alice")
    found = json.loads(done.stdout)
    # slots are counts of processes for mpirun and hold nothing back: gpu01 gives more than two GPUs
    assert {(n["name"], n["address"]) for n in found["rank_map"]["nodes"]} == {
        ("gpu01", "10.88.0.11"),
        ("gpu02", "10.88.0.12"),
    }
    claims = {
        (host, path.stat().st_uid)
        for host in ("gpu01", "gpu02")
        for path in nodes[host].path("/var/tmp").glob("gpuboard.GPU-*")
    }
    assert claims == {("gpu01", USERS["bob"]), ("gpu02", USERS["alice"])}


def test_groups_of_clustershell_name_nodes(nodes: Cluster) -> None:
    put(
        nodes,
        "alice",
        {
            ".config/clustershell/groups.conf": "[Main]\ndefault: lab\nautodir: $CFGDIR/groups.d\n",
            ".config/clustershell/groups.d/lab.yaml": "lab: {rack1: 'gpu[01-02]', rack2: gpu03}\n",
            ".config/gpuboard/config.toml": 'nodes = ["@*"]\n',
        },
    )
    assert status(nodes) == {"gpu01": "up", "gpu02": "up", "gpu03": "up"}
    assert status(nodes, "@rack1!gpu01", "@rack2") == {"gpu02": "up", "gpu03": "up"}
