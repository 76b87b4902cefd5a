"""`gpuboard launch --detach` and `gpuboard attach` on this machine."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboard.launch.runs.folder import read_runs
from tests.integration.launch_lab import SLEEP, Launch, without_torch
from tests.waiting import full_pipe, until

# Ranks that count the SIGUSR1 they get, and end once the file `end` exists.
COUNT = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("forwarded", flush=True))
for n in range(8):
    print("line", n, flush=True)
while not os.path.exists("end"):
    time.sleep(0.02)
sys.exit(3 if os.environ["RANK"] == "1" else 0)
"""


def attach(launch: Launch, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpuboard", "attach", *options],
        env=launch.env, cwd=launch.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_detached_run_survives_its_terminal_and_can_be_attached(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    lock_read, lock_write = os.pipe()
    os.set_inheritable(lock_write, True)
    before = ["setsid", "--ctty", "--wait", "sh", "-c", '"$@"; echo code $?; read hold', "sh"]
    with Launch(
        tmp_path, COUNT, "--detach", "--grace", "5s", terminal=theirs, stdin=theirs, before=before, keep=[lock_write]
    ) as launch:
        os.close(theirs)
        os.close(lock_write)
        shown = b""
        while b"code" not in shown:
            shown += os.read(ours, 65536)
        view = launch.view()
        assert f"run {view.id} is detached; ranks on 2: {view.ranks[0].node}" in shown.decode()
        assert "code 0" in shown.decode()
        assert view.state == "running"
        assert os.getsid(view.head.pid) == view.head.pid
        assert [os.readlink(f"/proc/{view.head.pid}/fd/{fd}") for fd in (0, 1, 2)] == ["/dev/null"] * 3
        os.close(ours)  # the terminal: SIGHUP to its processes
        launch.process.wait(10)
        assert os.read(lock_read, 1) == b"", "the head holds what the shell had open"
        os.kill(view.head.pid, signal.SIGHUP)

        with attach(launch) as first, attach(launch, view.id[:4], "--lines", "1") as second:
            assert first.stdout is not None
            lines = [first.stdout.readline().partition("] ")[2] for _ in range(5)]
            assert lines == [f"line {n}\n" for n in range(3, 8)]
            assert second.stdout is not None
            assert second.stdout.readline().endswith("] line 7\n")
            second.send_signal(signal.SIGINT)
            assert second.wait(20) == 130
            assert second.stderr is not None
            assert f"run {view.id} goes on; `gpuboard stop {view.id}` stops it" in second.stderr.read()
            with attach(launch) as piped:
                assert piped.stdout is not None
                piped.stdout.close()  # as `| head` does
                assert piped.wait(20) == 141
            first.send_signal(signal.SIGUSR1)
            while "forwarded" not in first.stdout.readline():
                pass
            (tmp_path / "end").touch()
            err = first.communicate(timeout=30)[1]
        assert first.returncode == 3
        assert "gpuboard: forwarding SIGUSR1 to ranks 0-1\n" in err
        assert "root cause: rank 1" in err
        assert err.endswith(f"gpuboard: run {view.id} failed\n")
        assert launch.view().exit_code == 3
        until(lambda: not launch.carriers() and not Path(f"/proc/{view.head.pid}").exists(), "its processes end", 10)


@pytest.mark.parametrize("end", ["fails", "interrupt", "killed"])
def test_until_the_ranks_run_a_detached_launch_ends_like_an_attached_one(tmp_path: Path, end: str) -> None:
    slow = "'1'" if end == "fails" else "'0', '1'"  # ranks that never run
    options = without_torch(tmp_path)
    text = f"import os, time\nif os.environ.get('RANK') in ({slow},): time.sleep(600)\n"
    (tmp_path / "fake" / "sitecustomize.py").write_text(text)
    script = "raise ValueError('early')"
    with Launch(tmp_path, script, "--detach", "--json", "--status-file", "status.json", *options) as launch:
        if end == "fails":
            assert launch.wait() == 1
            assert "ValueError: early at" in launch.text["err"]
            assert json.loads(launch.text["out"])["run"]["state"] == "failed"
            assert json.loads((tmp_path / "status.json").read_text())["exit_code"] == 1
            return
        until(lambda: read_runs(launch.env), "the run begins")
        launch.signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
        view = launch.wait_view(lambda view: view.state == "stopped")
        if end == "interrupt":
            assert launch.wait() == 130
            assert json.loads(launch.text["out"])["run"]["id"] == view.id
        until(lambda: not launch.carriers(), "its processes end", 10)


def test_detach_prints_json_and_a_short_run_its_output(tmp_path: Path) -> None:
    with Launch(tmp_path, "import time; time.sleep(600)", "--detach", "--json") as launch:
        assert launch.wait() == 0
        printed = json.loads(launch.text["out"])
        assert (printed["exit_code"], printed["run"]["state"]) == (0, "running")
        assert launch.text["err"] == ""
        assert launch.command("stop", printed["run"]["id"], "--now").returncode == 0
        done = launch.command("attach")
        assert done.returncode == 143
        assert "stopped by `gpuboard stop" in done.stderr


def test_interrupts_end_a_detached_launch_whose_output_nobody_reads(tmp_path: Path) -> None:
    reading, writing = full_pipe()
    before = ["sh", "-c", 'exec "$@" 2>err', "sh"]
    with Launch(tmp_path, SLEEP, "--detach", "--json", terminal=writing, before=before) as launch:
        wchan = Path(f"/proc/{launch.process.pid}/wchan")
        until(lambda: "pipe_write" in wchan.read_text(), "it writes")
        view = launch.view()
        launch.signal(signal.SIGINT)
        told = f"gpuboard: run {view.id} is detached and goes on; `gpuboard stop {view.id}` stops it\n"
        until(lambda: (tmp_path / "err").read_text().endswith(told), "it says that the run goes on")
        launch.signal(signal.SIGINT)
        assert launch.process.wait(20) == 130
        assert launch.view().state == "running"
        assert launch.command("stop", view.id, "--now").returncode == 0
        until(lambda: not launch.carriers(), "its processes end", 10)
    os.close(reading)
    os.close(writing)


def test_a_detached_run_is_restarted_under_an_attached_command(tmp_path: Path) -> None:
    script = """
import os, sys, time
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
while not os.path.exists("fail" if first else "end"):
    time.sleep(0.02)
sys.exit(3 if first else 0)
"""
    with Launch(tmp_path, script, "--detach", "--max-restarts", "1") as launch:
        assert launch.wait() == 0
        with attach(launch) as attached:
            (tmp_path / "fail").touch()
            view = launch.wait_view(lambda view: view.attempt == 2 and view.state == "running")
            os.kill(view.head.pid, signal.SIGHUP)
            (tmp_path / "end").touch()
            err = attached.communicate(timeout=60)[1]
        assert attached.returncode == 0, err
        assert "gpuboard: attempt 2 of 2\n" in err
        assert (launch.view().state, launch.view().attempt) == ("done", 2)
