"""The doctor's pure parts: facts → checks, and equal results of many nodes as one line."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpuboard.cli.setup.doctor import page
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.snapshot.views import NodeFacts
from gpuboard.doctor.fold import fold, summary
from gpuboard.doctor.machine import MachineFacts, SlurmFacts, machine_checks
from gpuboard.doctor.nodes import NodeSeen, clock_offset, node_checks, none_reached
from gpuboard.launch.preflight.check import Check
from gpuboard.model.reading import Hello, Reading
from gpuboard.model.schedule import Gres, Schedule, SchedulerNode
from gpuboard.model.snapshot import GpuView, NodeView
from gpuboard.transport.base import TransportError

GPU = GpuView(0, "GPU-a", "NVIDIA H100", "0:1", "free", "no process")
HEALTHY = MachineFacts("/home/alice/.local/state/gpuboard", None, 50 * 2**30, [], "/venv/bin/py-spy", None)


def seen(name: str, *gpus: GpuView, error: str | None = None, python: str = "3.9.2", **view: Any) -> NodeSeen:
    """Return a node over ssh with a reading, and with one healthy GPU by default."""
    facts = NodeFacts(
        name,
        hello=Hello(name, "boot", 2001, "alice", 7, python),
        reading=Reading(1, 0.0, 0.0, nvml_error=error, claims_error=view.get("claims_error")),
    )
    shown = NodeView(name, "up", gpus=list(gpus or [GPU]), **({"driver": "580.1", "cuda": "13.0"} | view))
    return NodeSeen(Node(name, name), facts, shown, offset_s=0.0)


def bad(*nodes: NodeSeen) -> list[tuple[str | None, str, str, str, str]]:
    """Return the checks that are not ok: node, name, status, words, remedy."""
    return [
        (c.node, c.name, c.status, "; ".join(part for part in (c.evidence, c.cause) if part), c.remedy)
        for c in node_checks(nodes)
        if c.status != "ok"
    ]


def test_a_healthy_node_has_one_line_per_check() -> None:
    assert [(c.name, c.evidence) for c in node_checks([seen("gpu01")])] == [
        ("ssh", "connected as alice"),
        ("agent", "runs under Python 3.9.2"),
        ("NVML", "1 x NVIDIA H100, driver 580.1, CUDA 13.0"),
        ("reservations", "the folder of claims is root's, sticky, and on the node itself"),
        ("clock", "within 5 s of this machine's"),
    ]


def test_gpus_are_counted_by_model() -> None:
    unread = [msgspec.structs.replace(GPU, uuid=f"unread-{k}", name="GPU that cannot be read") for k in range(2)]
    [nvml] = [check for check in node_checks([seen("gpu01", GPU, *unread)]) if check.name == "NVML"]
    assert nvml.evidence == "2 x GPU that cannot be read + 1 x NVIDIA H100, driver 580.1, CUDA 13.0"


def test_connections_that_fail_have_their_remedy_and_no_further_check() -> None:
    refused = TransportError("auth", "ssh: gpu01 was refused: no key was accepted", "check `ssh gpu01`")
    exited = TransportError("exited", "the agent ended with exit code 3", "")
    down = NodeSeen(Node("gpu01", "gpu01"), NodeFacts("gpu01", error="x"), NodeView("gpu01", "unreachable"), refused)
    assert bad(down) == [("gpu01", "ssh", "fail", "ssh: gpu01 was refused: no key was accepted", "check `ssh gpu01`")]
    assert bad(msgspec.structs.replace(down, failure=exited)) == [
        ("gpu01", "agent", "fail", "the agent ended with exit code 3", "")
    ]
    silent = msgspec.structs.replace(down, failure=None, facts=NodeFacts("gpu01"))
    assert bad(silent) == [("gpu01", "ssh", "fail", "no answer yet", "try `ssh gpu01`")]
    closed = msgspec.structs.replace(silent, facts=NodeFacts("gpu01", closed=True))
    assert [found[:3] for found in bad(closed)] == [("gpu01", "ssh", "skipped")]
    assert [none_reached(nodes) for nodes in ([], [closed], [closed, down], [down, seen("gpu02")])] == [
        False, False, True, False,
    ]  # fmt: skip


def test_faults_of_a_node_that_was_read() -> None:
    def gpu(**changes: Any) -> GpuView:
        return msgspec.structs.replace(GPU, **changes)

    mismatch = "driver/library version mismatch: the driver was updated; reload its kernel modules or reboot"
    [found] = bad(seen("gpu01", error=mismatch))
    assert found == (
        "gpu01", "NVML", "fail", "driver/library version mismatch: the driver was updated",
        "reload its kernel modules or reboot",
    )  # fmt: skip
    gpus = [
        gpu(state="broken", reason="fallen off the bus"),
        gpu(index=1, sick=["too hot", "row remap pending"], flags=["sick"]),
        gpu(index=2, state="unknown", reason="not readable: memory"),
        gpu(index=3, state="unknown", reason="not readable: memory"),
        gpu(index=4, state="reserved", flags=["disputed"], reason="k1 and k2"),
    ]
    assert [found[2:4] for found in bad(seen("gpu01", *gpus))] == [
        ("fail", "GPU 0; broken: fallen off the bus"),
        ("warn", "GPU 1; sick: too hot; row remap pending"),
        ("warn", "GPU 2, GPU 3; unknown: not readable: memory"),
        ("warn", "GPU 4; disputed: k1 and k2"),
    ]
    nfs = "/home/x cannot hold reservations: it is on nfs, which other machines share; set claims_dir to another folder"
    assert [found[1:] for found in bad(seen("gpu01", gpu(state="unknown"), claims_error=nfs))] == [
        ("reservations", "fail", nfs.rpartition("; ")[0], "set claims_dir to another folder")
    ]
    assert [found[1:3] for found in bad(seen("gpu01", python="", source="nvidia-smi"))] == [
        ("agent", "warn"), ("NVML", "warn"),
    ]  # fmt: skip
    drained = seen("gpu01", scheduler_state="idle+drain", scheduler_reason="fan [root]", claims_error="no matter")
    assert [found[1:4] for found in bad(drained)] == [
        ("slurm", "warn", "idle+drain: fan [root]; Slurm starts no job there")
    ]


def test_drivers_that_differ_are_listed_with_their_nodes() -> None:
    gpus = [msgspec.structs.replace(GPU, uuid=uuid) for uuid in ("GPU-1", "GPU-2", "GPU-3")]
    nodes = [seen("gpu01", gpus[0]), seen("gpu02", gpus[1], driver="575.2"), seen("gpu03", gpus[2])]
    assert bad(*nodes)[-1][:4] == (
        None, "driver", "warn", "580.1 on gpu[01,03]; 575.2 on gpu02; the nodes differ",
    )  # fmt: skip


def hello(node: NodeSeen, **changes: Any) -> NodeSeen:
    """Return a node whose agent said something else in its first message."""
    assert node.facts.hello is not None
    first = msgspec.structs.replace(node.facts.hello, **changes)
    return msgspec.structs.replace(node, facts=msgspec.structs.replace(node.facts, hello=first))


def test_a_small_shm_and_forbidden_stacks_are_found_without_a_launch() -> None:
    tiny, scope = hello(seen("gpu01"), shm_free=4096), hello(seen("gpu01"), ptrace_scope=3)
    assert [found[1:4] for found in bad(tiny)] == [
        ("/dev/shm", "fail", "/dev/shm has 0.0 MiB free; NCCL needs 32 MiB per rank")
    ]
    assert [found[1:] for found in bad(scope)] == [
        (
            "ptrace", "warn", "kernel.yama.ptrace_scope is 3; stalled ranks are reported without stacks",
            "on that node, as root: sysctl kernel.yama.ptrace_scope=1 (3 lasts until the next boot)",
        )
    ]  # fmt: skip
    assert bad(hello(seen("gpu01"), shm_free=2**34, ptrace_scope=1)) == []


def test_machines_with_one_hostname_and_one_machine_with_two_names_are_named() -> None:
    other = msgspec.structs.replace(GPU, uuid="GPU-b")
    same = [hello(seen("gpu01"), hostname="node"), hello(seen("gpu02", other), hostname="node", boot_id="other")]
    assert [found[:4] for found in bad(*same)] == [
        (None, "hostname", "warn", "gpu[01-02] have the same hostname, node; logs, caches and locks that programs "
         "name by host are mixed up in a shared home"),
    ]  # fmt: skip
    container = [hello(seen("gpu01"), hostname="node"), hello(seen("gpu02", other), hostname="node")]
    assert bad(*container) == [], "of one machine, which may have one name"
    assert [found[:4] for found in bad(seen("gpu01"), seen("gpu02"))] == [
        (None, "GPU", "warn", "gpu[01-02] have the same GPUs; one machine under several names")
    ]


@pytest.mark.parametrize(
    ("at", "offset_s"),
    [(100.0, 0.0), (103.0, 0.0), (103.5, 0.5), (99.0, -1.0), (3703.0, 3600.0)],
)
def test_a_clock_is_off_by_no_more_than_the_reading_proves(at: float, offset_s: float) -> None:
    assert clock_offset(at, sent=100.0, arrived=103.0) == offset_s


def test_a_wrong_clock_is_a_warning() -> None:
    ahead, behind, unread = (msgspec.structs.replace(seen("gpu01"), offset_s=s) for s in (3600.0, -7.0, None))
    assert [found[1:4] for found in bad(ahead)] == [
        ("clock", "warn", "1h00m ahead of this machine's; a lease expires by the clock of its node")
    ]
    assert bad(behind)[0][3].startswith("7s behind this machine's")
    assert bad(unread)[0][1:3] == ("clock", "skipped")


def test_this_machine() -> None:
    assert {c.status for c in machine_checks(HEALTHY, None)} == {"ok", "skipped"}
    sick = msgspec.structs.replace(
        HEALTHY, free=2**20, reapers=["logind kills the keeper; to keep it, enable linger"], pyspy=None,
        slurm=SlurmFacts("slurm 23.11.4", "slurmctld on ctl did not answer; is it stopped?"),
    )  # fmt: skip
    found = {c.name: c for c in machine_checks(sick, None)}
    assert {name: c.status for name, c in found.items() if c.status != "ok"} == {
        "state folder": "warn", "keeper": "warn", "py-spy": "warn", "slurm": "fail",
    }  # fmt: skip
    assert (found["keeper"].evidence, found["keeper"].remedy) == (
        "logind kills the keeper", "to keep it, enable linger",
    )  # fmt: skip
    full = msgspec.structs.replace(HEALTHY, state_error="/home is not a writable folder")
    assert machine_checks(full, None)[0].status == "fail"
    nodes = {name: SchedulerNode(name, name, name, "idle", gpus=(Gres("", 8),)) for name in ("n1", "n2")}
    slurm = msgspec.structs.replace(HEALTHY, slurm=SlurmFacts("slurm 23.11.4"))
    found = {c.name: c for c in machine_checks(slurm, Schedule(0.0, "lab", nodes))}
    assert found["slurm"].evidence == "slurm 23.11.4: the controller answers; nodes with GPUs: n[1-2]"


def test_two_hundred_nodes_make_a_short_page() -> None:
    names = [f"gpu{n:03}" for n in range(1, 201)]
    checks = [check for name in names for check in node_checks([seen(name)])]
    checks += [Check("ssh", name, "fail", f"ssh: {name}.lab is unknown", "", f"run `ssh {name}`") for name in names]
    checks += [Check("host key", name, "fail", f"ssh: key {n}") for n, name in enumerate(names)]
    checks += [Check("connect", name, "ok", f"reaches gpu{n:03} in {n} ms") for n, name in enumerate(names)]
    lines = page({"nodes": checks}, 80, colour=False)
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80
    assert "  ok       ssh             gpu[001-200]: connected as alice" in lines
    assert "  fail     ssh             gpu[001-200]: ssh: NODE.lab is unknown" in lines
    assert "                           → run `ssh NODE`" in lines
    assert "  fail     host key        gpu[012-200]: 189 more results; --json has them all" in lines
    assert lines[-1] == summary(checks) == "1200 ok, 400 failed"


def test_results_that_differ_stay_apart() -> None:
    checks = [Check("a", "n1", "ok", "x"), Check("a", "n2", "ok", "y"), Check("b", None, "warn", "z", "c", "r")]
    assert fold(checks) == checks
    assert summary(checks) == "2 ok, 1 warning"
    coloured = page({"here": checks}, None, colour=True)
    assert coloured[1] == "  \x1b[32mok     \x1b[0m  a               n1: x"
