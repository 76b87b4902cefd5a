"""The inventory: its nodes, invalid names, and which node is this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboard.agent.proc import ipv4_addresses
from gpuboard.cluster.inventory.nodes import (
    Node,
    expand_names,
    inventory,
    is_here,
    local_node,
    node_by_uuids,
    own_uuids,
)
from gpuboard.config import Settings
from gpuboard.errors import UsageError
from gpuboard.model.snapshot import GpuView, NodeView, Snapshot
from gpuboard.nodesets import expand

HERE = os.uname().nodename.partition(".")[0]


def test_without_configured_nodes_it_is_this_machine() -> None:
    assert inventory(Settings()) == [Node(HERE, None)]


def test_nodesets_expand_in_order_each_name_once() -> None:
    assert expand_names(["login", "gpu[01-03]", "gpu02,a-b_c.example.org"]) == [
        "login", "gpu01", "gpu02", "gpu03", "a-b_c.example.org",
    ]  # fmt: skip
    assert expand_names(["gpu[1-5]!gpu3"]) == ["gpu1", "gpu2", "gpu4", "gpu5"]


@pytest.mark.parametrize(
    ("nodeset", "words"),
    [("gpu[1-3]!gpu[1-3]", r"names no node$"), ("@absent", r"names no node; is the group defined on this host\?$")],
)
def test_an_empty_result_mentions_groups_only_where_one_is_named(nodeset: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        expand(nodeset)


def test_names_select_within_the_inventory() -> None:
    configured = Settings(nodes=["gpu[01-04]"])
    assert inventory(configured, ["gpu03,gpu01"]) == [Node("gpu01", "gpu01"), Node("gpu03", "gpu03")]
    with pytest.raises(UsageError, match="no node 'gpu09' among the configured nodes: gpu01, gpu02"):
        inventory(configured, ["gpu[03,09]"])
    assert inventory(Settings(), ["any[1-2]"]) == [Node("any1", "any1"), Node("any2", "any2")]


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "-oProxyCommand=x", "gpu01;reboot", "gpu$(id)", "gpu`id`", "gpu01\nx", "gpu01 -l", "a'b",
        'a"b', "a|b", "a>b",
        "gpu[1-", "gpu[1-2", "@no-such-group", "gpu[9-1]", "gpu[1-99999999]", "..", "a..b", ".gpu", "gpu.",
        "gpü", "gpu\x1b[2J",
        "a" * 64, ".".join(["abc"] * 70), "a\\b", "a(b)", "{1..3}", "~root", "a=b", "a%b", "#", "root@gpu01",
    ],
)  # fmt: skip
def test_invalid_node_names_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand_names([text])
    assert caught.value.exit_code == 2


def test_a_single_name_needs_no_clustershell() -> None:
    code = (
        "import sys; from gpuboard.cluster.inventory.nodes import inventory; from gpuboard.config import Settings; "
        "nodes = inventory(Settings(nodes=['gpu01', 'gpu-2.example.org'])); "
        "print([n.name for n in nodes], 'ClusterShell' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['gpu01', 'gpu-2.example.org'] False\n"


def test_this_machine_is_known_by_its_names_and_addresses() -> None:
    assert [is_here(name) for name in (HERE, os.uname().nodename, "localhost", "127.0.0.1", "127.1.2.3")] == [True] * 5
    elsewhere = {address for address in ipv4_addresses() if not is_here(address)}
    assert not elsewhere & {*ipv4_addresses()}, "docker may have removed an address meanwhile"
    assert "127.0.0.1" in ipv4_addresses()
    assert [is_here(name) for name in ("gpu-that-is-not-here", "192.0.2.1", HERE + "x")] == [False] * 3
    assert inventory(Settings(nodes=["192.0.2.1", HERE])) == [Node("192.0.2.1", "192.0.2.1"), Node(HERE, None)]


def test_the_scope_is_found_by_name_or_by_uuids(tmp_path: Path) -> None:
    nodes = [Node("sim1", None, simulate={}), Node("gpu01", "gpu01"), Node("me", None)]
    assert local_node(nodes) == nodes[2]
    assert local_node(nodes[:2]) is None
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1c:00.0").mkdir()
    uuid = "GPU-00000000-1111-2222-3333-444444444444"
    (tmp_path / "0000:1b:00.0" / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\n")
    assert own_uuids(str(tmp_path)) == [uuid]
    assert own_uuids(str(tmp_path / "none")) == []
    gpu = GpuView(index=0, uuid=uuid, name="H100", pci_bus_id="0", state="free", reason="")
    snapshot = Snapshot(1, "", "", [NodeView("a", "up"), NodeView("b", "up", gpus=[gpu])])
    assert node_by_uuids(snapshot, [uuid]) == "b"
    assert node_by_uuids(snapshot, []) is None
