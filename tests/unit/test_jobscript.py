"""The script of a lease's job, run for real with shortened times."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuboard.scheduler.slurm.job_script import script
from tests.waiting import Stopwatch, until

SHELLS = [shell for shell in ("sh", "bash", "busybox") if shutil.which(shell)]


@contextlib.contextmanager
def start(tmp_path: Path, text: str, shell: str = "sh") -> Iterator[subprocess.Popen[bytes]]:
    file = tmp_path / "script"
    file.write_text(text)
    command = ["busybox", "sh", str(file)] if shell == "busybox" else [shell, str(file)]
    with subprocess.Popen(command, env={"PATH": os.environ["PATH"]}, start_new_session=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of it lives any more
                os.killpg(process.pid, signal.SIGKILL)


def heartbeat(tmp_path: Path, name: str = "k3f9xy.alive") -> Path:
    file = tmp_path / name
    file.touch()
    seen = tmp_path / f"{name}.seen"
    seen.touch()
    os.utime(seen, (1, 1))
    return file


@pytest.mark.parametrize("shell", SHELLS)
def test_it_runs_while_heartbeats_arrive_and_ends_soon_after(tmp_path: Path, shell: str) -> None:
    file = heartbeat(tmp_path, "it's $(odd) `name`.alive")
    with start(tmp_path, script(str(file), 4.0, 0.1), shell) as process:
        until(lambda: (tmp_path / f"{file.name}.seen").stat().st_mtime > 1, "it has seen the file")
        for _ in range(50):  # longer than it lives without
            os.utime(file)
            time.sleep(0.1)
            assert process.poll() is None
        ended = Stopwatch()
        assert process.wait(60) == 0
        assert ended.stop() < 20.0  # it counts forty looks, each late on a busy machine


def test_a_failed_check_counts_as_one_without_a_heartbeat(tmp_path: Path) -> None:
    file = heartbeat(tmp_path)
    with start(tmp_path, script(str(file), 4.0, 0.1)) as process:
        until(lambda: (tmp_path / f"{file.name}.seen").stat().st_mtime > 1, "it has seen the file")
        file.rename(tmp_path / "away")
        time.sleep(0.5)
        (tmp_path / "away").rename(file)
        for _ in range(45):
            os.utime(file)
            time.sleep(0.1)
        assert process.poll() is None


def test_a_suspended_job_does_not_count_the_time(tmp_path: Path) -> None:
    file = heartbeat(tmp_path)
    with start(tmp_path, script(str(file), 4.0, 0.1)) as process:
        until(lambda: (tmp_path / f"{file.name}.seen").stat().st_mtime > 1, "it has seen the file")
        process.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        process.send_signal(signal.SIGCONT)
        for _ in range(20):
            os.utime(file)
            time.sleep(0.1)
        assert process.poll() is None


def test_without_a_shared_home_it_runs_until_its_time_limit(tmp_path: Path) -> None:
    with start(tmp_path, script(str(tmp_path / "nowhere" / "x.alive"), 0.2, 0.01)) as process:
        time.sleep(2.0)
        assert process.poll() is None
        assert not (tmp_path / "nowhere").exists()


def test_detached_it_checks_no_file() -> None:
    assert "look" not in script("")
    assert script("").startswith("#!/bin/sh\n")


def test_the_default_is_three_minutes() -> None:
    text = script("/home/a/x.alive")
    assert 'while [ "$silent" -lt 12 ]; do\n    sleep 15\n' in text
