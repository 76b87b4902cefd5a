"""What Slurm's own commands say, GPU by GPU, and what `gpuboard status --json` says otherwise."""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.slurm import SlurmCluster

Status = dict[str, Any]
Ask = Callable[[], Status]
Holder = tuple[str, str, str, str]  # a job's id as people write it, user, partition, end as seconds since the epoch


def configure(slurm: SlurmCluster, user: str, *settings: str, nodes: str = "gpu[01-03]") -> None:
    """Write a user's configuration: these lines, and that Slurm is asked as often as it may be."""
    folder = slurm.nodes.home(user) / ".config/gpuboard"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f'nodes = ["{nodes}"]', *settings, "[slurm]", 'interval = "1s"']
    (folder / "config.toml").write_text("\n".join(lines) + "\n")


def status(slurm: SlurmCluster, user: str, *args: str, host: str = "login1", code: int = 0) -> Status:
    """Return what `gpuboard status --json` prints."""
    done = slurm.run(["gpuboard", "status", "--json", *args], user=user, host=host)
    assert done.returncode == code, done.stderr
    found: Status = json.loads(done.stdout)
    return found


def holders(slurm: SlurmCluster) -> dict[str, dict[int, set[Holder]]]:
    """Return node → Slurm's index → the jobs that hold that GPU or shards of it, by `scontrol show job -d`."""
    found: dict[str, dict[int, set[Holder]]] = {}
    text = slurm.run(["scontrol", "show", "job", "-d"], user="root", check=True).stdout
    for record in re.split(r"\n\n+", text):
        for nodes, gres in re.findall(r"^ +Nodes=(\S+) .*GRES=(\S*)", record, re.MULTILINE):
            indexes = {k for part in re.findall(r"\(IDX:([\d,-]+)\)", gres) for k in _numbers(part)}
            for name in _names(nodes):
                for index in indexes:
                    found.setdefault(name, {}).setdefault(index, set()).add(_holder(record))
    return found


def differences(
    slurm: SlurmCluster, found: Status, place: Mapping[int, int] | None = None, node_names: str = "gpu[01-03]"
) -> list[str]:
    """Return where a status and Slurm disagree about who holds which GPU and about the nodes; [] when nowhere.

    ``place``: Slurm's index → index that the status shows, where that is not the same.
    """
    held = holders(slurm)
    wrong: list[str] = []
    if [node["name"] for node in found["nodes"]] != _names(node_names):
        wrong.append(f"nodes: {[node['name'] for node in found['nodes']]}")
    for node in found["nodes"]:
        said = slurm.node(node["name"])
        if node["scheduler_state"] != said["State"].lower():
            wrong.append(f"{node['name']} is {node['scheduler_state']}, by Slurm {said['State']}")
        expected = {(place or {}).get(k, k): jobs for k, jobs in held.get(node["name"], {}).items()}
        if not set(expected) <= {gpu["index"] for gpu in node["gpus"]}:
            wrong.append(f"{node['name']}: held {sorted(expected)}, shown {[gpu['index'] for gpu in node['gpus']]}")
        for gpu in node["gpus"]:
            jobs = {(j["id"], j["user"], j["partition"], _seconds(j["until"])) for j in gpu["jobs"]}
            if jobs != expected.get(gpu["index"], set()):
                wrong.append(f"{node['name']}:{gpu['index']}: {jobs}, by Slurm {expected.get(gpu['index'])}")
            if bool(jobs) != (gpu["state"] == "allocated"):
                wrong.append(f"{node['name']}:{gpu['index']}: {gpu['state']} ({gpu['reason']}) with jobs {jobs}")
    return wrong


def agreeing(
    slurm: SlurmCluster, ask: Ask, place: Mapping[int, int] | None = None, node_names: str = "gpu[01-03]"
) -> Status:
    """Return the first status that agrees with Slurm: answers are shared for a second, so the first one may be old."""
    deadline = time.monotonic() + 60
    while wrong := differences(slurm, found := ask(), place, node_names):
        assert time.monotonic() < deadline, "\n".join(wrong)
    return found


def gpus(found: Status, node: str) -> list[dict[str, Any]]:
    """Return the GPUs that a status shows of a node."""
    [view] = [view for view in found["nodes"] if view["name"] == node]
    shown: list[dict[str, Any]] = view["gpus"]
    return shown


def states(found: Status, node: str) -> str:
    """Return the states of a node's GPUs, one letter each (a: allocated, f: free, r: reserved, u: unknown, …)."""
    return "".join(gpu["state"][0] for gpu in gpus(found, node))


def _holder(record: str) -> Holder:
    values = dict(re.findall(r"(\S+?)=(\S*)", record))
    name = values["JobId"]
    if "ArrayJobId" in values:
        name = f"{values['ArrayJobId']}_{values['ArrayTaskId']}"
    if "HetJobId" in values:
        name = f"{values['HetJobId']}+{values['HetJobOffset']}"
    return name, values["UserId"].partition("(")[0], values["Partition"], _seconds(values["EndTime"])


def _seconds(text: str | None) -> str:
    """Return a moment as whole seconds since the epoch; Slurm writes local time."""
    if text in {None, "Unknown", "NONE"}:
        return ""
    assert text is not None
    return str(round(datetime.datetime.fromisoformat(text).astimezone().timestamp()))


def _names(nodes: str) -> list[str]:
    """Return the names of ``gpu[01-03]`` or ``gpu02``."""
    before, _, inside = nodes.rstrip("]").partition("[")
    return [f"{before}{k:02}" for k in _numbers(inside)] if inside else [nodes]


def _numbers(text: str) -> list[int]:
    ends = [part.partition("-")[::2] for part in text.split(",")]
    return [k for first, last in ends for k in range(int(first), int(last or first) + 1)]
