"""The leases among a schedule's jobs, and the keeper's records of jobs."""

from __future__ import annotations

import json

import msgspec
import pytest

from gpuboard.keeper.holder import Holder
from gpuboard.keeper.record import KeptJob, KeptNode, LeaseRecord, decode, files_of
from gpuboard.leases.slurm.schedule import leases
from gpuboard.model.lease import LeaseGpu
from gpuboard.model.schedule import Grant, Gres, Schedule, SchedulerJob, SchedulerNode
from gpuboard.model.snapshot import GpuView, JobView, MigView, NodeView, Snapshot

NOW = 1_800_000_000.0


def job(number: int, name: str, *grants: Grant, **more: object) -> SchedulerJob:
    values = {"state": "running", "started": NOW - 60, "until": NOW + 600, **more}
    return SchedulerJob(str(number), number, "alice", 2001, name, "gpu", grants=grants, **values)  # type: ignore[arg-type]


def gpu(index: int, job_id: str | None, uuid: str = "") -> GpuView:
    jobs = [JobView(job_id, "alice", "gpu", None)] if job_id else []
    return GpuView(index, uuid or f"GPU-{index}", "H100", "", "allocated", "", jobs=jobs)


def called(name: str) -> str | None:
    """Return a node's name in Slurm; gpu01 is called lab-a here."""
    return "gpu01" if name == "lab-a" else name


def found(jobs: list[SchedulerJob], *views: NodeView) -> list[tuple[str, list[LeaseGpu]]]:
    nodes = {name: SchedulerNode(name, name, name, "mixed") for name in ("gpu01", "gpu02")}
    schedule = Schedule(NOW, "lab", nodes, tuple(jobs))
    return [(lease.id, lease.gpus) for lease in leases(schedule, Snapshot(1, "", "", list(views)), NOW, called)]


def test_gpus_are_those_that_the_snapshot_shows_with_the_job() -> None:
    grants = Grant("gpu01", (Gres("h100", 2, (1, 3)),)), Grant("gpu02", (Gres("h100", 1, (0,)),))
    views = [
        NodeView("lab-a", "up", gpus=[gpu(0, None), gpu(1, "7"), gpu(3, "7"), gpu(4, "8")]),
        NodeView("gpu02", "up", gpus=[gpu(5, "7", "slurm-gpu02-5")]),
    ]
    assert found([job(7, "gpuboard-k3f9xy", *grants)], *views) == [
        ("k3f9xy", [LeaseGpu("lab-a", 1, "GPU-1"), LeaseGpu("lab-a", 3, "GPU-3"), LeaseGpu("gpu02", 5, "")])
    ]


def test_mig_devices_of_a_job_have_their_numbers() -> None:
    devices = [MigView(f"MIG-{n}", "3g.40gb", "allocated", "", None, None, jobs=gpu(0, str(n)).jobs) for n in (6, 7)]
    view = NodeView("gpu01", "up", gpus=[msgspec.structs.replace(gpu(2, None), mig=devices)])
    grant = Grant("gpu01", (Gres("3g.40gb", 1),))
    assert found([job(7, "gpuboard-k3f9xy", grant)], view) == [("k3f9xy", [LeaseGpu("gpu01", 2, "MIG-7", mig=1)])]


def test_where_the_snapshot_does_not_show_all_they_have_no_index() -> None:
    grant = Grant("gpu01", (Gres("h100", 2),))
    view = NodeView("gpu01", "up", gpus=[gpu(0, "7")])
    assert found([job(7, "gpuboard-k3f9xy", grant)], view) == [("k3f9xy", [LeaseGpu("gpu01", None, "")] * 2)]


def test_other_jobs_and_completing_ones_are_no_leases() -> None:
    grant = Grant("gpu01", (Gres("h100", 1),))
    jobs = [job(1, "train", grant), job(2, "gpuboard-x", grant), job(3, "gpuboard-abcdef", grant, state="completing")]
    assert found(jobs) == []


def test_a_lease_has_owner_times_job_and_purpose_and_hostile_text_is_cleaned() -> None:
    grant = Grant("gpu01", (Gres("h100", 1),))
    schedule = Schedule(NOW, "lab", {}, (job(7, "gpuboard-k3f9xy", grant, comment="a\x1b[31m\nb"),))
    [lease] = leases(schedule, Snapshot(1, "", "", []), NOW, called)
    assert (lease.owner, lease.uid, lease.job, lease.purpose, lease.remaining_s, lease.nodes) == (
        "alice", 2001, "7", "a[31m b", 600.0, ["gpu01"],
    )  # fmt: skip
    assert (lease.since, lease.until) == ("2027-01-15T07:59:00.000Z", "2027-01-15T08:10:00.000Z")
    assert json.loads(msgspec.json.encode(lease))["job"] == "7"


def test_one_id_with_two_owners_is_two_leases() -> None:
    grant = Grant("gpu01", (Gres("h100", 1),))
    forged = msgspec.structs.replace(job(8, "gpuboard-k3f9xy", grant), user="mallory", uid=666)
    schedule = Schedule(NOW, "lab", {}, (forged, job(7, "gpuboard-k3f9xy", grant)))
    assert [(lease.owner, lease.job) for lease in leases(schedule, Snapshot(1, "", "", []), NOW, called)] == [
        ("alice", "7"), ("mallory", "8"),
    ]  # fmt: skip


HOLDER = Holder("login1", "boot", 42, 4242)
JOB = KeptJob(
    "gpuboard-k3f9xy", 7, "/h/k3f9xy.alive", 30.0, ["/bin/scancel"], ["/bin/squeue"], {"A": "b"}, HOLDER,
    {"FAILED": "it failed"}, ["TIMEOUT"], ["SLURM_JWT"], "GPUBOARD_SUBMIT=k3f9xy", "SLURM_JOB_ID",
)  # fmt: skip
RECORD = LeaseRecord("k3f9xy", [KeptNode("Slurm", [], None, "", None)], {}, HOLDER, 1, 2, 3.0, 4.0, JOB)


@pytest.mark.parametrize("kept", [JOB, JOB._replace(number=None, taker=None), None])
def test_a_record_with_a_job_survives_encoding(kept: KeptJob | None) -> None:
    record = RECORD._replace(job=kept)
    assert decode(json.loads(json.dumps(record.plain()))) == record


def test_a_record_of_an_older_release_has_no_job() -> None:
    values = RECORD._replace(job=None).plain()
    del values["job"]
    assert decode(values).job is None


@pytest.mark.parametrize("wrong", [{"number": "x"}, {"cancel": 5}, {"environ": []}, {"taker": {"pid": 1}}])
def test_a_record_with_an_invalid_job_is_refused(wrong: dict[str, object]) -> None:
    values = RECORD.plain()
    values["job"] = values["job"] | wrong
    with pytest.raises(ValueError, match=r"not a keeper|invalid literal"):
        decode(values)


def test_the_files_of_a_lease() -> None:
    assert files_of(RECORD, "/s") == ["/s/leases/k3f9xy.json", "/h/k3f9xy.alive", "/h/k3f9xy.alive.seen"]
