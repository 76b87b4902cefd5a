"""Simulated nodes: readings follow from description and clock; simulated claims count like real ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuboard.agent.claims import store as claims
from gpuboard.agent.simulate import life
from gpuboard.agent.simulate.gpus import Simulated
from gpuboard.agent.simulate.ranks import ranks
from gpuboard.cluster.simulated import KINDS, living_nodes
from gpuboard.model.gpu import GpuReading, GpuStatic
from gpuboard.model.reading import Claim
from tests.waiting import Stopwatch, until

GIB = 2**30
JOB = {
    "gpus": ["0"], "from": 100.0, "until": 200.0, "user": "bob", "uid": 2000002, "pid": 4200001,
    "command": "python train.py", "memory": 40 * GIB, "utilization": 90,
}  # fmt: skip
CLAIM = {
    "gpus": ["1", "2/0"], "from": 50.0, "until": 150.0, "user": "alice", "uid": 2000001, "lease": "k3f9qa",
    "purpose": "ablation", "for_s": 3600.0, "nodes": ["n1"], "count": 2,
}  # fmt: skip
MIG = {"2": [["3g.40gb", 40 * GIB], ["3g.40gb", 40 * GIB]]}
SCRIPT = {"period": 900.0, "jobs": [JOB], "claims": [CLAIM], "faults": [], "hangs": [[300.0, 330.0]]}


def simulated(at: float, **script: Any) -> Simulated:
    description = {"cluster": "test-1-1", "count": 4, "mig": MIG, "at": at, "script": {**SCRIPT, **script}}
    return Simulated(description, "n1")


def reading(at: float, gpu: int = 0, **script: Any) -> GpuReading:
    values = simulated(at, **script).readings(0.0, lambda *_: None)
    return msgspec.convert(values, list[GpuReading])[gpu]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder for claims")
    tmp_path.chmod(0o1777)
    return str(tmp_path)


def take(probe: Simulated, folder: str, *gpus: str, lease: str = "mm22mm") -> Any:
    args = {
        "lease": lease,
        "uuids": [probe.uuid(gpu) for gpu in gpus],
        "for_s": 60.0,
        "nodes": ["n1"],
        "gpus": len(gpus),
    }
    return claims.handle("take", args, probe.folder(folder))


def owners(probe: Simulated, folder: str) -> dict[str, str]:
    found, error = probe.folder(folder).read()
    assert error is None
    return {claim.uuid.removeprefix(probe.start_of_uuid): claim.owner for claim in msgspec.convert(found, list[Claim])}


def test_elements_with_an_end_repeat_each_period() -> None:
    times = [99.0, 100.0, 199.0, 200.0, 1000.0, 1100.0, -750.0]
    assert [life.began(JOB, t, 900.0) for t in times] == [None, 100.0, 100.0, None, 1000.0, None, -800.0]
    assert life.began({"from": -5.0, "until": None}, 1e6, 900.0) == -5.0


def test_a_job_starts_grows_and_is_gone() -> None:
    seen = [reading(t) for t in (99.0, 101.0, 108.0, 160.0, 201.0)]
    assert [[p.user for p in r.processes or []] for r in seen] == [[], ["bob"], ["bob"], ["bob"], []]
    memory = [r.memory_used or 0 for r in seen]
    assert memory[0] == memory[4] == 0
    assert 0 < memory[1] < GIB < memory[2] < memory[3] == 40 * GIB
    assert (seen[0].utilization, seen[1].utilization, seen[4].utilization) == (0, 0, 0)
    assert (seen[3].utilization or 0) > 75
    assert (seen[3].temperature or 0) > (seen[4].temperature or 0) > (seen[0].temperature or 0)  # it cools slowly


def test_readings_depend_on_the_moment_alone() -> None:
    one, other = reading(151.5), reading(151.5)
    assert msgspec.structs.replace(one, processes=None) == msgspec.structs.replace(other, processes=None)


def test_a_process_of_the_simulated_has_a_pid_that_no_signal_reaches() -> None:
    highest = int(Path("/proc/sys/kernel/pid_max").read_text())
    pids = [job["pid"] for node in living_nodes() for job in (node.simulate or {})["script"]["jobs"]]
    assert len(pids) > 50
    assert min(pids) > max(highest, 2**22)


def test_a_lost_gpu_has_no_other_values_and_an_xid_has_its_time() -> None:
    fault = {
        "gpus": ["0"],
        "from": 120.0,
        "until": None,
        "reading": {"lost": True, "error": "GPU is lost"},
        "xids": [79],
    }
    earliest = time.time()
    before, after = reading(119.0, faults=[fault]), reading(150.0, faults=[fault])
    latest = time.time()
    assert (before.lost, before.xids) == (False, [])
    assert (after.lost, after.error, after.memory_used, after.processes) == (True, "GPU is lost", None, None)
    [xid] = after.xids or []
    assert (xid.code, earliest - 31.0 < xid.at < latest - 29.0) == (79, True)


def test_faults_change_single_values() -> None:
    fault = {"gpus": ["0"], "from": 0.0, "until": None, "reading": {"throttle": ["hw_thermal"], "temperature": 93}}
    seen = reading(160.0, faults=[fault])
    assert (seen.throttle, seen.temperature, seen.memory_used) == (["hw_thermal"], 93, 40 * GIB)


def test_a_mig_parent_and_its_devices() -> None:
    job = {**JOB, "gpus": ["2/1"], "memory": 9 * GIB}
    seen = reading(160.0, gpu=2, jobs=[job])
    assert [(d.uuid, d.memory_used) for d in seen.mig] == [
        ("SIM-test-1-1-n1-2-mig0", 0),
        ("SIM-test-1-1-n1-2-mig1", 9 * GIB),
    ]
    assert (seen.processes, seen.utilization) == ([], None)
    static = msgspec.convert(simulated(0.0).statics(), list[GpuStatic])
    assert [d.profile for d in static[2].mig or []] == ["3g.40gb", "3g.40gb"]
    assert [s.mig is None for s in static] == [True, True, False, True]


def test_claims_of_others_are_read_with_the_real_ones_and_refused_as_they_are(folder: str) -> None:
    probe = simulated(60.0)
    take(probe, folder, "0")
    me = probe.folder(folder).owner(os.geteuid())
    assert owners(probe, folder) == {"0": me, "1": "alice", "2-mig0": "alice"}
    with pytest.raises(claims.Refuse) as refused:
        take(probe, folder, "1", "3", lease="nn22nn")
    assert refused.value.kind == "conflict"
    assert [c["owner"] for c in refused.value.detail["claims"]] == ["alice"]
    assert "alice (k3f9qa)" in refused.value.message
    assert owners(probe, folder) == {"0": me, "1": "alice", "2-mig0": "alice"}  # nothing of it was taken


def test_leases_of_simulated_users_cannot_be_ended(folder: str) -> None:
    for op in ("release", "renew"):
        with pytest.raises(claims.Refuse) as refused:
            claims.handle(op, {"lease": "k3f9qa", "for_s": 60.0}, simulated(60.0).folder(folder))
        assert (refused.value.kind, refused.value.message) == ("not-yours", "k3f9qa belongs to alice, who is simulated")


def test_simulated_users_respect_real_claims_except_rogues(folder: str) -> None:
    soon = {"from": 40.3, "until": 900.0}
    script = {"jobs": [{**JOB, **soon}, {**JOB, **soon, "user": "dave", "rogue": True}], "claims": [{**CLAIM, **soon}]}
    probe = simulated(0.0, **script)
    probe.description.update(at=40.0)
    take(probe, folder, "0", "1")
    probe.description.update(at=None, epoch=time.time() - 40.2)
    until(lambda: "2-mig0" in owners(probe, folder), "alice comes")
    me = probe.folder(folder).owner(os.geteuid())
    assert owners(probe, folder) == {"0": me, "1": me, "2-mig0": "alice"}
    [seen, *_] = msgspec.convert(probe.readings(0.0, lambda *_: None), list[GpuReading])
    assert [p.user for p in seen.processes or []] == ["dave"]


def test_a_claims_time_runs_by_the_script(folder: str) -> None:
    [first, second] = msgspec.convert(simulated(110.0).folder(folder).read()[0], list[Claim])
    assert (first.remaining_s, first.state, first.gpus, first.nodes) == (3540.0, "live", 2, ["n1"])
    assert round(first.until - first.since) == 3600
    assert second.uuid.endswith("n1-2-mig0")


@pytest.fixture
def pipe() -> Iterator[tuple[int, Callable[[], None]]]:
    ours, theirs = os.pipe()
    ends = [theirs]
    yield ours, lambda: os.close(ends.pop())
    for fd in [ours, *ends]:
        os.close(fd)


def test_a_node_that_hangs_sends_nothing_until_its_end_or_the_clients(
    pipe: tuple[int, Callable[[], None]],
) -> None:
    fd, close = pipe
    epoch = time.time() - 329.5
    description = {"cluster": "test-1-1", "script": SCRIPT, "epoch": epoch}
    watch = Stopwatch()
    Simulated(description, "n1", fd).check(0.0)
    assert time.time() >= epoch + 330.0
    assert watch.stop() < 2.0
    close()
    watch = Stopwatch()
    Simulated({**description, "epoch": time.time() - 301.0}, "n1", fd).check(0.0)
    assert watch.stop() < 2.0


def proc(root: Path, pid: int, **env: str) -> None:
    folder = root / str(pid)
    folder.mkdir()
    (folder / "environ").write_text("\0".join(f"{k}={v}" for k, v in env.items()) + "\0")


def test_ranks_of_our_runs_are_found_on_the_gpus_of_their_lease(tmp_path: Path) -> None:
    def claim(node: str, gpu: int) -> dict[str, Any]:
        return {"lease": "k3f9qa", "uuid": f"SIM-d-{node}-{gpu}", "nodes": ["n1", "n2"], "gpus": 4}

    for rank in range(4):
        variables = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
        proc(tmp_path, 100 + rank, GPUBOARD_LEASE="k3f9qa", **variables)
    proc(tmp_path, 200, GPUBOARD_LEASE="other2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    proc(tmp_path, 201, GPUBOARD_LEASE="k3f9qa")  # a supervisor computes nothing
    on_first = ranks([claim("n1", 3), claim("n1", 10)], str(tmp_path))
    on_second = ranks([claim("n2", 0), claim("n2", 1)], str(tmp_path))
    assert {uuid: p["pid"] for uuid, p in on_first.items()} == {"SIM-d-n1-3": 100, "SIM-d-n1-10": 101}
    assert {uuid: p["pid"] for uuid, p in on_second.items()} == {"SIM-d-n2-0": 102, "SIM-d-n2-1": 103}


def test_the_demos_cluster_follows_from_its_seed() -> None:
    one, other, third = (living_nodes(seed=seed, epoch=5.0, cluster="c") for seed in (1, 1, 2))
    assert one == other
    assert one != third
    assert [node.name for node in one] == list(KINDS)
    assert sum(kind.count for kind in KINDS.values()) == 48


def test_every_script_gives_readings_and_claims_of_their_types_at_any_time(folder: str) -> None:
    for at in (0.0, 47.0, 90.0, 650.0, 5000.0):
        for node in living_nodes(seed=3, at=at, cluster="c"):
            assert node.simulate is not None
            probe = Simulated(node.simulate, node.name)
            static = msgspec.convert(probe.statics(), list[GpuStatic])
            found, error = probe.folder(folder).read()
            readings = msgspec.convert(probe.readings(0.0, lambda *_: None), list[GpuReading])
            assert error is None
            known = {gpu.uuid for gpu in static} | {d.uuid for gpu in static for d in gpu.mig or []}
            assert {claim.uuid for claim in msgspec.convert(found, list[Claim])} <= known
            for gpu, seen in zip(static, readings, strict=True):
                assert gpu.uuid == seen.uuid
                assert (seen.memory_used or 0) <= (gpu.memory_total or 0)
