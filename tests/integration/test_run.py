"""`gpuboard run` on the local node: exit codes, terminal, signals; no process outlives gpuboard."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from gpuboard.leases.remote_exec import local_command
from tests.integration.here import Here
from tests.integration.test_allocate import claims
from tests.waiting import Stopwatch, alive, read_line, until

pytestmark = pytest.mark.usefixtures("_claims")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def _claims(here: Here) -> None:
    here.needs_claims()


def start(here: Here, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        here.command("run", "--n", "1", "--", *argv),
        env=here.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def test_command_sees_its_gpus_and_run_exits_with_its_code(here: Here, tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    done = here.run("run", "--n", "2", "--status-file", str(status), "--",
                    "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER; pwd; exit 7")  # fmt: skip
    assert (done.returncode, done.stdout) == (7, f"0,1 PCI_BUS_ID\n{ROOT}\n")
    assert claims(here) == []
    outcome = json.loads(status.read_text())
    assert (outcome["exit_code"], outcome["started"], [gpu["index"] for gpu in outcome["gpus"]]) == (7, True, [0, 1])


def test_gpus_may_be_repeated_as_for_allocate(here: Here) -> None:
    done = here.run("run", "--gpus", "1", "--gpus", "0", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert (done.returncode, sorted(done.stdout.strip().split(","))) == (0, ["0", "1"]), done.stderr


def test_exit_codes_of_signals_missing_commands_and_refusals(here: Here, tmp_path: Path) -> None:
    done = here.run("run", "--n", "1", "--", "no\x1b[2J\u202e\ncommand")
    assert (done.returncode, done.stderr) == (127, "gpuboard: no?[2J??command: No such file or directory\n")
    assert here.run("run", "--n", "1").returncode == 2
    status = tmp_path / "status.json"
    assert here.run("run", "--n", "9", "--status-file", str(status), "--", "true").returncode == 3
    assert json.loads(status.read_text())["started"] is False
    done = here.run("run", "--n", "1", "--status-file", "/no/such/folder/s", "--", "sh", "-c", "kill -SEGV $$")
    assert (done.returncode, done.stderr) == (
        128 + signal.SIGSEGV,
        "gpuboard: --status-file /no/such/folder/s: No such file or directory\n",
    )


def test_signals_reach_the_command_and_the_lease_ends(here: Here) -> None:
    with start(here, "sh", "-c", "trap 'echo told; exit 5' TERM; echo up; while :; do sleep 0.1; done") as process:
        assert read_line(process) == "up\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("told\n", 5)
    assert claims(here) == []


def test_killing_gpuboard_ends_the_command_and_the_lease(here: Here) -> None:
    with start(
        here, "sh", "-c", "setsid sleep 300 & echo $! $$; trap '' TERM HUP; while :; do sleep 0.1; done"
    ) as process:
        pids = [int(pid) for pid in read_line(process).split()]
        process.kill()
        started = Stopwatch()
        until(lambda: not any(map(alive, pids)), "processes of the command live on")
        assert started.stop() < 5.0
        until(lambda: not claims(here), "the claim lives on")


def test_command_is_not_started_after_gpuboard_was_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "late")
    gpuboard = """
import os
from gpuboard.leases import remote_exec as commands
runner = commands.local_command(["touch", "started"], {}, os.getcwd())
os.posix_spawn("/bin/sh", ["sh", "-c", 'read line < late; exec "$@"', "sh", *runner], os.environ)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", gpuboard], cwd=tmp_path, env=env, stdout=subprocess.PIPE) as process:
        assert process.wait(60) == 0
        (tmp_path / "late").write_text("\n")
        assert process.stdout is not None
        assert process.stdout.read() == b"", "the runner has ended"
    assert not (tmp_path / "started").exists()


def test_leftover_processes_are_killed_and_reported(here: Here) -> None:
    done = here.run("run", "--n", "1", "--", "sh", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo $!")
    assert not alive(int(done.stdout))
    assert "ended 1 process that the command left running" in done.stderr


def test_helper_that_ends_with_the_command_is_not_reported(here: Here, tmp_path: Path) -> None:
    fifo = tmp_path / "life"
    os.mkfifo(fifo)  # the helper gets end-of-file from the command, then exits slowly, as interpreters do
    helper = f"import time; open({str(fifo)!r}).read(); time.sleep(0.05); print('ended by itself')"
    script = f'setsid python3 -S -c "{helper}" & exec 3>{fifo}; exit 3'
    done = here.run("run", "--n", "1", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (3, "ended by itself\n", "")


def test_command_has_the_terminal_and_ctrl_c_ends_it(here: Here) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        argv = here.command("run", "--n", "1", "--", "sh", "-c", "test -t 0 && test -t 1 && echo tty; exec sleep 60")
        os.execve(argv[0], argv, here.env)
    seen = b""
    while b"tty" not in seen:
        seen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    until(lambda: not claims(here), "the claim lives on")


def test_ctrl_z_suspends_and_fg_resumes(here: Here) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        script = 'set -m; "$@"; echo stopped $?; sleep 1.2; fg >/dev/null; echo code $?; exit'
        argv = here.command("run", "--n", "1", "--", "sh", "-c", "echo up; read line; echo got $line; exit 7")
        os.execve("/bin/bash", ["bash", "-c", script, "bash", *argv], here.env)
    seen = b""

    def read(words: bytes) -> None:
        nonlocal seen
        while words not in seen:
            seen += os.read(terminal, 4096)

    read(b"up")
    os.write(terminal, b"\x1a")
    read(b"stopped 148")
    assert len(claims(here)) == 1
    os.write(terminal, b"word\n")
    read(b"code 7")
    os.waitpid(pid, 0)
    os.close(terminal)
    assert b"got word" in seen
    until(lambda: not claims(here), "the claim lives on")


def test_removed_working_directory_is_reported_and_nothing_reserved(here: Here, tmp_path: Path) -> None:
    for asked in ("run --n 1 -- pwd", "allocate --n 1 --rank-map map.json"):
        command = " ".join(here.command(*asked.split()))
        script = f"mkdir '{tmp_path}/gone'; cd '{tmp_path}/gone'; rmdir '{tmp_path}/gone'; exec {command}"
        done = subprocess.run(["sh", "-c", script], env=here.env, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (
            2,
            "gpuboard: the working directory was removed; cd to one that exists on every node\n",
        )
    assert claims(here) == []


def test_ctrl_c_before_the_command_starts_prevents_its_start(tmp_path: Path) -> None:
    master, terminal = pty.openpty()

    def typed() -> None:  # while the runner starts
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        os.write(master, b"\x03")
        while signal.SIGINT not in signal.sigpending():
            time.sleep(0.01)

    command = local_command(["touch", "there"], {}, str(tmp_path))
    with subprocess.Popen(command, stdin=terminal, start_new_session=True, preexec_fn=typed) as runner:  # noqa: PLW1509
        assert runner.wait(60) == 128 + signal.SIGINT
    assert not (tmp_path / "there").exists()
    os.close(master)
    os.close(terminal)


def test_signal_while_the_runner_starts_causes_no_python_error() -> None:
    script = """
import os, signal, sys
from gpuboard.leases import remote_exec as commands
spawn = os.posix_spawn

def hasty(*args, **options):
    pid = spawn(*args, **options)
    caught = 0
    while not caught & 1 << signal.SIGINT - 1:  # until Python has its handler
        with open(f"/proc/{pid}/status") as file:
            caught = int(next(line for line in file if line.startswith("SigCgt")).split()[1], 16)
    os.kill(pid, signal.SIGINT)
    return pid

os.posix_spawn = hasty
sys.exit(commands.run_command(commands.local_command(["sleep", "600"], {}, "/"), os.environ, "none"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")
