"""The documented keys of the JSON output, as commands print them on simulated nodes. Keys are added, never renamed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from gpuboard.cluster.inventory.file import VARIABLE, write_nodes
from gpuboard.cluster.simulated import living_nodes
from gpuboard.model.text import clean
from tests.integration.here import Here

LEASE_GPU = "node index uuid share"
LEASE = "id owner uid host gpus from until holder purpose job flags"
NODE = "name state scheduler_state error age_s source driver cuda cpu_percent memory_used memory_total gpus"
GPU = (
    "index uuid name pci_bus_id state reason flags memory_used memory_total utilization temperature power power_limit "
    "processes leases jobs mig sensors"
)
SENSORS = (
    "performance_state sm_clock sm_clock_max memory_clock fan encoder decoder sm_activity sm_occupancy tensor_activity "
    "tensor_hmma tensor_imma tensor_dmma dram_activity pcie_sent pcie_received nvlink_sent nvlink_received nvlink_max"
)
PROCESS = "pid user command memory type"
MIG = "uuid profile state reason memory_used memory_total leases"
RANK_MAP = "schema lease master_addr master_port world_size nodes ranks"
MAP_NODE = "name address node_rank local_world_size cuda_visible_devices"
MAP_RANK = "rank node local_rank index uuid memory_fraction"
CHECK = "name node status evidence cause remedy"
RUN = "id lease target started state exit_code ranks verdicts"
RUN_RANK = "rank node local_rank index pid state last_line"
VERDICT = "at kind rank node text evidence"


@pytest.fixture
def nodes(here: Here) -> Here:
    """All kinds of GPUs, processes and MIG devices, with leases of several users."""
    here.needs_claims()
    path = here.folder / "inventory"
    write_nodes(path, living_nodes(str(here.claims), epoch=time.time() - 300))
    here.env[VARIABLE] = str(path)
    return here


def check(keys: str, *found: dict[str, Any]) -> None:
    """Check that there is a value and that all have these keys."""
    assert found
    for each in found:
        assert set(keys.split()) <= each.keys(), clean(str(each), 300)


def test_status(nodes: Here) -> None:
    found = nodes.json("status", "--json")
    check("schema at cluster nodes", found)
    check(NODE, *found["nodes"])
    gpus = [gpu for node in found["nodes"] for gpu in node["gpus"]]
    check(GPU, *gpus)
    sensors = [gpu["sensors"] for gpu in gpus if gpu["sensors"] is not None]
    check(SENSORS, *sensors)
    assert set(SENSORS.split()) == sensors[0].keys(), "a new one belongs into this list"
    check(PROCESS, *(process for gpu in gpus for process in gpu["processes"] or ()))
    check(MIG, *(device for gpu in gpus for device in gpu["mig"]))
    assert {gpu["state"] for gpu in gpus} >= {"free", "busy", "reserved", "mig"}
    assert {node["source"] for node in found["nodes"]} == {"simulated"}


def test_allocation_lease_and_refusal(nodes: Here) -> None:
    made = nodes.json("allocate", "--n", "2", "--detach", "--for", "10m", "--json")
    check("schema lease rank_map why", made)
    check(RANK_MAP, made["rank_map"])
    check(MAP_NODE, *made["rank_map"]["nodes"])
    check(MAP_RANK, *made["rank_map"]["ranks"])
    planned = nodes.json("allocate", "--n", "2", "--dry-run", "--json")
    check("schema lease rank_map why", planned)
    assert (planned["lease"], planned["rank_map"]) == (None, None)
    listed = nodes.json("leases", "--json")
    check("schema at leases", listed)
    check(LEASE, made["lease"], *listed["leases"])
    check(LEASE_GPU, *(gpu for lease in listed["leases"] for gpu in lease["gpus"]))
    check("pid alive", *(lease["holder"] for lease in listed["leases"] if lease["holder"]))
    shown = nodes.json("env", made["lease"]["id"], "--json")
    assert (shown["rank_map"], shown["why"]) == (made["rank_map"], f"lease {made['lease']['id']}")
    refused = nodes.run("allocate", "--n", "999", "--json")
    error = json.loads(refused.stdout)["error"]
    check("code message gpus nearest", error)
    check("node index uuid state reason", *error["gpus"])
    assert error["code"] == refused.returncode == 3


def test_run_and_checks(nodes: Here, tmp_path: Path) -> None:
    script = tmp_path / "fails"
    script.write_text("#!/bin/sh\nexit 5\n")
    script.chmod(0o755)
    launch = ["launch", "--device", "cpu", "--n", "1", "--nodes", "sim01", "--no-python", "--json", str(script)]
    done = nodes.run(*launch)
    outcome = json.loads(done.stdout)
    assert (done.returncode, outcome["exit_code"]) == (5, 5)
    [run] = nodes.json("runs", "--json")["runs"]
    check(RUN, run, outcome["run"])
    check(RUN_RANK, *run["ranks"])
    check(VERDICT, *run["verdicts"])
    check(CHECK, *outcome["checks"], *json.loads(nodes.run("doctor", "--json").stdout)["checks"])
