"""A real keeper with leases that are jobs; two small scripts replace the scheduler and log its queries."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuboard.config import Settings
from gpuboard.keeper import client as keeper
from gpuboard.keeper import runtime_dir
from gpuboard.keeper.client import Handover, KeeperError, KeptJob, KeptNode
from gpuboard.keeper.holder import Holder, identify
from gpuboard.leases.ledger import Scope
from gpuboard.leases.slurm import allocator
from gpuboard.leases.slurm.fit import Fit
from gpuboard.leases.slurm.lease import end
from gpuboard.leases.terms import Terms
from gpuboard.model.request import Request
from gpuboard.model.schedule import Seen
from gpuboard.scheduler.slurm import client as slurm
from gpuboard.scheduler.slurm.client import ENDED_STATES, Jobs, Uncertain
from gpuboard.scheduler.slurm.sbatch_args import Ask, Shape
from tests.integration.keeper_lab import unlocked
from tests.waiting import until

NAME = "gpuboard-k3f9xy"

# The scheduler's commands: the file `jobs` lists the jobs, a cancelled one is removed, and every command fails while
# there is a file `away`.
LOOK = """#!/bin/sh
cd {folder}; echo look >>asked; [ ! -e away ] || {{ echo "no controller" >&2; exit 1; }}
cat jobs
"""
CANCEL = """#!/bin/sh
cd {folder}; echo cancel >>asked; [ ! -e away ] || {{ echo "no controller" >&2; exit 1; }}
[ -e stuck ] || : >jobs
"""
# The controller does not answer, and accepts the job after the first query.
SBATCH = """#!/bin/sh
: >{folder}/submitting; exec sleep 60
"""
ACCEPT = LOOK + '[ -e accepted ] || {{ echo "12|PENDING|{name}" >jobs; : >accepted; }}\n'


class Unqueried:
    """A scheduler that knows nothing."""

    seen = Seen(None, 0.0, None, 30.0)

    def start(self, changed: object) -> None: ...
    def look(self, timeout_s: float = 0.0, *, retry: bool = False) -> Seen:
        return self.seen

    def close(self) -> None: ...


class Lab:
    """One user's home and scheduler, and the process that holds the lease."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"XDG_STATE_HOME": str(folder / "state"), "PATH": os.environ["PATH"]}
        for name, text in (("look", LOOK), ("cancel", CANCEL)):
            (folder / name).write_text(text.format(folder=folder))
            (folder / name).chmod(0o755)
        self.seen = 0
        self.jobs("RUNNING")
        self.heartbeat = folder / "k3f9xy.alive"
        self.heartbeat.touch()
        self.holder = subprocess.Popen(["sleep", "600"])

    def jobs(self, state: str) -> None:
        """Set the scheduler's jobs: the lease's in this state, and others."""
        (self.folder / "jobs").write_text(f"5|RUNNING|other|name\n12|{state}|{NAME}\nnonsense\n")

    def asked(self) -> list[str]:
        """Return the commands run since the last call."""
        file = self.folder / "asked"
        words = (file.read_text().split() if file.exists() else [])[self.seen :]
        self.seen += len(words)
        return words

    def hand_over(self, number: int | None = None, taker: Holder | None = None) -> Handover:
        """Hand the lease to the keeper."""
        job = KeptJob(
            NAME, number, str(self.heartbeat), 0.2, [str(self.folder / "cancel")], [str(self.folder / "look")],
            {"PATH": os.environ["PATH"]}, taker or identify(os.getpid()), ENDED_STATES, ["TIMEOUT"], [],
            "GPUBOARD_SUBMIT=k3f9xy", "SLURM_JOB_ID",
        )  # fmt: skip
        place = KeptNode("Slurm", [], None, "", None)
        return keeper.hand_over(
            keeper.record("k3f9xy", [place], {}, identify(self.holder.pid), 3600.0, job=job), self.env
        )

    def started(self, for_s: float = 3600.0) -> Handover:
        """Hand the lease to the keeper; its job then starts, for ``for_s`` seconds."""
        handed = self.hand_over()
        handed.job_started(12, for_s)
        return handed

    @property
    def kept(self) -> bool:
        """Whether the keeper has the lease."""
        return keeper.has("k3f9xy", self.env)

    @property
    def log(self) -> str:
        """The keeper's log."""
        return (self.place / "log").read_text()

    @property
    def place(self) -> Path:
        """The keeper's folder."""
        return self.folder / "state" / "gpuboard" / "keeper" / runtime_dir.folder_name(self.env)

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        """Let every write of the lease's record fail: in its place there is a folder."""
        record = self.place / "k3f9xy.json"
        record.unlink()
        record.mkdir()
        yield
        record.rmdir()

    def kill_keeper(self) -> None:
        """Kill the keeper."""
        subprocess.run(["pkill", "-9", "-f", str(self.place)], check=True)
        until(lambda: unlocked(self.place / "lock"), "it has ended and closed its files")


@pytest.fixture
def lab(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A lab whose holder ends with the test."""
    lab = Lab(tmp_path)
    yield lab
    lab.holder.kill()
    lab.holder.wait()
    subprocess.run(["pkill", "-9", "-f", str(lab.place)])


def test_heartbeats_cause_no_further_query_of_the_scheduler(lab: Lab) -> None:
    lab.started().confirm()
    for _ in range(10):
        before = lab.heartbeat.stat().st_mtime_ns
        until(lambda at=before: lab.heartbeat.stat().st_mtime_ns != at, "a heartbeat")  # type: ignore[misc]
    assert lab.asked() in ([], ["look"])


def test_the_end_of_the_holder_ends_the_job(lab: Lab) -> None:
    lab.started().confirm()
    lab.holder.kill()
    lab.holder.wait()
    until(lambda: not lab.kept, "the keeper removes it")
    asked = lab.asked()
    assert asked[asked.index("cancel") :][:2] == ["cancel", "look"], "a slow answer may be asked for again"
    assert not lab.heartbeat.exists()


def test_an_abandoned_lease_is_cancelled(lab: Lab) -> None:
    lab.started().abandon()
    until(lambda: not lab.kept, "the keeper removes it")
    assert lab.asked()[-2:] == ["cancel", "look"]


def test_a_job_without_a_number_is_queried_twice(lab: Lab) -> None:
    lab.jobs("PENDING")
    lab.hand_over().abandon()
    until(lambda: not lab.kept, "the keeper removes it")
    asked = lab.asked()
    assert asked[:4] == ["cancel", "look"] * 2
    assert asked == ["cancel", "look"] * (len(asked) // 2)  # once more where an answer took seconds
    assert "querying once more" in lab.log


def test_release_waits_for_a_running_submission(lab: Lab) -> None:
    env = {"GPUBOARD_SUBMIT": "k3f9xy", "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sleep", "600"], env=env) as submission:
        lab.hand_over().abandon()
        time.sleep(2.0)  # nothing must happen now
        assert "cancel" not in lab.asked()
        submission.kill()
    until(lambda: "cancel" in lab.asked(), "it is cancelled then")


@pytest.mark.parametrize("what", ["the request is cancelled", "the keeper is killed"])
def test_a_job_that_is_accepted_after_its_submission_failed_is_cancelled(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for name, text in (("sbatch", SBATCH), ("scancel", CANCEL), ("squeue", ACCEPT)):
        (lab.folder / name).write_text(text.format(folder=lab.folder, name=NAME))
        (lab.folder / name).chmod(0o755)
    jobs = lab.folder / "jobs"
    jobs.write_text("")
    monkeypatch.setenv("PATH", f"{lab.folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "SUBMIT_S", 4.0)
    monkeypatch.setattr(allocator, "new_id", lambda _: "k3f9xy")
    monkeypatch.setattr(allocator.SlurmAllocator, "_fit", lambda *_: (Fit(Shape(1, 1), ""), 60.0))
    env = lab.env | {"PATH": os.environ["PATH"]}
    own = allocator.SlurmAllocator(Scope(()), Settings(), env, scheduler=Unqueried(), options=Ask())

    def disturb() -> None:
        until((lab.folder / "submitting").exists)
        own.abandon() if what == "the request is cancelled" else lab.kill_keeper()

    thread = threading.Thread(target=disturb)
    thread.start()
    with pytest.raises(Uncertain), own:
        own.allocate(Request(n=1), Terms(60.0, identify(lab.holder.pid)))
    thread.join()
    until((lab.folder / "accepted").exists, "the job is accepted")
    until(lambda: not jobs.read_text(), "the keeper cancels it")
    until(lambda: not lab.kept)


def test_the_jobs_own_script_is_no_submission(lab: Lab) -> None:
    env = {"GPUBOARD_SUBMIT": "k3f9xy", "SLURM_JOB_ID": "12", "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sleep", "600"], env=env) as script:
        lab.started().abandon()
        until(lambda: not lab.kept, "the keeper removes it")
        script.kill()


def test_release_is_retried_while_the_scheduler_is_unreachable(lab: Lab) -> None:
    (lab.folder / "away").touch()
    lab.started().abandon()
    until(lambda: "not cancelled: no controller" in lab.log, "one attempt failed")
    assert lab.kept
    (lab.folder / "away").unlink()
    until(lambda: not lab.kept, "the keeper removes it")


def test_a_job_that_does_not_end_stays_with_the_keeper(lab: Lab) -> None:
    (lab.folder / "stuck").touch()
    lab.started().abandon()
    until(lambda: "cancelled, but it still exists" in lab.log, "its state was queried")
    assert lab.kept


@pytest.mark.parametrize(
    ("state", "words"),
    [("PREEMPTED", "it was preempted"), ("NODE_FAIL", "one of its nodes failed"), ("", "it no longer exists"),
     ("TIMEOUT", None)],
)  # fmt: skip
def test_a_job_ended_by_others_is_reported_once(lab: Lab, state: str, words: str | None) -> None:
    handed = lab.hand_over()
    lab.jobs(state)
    if not state:
        (lab.folder / "jobs").write_text("")
    handed.job_started(12, 3600.0)
    handed.confirm()
    until(lambda: not lab.kept, "the keeper removes it")
    lost = [f"lease k3f9xy ended: Slurm job 12: {words}"] if words else []  # its time limit is no loss
    assert keeper.recover(lab.env) == lost
    assert keeper.recover(lab.env) == []
    assert not lab.heartbeat.exists()


def test_a_job_that_is_still_completing_is_kept(lab: Lab) -> None:
    lab.jobs("COMPLETING")
    lab.started().confirm()
    until(lambda: "look" in lab.asked(), "its state is queried")
    for _ in range(3):
        before = lab.heartbeat.stat().st_mtime_ns
        until(lambda at=before: lab.heartbeat.stat().st_mtime_ns != at, "a heartbeat")  # type: ignore[misc]
    assert keeper.recover(lab.env) == []
    assert lab.kept


def test_a_job_cancelled_by_its_owner_is_no_loss(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper's query is answered after scancel's effect, and scancel returns after the keeper's reaction."""
    answers_late = LOOK.replace("cat jobs", "until [ -e cancelled ]; do sleep 0.05; done; cat jobs")
    scancel = """#!/bin/sh
        cd {folder}; until [ -e asked ]; do sleep 0.05; done
        echo '12|CANCELLED|{name}' >jobs; : >cancelled; while [ -e {record} ]; do sleep 0.05; done
    """
    (lab.folder / "look").write_text(answers_late.format(folder=lab.folder))
    (lab.folder / "scancel").write_text(scancel.format(folder=lab.folder, name=NAME, record=lab.place / "k3f9xy.json"))
    (lab.folder / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{lab.folder}:{os.environ['PATH']}")
    lab.started().confirm()
    end("k3f9xy", lambda: Jobs(lab.env).cancel_number(12), lab.env)
    assert "it was cancelled" in lab.log
    assert keeper.recover(lab.env) == []


def test_confirming_a_lease_fails_when_the_keeper_has_ended(lab: Lab) -> None:
    handed = lab.started()
    lab.kill_keeper()
    with pytest.raises(KeeperError, match="the keeper has ended"):
        handed.confirm()


def test_a_full_disk_while_the_job_is_submitted_leaves_no_job(lab: Lab) -> None:
    """The command hands the lease over again, which fails too, and leaves the job to the keeper."""
    handed = lab.hand_over()
    with lab.full_disk():
        with pytest.raises(KeeperError, match="Is a directory"):
            handed.job_started(12, 3600.0)
        before = lab.heartbeat.stat().st_mtime_ns
        until(lambda: lab.heartbeat.stat().st_mtime_ns != before, "heartbeats continue")
        with pytest.raises(KeeperError, match=r"refused the lease: .*: Is a directory"):
            lab.hand_over(12)
        handed.abandon()
        until(lambda: "k3f9xy: released" in lab.log, "the keeper removes it")
    assert "cancel" in lab.asked()


def test_confirming_a_lease_fails_when_its_record_cannot_be_written(lab: Lab) -> None:
    """A successor would find it unconfirmed, and cancel a job in use."""
    handed = lab.started()
    with lab.full_disk(), pytest.raises(KeeperError, match="Is a directory"):
        handed.confirm()


def test_a_successor_takes_the_lease_over(lab: Lab) -> None:
    lab.started().confirm()
    lab.kill_keeper()
    assert keeper.recover(lab.env) == []
    before = lab.heartbeat.stat().st_mtime_ns
    until(lambda: lab.heartbeat.stat().st_mtime_ns != before, "heartbeats continue")
    lab.holder.kill()
    lab.holder.wait()
    until(lambda: not lab.kept, "the keeper removes it")


def test_a_successor_releases_the_lease_of_a_command_that_ended(lab: Lab) -> None:
    taker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    handed = lab.hand_over(12, identify(taker.pid))
    assert not handed.lost
    lab.kill_keeper()
    until(lambda: handed.lost, "the loss is noticed")
    keeper.recover(lab.env)
    until(lambda: "k3f9xy: taken over" in lab.log, "a successor is running, and so is the command")
    assert "ended before it handed it over" not in lab.log
    taker.kill()
    taker.wait()
    until(lambda: not lab.kept, "the keeper removes it")
    assert "ended before it handed it over" in lab.log
    assert "cancel" in lab.asked()


def test_renewing_extends_the_lease(lab: Lab) -> None:
    lab.started(10.0).confirm()
    keeper.renew("k3f9xy", 3600.0, lab.env)
    started = time.monotonic()
    until(lambda: time.monotonic() - started > 11.0, "its first end has passed")
    assert lab.kept


def test_holders_are_listed_on_their_host(lab: Lab) -> None:
    lab.hand_over(12).confirm()
    assert keeper.holders(lab.env) == {"k3f9xy": identify(lab.holder.pid)}
    (lab.place / "bad.json").write_text("{}")
    assert keeper.holders(lab.env).keys() == {"k3f9xy"}
