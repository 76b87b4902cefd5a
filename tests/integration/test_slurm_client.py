"""gpuboard's client of Slurm, against a real one: what it sees, how it fails, and how rarely it asks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuboard.model.schedule import Schedule, SchedulerJob, Seen
from tests.hosts import PATH, USERS, Running
from tests.slurm import SlurmCluster, configured
from tests.slurmtext import held, used
from tests.waiting import read_line, until

pytestmark = pytest.mark.nodes

DRIVER = Path(__file__).with_name("slurm_driver.py")
QUICK = {"slurm": {"interval": "1s"}}
SELDOM = {"slurm": {"interval": "10m"}}


class Told(msgspec.Struct):
    """A line of the driver."""

    seen: Seen
    age_s: float
    took_s: float

    @property
    def schedule(self) -> Schedule:
        """The answer, which there must be."""
        assert self.seen.schedule is not None, self.seen.error
        return self.seen.schedule

    @property
    def jobs(self) -> dict[int, SchedulerJob]:
        """The jobs by number."""
        return {job.number: job for job in self.schedule.jobs}


def look(
    slurm: SlurmCluster,
    user: str = "alice",
    *,
    host: str = "login1",
    env: dict[str, str] | None = None,
    settings: dict[str, Any] | None = None,
    timeout_s: float = 15.0,
) -> Told:
    """Look once, as a command does."""
    options = json.dumps({"settings": settings or {}, "timeout_s": timeout_s})
    done = slurm.nodes[host].run([sys.executable, str(DRIVER), "look", options], user=user, env=env, check=True)
    return msgspec.json.decode(done.stdout, type=Told)


def afresh(slurm: SlurmCluster, user: str = "alice", **options: Any) -> Told:
    """Look once, as the first command of a user that has nothing to go by."""
    shutil.rmtree(slurm.nodes.home(user) / ".cache", ignore_errors=True)
    return look(slurm, user, **options)


def waited_s(told: Told) -> int:
    """Return for how many seconds a hung controller was waited for, by the words about it."""
    words = r"slurmctld on login1 did not answer within (\d+) s; is it stopped or overloaded\? see `scontrol ping`"
    found = re.fullmatch(words, told.seen.error or "")
    assert found, told.seen.error
    return int(found[1])


def watch(slurm: SlurmCluster, user: str = "alice") -> Running:
    """Keep looking, as the board does, once a second."""
    argv = [sys.executable, str(DRIVER), "watch", json.dumps({"settings": QUICK})]
    return slurm.nodes["login1"].popen(argv, user=user, stdin=subprocess.PIPE)


def next_line(process: Running) -> Told:
    """Return the next thing that a watch has learnt."""
    return msgspec.json.decode(read_line(process), type=Told)


def count_commands(slurm: SlurmCluster, pause: str = "") -> tuple[dict[str, str], Path]:
    """Return an environment for alice in which each of Slurm's commands leaves a line in a file, and that file."""
    folder = slurm.nodes.home("alice") / "counted"
    folder.mkdir(exist_ok=True)
    log = folder / "log"
    log.write_text("")
    log.chmod(0o666)
    for name in ("scontrol", "squeue"):
        path = folder / name
        path.write_text(
            f'#!/bin/sh\necho "{name} $*" >>/srv/home/alice/counted/log\n{pause}\nexec /usr/bin/{name} "$@"\n'
        )
        path.chmod(0o755)
    return {"PATH": f"/srv/home/alice/counted:{PATH}"}, log


def test_every_kind_of_job_is_shown_as_in_slurm(slurm: SlurmCluster) -> None:
    numbers = [
        slurm.submit([*args, "--wrap", "sleep 600"], user=user)
        for user, args in [
            ("alice", ["--gres=gpu:2", "-w", "gpu01"]),
            ("bob", ["--gres=gpu:h100:1", "-w", "gpu01", "-t", "UNLIMITED"]),
            ("alice", ["-N2", "-w", "gpu02,gpu03", "--gres=gpu:3", "-t", "7", "-J", "two nodes"]),
            ("bob", ["--gpus=4", "-N2", "-n4", "-w", "gpu01,gpu02"]),
        ]
    ]
    array = slurm.submit(["--array=0-1", "--gres=gpu:1", "-w", "gpu03", "--wrap", "sleep 600"])
    het = slurm.submit(["--gres=gpu:1", "-w", "gpu01", ":", "--gres=gpu:1", "-w", "gpu03", "--wrap", "sleep 600"])
    slurm.submit(["-w", "gpu01", "--wrap", "sleep 600"])  # without GPUs
    suspended = slurm.submit(["--gres=gpu:1", "-w", "gpu02", "--wrap", "sleep 600"], running=True)
    slurm.run(["scontrol", "suspend", str(suspended)], user="root", check=True)
    until(lambda: slurm.run(["squeue", "-h", "-t", "PD"]).stdout == "", "all jobs have started")
    told = afresh(slurm)
    assert told.seen.error is None
    assert told.schedule.notes == ()
    assert told.schedule.cluster == "lab"
    by_id = {job.id: job for job in told.schedule.jobs}
    plain = {str(number) for number in (*numbers, suspended)}
    assert set(by_id) == plain | {f"{array}_0", f"{array}_1", f"{het}+0", f"{het}+1"}
    assert {id: held(by_id[id]) for id in plain} == {id: slurm.held(int(id)) for id in plain}
    assert {
        id: (list(held(job)), sum(map(len, held(job).values()))) for id, job in by_id.items() if id not in plain
    } == {
        f"{array}_0": (["gpu03"], 1),
        f"{array}_1": (["gpu03"], 1),
        f"{het}+0": (["gpu01"], 1),
        f"{het}+1": (["gpu03"], 1),
    }
    two = by_id[str(numbers[2])]
    assert (two.user, two.uid, two.name) == ("alice", USERS["alice"], "two nodes")
    assert (two.partition, two.state) == ("gpu", "running")
    assert two.started is not None
    assert two.until == two.started + 7 * 60
    assert abs(two.started - time.time()) < 600
    assert by_id[str(numbers[1])].until is None
    assert by_id[str(suspended)].state == "suspended"
    claims = {name: set[int]() for name in told.schedule.nodes}
    for job in told.schedule.jobs:
        for name, indexes in held(job).items():
            claims[name] |= indexes
    assert claims == {node.name: used(node) for node in told.schedule.nodes.values()}
    assert {node.state for node in told.schedule.nodes.values()} == {"mixed"}


@configured("KillWait=30")
def test_a_job_that_is_ending_is_shown_where_it_ran(slurm: SlurmCluster) -> None:
    number = slurm.submit(
        ["--gres=gpu:1", "-w", "gpu01", "--wrap", "trap '' TERM; sleep 600 & wait; sleep 600"], running=True
    )
    until(lambda: slurm.nodes["gpu01"].processes(lambda p: p.name == "sleep", user="alice"), "it minds no SIGTERM")
    slurm.run(["scancel", str(number)], check=True)
    until(lambda: slurm.job(number)["JobState"] == "COMPLETING", "the job is completing")
    job = afresh(slurm).jobs[number]
    assert (job.state, [grant.node for grant in job.grants]) == ("completing", ["gpu01"])


def test_drained_down_and_reserved_nodes_show_reason_and_user(slurm: SlurmCluster) -> None:
    slurm.update("node", "gpu01", State="DRAIN", Reason="bad NVLink, ticket=42 State=IDLE")
    slurm.update("node", "gpu02", State="DOWN", Reason="power")
    new = ["scontrol", "create", "reservation", "starttime=now", "duration=60", "users=bob", "flags=ignore_jobs"]
    slurm.run([*new, "reservationname=course", "nodes=gpu03"], user="root", check=True)
    until(lambda: "RESERVED" in slurm.node("gpu03")["State"], "the reservation is in force")
    nodes = afresh(slurm).schedule.nodes
    assert {name: (node.state, node.reservation) for name, node in nodes.items()} == {
        "gpu01": ("idle+drain", ""),
        "gpu02": ("down", ""),
        "gpu03": ("idle+reserved", "course"),
    }
    assert nodes["gpu01"].reason.startswith("bad NVLink, ticket=42 State=IDLE (root, 20")
    assert nodes["gpu02"].reason.startswith("power (root, 20")


@configured("PrivateData=jobs")
def test_jobs_of_others_that_are_private_still_hold_their_gpus(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", "--wrap", "sleep 600"], user="bob", running=True)
    told = afresh(slurm)
    assert told.jobs == {}
    assert used(told.schedule.nodes["gpu01"]) == {0, 1}
    assert told.schedule.notes == ()


@configured("PartitionName=secret Nodes=ALL Hidden=YES AllowGroups=root State=UP MaxTime=60")
def test_partitions_that_are_hidden_or_not_for_us_hold_gpus_too(slurm: SlurmCluster) -> None:
    number = slurm.submit(
        ["-p", "secret", "--gres=gpu:2", "-w", "gpu01", "--wrap", "sleep 600"], user="root", running=True
    )
    told = afresh(slurm)
    assert held(told.jobs[number]) == {"gpu01": {0, 1}}
    assert told.schedule.nodes["gpu01"].partitions == ("gpu", "short", "secret")


def record_of(slurm: SlurmCluster, number: int) -> str:
    """Return a job's record as one line, as its name's owner would like to forge it."""
    show = ["scontrol", "--oneliner", "--details", "show", "job", str(number)]
    return slurm.run(show, user="root", check=True).stdout.rstrip()


@pytest.mark.parametrize(
    "slurm", [{}, {"gres": "Name=gpu File=/dev/nvidia[0-7]"}], indirect=True, ids=["typed", "untyped"]
)
def test_text_of_a_job_cannot_imitate_another_users_job(slurm: SlurmCluster) -> None:
    bob = slurm.submit(["--gres=gpu:1", "-w", "gpu01", "--wrap", "sleep 600"], user="bob", running=True)
    true = record_of(slurm, bob)
    grand = true.replace("(IDX:0)", "(IDX:0-7)").replace(":1(IDX", ":8(IDX")
    invented = grand.replace(f"JobId={bob} ", "JobId=4711 ")
    (slurm.nodes.home("alice") / "job.sh").write_text("#!/bin/sh\nexec sleep 600\n")
    alice = [
        slurm.submit([*args, "--gres=gpu:1", "-w", "gpu02", "job.sh", *words])
        for args, words in [
            (["-J", "x UserId=bob(1002) GroupId=bob(1002) JobState=PENDING GRES=gpu:8(IDX:0-7)"], []),
            (["-J", "two\nlines"], []),
            (["--comment", f"x\n{invented[:900]}"], []),
            (["-A", "x JobState=PENDING"], []),
            (["--network", "x MinCPUsNode=1"], []),
            ([], [f"\n{invented}"]),
            ([], [f"x\n{grand}"]),
        ]
    ]
    until(lambda: slurm.run(["squeue", "-h", "-t", "PD"]).stdout == "", "all jobs have started")
    told = afresh(slurm, user="bob")
    assert set(told.jobs) == {bob, *alice}
    assert {number: job.user for number, job in told.jobs.items()} == {bob: "bob"} | dict.fromkeys(alice, "alice")
    assert {grant.node for number in alice for grant in told.jobs[number].grants} == {"gpu02"}
    assert {grant.node for grant in told.jobs[bob].grants} == {"gpu01"}
    assert all(held(told.jobs[number])["gpu02"] <= slurm.held(number)["gpu02"] for number in alice)
    assert held(told.jobs[bob])["gpu01"] <= {0}
    assert [note for note in told.schedule.notes if "imitates Slurm's output" in note] != []
    assert told.jobs[alice[1]].name in {"two lines", ""}


def test_a_dead_controller_is_reported_and_its_last_answer_if_any_is_kept(slurm: SlurmCluster) -> None:
    number = slurm.submit(["--gres=gpu:1", "--wrap", "sleep 600"], running=True)
    before = afresh(slurm, settings=QUICK)
    slurm.controller("kill")
    until(lambda: look(slurm, settings=QUICK).seen.error is not None, "the controller is missed", 60)
    told = look(slurm, settings=QUICK)
    assert told.seen.error == (
        "slurmctld on login1 cannot be reached (connect failure); is it running there? see `scontrol ping`"
    )
    assert set(told.jobs) == {number}
    assert told.age_s > before.age_s
    told = afresh(slurm)
    assert told.seen.schedule is None, "without an earlier answer nothing is shown"
    assert "cannot be reached (connect failure)" in (told.seen.error or "")
    assert told.took_s < 20


@configured("MessageTimeout=100")
def test_a_controller_that_hangs_is_given_up_after_twelve_seconds(slurm: SlurmCluster) -> None:
    slurm.controller("stop")
    told = afresh(slurm, timeout_s=20.0)
    assert waited_s(told) <= round(told.took_s)  # and less where it came late to asking
    assert 12 <= told.took_s < 20
    until(lambda: not slurm.nodes["login1"].processes(user="alice"), "nothing of it is left")


def test_who_waits_less_is_answered_sooner_and_the_failure_is_shared(slurm: SlurmCluster) -> None:
    slurm.controller("stop")
    env, log = count_commands(slurm)
    first = afresh(slurm, env=env, settings=SELDOM, timeout_s=1.0)
    assert waited_s(first) <= round(first.took_s)
    assert 1 <= first.took_s < 8  # and not 12
    asked = log.read_text()
    told = [look(slurm, env=env, settings=SELDOM) for _ in range(3)]
    assert {one.seen.error for one in told} == {first.seen.error}
    assert max(one.took_s for one in told) < 8  # and not 12
    assert log.read_text() == asked


def test_a_watch_sees_the_controller_go_and_come_back(slurm: SlurmCluster) -> None:
    number = slurm.submit(["--gres=gpu:1", "--wrap", "sleep 600"], running=True)
    with watch(slurm) as process:
        assert set(next_line(process).jobs) == {number}
        slurm.save()
        slurm.controller("kill")
        until(lambda: next_line(process).seen.error is not None, "the watch misses the controller", 60)
        told = next_line(process)
        assert (set(told.jobs), told.seen.error is None) == ({number}, False)
        slurm.controller("restart")
        until(lambda: next_line(process).seen.error is None, "the watch hears the controller again", 60)
        second = slurm.submit(["--gres=gpu:1", "--wrap", "sleep 600"], running=True)
        until(lambda: set(next_line(process).jobs) == {number, second}, "the watch sees a new job", 60)
        process.communicate("", 60)


def test_a_watch_outlives_a_controller_that_hangs_for_a_while(slurm: SlurmCluster) -> None:
    with watch(slurm) as process:
        assert next_line(process).seen.error is None
        slurm.controller("stop")
        until(lambda: next_line(process).seen.error is not None, "the watch misses the controller", 60)
        slurm.controller("continue")
        until(lambda: next_line(process).seen.error is None, "the watch hears the controller again", 60)
        process.communicate("", 60)


def test_a_watch_closes_at_once_whatever_hangs(slurm: SlurmCluster) -> None:
    slurm.controller("stop")
    host = slurm.nodes["login1"]
    with watch(slurm) as process:
        until(lambda: host.processes(lambda p: p.name == "scontrol", user="alice"), "scontrol waits")
        out, _ = process.communicate("", 60)
        assert msgspec.json.decode(out.splitlines()[-1], type=Told).took_s < 3.0
    until(lambda: not host.processes(user="alice"), "nothing is left behind", 8)


def test_processes_of_a_user_share_one_question(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:1", "--wrap", "sleep 600"], running=True)
    env, log = count_commands(slurm, pause="sleep 0.5")
    argv = [sys.executable, str(DRIVER), "look", "{}"]
    started = [slurm.nodes["login1"].popen(argv, env=env) for _ in range(4)]
    told = [msgspec.json.decode(process.communicate(timeout=60)[0], type=Told) for process in started]
    assert [set(one.jobs) for one in told] == [{1}] * 4
    assert len({one.schedule.at for one in told}) == 1
    lines = log.read_text().splitlines()
    assert lines == [f"scontrol --all --local --oneliner --details show {what}" for what in ("job", "node")]
    folder = slurm.nodes.home("alice") / ".cache/gpuboard"
    assert {path.stat().st_mode & 0o7777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o7777 == 0o700


def test_a_host_asks_for_itself_where_the_home_is_shared_and_a_process_without_a_cache(slurm: SlurmCluster) -> None:
    assert afresh(slurm).age_s < 5
    env, log = count_commands(slurm)
    assert look(slurm, host="login2", env=env).age_s < 5
    assert len(log.read_text().splitlines()) == 2
    env["XDG_CACHE_HOME"] = "/proc/self/nothing"
    for number in (4, 6):
        assert look(slurm, env=env).seen.error is None
        assert len(log.read_text().splitlines()) == number


def test_at_most_three_commands_a_cycle(slurm: SlurmCluster) -> None:
    for number in range(6):
        slurm.submit(["--gres=gpu:1", "-J", f"a\nJobId={number} JobName=b", "--wrap", "sleep 600"])
    until(lambda: slurm.run(["squeue", "-h", "-t", "PD"]).stdout == "", "all jobs have started")
    new = ["scontrol", "create", "reservation", "starttime=now", "duration=60", "users=bob", "flags=ignore_jobs"]
    slurm.run([*new, "reservationname=course", "nodes=gpu03"], user="root", check=True)
    env, log = count_commands(slurm)
    afresh(slurm, env=env)
    assert len(log.read_text().splitlines()) == 3


def test_variables_of_the_caller_do_not_change_what_is_seen(slurm: SlurmCluster) -> None:
    number = slurm.submit(["--gres=gpu:1", "-J", "a UserId=x(0) GroupId=y", "--wrap", "sleep 600"], running=True)
    env = {
        "SLURM_TIME_FORMAT": "relative",
        "SLURM_CLUSTERS": "elsewhere",
        "SQUEUE_FORMAT": "%j",
        "SQUEUE_STATES": "PD",
        "SQUEUE_USERS": "root",
        "SCONTROL_FUTURE": "1",
        "SLURM_BITSTR_LEN": "4",
        "LC_ALL": "de_DE.UTF-8",
        "TZ": "Asia/Tokyo",
    }
    told = afresh(slurm, env=env)
    job = told.jobs[number]
    assert (told.seen.error, job.user) == (None, "alice")
    assert job.started is not None
    assert abs(job.started - time.time()) < 600


def test_a_missing_or_invalid_configuration_is_reported_at_once(slurm: SlurmCluster) -> None:
    told = afresh(slurm, env={"SLURM_CONF": "/etc/slurm/other.conf"})
    assert told.seen.error == "SLURM_CONF=/etc/slurm/other.conf: no such file; correct or unset the variable"
    assert told.took_s < 8  # and not 12
    (slurm.nodes.home("alice") / "slurm.conf").write_text("SlurmctldHost=\n")
    told = afresh(slurm, env={"SLURM_CONF": "/srv/home/alice/slurm.conf"})
    assert told.seen.error == ("Slurm's configuration /srv/home/alice/slurm.conf cannot be used; see `scontrol ping`")


def test_a_missing_munge_is_reported(slurm: SlurmCluster) -> None:
    host = slurm.nodes["login2"]
    socket = host.path("/run/munge/munge.socket.2")
    aside = socket.with_name("aside")
    socket.rename(aside)
    try:
        told = afresh(slurm, host="login2")
    finally:
        aside.rename(socket)
    assert told.seen.error == (
        "munged is not running on this host (/run/munge/munge.socket.2: No such file or directory), "
        "but Slurm needs it: `systemctl start munge`"
    )
    until(lambda: look(slurm, host="login2", settings=QUICK).seen.error is None, "munge is there again")


def test_without_slurm_no_process_looks_for_it(slurm: SlurmCluster) -> None:
    host = slurm.nodes["login1"]

    def found(settings: dict[str, Any], env: dict[str, str]) -> str:
        options = json.dumps({"settings": settings})
        return host.run([sys.executable, str(DRIVER), "look", options], env=env, check=True).stdout.strip()

    assert found({"scheduler": "none"}, {}) == "null"
    (slurm.nodes.home("alice") / "bare").mkdir(exist_ok=True)
    (slurm.nodes.home("alice") / "bare/sh").symlink_to("/bin/sh")
    bare = {"PATH": "/srv/home/alice/bare"}
    assert found({}, bare) == "null"
    told = msgspec.json.decode(found({"scheduler": "slurm"}, bare), type=Told)
    assert told.seen.error == (
        "scheduler is set to slurm, but scontrol is not on PATH; install Slurm's programs, or set scheduler to none"
    )
