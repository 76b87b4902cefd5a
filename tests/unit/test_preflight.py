"""Preflight: which replies of the nodes keep the gate closed, with cause and remedy."""

from __future__ import annotations

import queue
from typing import Any

import msgspec
import pytest

from gpuboard.agent.launch.network import REPLY_FACTOR
from gpuboard.config import Settings
from gpuboard.doctor import launch as doctor_launch
from gpuboard.launch.causes.gpus import damaged
from gpuboard.launch.plan import Device
from gpuboard.launch.preflight.check import Check, check_text, grouped
from gpuboard.launch.preflight.checks import (
    REQUIRED,
    SKIPPABLE,
    Answers,
    Failure,
    failed,
    interfaces,
    preflight,
    skipped,
)
from gpuboard.launch.preflight.collect import PreflightCalls, failure
from gpuboard.launch.preflight.gpus import gpu_checks
from gpuboard.launch.preflight.interfaces import preferred
from gpuboard.launch.supervisors import CallReply, Supervisors
from gpuboard.launch.timing import DEFAULT_TIMING
from gpuboard.model.gpu import NodeState
from gpuboard.model.rankmap import RankMap
from gpuboard.model.replies import Detail, LaunchFacts, ProbeResult, RanksStarted, TaskLimit
from gpuboard.model.snapshot import GpuView, NodeView, ProcessView, Snapshot
from gpuboard.transport.base import CallFailed, LinkLost
from gpuboard.transport.connector import Connector
from tests.unit.test_plan import MAP, planned

FACTS = LaunchFacts(
    python="/venv/bin/python",
    python_version="3.11.7",
    torch="2.13.0+cu128",
    torch_cuda="12.8",
    nccl="2.27.3",
    target_sha256="0123456789abcdef",
    shm_free=8 * 2**30,
    memlock=None,
    nofile=65536,
    addresses={"lo": ["127.0.0.1"], "eth0": ["10.0.0.1", "fe80::1%eth0"]},
    hostname="gpu01",
)
FACTS2 = msgspec.structs.replace(FACTS, addresses={"lo": ["127.0.0.1"], "ib0": ["10.0.0.2"]}, hostname="gpu02")
OK1 = ProbeResult("gpu02", "10.0.0.2", 41001, "ok", 0.3, "10.0.0.1", "eth0")
OK2 = ProbeResult("gpu01", "10.0.0.1", 29500, "ok", 0.4, "10.0.0.2", "ib0")


def gpu(index: int, uuid: str, **changes: Any) -> GpuView:
    """Return a GPU that the lease of the map holds."""
    view = GpuView(
        index, uuid, "H100", f"0:{index}", "reserved", "reserved by alice (k3f9)", processes=[], leases=["k3f9"]
    )
    return msgspec.structs.replace(view, **changes)


GPUS = {"gpu01": [gpu(0, "GPU-a"), gpu(3, "GPU-b")], "gpu02": [gpu(7, "GPU-c")]}


def snapshot(**changes: list[GpuView]) -> Snapshot:
    """Return both nodes with the GPUs of the map."""
    nodes = [NodeView(name, "up", driver="580.1", gpus=gpus) for name, gpus in (GPUS | changes).items()]
    return Snapshot(1, "", "lab", nodes)


def answers(**changes: Any) -> Answers:
    """Return answers without problems, with changes."""
    both = {"gpu01": FACTS, "gpu02": FACTS2}
    found = Answers(both, {}, None, {"gpu01": [OK1], "gpu02": [OK2]}, snapshot())
    return msgspec.structs.replace(found, **changes)


def problems(found: Answers, device: Device = "cuda", rank_map: RankMap = MAP) -> list[Check]:
    """Return the checks that fail or warn."""
    return [c for c in preflight(rank_map, "10.0.0.1", device, found) if c.status in {"fail", "warn"}]


def only(checks: list[Check]) -> Check:
    """Return the only check."""
    assert len(checks) == 1, checks
    return checks[0]


def test_no_problems() -> None:
    assert problems(answers()) == []
    assert {c.name for c in preflight(MAP, "10.0.0.1", "cuda", answers())} == {
        "start", "torch", "python", "torch version", "CUDA of torch", "NCCL", "driver", "script", "/dev/shm",
        "open files", "processes", "locked memory", "loopback", "master port", "connect", "interface", "GPU",
    }  # fmt: skip
    assert {*REQUIRED, *SKIPPABLE} == {c.name for c in preflight(MAP, "10.0.0.1", "cuda", answers())} | {
        "master address"
    }


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({"torch": None}, "torch", "fail", "/venv/bin/python has no torch"),
        ({"torch": "2.12.0+cu128"}, "torch version", "fail", "2.13.0+cu128 on gpu01; 2.12.0+cu128 on gpu02"),
        ({"python_version": "3.10.1"}, "python", "fail", "3.11 on gpu01; 3.10 on gpu02"),
        ({"nccl": "2.21.5"}, "NCCL", "fail", "2.27.3 on gpu01; 2.21.5 on gpu02"),
        ({"torch_cuda": "11.8"}, "CUDA of torch", "fail", "12.8 on gpu01; 11.8 on gpu02"),
        ({"target_sha256": "f" * 64}, "script", "fail", "0123456789ab on gpu01; ffffffffffff on gpu02"),
        ({"shm_free": 2**20}, "/dev/shm", "fail", "NCCL needs 32 MiB per rank"),
        ({"shm_free": 64 * 2**20}, "/dev/shm", "warn", "may die of SIGBUS"),
        ({"nofile": 64}, "open files", "fail", "limit 64"),
        ({"nofile": 512}, "open files", "warn", "limit 512"),
        ({"tasks": TaskLimit(4, 100, "ulimit -u")}, "processes", "fail", "4 of 100 processes and threads left"),
        ({"tasks": TaskLimit(90, 100, "/c/pids.max")}, "processes", "warn", "(/c/pids.max); 1 ranks and their"),
        ({"loopback": False}, "loopback", "fail", "lo is down"),
        ({"memlock": 65536}, "locked memory", "warn", "limit 64 KiB"),
    ],
)
def test_one_node_that_differs_or_is_incomplete(changes: dict[str, Any], name: str, status: str, words: str) -> None:
    other = msgspec.structs.replace(FACTS2, **changes)
    check = only(problems(answers(facts={"gpu01": FACTS, "gpu02": other})))
    assert (check.name, check.status) == (name, status)
    assert words in check_text(check)
    assert check.remedy


def test_a_skipped_check_keeps_its_result_and_does_not_fail() -> None:
    other = msgspec.structs.replace(FACTS2, torch="2.12.0+cu128", nofile=512)
    found = preflight(MAP, "10.0.0.1", "cuda", answers(facts={"gpu01": FACTS, "gpu02": other}))
    assert [check.name for check in failed(found)] == ["torch version"]
    after = skipped(found, ["torch version", "open files", "NCCL"])
    assert failed(after) == []
    changed = [check for check, before in zip(after, found, strict=True) if check != before]
    assert {(check.name, check.status, check.evidence) for check in changed} == {
        ("torch version", "skipped", "would fail: 2.13.0+cu128 on gpu01; 2.12.0+cu128 on gpu02"),
        ("open files", "skipped", "would warn: limit 512 (ulimit -n)"),
        ("open files", "skipped", "limit 65536"),
        ("NCCL", "skipped", "2.27.3 on every node"),
    }


def test_micro_versions_of_python_may_differ() -> None:
    other = msgspec.structs.replace(FACTS2, python_version="3.11.9")
    assert problems(answers(facts={"gpu01": FACTS, "gpu02": other})) == []


def test_a_build_without_cuda_fails_on_gpus_only() -> None:
    bare = {n: msgspec.structs.replace(FACTS, torch="2.13.0+cpu", torch_cuda=None) for n in ("gpu01", "gpu02")}
    assert [c.cause for c in problems(answers(facts=bare))] == ["a build without CUDA"] * 2
    assert problems(answers(facts=bare, snapshot=None), "cpu") == []


@pytest.mark.parametrize(
    ("kind", "message", "remedy"),
    [
        ("python", "no python3 or python on PATH", "--python PATH"),
        ("cwd", "no folder /exp", "launch from a folder that every node has"),
        ("target", "train.py cannot be read", "copy the file to the node"),
        ("connection", "gpu02: no answer in 20 s", "gpuboard status"),
    ],
)
def test_a_node_that_could_not_start(kind: str, message: str, remedy: str) -> None:
    check = only(failed(preflight(MAP, "10.0.0.1", "cuda", answers(failures={"gpu02": Failure(kind, message)}))))
    assert (check.node, check.evidence) == ("gpu02", message)
    assert remedy in check.remedy


@pytest.mark.parametrize(
    ("result", "cause", "remedy"),
    [
        ("refused", "a firewall rejects it", "iptables -I INPUT -p tcp -s 10.0.0.2 --dport 1024:65535 -j ACCEPT"),
        ("dropped", "a firewall drops it", "on gpu01, as root: iptables"),
        ("unreachable", "no route", "set an address of gpu01 in the rank map that gpu02 can reach: 10.0.0.1"),
        ("small-only", "packets of full size are lost", "set one MTU on both"),
        ("stranger", "another program replies", "set an address of gpu01"),
    ],
)
def test_a_failed_connection_names_cause_and_remedy(result: str, cause: str, remedy: str) -> None:
    bad = msgspec.structs.replace(OK2, result=result, ms=None)
    check = only(problems(answers(probes={"gpu01": [OK1], "gpu02": [bad, OK2]})))
    assert check.evidence == "gpu02 cannot reach gpu01 at 10.0.0.1, port 29500"
    assert cause in check.cause
    assert remedy in check.remedy


BOTH = msgspec.structs.replace(FACTS2, addresses={"lo": ["127.0.0.1"], "ib0": ["192.168.7.2", "10.0.0.2"]})


def connection(*tried: ProbeResult) -> Check:
    """Return the failed check of gpu02, whose first address is 192.168.7.2 and 10.0.0.2 in the rank map."""
    both = {"gpu01": FACTS, "gpu02": BOTH}
    return only(problems(answers(facts=both, probes={"gpu01": list(tried), "gpu02": [OK2]})))


def test_a_failed_connection_names_the_ports_of_one_address() -> None:
    tried = [
        ProbeResult("gpu02", address, port, "dropped") for address in ("10.0.0.2", "192.168.7.2") for port in (41, 42)
    ]
    check = connection(*tried)
    assert check.evidence == "gpu01 cannot reach gpu02 at 10.0.0.2, port 41, 42"
    assert check.cause == "no reply: a firewall drops it"


NOT_OF_THE_MAP = "ranks (gloo) use that address, the first of ib0 on gpu02, not the rank map's"
ANOTHER = (
    "or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface whose first address on gpu02 gpu01 can reach"
)


@pytest.mark.parametrize(
    ("result", "remedy"),
    [
        ("unreachable", f"repair that network; {ANOTHER}"),
        ("stranger", f"repair that network; {ANOTHER}"),
        ("dropped", f"(ranks connect on the master port and on random high ports); {ANOTHER}"),
        ("small-only", f"let ICMP 'fragmentation needed' through; {ANOTHER}"),
    ],
)
def test_an_address_that_is_not_in_the_rank_map_is_that_of_the_interface(result: str, remedy: str) -> None:
    check = connection(OK1, ProbeResult("gpu02", "192.168.7.2", 41, result))
    assert check.evidence == "gpu01 cannot reach gpu02 at 192.168.7.2, port 41"
    assert check.cause.endswith(f"; {NOT_OF_THE_MAP}")
    assert check.remedy.endswith(remedy)
    assert "in the rank map" not in check.remedy


def test_the_rule_is_for_the_family_of_the_address() -> None:
    first = msgspec.structs.replace(FACTS, addresses={"eth0": ["10.0.0.1", "fd00::1"]})
    bad = ProbeResult("gpu02", "fd00::2", 41, "dropped")
    found = answers(facts={"gpu01": first, "gpu02": FACTS2}, probes={"gpu01": [bad], "gpu02": [OK2]})
    assert "ip6tables -I INPUT -p tcp -s fd00::1 --dport" in only(problems(found)).remedy


def test_the_deadline_of_a_connectivity_check_leaves_time_for_each_result() -> None:
    for timing in (DEFAULT_TIMING, doctor_launch._TIMING):
        assert timing.probe_s > timing.connect_s * (1 + REPLY_FACTOR)


def test_the_check_of_a_node_has_its_name_once() -> None:
    assert failure(LinkLost("gpu01", "no answer in 5.0 s")) == Failure("connection", "no answer in 5.0 s")


def test_a_port_in_use_names_its_holder() -> None:
    listen = Failure("port-in-use", "port 29500 of 10.0.0.1 is in use", "pid 12 (alice, python)")
    check = only(problems(answers(listen=listen)))
    assert (check.name, check.cause) == ("master port", "held by pid 12 (alice, python)")
    assert "set master_port to 0" in check.remedy
    words = "port 29500 of 10.0.0.1 is in use by pid 12 (alice, python)"
    check = only(problems(answers(listen=Failure("port-in-use", words, "pid 12 (alice, python)"))))
    assert (check.evidence, check.cause) == (words, ""), "named once"


def test_a_foreign_master_address_names_those_of_the_node() -> None:
    listen = failure(CallFailed("address", "10.9.9.9 is not an address of this node", Detail()))
    check = only(problems(answers(listen=listen)))
    assert check.cause == ""
    assert check.remedy == "set master_addr in the rank map to one of gpu01: 10.0.0.1"  # not the link-local one


def test_a_name_that_resolves_differently_is_a_warning() -> None:
    first = msgspec.structs.replace(FACTS, resolves={"gpu01": ["127.0.1.1"]})
    second = msgspec.structs.replace(FACTS2, resolves={"gpu01": ["10.0.0.1"]})
    checks = preflight(MAP, "gpu01", "cuda", answers(facts={"gpu01": first, "gpu02": second}))
    check = only([c for c in checks if c.status != "ok"])
    assert (check.status, check.evidence) == ("warn", "127.0.1.1 on gpu01; 10.0.0.1 on gpu02")


def test_a_name_that_is_loopback_on_its_own_node_is_the_cause() -> None:
    first = msgspec.structs.replace(FACTS, resolves={"gpu01": ["127.0.1.1"]})
    second = msgspec.structs.replace(FACTS2, resolves={"gpu01": ["10.0.0.1"]})
    refused = ProbeResult("gpu01", "gpu01", 29500, "refused", 0.2, "10.0.0.2", "ib0")
    probes = {"gpu01": [OK1], "gpu02": [refused]}
    checks = preflight(MAP, "gpu01", "cuda", answers(facts={"gpu01": first, "gpu02": second}, probes=probes))
    [check] = failed(checks)
    assert (check.name, check.node, check.evidence) == (
        "connect",
        "gpu02",
        "gpu02 cannot reach gpu01 at gpu01, port 29500",
    )
    assert check.cause == "on gpu01 that name resolves to 127.0.1.1, which only gpu01 itself can reach"
    assert check.remedy == (
        "set master_addr in the rank map to an IP address: 10.0.0.1; "
        "or remove the name from that line of /etc/hosts on gpu01"
    )


def test_a_name_that_resolves_to_another_machine_is_the_cause() -> None:
    first = msgspec.structs.replace(FACTS, resolves={"head": ["10.0.0.1"]})
    dropped = ProbeResult("gpu01", "head", 29500, "dropped")
    for found, words in (["10.0.0.9"], "10.0.0.9"), ([], "nothing"):
        second = msgspec.structs.replace(FACTS2, resolves={"head": found})
        both = {"gpu01": first, "gpu02": second}
        [check] = failed(
            preflight(MAP, "head", "cuda", answers(facts=both, probes={"gpu01": [OK1], "gpu02": [dropped]}))
        )
        assert check.cause == f"on gpu02 that name resolves to {words}, not to an address of gpu01"
        assert check.remedy == "set master_addr in the rank map to an IP address: 10.0.0.1"


def test_an_address_that_is_no_name_resolves_to_itself() -> None:
    both = {"gpu01": FACTS, "gpu02": msgspec.structs.replace(FACTS2, resolves={"10.0.0.7": ["10.0.0.7"]})}
    bad = ProbeResult("gpu01", "10.0.0.7", 29500, "dropped")
    [check] = failed(preflight(MAP, "10.0.0.7", "cuda", answers(facts=both, probes={"gpu01": [OK1], "gpu02": [bad]})))
    assert check.cause == "no reply: a firewall drops it"


def test_a_port_that_cannot_be_bound_is_not_a_matter_of_the_address() -> None:
    denied = failure(CallFailed("root-port", "cannot listen on 10.0.0.1 port 80: Permission denied", Detail()))
    assert only(problems(answers(listen=denied))).remedy.startswith("set master_port to 0")


def test_ranks_use_the_first_address_of_an_interface() -> None:
    both = msgspec.structs.replace(FACTS, addresses={"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1", "fd00::1"]})
    assert preferred(both, "fd00::1") == ["10.0.0.1"]
    assert preferred(msgspec.structs.replace(both, resolves={"gpu01": ["fd00::1"]}), "gpu01") == ["10.0.0.1"]
    assert preferred(msgspec.structs.replace(both, resolves={"gpu01": ["::1"]}), "gpu01") == []
    chosen = msgspec.structs.replace(both, socket_ifname={"GLOO_SOCKET_IFNAME": "ib0"})
    assert [preferred(seen, address) for seen, address in ((both, "10.0.0.1"), (chosen, "fd00::1"), (None, "x"))] == [
        [],
        [],
        [],
    ]


def test_an_interface_with_the_same_address_on_every_node_fails() -> None:
    docker = {"docker0": ["172.17.0.1", "fe80::2"]}
    chosen = {"GLOO_SOCKET_IFNAME": "docker0"}
    both = {
        name: msgspec.structs.replace(seen, addresses=seen.addresses | docker, socket_ifname=chosen)
        for name, seen in (("gpu01", FACTS), ("gpu02", FACTS2))
    }
    found = problems(answers(facts=both), "cpu")
    assert [(check.name, check.node, check.status) for check in found] == [
        ("interface", "gpu01", "fail"),
        ("interface", "gpu02", "fail"),
    ]
    assert "172.17.0.1 is an address of other nodes too" in found[0].cause


def test_the_interface_is_the_one_of_the_address_or_of_the_route() -> None:
    assert interfaces("10.0.0.1", "gpu01", answers()) == {"gpu01": "eth0", "gpu02": "ib0"}
    assert interfaces("127.0.0.1", "gpu01", answers(probes={})) == {"gpu01": "lo"}
    assert interfaces("10.9.9.9", "gpu01", answers(probes={})) == {}
    named = msgspec.structs.replace(FACTS, resolves={"gpu01.lab": ["10.0.0.1"]})
    assert interfaces("gpu01.lab", "gpu01", answers(facts={"gpu01": named}, probes={})) == {"gpu01": "eth0"}


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"state": "broken", "reason": "GPU is lost"}, "fail", "GPU 7 is broken; GPU is lost"),
        ({"state": "unknown", "reason": "the reading hangs"}, "fail", "GPU 7 is unknown; the reading hangs"),
        (
            {"leases": ["zzzz"], "reason": "reserved by bob"},
            "fail",
            "GPU 7 is no longer held by lease k3f9; reserved by bob",
        ),
        ({"leases": [], "state": "free"}, "fail", "is no longer held by lease k3f9"),
        ({"flags": ["disputed"]}, "fail", "GPU 7 is disputed"),
        (
            {"flags": ["rogue"], "processes": [ProcessView(9, "bob", "python x", 1, "compute", rogue=True)]},
            "fail",
            "runs processes of others; bob (pid 9, python x)",
        ),
        ({"index": 6}, "fail", "GPU-c has index 6 now"),
        ({"uuid": "GPU-x"}, "fail", "GPU-c is missing; the node has GPU-x"),
        ({"flags": ["sick"]}, "warn", "GPU 7 is sick"),
        (
            {"memory_used": 2 * 2**30, "memory_total": 80 * 2**30},
            "warn",
            "has 2.0 GiB of 80 GiB in use; by no visible process",
        ),
        (
            {"memory_used": 70 * 2**30, "memory_total": 80 * 2**30},
            "fail",
            "has 70 GiB of 80 GiB in use; by no visible process",
        ),
        ({"processes": [ProcessView(9, "alice", "python", 1, "compute")]}, "warn", "already runs pid 9"),
        (
            {"processes": [ProcessView(9, "alice", "python", 1, "compute")], "compute_mode": 3},
            "fail",
            "already runs pid 9; in an exclusive compute mode",
        ),
        ({"compute_mode": 2}, "fail", "GPU 7 is in compute mode prohibited"),
    ],
)
def test_a_gpu_that_does_not_match_the_lease(changes: dict[str, Any], status: str, words: str) -> None:
    changed = msgspec.structs.replace(GPUS["gpu02"][0], **changes)
    check = only([c for c in gpu_checks(MAP, snapshot(gpu02=[changed])) if c.status != "ok"])
    assert (check.node, check.status) == ("gpu02", status)
    assert words in check_text(check)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "broken", "reason": "GPU lost: fallen off the bus"}, "is broken: GPU lost: fallen off the bus"),
        ({"sick": ["row remap pending; reset the GPU"]}, "is sick: row remap pending; reset the GPU"),
        ({"uuid": "GPU-x"}, "is lost: the driver no longer lists GPU-c; the node's kernel log may explain it"),
        ({"state": "busy"}, ""),
    ],
)
def test_a_gpu_that_is_damaged_during_a_run_is_named(changes: dict[str, Any], words: str) -> None:
    changed = msgspec.structs.replace(GPUS["gpu02"][0], **changes)
    expected = [f"rank 2 (gpu02:7): GPU 7 {words}"] if words else []
    assert damaged(MAP, snapshot(gpu02=[changed])) == expected


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"state": "free"}, "warn"),
        ({"state": "busy"}, "fail"),
        ({"state": "reserved", "leases": ["zzzz"]}, "fail"),
        ({"uuid": "GPU-other"}, "fail"),
    ],
)
def test_without_a_lease_a_gpu_must_be_free(changes: dict[str, Any], status: str) -> None:
    unheld = {name: [msgspec.structs.replace(g, state="free", leases=[]) for g in gpus] for name, gpus in GPUS.items()}
    unheld["gpu02"] = [msgspec.structs.replace(unheld["gpu02"][0], **changes)]
    checks = gpu_checks(msgspec.structs.replace(MAP, lease=None), snapshot(**unheld))
    assert [c.status for c in checks if c.node == "gpu02"] == [status]
    assert not any("allocate again" in c.remedy or "release" in c.remedy for c in checks), "there is no lease"
    assert [c.status for c in checks if c.node == "gpu01"] == ["warn", "warn"]


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"state": "free"}, "ok", "is held by Slurm job 12"),
        ({"state": "reserved", "leases": ["zzzz"]}, "ok", "is held by Slurm job 12"),
        ({"state": "busy", "processes": [ProcessView(9, "bob", "python", 1, "compute")]}, "warn", "already runs pid 9"),
        ({"state": "broken", "reason": "GPU is lost"}, "fail", "is broken; GPU is lost"),
        ({"uuid": "GPU-other"}, "fail", "is missing"),
    ],
)
def test_a_gpu_of_a_slurm_job(changes: dict[str, Any], status: str, words: str) -> None:
    unheld = {name: [msgspec.structs.replace(g, state="free", leases=[]) for g in gpus] for name, gpus in GPUS.items()}
    unheld["gpu02"] = [msgspec.structs.replace(unheld["gpu02"][0], **changes)]
    check = only(
        [c for c in gpu_checks(msgspec.structs.replace(MAP, job="12"), snapshot(**unheld)) if c.node == "gpu02"]
    )
    assert check.status == status
    assert words in check_text(check)


@pytest.mark.parametrize(
    ("state", "error"), [("unreachable", "ssh: no answer in 5 s"), ("up", "NVML has not answered yet")]
)
def test_a_node_that_was_not_read_fails(state: NodeState, error: str) -> None:
    dark = Snapshot(1, "", "lab", [snapshot().nodes[0], NodeView("gpu02", state, error=error)])
    check = only([c for c in gpu_checks(MAP, dark) if c.status != "ok"])
    assert (check.status, check.evidence, check.cause) == ("fail", "its GPUs could not be read", error)


def test_checks_that_differ_in_their_evidence_only_are_merged() -> None:
    checks = [Check("GPU", "gpu01", "warn", f"GPU {n} is not reserved", "cause", "remedy") for n in range(3)]
    words = "GPU 0 is not reserved, GPU 1 is not reserved, GPU 2 is not reserved"
    other = Check("GPU", "gpu02", "warn", "GPU 0 is sick")
    assert grouped([*checks, other]) == [Check("GPU", "gpu01", "warn", words, "cause", "remedy"), other]


def test_a_check_as_text() -> None:
    check = Check("connect", "gpu02", "fail", "no way", "a firewall drops it", "open it")
    assert check_text(check) == "fail connect: gpu02: no way; a firewall drops it\n     → open it"


@pytest.mark.parametrize(
    ("name", "value", "device", "status", "words"),
    [
        ("GLOO_SOCKET_IFNAME", "ib0", "cpu", "", ""),
        ("GLOO_SOCKET_IFNAME", "eth9", "cpu", "fail", "launch then sets it to ib0 on gpu02"),
        ("GLOO_SOCKET_IFNAME", "ib0,eth9", "cpu", "fail", "no such interface with an address; there are lo, ib0, eth1"),
        ("GLOO_SOCKET_IFNAME", "eth9", "cuda", "warn", "no such interface"),
        ("GLOO_SOCKET_IFNAME", "lo", "cpu", "fail", "through loopback"),
        ("GLOO_SOCKET_IFNAME", "eth1", "cpu", "warn", "the master's address belongs to ib0 there"),
        ("NCCL_SOCKET_IFNAME", "eth9", "cpu", "", ""),
        ("NCCL_SOCKET_IFNAME", "eth9", "cuda", "fail", "no such interface"),
        ("NCCL_SOCKET_IFNAME", "eth,ib", "cuda", "", ""),
        ("NCCL_SOCKET_IFNAME", "=ib", "cuda", "fail", "no such interface"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "cuda", "", ""),
        ("NCCL_SOCKET_IFNAME", "^ib,eth", "cuda", "fail", "no such interface"),
        ("NCCL_SOCKET_IFNAME", "^=ib0", "cuda", "warn", "the master's address belongs to ib0"),
        ("NCCL_SOCKET_IFNAME", "lo", "cuda", "fail", "through loopback"),
    ],
)
def test_a_variable_that_selects_the_wrong_interface(
    name: str, value: str, device: Device, status: str, words: str
) -> None:
    addresses = {"lo": ["127.0.0.1"], "ib0": ["10.0.0.2"], "eth1": ["192.0.2.2"]}
    other = msgspec.structs.replace(FACTS2, addresses=addresses, socket_ifname={name: value})
    found = problems(answers(facts={"gpu01": FACTS, "gpu02": other}), device)
    assert [(check.name, check.node, check.status) for check in found] == (
        [("interface", "gpu02", status)] if status else []
    )
    assert all(words in check_text(check) for check in found)


def test_a_node_that_has_replied_is_not_waited_for() -> None:
    plan = planned()
    calls = PreflightCalls(plan, Supervisors(plan, {}, Connector(Settings()), queue.SimpleQueue()))
    assert calls.waiting_for() == "gpu01, gpu02"
    calls.take(CallReply("gpu01", "check", FACTS))
    calls.take(CallReply("gpu01", "spawn", RanksStarted({})))
    assert calls.waiting_for() == "gpu02"
