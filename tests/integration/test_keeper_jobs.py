"""A real keeper with leases that are jobs of a scheduler that two small scripts stand for: what it asks, and when."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuboard.keeper import client as keeper
from gpuboard.keeper import runtime_dir
from gpuboard.keeper.client import Handover, KeeperError, KeptJob, KeptNode
from gpuboard.keeper.holder import Holder, identify
from gpuboard.leases.slurm.lease import end
from gpuboard.scheduler.slurm.client import ENDED_STATES, Jobs
from tests.integration.keeper_lab import unlocked
from tests.waiting import until

NAME = "gpuboard-k3f9xy"

# What stands for the scheduler: it has the jobs that the file `jobs` lists, forgets the one that is cancelled, and
# answers nothing while there is a file `away`.
LOOK = """#!/bin/sh
cd {folder}; echo look >>asked; [ ! -e away ] || {{ echo "no controller" >&2; exit 1; }}
cat jobs
"""
CANCEL = """#!/bin/sh
cd {folder}; echo cancel >>asked; [ ! -e away ] || {{ echo "no controller" >&2; exit 1; }}
[ -e deaf ] || : >jobs
"""


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
        """Say what the scheduler has: our job in this state, and others."""
        (self.folder / "jobs").write_text(f"5|RUNNING|other|name\n12|{state}|{NAME}\nnonsense\n")

    def asked(self) -> list[str]:
        """Return what the scheduler was asked since the last time."""
        file = self.folder / "asked"
        words = (file.read_text().split() if file.exists() else [])[self.seen :]
        self.seen += len(words)
        return words

    def hand_over(self, number: int | None = None, taker: Holder | None = None) -> Handover:
        """Give the lease to the keeper."""
        job = KeptJob(
            NAME, number, str(self.heartbeat), 0.2, [str(self.folder / "cancel")], [str(self.folder / "look")],
            {"PATH": os.environ["PATH"]}, taker or identify(os.getpid()), ENDED_STATES, ["TIMEOUT"], [],
            "GPUBOARD_SUBMIT=k3f9xy", "SLURM_JOB_ID",
        )  # fmt: skip
        place = KeptNode("Slurm", [], None, "", None)
        return keeper.hand_over(
            keeper.record("k3f9xy", [place], {}, identify(self.holder.pid), 3600.0, job=job), self.env
        )

    @property
    def kept(self) -> bool:
        """Whether the keeper has the lease."""
        return keeper.has("k3f9xy", self.env)

    @property
    def log(self) -> str:
        """What the keeper has said."""
        return (self.place / "log").read_text()

    @property
    def place(self) -> Path:
        """The keeper's folder."""
        return self.folder / "state" / "gpuboard" / "keeper" / runtime_dir.folder_name(self.env)

    def kill_keeper(self) -> None:
        """Kill the keeper."""
        subprocess.run(["pkill", "-9", "-f", str(self.place)], check=True)
        until(lambda: unlocked(self.place / "lock"), "it has ended, and let go of what it had open")


@pytest.fixture
def lab(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A lab whose holder ends with the test."""
    lab = Lab(tmp_path)
    yield lab
    lab.holder.kill()
    lab.holder.wait()
    subprocess.run(["pkill", "-9", "-f", str(lab.place)])


def test_life_is_shown_and_the_scheduler_left_in_peace(lab: Lab) -> None:
    handed = lab.hand_over()
    handed.started(12, 3600.0)
    handed.known()
    for _ in range(10):
        before = lab.heartbeat.stat().st_mtime_ns
        until(lambda at=before: lab.heartbeat.stat().st_mtime_ns != at, "life is shown")  # type: ignore[misc]
    assert lab.asked() in ([], ["look"])


def test_the_end_of_the_holder_ends_the_job(lab: Lab) -> None:
    handed = lab.hand_over()
    handed.started(12, 3600.0)
    handed.known()
    lab.holder.kill()
    lab.holder.wait()
    until(lambda: not lab.kept, "the keeper lets go of it")
    asked = lab.asked()
    assert asked[asked.index("cancel") :][:2] == ["cancel", "look"], "a slow answer may be asked for again meanwhile"
    assert not lab.heartbeat.exists()


def test_nobody_was_told_of_it(lab: Lab) -> None:
    handed = lab.hand_over()
    handed.started(12, 3600.0)
    handed.abandon()
    until(lambda: not lab.kept, "the keeper lets go of it")
    assert lab.asked()[-2:] == ["cancel", "look"]


def test_a_job_without_a_number_is_looked_for_twice(lab: Lab) -> None:
    lab.jobs("PENDING")
    lab.hand_over().abandon()
    until(lambda: not lab.kept, "the keeper lets go of it")
    asked = lab.asked()
    assert asked[:4] == ["cancel", "look"] * 2
    assert asked == ["cancel", "look"] * (len(asked) // 2)  # once more where an answer took seconds
    assert "looking once more" in lab.log


def test_a_submission_on_its_way_is_waited_for(lab: Lab) -> None:
    env = {"GPUBOARD_SUBMIT": "k3f9xy", "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sleep", "600"], env=env) as submission:
        lab.hand_over().abandon()
        time.sleep(2.0)  # nothing must happen now
        assert "cancel" not in lab.asked()
        submission.kill()
    until(lambda: "cancel" in lab.asked(), "then it is cancelled")


def test_the_jobs_own_script_is_no_submission(lab: Lab) -> None:
    env = {"GPUBOARD_SUBMIT": "k3f9xy", "SLURM_JOB_ID": "12", "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sleep", "600"], env=env) as script:
        handed = lab.hand_over()
        handed.started(12, 3600.0)
        handed.abandon()
        until(lambda: not lab.kept, "the keeper lets go of it")
        script.kill()


def test_while_the_scheduler_is_away_it_is_tried_again(lab: Lab) -> None:
    (lab.folder / "away").touch()
    handed = lab.hand_over()
    handed.started(12, 3600.0)
    handed.abandon()
    until(lambda: "not cancelled: no controller" in lab.log, "it was tried")
    assert lab.kept
    (lab.folder / "away").unlink()
    until(lambda: not lab.kept, "the keeper lets go of it")


def test_a_job_that_does_not_end_is_not_let_go_of(lab: Lab) -> None:
    (lab.folder / "deaf").touch()
    handed = lab.hand_over()
    handed.started(12, 3600.0)
    handed.abandon()
    until(lambda: "it was cancelled and still exists" in lab.log, "it was looked for")
    assert lab.kept


@pytest.mark.parametrize(
    ("state", "words"),
    [("PREEMPTED", "it was preempted"), ("NODE_FAIL", "a node of it failed"), ("", "it is not there any more"),
     ("TIMEOUT", None)],
)  # fmt: skip
def test_what_others_did_to_it_is_told_once(lab: Lab, state: str, words: str | None) -> None:
    handed = lab.hand_over()
    lab.jobs(state)
    if not state:
        (lab.folder / "jobs").write_text("")
    handed.started(12, 3600.0)
    handed.known()
    until(lambda: not lab.kept, "the keeper lets go of it")
    told = [f"lease k3f9xy has ended: of Slurm job 12: {words}"] if words else []  # its time was up: no news
    assert keeper.mind(lab.env) == told
    assert keeper.mind(lab.env) == []
    assert not lab.heartbeat.exists()


def test_a_job_that_is_still_ending_does_not_say_yet_why(lab: Lab) -> None:
    lab.jobs("COMPLETING")
    handed = lab.hand_over()
    handed.started(12, 3600.0)
    handed.known()
    until(lambda: "look" in lab.asked(), "it is asked for")
    for _ in range(3):
        before = lab.heartbeat.stat().st_mtime_ns
        until(lambda at=before: lab.heartbeat.stat().st_mtime_ns != at, "life is shown")  # type: ignore[misc]
    assert keeper.mind(lab.env) == []
    assert lab.kept


def test_what_its_owner_does_to_it_is_no_news(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper's question is answered when scancel has done its work, and scancel ends when the keeper knows."""
    answers_late = LOOK.replace("cat jobs", "until [ -e cancelled ]; do sleep 0.05; done; cat jobs")
    scancel = """#!/bin/sh
        cd {folder}; until [ -e asked ]; do sleep 0.05; done
        echo '12|CANCELLED|{name}' >jobs; : >cancelled; while [ -e {record} ]; do sleep 0.05; done
    """
    (lab.folder / "look").write_text(answers_late.format(folder=lab.folder))
    (lab.folder / "scancel").write_text(scancel.format(folder=lab.folder, name=NAME, record=lab.place / "k3f9xy.json"))
    (lab.folder / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{lab.folder}:{os.environ['PATH']}")
    handed = lab.hand_over()
    handed.started(12, 3600.0)
    handed.known()
    end("k3f9xy", lambda: Jobs(lab.env).cancel_number(12), lab.env)
    assert "it was cancelled" in lab.log
    assert keeper.mind(lab.env) == []


def test_who_tells_the_owner_learns_that_the_keeper_ended_before_it_knew(lab: Lab) -> None:
    handed = lab.hand_over()
    handed.started(12, 3600.0)
    lab.kill_keeper()
    with pytest.raises(KeeperError, match="the keeper has ended"):
        handed.known()


def test_a_successor_keeps_it_and_releases_what_nobody_was_told_of(lab: Lab) -> None:
    handed = lab.hand_over()
    handed.started(12, 3600.0)
    handed.known()
    lab.kill_keeper()
    assert keeper.mind(lab.env) == []
    before = lab.heartbeat.stat().st_mtime_ns
    until(lambda: lab.heartbeat.stat().st_mtime_ns != before, "life is shown again")
    lab.holder.kill()
    lab.holder.wait()
    until(lambda: not lab.kept, "the keeper lets go of it")


def test_a_successor_releases_what_was_being_taken_by_somebody_who_has_gone(lab: Lab) -> None:
    taker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    handed = lab.hand_over(12, identify(taker.pid))
    assert not handed.lost
    lab.kill_keeper()
    until(lambda: handed.lost, "it is missed")
    keeper.mind(lab.env)
    started = time.monotonic()
    until(lambda: time.monotonic() - started > 1.5, "a successor runs, and the taker lives")
    assert lab.kept
    taker.kill()
    taker.wait()
    until(lambda: not lab.kept, "the keeper lets go of it")
    assert "before anybody knew of it" in lab.log
    assert "cancel" in lab.asked()


def test_renewing_moves_its_end(lab: Lab) -> None:
    handed = lab.hand_over()
    handed.started(12, 10.0)
    handed.known()
    keeper.renew("k3f9xy", 3600.0, lab.env)
    started = time.monotonic()
    until(lambda: time.monotonic() - started > 11.0, "its first end has passed")
    assert lab.kept


def test_holders_are_known_on_their_host(lab: Lab) -> None:
    lab.hand_over(12).known()
    assert keeper.holders(lab.env) == {"k3f9xy": identify(lab.holder.pid)}
    (lab.place / "bad.json").write_text("{}")
    assert keeper.holders(lab.env).keys() == {"k3f9xy"}
