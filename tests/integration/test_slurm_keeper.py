"""Heartbeats of leases in Slurm, and their end when the holder, the keeper or both are gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.hosts import PATH, Running
from tests.integration.slurm_leases import all_gone, allocate, do, gpuboard, keepers, left, line_of, shell
from tests.slurm import SlurmCluster
from tests.waiting import Stopwatch, kill_each, until

pytestmark = pytest.mark.nodes

SHORT = '[slurm]\nsilence = "9s"\n'  # in place of three minutes: the keeper then sends a heartbeat every 1.5 s


def kill_keeper(slurm: SlurmCluster) -> None:
    running = until(lambda: keepers(slurm), "a keeper runs")  # and perhaps its child, which has not called exec yet
    kill_each(running)
    # its command line disappears first; until then it accepts connections
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running), "it has ended")


def configured(slurm: SlurmCluster, text: str) -> None:
    config = slurm.nodes.home("alice") / ".config" / "gpuboard" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(text)


def running(slurm: SlurmCluster) -> int:
    """The one running job, besides those that are ending."""
    [number] = slurm.jobs(ending=False)
    assert slurm.job(number)["JobState"] == "RUNNING"
    return number


def kill_all(slurm: SlurmCluster, *holders: Running) -> None:
    """Kill keeper and holders at once."""
    kill_each([*until(lambda: keepers(slurm), "a keeper runs"), *(process.inner for process in holders)])


def test_jobs_run_with_heartbeats_and_few_queries_and_end_themselves_without(slurm: SlurmCluster) -> None:
    home = slurm.nodes.home("alice")
    (home / "bin").mkdir()
    for name in ("squeue", "scontrol", "sinfo", "scancel"):
        wrapper = home / "bin" / name
        wrapper.write_text(f'#!/bin/sh\necho {name} >>/srv/home/alice/queries\nexec /usr/bin/{name} "$@"\n')
        wrapper.chmod(0o755)
    (home / "queries").touch()
    os.chown(home / "queries", 2001, 2001)
    configured(slurm, SHORT)
    env = {"PATH": f"/srv/home/alice/bin:{PATH}"}
    with shell(slurm, "--n", "1", env=env) as one, shell(slurm, "--n", "1", env=env) as two:
        assert line_of(one) == line_of(two) == "code 0"
        (home / "queries").write_text("")
        started = time.monotonic()
        until(lambda: time.monotonic() - started > 20, "twice the silence limit, more than ten heartbeats of each")
        assert (home / "queries").read_text().split() in ([], ["squeue"], ["squeue", "squeue"])
        jobs = slurm.jobs(ending=False)
        assert [slurm.job(number)["JobState"] for number in jobs] == ["RUNNING"] * 2
        kill_all(slurm, one, two)
        killed = Stopwatch()
        until(lambda: not slurm.jobs(), "the jobs have ended themselves")
        assert killed.stop() < 18.0
        assert [slurm.job(number)["JobState"] for number in jobs] == ["COMPLETED"] * 2
    gpuboard(slurm, "leases")  # starts a keeper, which has nothing left to do
    all_gone(slurm)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.environ.get("GPUBOARD_TEST_MINUTES"), reason="needs GPUBOARD_TEST_MINUTES=1: four minutes")
def test_with_keeper_and_holder_killed_the_job_ends_within_four_minutes(slurm: SlurmCluster) -> None:
    with shell(slurm, "--n", "1") as process:
        assert line_of(process) == "code 0"
        number = running(slurm)
        kill_all(slurm, process)
        killed = Stopwatch()
        until(lambda: not slurm.jobs(), "the job has ended itself", 300)
        assert 120 < killed.stop() < 240  # 195 s were measured
        assert slurm.job(number)["JobState"] == "COMPLETED"


def test_the_next_command_replaces_a_killed_keeper(slurm: SlurmCluster) -> None:
    with shell(slurm, "--n", "1") as process:
        assert line_of(process) == "code 0"
        kill_keeper(slurm)
        do(process, "gpuboard leases >/dev/null; echo ok")  # any command starts another
        until(lambda: keepers(slurm), "another keeper runs")
        running(slurm)
        process.send_signal(signal.SIGKILL)
        all_gone(slurm)


def test_a_keeper_killed_just_before_the_lease_is_confirmed(slurm: SlurmCluster) -> None:
    """Its record is of an unconfirmed lease, whose job the next keeper would cancel."""
    folder = slurm.nodes.home("alice") / "bin"
    folder.mkdir()
    (folder / "srun").write_text('#!/bin/sh\npkill -9 -f keeper.daemon\nexec /usr/bin/srun "$@"\n')
    (folder / "srun").chmod(0o755)
    with shell(slurm, "--n", "1", env={"PATH": f"/srv/home/alice/bin:{PATH}"}) as process:
        assert line_of(process) == "code 0"
        if keepers(slurm):
            kill_keeper(slurm)
        [log] = (slurm.nodes.home("alice") / ".local/state/gpuboard/keeper").glob("*/log")
        read = len(log.read_text())
        do(process, "gpuboard leases >/dev/null 2>&1; echo ok")
        until(lambda: ": taken over\n" in log.read_text()[read:], "the next keeper has read the record")
        assert "ended before it handed it over" not in log.read_text()
        running(slurm)
        process.kill()
    all_gone(slurm)


@pytest.mark.parametrize("ends", ["it is granted", "it is killed", "both are killed"])
def test_a_keeper_killed_while_allocate_waits(slurm: SlurmCluster, ends: str) -> None:
    blocker = slurm.submit(["-N3", "--gpus-per-node=8", "--wrap", "sleep 600"], user="bob", running=True)
    login = slurm.nodes["login1"]
    with login.popen(["sleep", "600"]) as holder:
        try:
            words = ["gpuboard", "allocate", "--n", "2", "--wait", "5m", "--format", "uuids"]
            with login.popen([*words, "--holder", str(holder.process.inner)]) as process:
                until(lambda: len(slurm.jobs()) == 2, "it waits in the queue")
                if ends == "both are killed":
                    kill_all(slurm, process)
                    process.wait(60)
                    gpuboard(slurm, "leases")  # the next command's keeper finds the unconfirmed lease
                else:
                    kill_keeper(slurm)
                    until(lambda: keepers(slurm), "allocate has started another", 60)
                if ends == "it is killed":
                    process.send_signal(signal.SIGKILL)
                if ends == "it is granted":
                    slurm.run(["scancel", str(blocker)], user="root", check=True)
                    out, err = process.communicate(timeout=60)
                    assert (process.returncode, out[:4]) == (0, "GPU-"), err
                    running(slurm)
                    holder.kill()
                    all_gone(slurm)
                else:
                    until(lambda: slurm.jobs() == {blocker}, "the job in the queue is cancelled")
        finally:
            holder.kill()


@pytest.mark.parametrize("keeper", ["lives", "is killed"])
def test_a_home_that_is_not_shared_is_reported(slurm: SlurmCluster, keeper: str) -> None:
    configured(slurm, SHORT)
    gpu01 = slurm.nodes["gpu01"]
    gpu01.run(["mount", "-t", "tmpfs", "tmpfs", "/srv/home/alice"], user="root", check=True)
    try:
        with shell(slurm, "--n", "1", "--nodes", "gpu01") as process:
            assert line_of(process) == "code 0"
            assert process.stderr is not None
            note = process.stderr.readline()
            assert "do not share /srv/home/alice/.local/state/gpuboard/leases: if this host or the keeper fails" in note
            assert "lasts until its time limit" in note
            number = running(slurm)
            if keeper == "lives":  # the login node's keeper cancels the job without the file
                process.send_signal(signal.SIGKILL)
                all_gone(slurm)
            else:
                kill_all(slurm, process)
                killed = time.monotonic()
                until(lambda: time.monotonic() - killed > 20, "more than twice the silence limit has passed")
                assert running(slurm) == number
    finally:
        gpu01.run(["umount", "-l", "/srv/home/alice"], user="root", check=True)


def test_a_job_that_others_cancelled_is_reported(slurm: SlurmCluster) -> None:
    with shell(slurm, "--n", "1") as process:
        assert line_of(process) == "code 0"
        lease = do(process, "echo $GPUBOARD_LEASE")
        number = running(slurm)
        slurm.run(["scancel", str(number)], user="root", check=True)
        until(lambda: slurm.job(number)["JobState"] == "CANCELLED", "Slurm has ended it")
        kill_keeper(slurm)  # the next keeper queries at once instead of after a minute
        do(process, "gpuboard leases >/dev/null 2>&1; echo ok")
        until(lambda: not left(slurm), "its keeper has noticed", 90)
        assert do(process, "gpuboard leases 2>&1 >/dev/null") == (
            f"gpuboard: lease {lease} ended: Slurm job {number}: it was cancelled"
        )
        process.kill()


def test_a_detached_lease_needs_no_keeper(slurm: SlurmCluster) -> None:
    configured(slurm, SHORT)
    allocate(slurm, "--n", "1")
    kill_keeper(slurm)
    killed = time.monotonic()
    until(lambda: time.monotonic() - killed > 20, "more than twice the silence limit has passed")
    running(slurm)
    assert gpuboard(slurm, "release", "--mine").returncode == 0
    all_gone(slurm)
