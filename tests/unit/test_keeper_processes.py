"""Carriers and orphans among real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gpuboard.agent.proc import read_process
from gpuboard.keeper import processes
from tests.waiting import kill_each, read_line, until

LEASE = f"t{os.getpid()}"


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Pids to kill at the end."""
    pids: list[int] = []
    yield pids
    kill_each(pids)


def holder_with(script: str) -> tuple[int, int, list[int]]:
    """Run a shell script that prints pids and ends; return its session, its process group and the pids."""
    session = subprocess.Popen(
        ["bash", "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    pids = [int(word) for word in read_line(session).split()]
    session.wait()
    return session.pid, session.pid, pids


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def test_carrier_is_found_by_the_environment_it_was_started_with(started: list[int]) -> None:
    env = {**os.environ, "GPUBOARD_LEASE": LEASE}
    wanted = subprocess.Popen(["sleep", "60"], env=env)
    longer = subprocess.Popen(["sleep", "60"], env={**env, "GPUBOARD_LEASE": LEASE + "x"})
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "NOT_GPUBOARD_LEASE": LEASE})
    started += [wanted.pid, longer.pid, other.pid]
    assert processes.carriers(LEASE) == [wanted.pid]
    wanted.kill()
    os.waitid(os.P_PID, wanted.pid, os.WEXITED | os.WNOWAIT)
    assert processes.carriers(LEASE) == []  # it is a zombie now
    for process in (wanted, longer, other):
        process.kill()
        process.wait()


def test_subshell_left_behind_is_an_orphan(started: list[int]) -> None:
    born = boottime()
    session, group, pids = holder_with("( while :; do read -t 60 <&5; done ) 5<> <(:) & echo $!; exec >&-")
    started += pids
    until(lambda: processes.orphans(session, group, born) == pids)  # bash's <(:) exists for a moment, too


def test_process_older_than_the_lease_is_no_orphan(started: list[int]) -> None:
    """It started before the lease, so it cannot have its variables."""
    session, group, pids = holder_with("sleep 60 >/dev/null & echo $!")
    started += pids
    process = read_process(pids[0])
    assert process is not None
    tick = os.sysconf("SC_CLK_TCK")
    assert processes.orphans(session, group, process.start / tick) == pids
    assert processes.orphans(session, group, process.start / tick + 1.0) == []


def test_process_in_another_session_is_no_orphan(started: list[int]) -> None:
    born = boottime()
    session, group, pids = holder_with("setsid sleep 60 >/dev/null & echo $!")
    started += pids
    until(lambda: os.getsid(pids[0]) == pids[0], "it is in its own session")
    assert processes.orphans(session, group, born) == []


def test_command_typed_in_the_same_terminal_is_no_orphan(started: list[int]) -> None:
    """In one session: a shell, a job that left a process behind, and a command typed later."""
    job = "sleep 60 >/dev/null & echo $!; echo $$"
    shell = subprocess.Popen(
        ["bash", "-c", 'read; set -m; bash -c "$JOB"; sleep 61 >/dev/null & echo $!; read; :'],
        env={**os.environ, "JOB": job},
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert shell.stdout is not None and shell.stdin is not None
    process = read_process(shell.pid)
    assert process is not None
    tick = os.sysconf("SC_CLK_TCK")
    while boottime() * tick < process.start + 3:
        time.sleep(0.01)
    born = boottime()
    shell.stdin.write("\n")
    shell.stdin.flush()
    left, group, typed = (int(shell.stdout.readline()) for _ in range(3))
    started += [left, typed, shell.pid]
    assert processes.orphans(shell.pid, group, born) == [left]
    shell.kill()
    shell.communicate()


def test_descendants_of_an_orphan_are_orphans(started: list[int]) -> None:
    born = boottime()
    program = "import os,time; os.fork(); time.sleep(60)"
    session, group, pids = holder_with(f'{sys.executable} -c "{program}" >/dev/null & echo $!')
    started += pids
    until(lambda: len(processes.orphans(session, group, born)) == 2, "it and its child are orphans")
    found = processes.orphans(session, group, born)
    started += found
    assert set(pids) < set(found)
