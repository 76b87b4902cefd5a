"""The file lock that a process waits for, and who holds it: with real locks of this kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboard.agent import proc
from gpuboard.agent.launch.watch import locks
from tests.waiting import until

WAIT = {
    "flock": "fcntl.flock(file, fcntl.LOCK_EX)",
    "lockf": "fcntl.lockf(file, fcntl.LOCK_EX)",
    "poll": "time.sleep(600)",  # tries again and again, as sqlite does
}


@pytest.mark.parametrize("way", list(WAIT))
def test_the_holder_of_a_file_lock_is_found(tmp_path: Path, way: str) -> None:
    path = tmp_path / "cache.lock"
    path.write_text("")
    waits = f"import fcntl, sys, time\nfile = open({str(path)!r}, 'a')\nprint('up', flush=True)\n{WAIT[way]}"
    holds = f"import fcntl, sys\nfile = open({str(path)!r}, 'a')\nfcntl.{'flock' if way == 'flock' else 'lockf'}"
    holder = _start(f"{holds}(file, fcntl.LOCK_EX)\nprint('up', flush=True)\nsys.stdin.read()")
    waiting = _start(waits)
    try:
        own = proc.read_process(holder.pid)
        assert own is not None
        found = {"file": str(path), "pid": holder.pid, "name": own.name, "waits": way != "poll"}
        until(lambda: locks.awaited(waiting.pid, locks.read()) == found)  # its file is open before it waits
        assert locks.awaited(holder.pid, locks.read()) is None
    finally:
        for process in (holder, waiting):
            process.kill()
            process.communicate()


def _start(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_locks_that_cannot_be_read_are_left_out() -> None:
    text = "1: LEASE  ACTIVE    READ  7 fe:00:9 0 EOF\n2: OFDLCK ADVISORY  WRITE -1 00:2f:12 0 EOF\nx\n3: POSIX\n"
    assert [(lock.pid, lock.inode) for lock in locks.parse(text)] == [(-1, 12)]


def test_a_number_that_two_locks_had_while_they_were_read_names_the_right_holder() -> None:
    """A lock was removed between two reads of /proc/locks, so that the numbers after it are one less."""
    own = proc.read_process(os.getpid())
    assert own is not None
    text = "1: FLOCK ADVISORY WRITE 7 fe:00:9 0 EOF\n" + "".join(
        f"1: {waits}POSIX ADVISORY WRITE {pid} fe:00:12 0 EOF\n"
        for waits, pid in (("", os.getpid()), ("-> ", 999999998))
    )
    found = {"file": "", "pid": os.getpid(), "name": own.name, "waits": True}
    assert locks.awaited(999999998, locks.parse(text)) == found


def test_a_database_that_another_process_has_locked_is_found(tmp_path: Path) -> None:
    opened = (
        f"import sqlite3, sys\ndb = sqlite3.connect({str(tmp_path / 'runs.db')!r}, isolation_level=None, timeout=600)\n"
    )
    up = "\nprint('up', flush=True)\n"
    holder = _start(f"{opened}db.execute('create table runs (id)'); db.execute('begin exclusive'){up}sys.stdin.read()")
    waiting = _start(f"{opened}{up}db.execute('insert into runs values (1)')")
    try:
        until(lambda: (locks.awaited(waiting.pid, locks.read()) or {}).get("pid") == holder.pid)
    finally:
        for process in (holder, waiting):
            process.kill()
            process.communicate()
